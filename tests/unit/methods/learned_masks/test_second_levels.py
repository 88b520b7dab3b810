"""BLO-MAE and fine-tuning: their hypergradients by automatic differentiation through committed steps, in float64; what
a joint window holds (MLO-MAE eq. 5), and the second encoder's start and pull (eq. 13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Watched, held_adamw, state
from tests.synthetic_images import CROPS
from tests.synthetic_masks import CLASSES, D_TR, D_VAL, MasksRun, labelled, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Levels, Weights, cross_entropy
from tests.unit.methods.learned_masks.test_hypergradient import copies, relative, start
from trp_scale.config import Config
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.learned_masks.second_levels import (
    FINE_TUNED,
    HEAD,
    STEP,
    JointObjective,
    second_encoder,
)
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.training.loop import validate

CYCLES, UNROLL = 3, 2
DECODER = ("decoder_", "prediction.", "mask_token")
"""Of the second encoder's module: no part of what is asked."""


def weights_of(run: MasksRun, key: str) -> list[Weights]:
    """weight, exp_avg or exp_avg_sq of the encoder, the second encoder (the first without one), and the head."""
    head = run.hook.outer.level.head.state_dict()
    of_head = {name: values["value" if key == "weight" else key] for name, values in head.items()}
    return [state(run.engine, key), state(run.hook.engines().get(FINE_TUNED, run.engine), key), of_head]


def watch_outer_step(run: MasksRun) -> tuple[Levels, Watched]:
    """Train up to an outer step; return what its exact hypergradient needs, with second moments held, and ours."""
    config, watched, size = run.trainer.config, Watched(run), run.trainer.config.batch.global_size
    for _ in range(CYCLES * UNROLL - 1):
        run.trainer.train_step()
    weights, means = weights_of(run, "weight"), weights_of(run, "exp_avg")
    run.trainer.train_step()
    lr = run.trainer.history[-1].lr  # type: ignore[attr-defined]
    head_lr = config.multilevel.head_lr * lr / config.optimizer.lr
    decay = {name: config.optimizer.weight_decay if value.ndim > 1 else 0.0 for name, value in weights[0].items()}
    head_decay = {"weight": config.multilevel.head_weight_decay, "bias": 0.0}
    head_steps = CYCLES * (UNROLL if config.multilevel.kind == "joint" else 1)
    steps, rates = [CYCLES * UNROLL, CYCLES, head_steps], [lr, lr, head_lr]
    moments = zip(means, weights_of(run, "exp_avg_sq"), steps, rates, [decay, decay, head_decay], strict=True)
    rules = [held_adamw(mean, square, step, rate, config, own) for mean, square, step, rate, own in moments]
    train, validation = D_TR + (head_steps - 1) * size, D_VAL + (CYCLES - 1) * size
    levels = Levels(
        model=run.model,
        masking=run.networks[0],
        encoder=weights[0],
        tuned=weights[1],
        head=weights[2],
        network=watched.network,
        encoder_rule=rules[0],
        tuned_rule=rules[1],
        head_rule=rules[2],
        lower=watched.lower(),
        train=labelled(range(train, train + size)),
        validation=labelled(range(validation, validation + size)),
    )
    return levels, watched


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"kind": "joint", "gamma": 0.3}},
        {"multilevel": {"kind": "joint", "gamma": 3.0, "network": "patchwise", "weights": "normalised"}},
        {"multilevel": {"kind": "joint", "gamma": 0.3}, "vision": {"tokens": "all", "positions": "relative"}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 20.0}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 1.0, "network": "patchwise"}},
        {
            "multilevel": {"kind": "fine_tuning", "proximity": 20.0},
            "vision": {"tokens": "all", "positions": "relative"},
        },
    ],
)
def test_a_step_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    run = start(micro_size=micro_size, **{**settings, "multilevel": {"unroll": UNROLL, **settings["multilevel"]}})
    levels, watched = watch_outer_step(run)
    masks = run.trainer.config.multilevel
    if masks.kind == "joint":
        exact = levels.joint(masks.gamma, normalise=masks.weights == "normalised")
    else:
        exact = levels.fine_tuned(masks.pull(run.trainer.history[-1].lr))  # type: ignore[attr-defined]
        for name in [name for name in exact.encoder if name.startswith(DECODER)]:
            del exact.encoder[name]
    _, encoder, head = weights_of(run, "weight")
    assert relative(watched.gradient, exact.hypergradient) < 1e-6  # targets are fp32
    assert relative(encoder, exact.encoder) < 1e-9 and relative(head, exact.head) < 1e-12


ADVERSARIES: dict[str, dict[str, Any]] = {
    "none": {},
    "pixels": {"kind": "pixels", "norm": "linf", "eps": 0.1},
    "positions": {"kind": "absolute_embedding", "update": "sequential", "eps": 0.5},
}


