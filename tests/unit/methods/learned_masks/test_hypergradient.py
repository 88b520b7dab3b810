"""The hypergradient against automatic differentiation through the unrolled step, in float64; sign and scale of both
ways in which the encoder acts on the validation loss, each alone."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Path, exact, flat, update
from tests.synthetic_masks import MasksRun, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Weights

DOUBLE = torch.float64
FINE = {"difference": 1e-4}


def start(*, micro_size: int = 8, **changes: Any) -> MasksRun:
    """A run in float64 whose network, head and weights have already moved a little."""
    changes["multilevel"] = {**FINE, **changes.get("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, **changes), dtype=DOUBLE)


def copies(module: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def relative(found: Weights, expected: Weights) -> float:
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([value.flatten() for value in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"unroll": 1, "pooling": "class", "network": "patchwise"}},
        {"multilevel": {"unroll": 1, "weights": "normalised"}},
        {"multilevel": {"unroll": 1}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_committed_steps_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    changes = {**settings, "multilevel": {**FINE, **settings["multilevel"]}}
    ours = update(Layout(micro_size=micro_size), changes, dtype=DOUBLE)
    assert relative(ours.gradient, exact([ours])) < 1e-6


SHARE = 0.1
"""Each path is at least this much of the whole, so that one that is wrong shows."""


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("network", ["flattened", "patchwise"])
def test_each_path_is_that_of_exact_differentiation(network: str, micro_size: int, unroll: int) -> None:
    changes = {"multilevel": {"network": network, "unroll": unroll, **FINE}}
    sizes: dict[Path, float] = {}
    for path in get_args(Path):
        ours = update(Layout(micro_size=micro_size), changes, path=path, dtype=DOUBLE)
        theirs = exact([ours], path)
        assert relative(ours.gradient, theirs) < 1e-6, path
        sizes[path] = float(flat(theirs).norm())
    assert min(sizes.values()) >= SHARE * sizes["both"]
