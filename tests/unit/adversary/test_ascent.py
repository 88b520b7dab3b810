"""The rules of ascent, each against its definition or another library."""

from __future__ import annotations

import pytest
import torch

from tests.unit.adversary.toy import COORDINATES
from trp_scale.adversary.ascent import ASCENTS, Ascent
from trp_scale.adversary.projection import Balls
from trp_scale.config import OptimizerConfig
from trp_scale.config.components import settings_of


def rule(name: str, **settings: object) -> Ascent:
    adversary = settings_of("adversary", "relative_coordinate", eps=2.0, **settings)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(beta1=0.8, beta2=0.97, eps=1e-5, weight_decay=0.1)
    return ASCENTS[name](adversary, optimizer, Balls(COORDINATES, adversary.norm, adversary.eps))  # type: ignore[arg-type]


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


def test_a_step_leaves_its_arguments_as_they_were() -> None:
    for name in ASCENTS:
        ours = rule(name, lr=0.1)
        vector, (gradient,) = torch.ones(6), gradients(1)
        state = ours.start(vector)
        before = {key: value.clone() for key, value in state.items()}
        moved, _ = ours.step(vector, gradient, state, 0.1)
        assert not torch.equal(moved, vector), name
        assert torch.equal(vector, torch.ones(6)), name
        assert all(torch.equal(state[key], value) for key, value in before.items()), name


def test_sgd_and_sign_climb_at_the_adversary_s_own_rate() -> None:
    vector, (gradient,) = torch.linspace(-1.0, 1.0, 6), gradients(1)
    climbed, _ = rule("sgd", lr=0.25).step(vector, gradient, {}, 99.0)
    torch.testing.assert_close(climbed, vector + 0.25 * gradient, rtol=0.0, atol=0.0)
    climbed, _ = rule("sign", lr=0.25).step(vector, gradient, {}, 99.0)
    torch.testing.assert_close(climbed, vector + 0.25 * gradient.sign(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_linear_steps_from_zero_to_the_edge_of_each_ball(norm: str) -> None:
    ours = rule("linear", norm=norm)
    vector, gradient = torch.ones(6), torch.tensor([3.0, -4.0, 0.0, 0.0, 1e-20, 0.0])
    assert torch.equal(ours.origin(vector), torch.zeros(6))
    climbed, _ = ours.step(vector, gradient, {}, 99.0)
    expected = [1.2, -1.6, 0.0, 0.0, 2.0, 0.0] if norm == "l2" else [2.0, -2.0, 0.0, 0.0, 2.0, 0.0]
    assert climbed.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adamw", "sgd", "sign"])
def test_the_others_take_their_gradient_where_they_are(name: str) -> None:
    vector = torch.ones(6)
    assert torch.equal(rule(name, lr=0.1).origin(vector), vector)