def joint_run(micro_size: int = 4, **changes: Any) -> MasksRun:
    multilevel = {"kind": "joint", "gamma": 0.5, **changes.pop("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, multilevel=multilevel, **changes))


def head_of(run: MasksRun) -> Tensor:
    return run.hook.outer.level.head.parameters.flat()


def test_every_step_takes_a_window_of_both_sources() -> None:
    run = joint_run(multilevel={"unroll": 2, "batch_size": 12, "micro_size": 6})
    window = run.trainer.source.next_window()
    assert [micro.joined for micro in window] == [False, False, True, True]
    assert [micro.start for micro in window] == [0, 4, D_TR, D_TR + 6]
    before = head_of(run)
    for _ in range(3):
        run.trainer.train_step()
    source: Any = run.trainer.source
    assert (source.own.cursor, source.joined.cursor) == (4 * 8, 4 * 12)
    assert run.hook.outer.sources.validation.cursor == 12  # type: ignore[attr-defined]  # one outer step in three
    assert not torch.equal(before, head_of(run))
    optimizer = run.hook.outer.level.head.optimizer
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_two_tasks_with_the_weights_of_equation_5() -> None:
    run = joint_run()
    objective, engine = run.trainer.objective, run.engine
    assert isinstance(objective, JointObjective) and objective.tasks == ("reconstruction", "classification")
    own, other = run.trainer.source.next_window()[::2]
    other.fields["row_weights"][1], other.fields["labels"][1] = 0.0, -1  # a row that is not there
    leaf = torch.randn_like(head_of(run)).requires_grad_()
    other.extras = {HEAD: leaf, STEP: torch.tensor(0)}

    with torch.no_grad():
        plain: TaskLosses = objective.reconstruction(engine, own)
        losses = objective(engine, own)
    assert losses.sums.tolist() == [float(plain.sums), 0.0] and losses.counts.tolist() == [float(plain.counts), 0.0]

    losses = objective(engine, other)
    every = torch.arange(16).expand(4 * CROPS, -1)
    tokens = engine(objective.patches(other), every, every[:, :0], output="features")
    weight, bias = leaf[: CLASSES * 32].view(CLASSES, 32), leaf[CLASSES * 32 :]
    logits = F.linear(tokens[:, 1:].mean(1), weight, bias).view(4, CROPS, CLASSES)[[0, 2, 3]]
    expected = F.cross_entropy(
        logits.flatten(0, 1).double(), other["labels"][[0, 2, 3]].repeat_interleave(CROPS), reduction="sum"
    )
    assert losses.counts.tolist() == objective.count(other).tolist() == [0.0, 3.0 * CROPS]
    torch.testing.assert_close(losses.sums, torch.stack([expected.new_zeros(()), expected]), rtol=1e-5, atol=0.0)

    run.trainer.train_step()
    stats = run.trainer.history[-1]  # type: ignore[attr-defined]
    assert stats.task_weights == (0.5, 1.0)
    assert stats.loss == pytest.approx(0.5 * stats.task_losses[0] + stats.task_losses[1], rel=1e-6)
    assert float(run.hook.outer.level.train_loss) == pytest.approx(stats.task_losses[1], rel=1e-6)


def first_gradient(run: MasksRun) -> tuple[Tensor, list[tuple[bool, set[str]]]]:
    """The head's gradient in the first step, and what was added to each micro-batch that the objective saw."""
    seen: list[tuple[bool, set[str]]] = []
    batch_of = run.trainer.hooks.batch

    def noted(ctx: StepContext, micro: Batch) -> Batch:
        found = batch_of(ctx, micro)
        seen.append((found.joined, set(found.extras)))
        return found

    run.trainer.hooks.batch = noted  # type: ignore[method-assign]
    run.trainer.train_step()
    return run.hook.outer.gradient, seen


@pytest.mark.parametrize("kind", ["pixels", "positions"])
def test_adversaries_and_their_passes_leave_the_head_and_its_images_alone(kind: str) -> None:
    reference, _ = first_gradient(joint_run())
    ours, seen = first_gradient(joint_run(adversary=ADVERSARIES[kind]))
    assert reference.norm() > 0
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-9)
    assert [joined for joined, _ in seen].count(True) == 2  # once for each of the window's two, in no other pass
    assert all("pixel_shift" not in extras and "patch_weights" not in extras for joined, extras in seen if joined)
    added = "pixel_shift" if kind == "pixels" else "perturbation"
    assert any(added in extras for joined, extras in seen if not joined)


def test_a_skipped_step_moves_no_head_and_leaves_nothing_behind() -> None:
    run = joint_run()
    run.trainer.train_step()
    before, check = head_of(run), run.engine.check_gradients
    run.engine.check_gradients = lambda: check() * torch.inf  # type: ignore[method-assign]
    run.trainer.train_step()
    assert not run.trainer.history[-1].applied  # type: ignore[attr-defined]
    assert torch.equal(head_of(run), before) and run.hook.outer.leaf.grad is None
    run.engine.check_gradients = check  # type: ignore[method-assign]
    run.trainer.train_step()
    assert not torch.equal(head_of(run), before)


def test_held_out_rows_have_no_classification() -> None:
    run = joint_run()
    found = validate(run.engine, run.trainer.objective, [labelled(range(40, 44)), labelled(range(44, 48))], set())
    plain = validate(run.engine, run.trainer.objective.reconstruction, [labelled(range(40, 48))], set())  # type: ignore[attr-defined]
    assert found["tasks"]["classification"] == {"loss": None, "count": 0}
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found["tasks"]["reconstruction"]["count"] == plain["tasks"]["reconstruction"]["count"]


def test_head_dropout_is_of_the_step_and_the_position() -> None:
    """A prepass sees what the weighted pass sees; the next step sees another."""
    run = joint_run(multilevel={"head_dropout": 0.5})
    objective, other = run.trainer.objective, run.trainer.source.next_window()[2]
    losses = []
    for step in (0, 0, 1):
        other.extras = {HEAD: head_of(run), STEP: torch.tensor(step)}
        losses.append(float(objective(run.engine, other).sums[1].detach()))
    assert losses[0] == losses[1] != losses[2]


def tuned_run(micro_size: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> MasksRun:
    multilevel = {"kind": "fine_tuning", "proximity": 20.0, **changes.pop("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, multilevel=multilevel, **changes), dtype=dtype)


def test_it_starts_where_the_first_is_and_is_an_engine_of_the_hook() -> None:
    config = mask_config(Layout())

    def make_engine(module: torch.nn.Module, config: Config) -> PlainEngine:
        return PlainEngine(module, config, device=torch.device("cpu"))

    engine = make_engine(MaskedAutoencoder(config), config)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.1)  # as if the run had started from given weights
    makers = {"make_engine": make_engine, "make_model": lambda: MaskedAutoencoder(config)}
    tuned = second_encoder(RunContext(config=config, objective=None, engine=engine, **makers))
    assert all(torch.equal(tuned.module.get_parameter(name), value) for name, value in copies(engine.module).items())
    run = tuned_run()
    assert run.hook.engines()[FINE_TUNED] is run.hook.outer.tuned
    assert all({"exp_avg", "exp_avg_sq"} <= set(piece.tensors) for piece in run.hook.outer.tuned.pieces())


def test_with_gradient_descent_a_step_is_down_the_sum_of_equation_13() -> None:
    """F' = F - eta d/dF (L_cls(D_tr; F, C) + lambda ||F - E||^2), by automatic differentiation."""
    run = tuned_run(dtype=torch.float64, optimizer={"kind": "sgd", "lr": 0.01}, multilevel={"unroll": 1})
    for _ in range(2):
        run.trainer.train_step()
    head = run.hook.outer.level.head.parameters
    before = {name: value.requires_grad_() for name, value in copies(run.networks[1]).items()}
    assert any(not torch.equal(value, run.model.get_parameter(name)) for name, value in before.items())
    run.trainer.train_step()  # E moves first
    encoder = copies(run.model)
    distance = torch.stack([(value - encoder[name]).square().sum() for name, value in before.items()]).sum()
    batch = labelled(range(D_TR + 16, D_TR + 24))
    loss = cross_entropy(run.networks[1], before, (head.weight, head.bias), batch, "mean") + 20.0 * distance
    gradients = torch.autograd.grad(loss, list(before.values()))
    expected = {n: v.detach() - 0.01 * g for (n, v), g in zip(before.items(), gradients, strict=True)}
    assert relative(copies(run.networks[1]), expected) < 1e-12
    assert float(run.hook.outer.distance) == pytest.approx(float(distance.detach().sqrt()), rel=1e-12)


def test_a_gradient_that_is_not_finite_leaves_the_pull() -> None:
    run = tuned_run(multilevel={"unroll": 1})
    run.trainer.train_step()
    outer, before = run.hook.outer, copies(run.networks[1])
    head, check = outer.level.head.parameters.flat(), outer.tuned.check_gradients
    outer.tuned.check_gradients = lambda: check() * torch.inf  # type: ignore[method-assign]
    run.trainer.train_step()
    pull = 2 * run.trainer.history[-1].lr * 20.0  # type: ignore[attr-defined]
    expected = {name: value + pull * (run.model.get_parameter(name) - value) for name, value in before.items()}
    assert relative(copies(run.networks[1]), {name: value.detach() for name, value in expected.items()}) < 1e-7
    assert torch.equal(outer.level.head.parameters.flat(), head)
    assert outer.tuned.optimizer_steps() == 1
    outer.tuned.check_gradients = check  # type: ignore[method-assign]
    run.trainer.train_step()
    assert outer.tuned.optimizer_steps() == 2


def test_the_network_s_eps_carries_what_its_gradients_carry() -> None:
    eps: dict[float, float] = {}
    for proximity in (1.0, 20.0):
        run = tuned_run(multilevel={"proximity": proximity})
        network: Any = run.hook.masker.network
        eps[proximity] = network.optimizer.param_groups[0]["eps"]
        assert eps[proximity] == run.hook.masker.eps
    assert eps[20.0] == pytest.approx(1e-8 * 3e-3 * 2 * 3e-3 * 20.0) and eps[20.0] == pytest.approx(20 * eps[1.0])
