"""The balls and the rules of ascent, each against its definition or another library; what is logged of the adversary,
and the warning of one that does nothing."""

from __future__ import annotations

import logging
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.synthetic import Layout
from tests.synthetic_images import image_config, image_trainer
from tests.unit.methods.adversary.toy import COORDINATES, Setting, Toy, toy_hook, toy_trainer
from tests.unit.methods.adversary.toy import gradient as toy_gradient
from trp_scale.config import OptimizerConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.hooks import Hook
from trp_scale.methods.adversary.ascent import IDLE_STEPS, QUARTER, Ascent, Balls, Norm, project, size, steepest
from trp_scale.models.positions import PerturbationShape

NORMS: tuple[Norm, ...] = ("l2", "linf")
fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays.arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=fp32).map(torch.from_numpy)
radii = st.floats(2.0**-10, 2.0**10, width=32)
norms = st.sampled_from(NORMS)


def reference_size(vector: Tensor, norm: Norm) -> Tensor:
    """[..., D] -> [...] float64, from the definition."""
    wide = vector.double().abs()
    return wide.square().sum(-1).sqrt() if norm == "l2" else wide.amax(-1)


@given(vectors, radii, norms)
def test_the_projection_is_inside_the_ball(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    inside = project(given_vectors, norm, eps)
    assert inside.dtype == torch.float32 and inside.shape == given_vectors.shape
    assert inside.isfinite().all()
    assert (reference_size(inside, norm) <= eps * (1 + 1e-6)).all()
    assert torch.equal(size(inside, norm), reference_size(inside, norm)) or torch.allclose(
        size(inside, norm), reference_size(inside, norm), rtol=1e-12
    )


@given(vectors, radii, norms)
def test_what_is_inside_stays_bit_for_bit(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    inside = reference_size(given_vectors, norm) <= eps * (1 - 1e-6)  # [n]
    assert torch.equal(project(given_vectors, norm, eps)[inside], given_vectors[inside])


@given(vectors, radii, norms, vectors)
def test_no_point_of_the_ball_is_nearer(given_vectors: Tensor, eps: float, norm: Norm, others: Tensor) -> None:
    given_vectors = given_vectors.clamp(-1e6, 1e6)
    rows, width = min(len(given_vectors), len(others)), min(given_vectors.shape[1], others.shape[1])
    given_vectors, others = given_vectors[:rows, :width], others[:rows, :width]
    nearest, other = project(given_vectors, norm, eps), project(others, norm, eps)
    to_nearest = (given_vectors - nearest).double().norm(dim=-1)
    to_other = (given_vectors - other).double().norm(dim=-1)
    assert (to_nearest <= to_other * (1 + 1e-5) + 1e-4 * eps).all()


@given(vectors, radii, norms)
def test_the_one_step_rule_goes_furthest_along_the_gradient(gradients: Tensor, eps: float, norm: Norm) -> None:
    shift = steepest(gradients, norm, eps)
    assert shift.isfinite().all()
    zero = reference_size(gradients, norm) == 0
    assert (shift[zero] == 0).all()
    gained = (shift.double() * gradients.double()).sum(-1)
    dual = reference_size(gradients, "l2") if norm == "l2" else gradients.double().abs().sum(-1)
    torch.testing.assert_close(gained, eps * dual, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("norm", NORMS)
def test_each_vector_of_the_last_dimension_has_a_ball_of_its_own(norm: Norm) -> None:
    shape = PerturbationShape(kind="relative_embedding", encoder=(2, 3, 4), decoder=(1, 3, 5))
    balls = Balls(shape, norm, 1.5)  # type: ignore[arg-type]
    flat = torch.linspace(-9.0, 9.0, shape.numel)
    flat[4:8] = 0.0
    encoder, decoder = flat[:24].view(2, 3, 4), flat[24:].view(1, 3, 5)
    expected: list[Any] = [project(vector, norm, 1.5) for vector in (*encoder.reshape(-1, 4), *decoder.reshape(-1, 5))]
    assert torch.equal(balls.project(flat), torch.cat(expected))
    sizes = [float(reference_size(vector, norm)) for vector in (*encoder.reshape(-1, 4), *decoder.reshape(-1, 5))]
    assert balls.sizes(flat).tolist() == pytest.approx(sizes)
    climbed = balls.steepest(flat)
    # From one end of the ball to the other the linearised loss changes by twice what the one-step rule gains.
    assert float(balls.reach(flat)) == pytest.approx(2 * float((climbed.double() * flat.double()).sum()), rel=1e-6)


def rule(name: str, **settings: object) -> Ascent:
    adversary = make_settings("adversary", "relative_coordinate", eps=2.0, ascent=name, **settings)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(beta1=0.8, beta2=0.97, eps=1e-5, weight_decay=0.1)
    return Ascent(adversary, optimizer, Balls(COORDINATES, adversary.norm, adversary.eps))  # type: ignore[arg-type]


def gradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scales = torch.tensor([1e-6, 1e-3, 1.0, 10.0, 0.0, 1e-9])
    return [torch.randn(6, generator=generator) * scales for _ in range(steps)]


def test_adamw_is_torch_s_maximising_without_decay() -> None:
    ours = rule("adamw")
    vector = torch.linspace(-1.0, 1.0, 6)
    theirs = torch.nn.Parameter(vector.clone())
    optimizer = torch.optim.AdamW([theirs], betas=(0.8, 0.97), eps=1e-5, weight_decay=0.0, maximize=True)
    state = ours.start(vector)
    for step, gradient in enumerate(gradients(60)):
        lr = 0.05 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient.clone()
        optimizer.step()
        vector, state = ours.step(vector, gradient, state, lr)
        torch.testing.assert_close(vector, theirs.detach(), rtol=1e-5, atol=1e-8)
    assert int(state["steps"]) == 60
    # torch negates the gradient to maximise, and so holds the negative of its mean.
    for name, sign in (("exp_avg", -1), ("exp_avg_sq", 1)):
        torch.testing.assert_close(state[name], sign * optimizer.state[theirs][name], rtol=1e-5, atol=1e-20)
    assert vector[4] == torch.linspace(-1.0, 1.0, 6)[4], "no gradient, no decay: it stays"


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_linear_steps_from_zero_to_the_edge_of_each_ball(norm: str) -> None:
    ours = rule("linear", norm=norm)
    vector, gradient = torch.ones(6), torch.tensor([3.0, -4.0, 0.0, 0.0, 1e-20, 0.0])
    assert torch.equal(ours.origin(vector), torch.zeros(6))
    climbed, _ = ours.step(vector, gradient, {}, 99.0)
    expected = [1.2, -1.6, 0.0, 0.0, 2.0, 0.0] if norm == "l2" else [2.0, -2.0, 0.0, 0.0, 2.0, 0.0]
    assert climbed.tolist() == pytest.approx(expected)


SGD = {"ascent": "sgd", "lr": 0.3, "eps": 0.4}
WARNING = "had no effect for"


def run(setting: Setting, steps: int, factor: float = 1.0) -> Any:
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    module: Any = trainer.engine.module
    module.factor = factor
    for _ in range(steps):
        trainer.train_step()
    return hook


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_what_is_logged(norm: str) -> None:
    shape = PerturbationShape(kind="relative_coordinate", encoder=(2, 2), decoder=(1, 2))
    setting = Setting(adversary={**SGD, "norm": norm, "eps": 30.0}, shape=shape)
    hook = run(setting, 1)
    line = hook.metrics()
    pairs = hook.vector.detach().double().view(3, 2)
    sizes = pairs.norm(dim=1) if norm == "l2" else pairs.abs().amax(1)
    _, above, loss = toy_gradient(setting, Toy(6).weight, torch.zeros(6), 0)
    assert line == {
        "kind": "relative_coordinate",
        "norm": pytest.approx(float(sizes.mean())),
        "largest_norm": pytest.approx(float(sizes.max())),
        "eps": 30.0,
        "share_of_eps": pytest.approx(float(sizes.mean()) / 30.0),
        "sensitivity": pytest.approx(float(above.norm()), rel=1e-5),
        "effect": pytest.approx(float(above @ hook.vector.detach().double()) / loss, rel=1e-5),
        "saturated": line["saturated"],
    }
    assert 0.0 <= line["saturated"] < 0.2


class CountsReads(TorchDispatchMode):
    """Counts values that the host reads from tensors, but for `tolist`, of which the CPU makes no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("update", ["parallel", "sequential"])
@pytest.mark.parametrize("ascent", ["adamw", "sgd"])
def test_a_step_reads_nothing_from_the_device(update: str, ascent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = {"ascent": ascent, "lr": 0.3 if ascent == "sgd" else 0.0, "update": update, "on_saturation": "reset"}
    setting = Setting(adversary=adversary)
    lists: list[Any] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or tolist(tensor))
    reads = []
    for hook in (toy_hook(setting), Hook()):
        trainer = toy_trainer(setting, hook)
        trainer.train_step()
        lists.clear()
        with CountsReads() as values:
            trainer.train_step()
        reads.append((values.count, len(lists)))
    assert reads[0] == reads[1]
    hook = toy_hook(setting)
    lists.clear()
    hook.metrics()
    assert len(lists) == 1


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(WARNING in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("adversary", "factor"),
    [
        (SGD, 0.0),  # no gradient at all
        ({"ascent": "sgd", "lr": 1e-30, "eps": 0.4}, 1.0),  # a gradient, and no movement that fp32 could hold
        ({"ascent": "adamw", "eps": 1e-9}, 1.0),  # it moves, in a ball too small to matter
    ],
)
def test_an_adversary_without_effect_is_warned_of_once(
    adversary: dict[str, Any], factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(adversary=adversary)
    hook = toy_hook(setting)
    with torch.no_grad():
        hook.vector.fill_(1e-12 if adversary["eps"] < 1e-6 else 0.1)
    trainer = toy_trainer(setting, hook)
    module: Any = trainer.engine.module
    module.factor = factor
    with caplog.at_level(logging.WARNING):
        for step in range(IDLE_STEPS + 20):
            trainer.train_step()
            hook.metrics()
            assert warnings(caplog) == (step + 1 >= IDLE_STEPS), step


@pytest.mark.parametrize(("scope", "idle"), [("shared", 4), ("per_bucket", 0), ("value", 0)])
@pytest.mark.parametrize("ascent", ["adamw", "sgd"])
def test_one_vector_for_all_buckets_has_no_effect_and_is_seen_to_have_none(ascent: str, scope: str, idle: int) -> None:
    adversary = {"kind": "relative_embedding", "scope": scope, "ascent": ascent, "lr": 1.0, "eps": 20.0}
    trainer, hook = image_trainer(Layout(), image_config(Layout(), adversary=adversary))
    for _ in range(4):
        trainer.train_step()
    assert int(hook.effect.idle) == idle


@pytest.mark.parametrize("ascent", ["sgd", "adamw", "sign"])
def test_one_that_stands_at_the_edge_of_its_ball_is_at_work(ascent: str, caplog: pytest.LogCaptureFixture) -> None:
    adversary = {"ascent": ascent, "lr": 0.0 if ascent == "adamw" else 5.0, "eps": 0.01}
    setting = Setting(adversary=adversary, optimizer={"lr": 1e-3})
    hook = run(setting, IDLE_STEPS + 5)
    with caplog.at_level(logging.WARNING):
        hook.metrics()
    assert int(hook.effect.idle) < 5 and not warnings(caplog)


STEPS = QUARTER * (IDLE_STEPS + 20)


def still(adversary: dict[str, Any], every: int = 1) -> list[str]:
    """The notices logged, with a line each `every` steps, in a bit more than a quarter of a run whose weights hardly
    learn."""
    setting = Setting(adversary=adversary, optimizer={"lr": 1e-6}, steps=STEPS)
    trainer = toy_trainer(setting, hook := toy_hook(setting))
    notices = []
    for step in range(STEPS // QUARTER + every + 1):
        trainer.train_step()
        if step % every == 0:
            notices.append(hook.metrics().get("notice", ""))
    return notices


@pytest.mark.parametrize("every", [1, 24])
def test_an_adversary_that_hardly_acts_for_a_quarter_of_the_run_is_warned_of_once(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """AdamW at the weights' learning rate of 1e-6 moves, and so is not idle, but gets nowhere in a ball of 20."""
    with caplog.at_level(logging.WARNING):
        notices = still({"ascent": "adamw", "eps": 20.0}, every)
    due = -(-STEPS // QUARTER // every)  # the first line, of step 1, is where it begins
    assert not any(notices[:due]) and all(notices[due:])
    assert "hardly acts (since step 1):" in notices[-1] and "--adversary.lr" in notices[-1]
    assert sum("hardly acts" in record.getMessage() for record in caplog.records) == 1


def test_one_at_a_rate_of_its_own_acts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notices = still({"ascent": "adamw", "eps": 20.0, "lr": 0.05})
    assert not any(notices) and not caplog.records


def test_one_with_a_small_share_of_a_ball_too_large_for_it_acts_by_its_effect() -> None:
    """Share of eps and effect are both asked: this one stands at a thousandth of eps, and makes much of the loss."""
    notices = still({"ascent": "sgd", "eps": 2000.0, "lr": 0.05})
    assert not any(notices)


def test_steps_that_are_skipped_do_not_count() -> None:
    hook = run(Setting(adversary=SGD), 3, factor=float("nan"))
    assert int(hook.effect.idle) == 0
