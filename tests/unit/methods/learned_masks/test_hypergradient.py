"""The hypergradient against automatic differentiation through the unrolled step, in float64; sign and scale of both
ways in which the encoder acts on the validation loss, each alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Path, Update, agreement, exact, flat, update
from tests.synthetic_masks import MasksRun, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Masked, Weights, joined
from trp_scale.methods.learned_masks.masks import MaskedWindow

DOUBLE = torch.float64
FINE = {"difference": 1e-4}


def start(*, micro_size: int = 8, **changes: Any) -> MasksRun:
    """A run in float64 whose network, head and weights have already moved a little."""
    changes["multilevel"] = {**FINE, **changes.get("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, **changes), dtype=DOUBLE)


def copies(module: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


class Recorder:
    """The gradient that reaches the masking network, and what it was chosen with."""

    def __init__(self, run: MasksRun) -> None:
        assert run.hook is not None
        self.masker = run.hook.masker
        self.gradient: Weights = {}
        self.windows: list[MaskedWindow] = []
        self.own: Weights = {}
        check, outer_step = self.masker.network.check_gradients, self.masker.outer_step

        def check_gradients() -> Tensor:
            self.gradient = {n: p.grad.clone() for n, p in run.networks[0].named_parameters() if p.grad is not None}
            return check()

        def recorded(windows: Any, scale: float) -> bool:
            self.windows = [window for window, _ in windows]
            self.own = copies(run.networks[0])
            return outer_step(windows, scale)

        self.masker.network.check_gradients = check_gradients  # type: ignore[method-assign]
        self.masker.outer_step = recorded  # type: ignore[method-assign]

    def lower(self, number: int = 0) -> Masked:
        window = self.windows[number]
        embeddings = [each.embeddings for each in window.selections]
        return Masked(
            batch=joined(list(window.micros)),
            visible=torch.cat([each.visible for each in window.selections]),
            masked=torch.cat([each.masked for each in window.selections]),
            embeddings=torch.cat([each for each in embeddings if each is not None]),
        )


def relative(found: Weights, expected: Weights) -> float:
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([value.flatten() for value in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"unroll": 1}},
        {"multilevel": {"unroll": 1, "pooling": "class", "network": "patchwise"}},
        {"multilevel": {"unroll": 1, "weights": "normalised"}},
        {"multilevel": {"unroll": 1}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_committed_steps_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    changes = {**settings, "multilevel": {**FINE, **settings["multilevel"]}}
    ours = update(Layout(micro_size=micro_size), changes, dtype=DOUBLE)
    assert relative(ours.gradient, exact([ours])) < 1e-6


CLOSE = 1e-3
SHARE = 0.1
"""Each path is at least this much of the whole, so that one that is wrong shows."""


@lru_cache
def found(path: Path, network: str, micro_size: int, unroll: int) -> Update:
    """Return an update of the plain engine in float64."""
    changes = {"multilevel": {"network": network, "unroll": unroll, **FINE}}
    return update(Layout(micro_size=micro_size), changes, path=path, dtype=DOUBLE)


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("network", ["flattened", "patchwise"])
@pytest.mark.parametrize("path", ["encoder", "head", "both"])
def test_each_path_has_the_direction_and_the_size_of_exact_differentiation(
    path: Path, network: str, micro_size: int, unroll: int
) -> None:
    ours = found(path, network, micro_size, unroll)
    theirs = exact([ours], path)
    measured = agreement(ours.gradient, theirs)
    assert measured.cosine == pytest.approx(1.0, abs=CLOSE)
    assert measured.ratio == pytest.approx(1.0, abs=CLOSE)
    assert flat(theirs).norm() >= SHARE * flat(exact([ours], "both")).norm()
