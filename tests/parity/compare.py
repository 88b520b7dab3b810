"""How far two runs' weights are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout, Result
from trp_scale.core.batch import TaskLosses
from trp_scale.core.engine import Engine

RELATIVE = 1e-5
"""Largest norm of the difference over the norm of the weights."""
TRAVELLED = 1e-4
"""Largest norm of the difference over the distance travelled since the start."""


def without_gradient(name: str) -> bool:
    """Key biases: softmax does not see them, so their gradient is rounding noise, which AdamW scales up to the
    learning rate. They are compared under SGD only."""
    return name.endswith("key.bias")


def distances(ours: Result, reference: Result, *, skip_key_biases: bool) -> dict[str, tuple[float, float]]:
    """(relative, travelled) by tensor, and under "all" over everything compared."""
    names = [name for name in reference.weights if not (skip_key_biases and without_gradient(name))]
    assert set(ours.weights) == set(reference.weights)
    difference = {name: (ours.weights[name] - reference.weights[name]).double() for name in names}
    weight = {name: reference.weights[name].double() for name in names}
    travel = {name: (reference.weights[name] - reference.initial[name]).double() for name in names}

    def ratio(top: list[torch.Tensor], bottom: list[torch.Tensor]) -> float:
        size = torch.cat([each.flatten() for each in bottom]).norm()
        apart = torch.cat([each.flatten() for each in top]).norm()
        return float(apart / size) if size > 0 else float(apart)

    found = {
        name: (ratio([difference[name]], [weight[name]]), ratio([difference[name]], [travel[name]])) for name in names
    }
    found["all"] = tuple(  # type: ignore[assignment]
        ratio(list(difference.values()), list(bottom.values())) for bottom in (weight, travel)
    )
    return found


def run_alone(train: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return a run of one process in four micro-batches; it is made once."""
    key = (train, repr(arguments), repr(named))
    if key not in _ALONE:
        _ALONE[key] = train(Layout(micro_size=2), *arguments, **named)
    return _ALONE[key]


_ALONE: dict[tuple[Callable[..., Any], str, str], Any] = {}


def way_apart(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Distance of weights over the distance travelled since the start, without key biases."""
    pair = [Result(weights=each, initial=start, steps=[], moved=True) for each in (ours, theirs)]
    return distances(*pair, skip_key_biases=True)["all"][1]


def too_far(ours: Result, reference: Result, *, skip_key_biases: bool = True) -> list[str]:
    """The tensors that are further apart than allowed, in words; empty when the runs agree."""
    found = distances(ours, reference, skip_key_biases=skip_key_biases)
    return [
        f"{name}: {relative:.1e} of its norm, {travelled:.1e} of the distance travelled"
        for name, (relative, travelled) in found.items()
        if relative > RELATIVE or travelled > TRAVELLED
    ]


def steps_too_far(
    ours: Result, theirs: Result, *, names: Sequence[str] = ("loss", "task_weights", "grad_norm")
) -> list[str]:
    """The steps whose values differ by more than rounding, in words: 1e-5 of these values, 1e-4 of the gradient's norm,
    whose squares are summed."""
    return [
        f"{name} of step {step}"
        for step, (mine, other) in enumerate(zip(ours.steps, theirs.steps, strict=True))
        for name in names
        if getattr(mine, name)
        != pytest.approx(getattr(other, name), rel=1e-4 if name == "grad_norm" else 1e-5, abs=1e-9)
    ]


def kept_bytes(engine: Engine, losses_of: Callable[[Engine], TaskLosses]) -> int:
    """That a forward pass keeps for its backward pass, parameters left out; closes the engine."""
    known = {each.untyped_storage().data_ptr() for each in engine.module.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = losses_of(engine)
    assert losses.sums.isfinite().all()
    engine.close()
    return sum(found.values())
