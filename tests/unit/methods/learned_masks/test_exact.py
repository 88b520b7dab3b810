"""The comparison with the exact hypergradient that a run makes on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_masks import mask_config, masks_run
from trp_scale.core.pieces import Shards


def compared(dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, float]:
    """Metrics after two cycles."""
    layout = Layout(micro_size=4)
    own = {"exact_every": 2, "difference": 1e-4 if dtype == torch.float64 else 1e-2, **changes.pop("multilevel", {})}
    run = masks_run(layout, mask_config(layout, multilevel=own, **changes), dtype=dtype)
    assert run.hook is not None
    for step in range(2 * run.trainer.config.multilevel.unroll):
        run.trainer.train_step()
        if step < run.trainer.config.multilevel.unroll:
            assert "exact_cosine" not in run.hook.metrics(), "compared each second time only"
    return dict(run.hook.metrics())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"multilevel": {"mode": "look_ahead", "unroll": 1, "head_norm": "layer", "head_dropout": 0.3}},
        {"multilevel": {"mode": "look_ahead", "unroll": 2, "derivative": "full"}},
        {"multilevel": {"selection": "softsort", "weights": "normalised"}},
        {"multilevel": {"kind": "joint", "gamma": 0.5}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 20.0, "selection": "softsort"}},
    ],
)
def test_in_float64_both_agree(changes: dict[str, Any]) -> None:
    found = compared(**changes)
    assert found["exact_cosine"] == pytest.approx(1.0, abs=1e-9)
    assert found["exact_norm_ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_wrong_direction_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the direction's elements turned round."""
    times = Shards.times

    def turned(self: Shards, factor: Any) -> Shards:
        made = times(self, factor)
        return made if factor != 0.125 else Shards(parts=[-p for p in made.parts], owned=made.owned, group=made.group)

    monkeypatch.setattr(Shards, "times", turned)
    found = compared(multilevel={"mode": "look_ahead", "unroll": 1, "look_ahead_lr": 0.125})
    assert found["exact_cosine"] < 0.99
