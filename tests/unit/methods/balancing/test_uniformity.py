"""When U-MAE's moment is there, and of which model and which images it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_images import image_config, image_trainer
from trp_scale.core.hooks import StepContext
from trp_scale.methods.adversary.pixels import PixelAdversary
from trp_scale.pretraining.mae.upstream import MOMENT, ROWS, Uniformity

PIXELS = {"kind": "pixels", "norm": "l2", "eps": 2.0}


def begun(micro_size: int, **changes: Any) -> tuple[Any, StepContext, Uniformity]:
    """A trainer, the context of its first step, and the hook."""
    layout = Layout(micro_size=micro_size)
    changes["objective"] = {"uniformity": 0.5}
    trainer, _ = image_trainer(layout, image_config(layout, **changes))
    window = trainer.source.next_window()
    ctx = trainer.context(window, torch.stack([trainer.objective.count(micro) for micro in window]).sum(0))
    (hook,) = (hook for hook in trainer.hooks.all if isinstance(hook, Uniformity))
    return trainer, ctx, hook


@pytest.mark.parametrize("micro_size", [8, 4])
def test_a_batch_carries_the_moment_or_the_rows_between_before_step_and_after_step(micro_size: int) -> None:
    trainer, ctx, hook = begun(micro_size)
    micro = ctx.window[0]
    assert hook.batch(ctx, micro).extras == {}
    trainer.hooks.before_step(ctx)
    extras = hook.batch(ctx, micro).extras
    if micro_size == 8:
        assert list(extras) == [ROWS] and extras[ROWS] == 8 * 2
    else:
        moment = extras[MOMENT]
        assert list(extras) == [MOMENT] and moment.shape == (32, 32) and not moment.requires_grad
        # Unit rows: the trace of their second moment is one.
        assert float(moment.trace()) == pytest.approx(1.0, rel=1e-12)
    hook.after_step(ctx)
    assert hook.batch(ctx, micro).extras == {}


def test_the_moment_is_of_the_shifted_pixels_and_the_adversary_s_own_pass_is_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    trainer, ctx, hook = begun(4, adversary=PIXELS)
    losses_of = trainer.objective.__call__

    def watched(forward: Any, batch: Any) -> Any:
        seen.append(MOMENT in batch.extras)
        return losses_of(forward, batch)

    monkeypatch.setattr(type(trainer.objective), "__call__", lambda self, *arguments: watched(*arguments))
    trainer.hooks.before_step(ctx)
    assert seen == [False, False]
    shifted = hook.batch(ctx, ctx.window[0]).extras[MOMENT]
    with torch.no_grad():
        clean = sum(trainer.objective.moment(trainer.engine, micro) for micro in ctx.window) / ctx.counts[1]
        again = sum(trainer.objective.moment(trainer.engine, ctx.apply_hooks(micro)) for micro in ctx.window)
    assert any(isinstance(hook, PixelAdversary) for hook in trainer.hooks.all)
    assert (shifted - clean).norm() > 1e-4 * clean.norm()
    torch.testing.assert_close(shifted, again / ctx.counts[1], rtol=1e-12, atol=1e-15)
