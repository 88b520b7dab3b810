"""Taps tell the tasks' gradients apart under one backward pass, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.synthetic_modalities import batch
from tests.unit.models.small_modalities import EVERY_TASK, config, small_model
from trp_scale.core.batch import Batch
from trp_scale.core.objective import TappedObjective, TapPlace
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction

WEIGHTS = torch.tensor([0.2, 0.5, 1.5, 0.7], dtype=torch.float64)


def tapped(objective: MultimodalReconstruction, rows: Batch, at: TapPlace) -> tuple[Batch, torch.Tensor]:
    name, shape = objective.tap(rows, at)
    tap = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    return replace(rows, extras={name: tap}), tap


@pytest.mark.parametrize("reduction", ["sample", "element"])
def test_each_task_s_gradient_of_the_last_shared_weights(reduction: Any) -> None:
    """As one backward pass for each task gives it."""
    settings = config(outputs=EVERY_TASK)
    settings.objective.reduction = reduction
    objective, model, rows = MultimodalReconstruction(settings), small_model(settings), batch(range(3))
    shared = model.blocks[-1].mlp.fc2.weight
    plain = objective(model, rows)
    expected = [
        torch.autograd.grad(weight * loss / count, shared, retain_graph=True)[0]
        for weight, loss, count in zip(WEIGHTS, plain.sums, plain.counts, strict=True)
    ]
    batch_with_tap, tap = tapped(objective, rows, "weights")
    losses = objective(model, batch_with_tap)
    torch.testing.assert_close(losses.sums, plain.sums, rtol=1e-13, atol=0)
    (WEIGHTS * losses.sums / losses.counts).sum().backward()
    assert tap.grad is not None and losses.shared_inputs is not None and not losses.shared_inputs.requires_grad
    parts = objective.task_gradients(rows, "weights", tap.grad)
    assert set(parts) == set(objective.tapped_tasks("weights")) == {0, 1, 2, 3}
    for task, one in enumerate(expected):
        torch.testing.assert_close(parts[task].T @ losses.shared_inputs, one, rtol=0, atol=1e-10)
        assert one.norm() > 1e-3
    torch.testing.assert_close(sum(expected), shared.grad, rtol=0, atol=1e-10)


def test_each_task_s_gradient_of_the_shared_representation() -> None:
    settings = config(outputs=("semseg", "rgb"))
    objective, model, rows = MultimodalReconstruction(settings), small_model(settings), batch(range(2))
    kept: list[torch.Tensor] = []
    handle = model.blocks[-1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    sums = objective(model, rows).sums
    handle.remove()
    expected = [torch.autograd.grad(one, kept[0], retain_graph=True)[0].flatten(0, 1) for one in sums]
    batch_with_tap, tap = tapped(objective, rows, "representation")
    objective(model, batch_with_tap).sums.sum().backward()
    assert tap.grad is not None
    parts = objective.task_gradients(rows, "representation", tap.grad)
    for task in objective.tapped_tasks("representation"):
        torch.testing.assert_close(parts[task], expected[task], rtol=0, atol=1e-10)
    assert not torch.allclose(parts[0], parts[1])


def test_all_weights_get_the_gradients_that_they_get_without_a_tap() -> None:
    settings = config()
    objective, model, rows = MultimodalReconstruction(settings), small_model(settings), batch(range(2))
    assert isinstance(objective, TappedObjective)
    found = []
    for each in (rows, tapped(objective, rows, "weights")[0]):
        model.zero_grad()
        objective(model, each).sums.sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-11, msg=name)
