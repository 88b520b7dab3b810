"""The gradient noise scale (methods/gradient_noise_scale.py) against float64 gradients and known distributions."""

from __future__ import annotations

import pytest
import torch

from tests.synthetic import Layout, small_config, trainer_for
from trp_scale.core.hooks import Hooks
from trp_scale.methods.gradient_noise_scale import GradientNoiseScale, estimates
from trp_scale.methods.settings import GradientNoiseScaleSettings


def test_the_estimates_are_unbiased() -> None:
    """Gradients of rows drawn around a known one, whose covariance has a known trace."""
    generator = torch.Generator().manual_seed(5)
    rows, count, draws = 3, 4, 20_000
    true, spread = torch.tensor([0.5, -1.0, 2.0]).double(), torch.tensor([1.0, 2.0, 0.5]).double()
    noise = torch.randn(draws, count, rows, 3, generator=generator, dtype=torch.float64) * spread
    small = (true + noise).mean(2)  # [draws, count, 3]
    big = small.mean(1)
    found = estimates(small.square().sum(2).mean(1), big.square().sum(1), rows=rows, count=count)  # [2, draws]
    expected = torch.stack([spread.square().sum(), true.square().sum()])
    error = found.std(1) / draws**0.5
    assert ((found.mean(1) - expected).abs() < 4 * error).all()
    assert (error < 0.02 * expected).all(), "too few draws to tell"


def test_averages_and_state_over_steps() -> None:
    """Each estimate is averaged with the weights 1 - s, s (1 - s), ..., and both before they are divided."""
    layout = Layout()
    trainer = trainer_for(layout, small_config(layout))
    hook = GradientNoiseScale(GradientNoiseScaleSettings(smoothing=0.75), trainer.run_context)
    trainer.hooks = Hooks(trainer.hooks.balancer, [hook])
    assert hook.metrics() == {}
    found, step = [], hook.after_step

    def noting(ctx):  # type: ignore[no-untyped-def]
        found.append(
            estimates(4 * hook._squares, ctx.stats().grad_norm ** 2, rows=2, count=4)
        )  # four micro-batches of two
        step(ctx)

    hook.after_step = noting  # type: ignore[method-assign]
    for _ in range(3):
        trainer.train_step()
    powers = [0.75**2, 0.75, 1.0]
    mean = sum(power * each for power, each in zip(powers, found, strict=True)) / sum(powers)
    metrics = hook.metrics()
    assert metrics["trace"] == pytest.approx(float(mean[0]), rel=1e-9)
    assert metrics["squared_norm"] == pytest.approx(float(mean[1]), rel=1e-9)
    assert metrics["noise_scale"] == pytest.approx(float(mean[0] / mean[1]), rel=1e-9)
    again = GradientNoiseScale(GradientNoiseScaleSettings(smoothing=0.75), trainer.run_context)
    again.load_state_dict(hook.state_dict())
    assert again.metrics() == metrics


def test_what_tells_nothing_is_refused() -> None:
    (problem,) = GradientNoiseScaleSettings().problems(small_config(Layout(), batch={"micro_size": 8}))
    assert problem.startswith("--batch.micro_size is 8 and --batch.global_size 8")
    assert not list(GradientNoiseScaleSettings().problems(small_config(Layout())))
