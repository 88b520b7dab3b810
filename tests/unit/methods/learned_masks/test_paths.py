"""Sign and scale of both ways in which the encoder acts on the validation loss, each alone (issue line 2)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Path, Update, Weights, agreement, exact, flat, update

CLOSE = 1e-3
SHARE = 0.1
"""Each path is at least this much of the whole, so that one that is wrong shows."""
SMALL = {"lr": 1e-6}
"""A learning rate of the encoder at which dL_val / dE is the same before and after a step."""


@lru_cache
def found(path: Path, network: str = "flattened", micro_size: int = 8, unroll: int = 1, **rates: float) -> Update:
    """Plain, float64."""
    optimizer = {name: rates.pop(name) for name in ("lr",) if name in rates}
    multilevel = {name: rates.pop(name) for name in ("head_lr",) if name in rates}
    changes: dict[str, Any] = {
        "multilevel": {"network": network, "unroll": unroll, "difference": 1e-4, **multilevel},
        "optimizer": optimizer,
    }
    return update(Layout(micro_size=micro_size), changes, path=path, dtype=torch.float64, **rates)


def apart(ours: Weights, theirs: Weights, factor: float) -> float:
    """How far ours is from factor x theirs, by the length of that."""
    expected = factor * flat(theirs)
    return float((flat(ours) - expected).norm() / expected.norm())


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


@pytest.mark.parametrize("micro_size", [8, 4])
def test_the_whole_is_the_sum_of_both_paths(micro_size: int) -> None:
    """What was measured alone is what the hook adds up."""
    encoder, head, both = (flat(found(path, micro_size=micro_size).gradient) for path in ("encoder", "head", "both"))
    assert (encoder + head - both).norm() < 1e-5 * both.norm()


@pytest.mark.parametrize("path", ["encoder", "head", "both"])
def test_half_the_encoder_s_learning_rate_is_half_the_hypergradient(path: Path) -> None:
    whole, half = found(path, **SMALL), found(path, **SMALL, lr_factor=0.5)
    assert half.lr == whole.lr / 2
    assert apart(half.gradient, whole.gradient, 0.5) < CLOSE


def test_half_the_head_s_learning_rate_is_half_of_its_path_alone() -> None:
    rates = {**SMALL, "head_lr": 1e-5}
    for path, factor in (("head", 0.5), ("encoder", 1.0)):
        whole, half = found(path, **rates), found(path, **rates, head_lr_factor=0.5)  # type: ignore[arg-type]
        assert apart(half.gradient, whole.gradient, factor) < CLOSE, path


def test_a_head_that_does_not_learn_has_no_path() -> None:
    ours = found("both", head_lr=1e-12)
    measured = agreement(ours.gradient, exact([ours], "encoder"))
    assert measured.cosine == pytest.approx(1.0, abs=1e-6) and measured.ratio == pytest.approx(1.0, abs=1e-6)
