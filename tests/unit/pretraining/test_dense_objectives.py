"""Losses of pixels in float64 and by hand; that they are sums over what is there, however rows are split; fine-tuning's
objectives that say so are one graph with their model, without a break.

Pre-training's are run whole in tests/parity/test_compiled.py and tests/unit/benchmarks/test_step_counts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Balancer, Hooks, StepContext
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.classification.task import ImageClassification
from trp_scale.finetuning.dense.depth import LARGEST, DepthObjective, DepthSpace, LargestError, reverse_huber
from trp_scale.finetuning.dense.task import Segmentation
from trp_scale.finetuning.glue.task import INPUTS, SentenceClassification
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

SPACE = DepthSpace(inverse=False, mean=3.0, deviation=2.0, low=1e-3, high=float("inf"))


def batch_of(name: str, maps: Tensor) -> Batch:
    size = maps.shape[-1]
    images = torch.randint(0, 256, (len(maps), 3, size, size), generator=torch.Generator().manual_seed(4)).byte()
    return Batch(fields={"images": images, name: maps}, keys=torch.arange(len(maps)), start=0)


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(fields={name: value[rows] for name, value in batch.fields.items()}, keys=batch.keys[rows], start=0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Fixed:
    """A model that gives these outputs, row after row, and an engine of it."""

    device, data_group = torch.device("cpu"), ALONE
    graphs = captured_graphs = None

    def __init__(self, *outputs: Tensor) -> None:
        self.outputs, self.given = outputs, 0

    def __call__(self, images: Tensor) -> list[Tensor]:
        rows = slice(self.given, self.given + len(images))
        self.given += len(images)
        return [each[rows] for each in self.outputs]


def segmentation_case() -> tuple[Any, Batch, list[Tensor]]:
    labels = torch.randint(0, 5, (4, 6, 6), generator=torch.Generator().manual_seed(1)).byte()
    labels[0, :3], labels[3] = 255, 255
    return Segmentation(0.4), batch_of("semseg", labels), [drawn(4, 5, 6, 6), drawn(4, 5, 6, 6, seed=1)]


def depth_case(inverse: bool = False) -> tuple[Any, Batch, list[Tensor]]:
    depth = drawn(4, 6, 6, seed=2).abs() + 0.5
    depth[0, :3], depth[3] = 0, 0
    space = DepthSpace(inverse=inverse, mean=3.0, deviation=2.0, low=1e-3, high=float("inf"))
    return DepthObjective(space), batch_of("depth", depth), [drawn(4, 1, 6, 6)]


def test_segmentation_is_the_sum_of_cross_entropies_of_pixels_with_a_class() -> None:
    objective, batch, outputs = segmentation_case()
    losses = objective(Fixed(*outputs), batch)
    labels, total = batch["semseg"].numpy(), 0.0
    for weight, logits in zip((1.0, 0.4), outputs, strict=True):
        shifted = logits.double().numpy()
        logarithms = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        for row, line, column in np.argwhere(labels != 255):
            total -= weight * logarithms[row, labels[row, line, column], line, column]
    assert float(losses.sums) == pytest.approx(total, rel=1e-6)
    assert float(losses.counts) == (labels != 255).sum() == 4 * 36 - 18 - 36


@pytest.mark.parametrize("case", [segmentation_case, depth_case, lambda: depth_case(inverse=True)])
def test_sums_and_counts_add_over_any_split(case: Any) -> None:
    objective, batch, outputs = case()
    whole = objective(Fixed(*outputs), batch)
    model = Fixed(*outputs)
    parts = [objective(model, part(batch, rows)) for rows in (slice(0, 1), slice(1, 4))]
    assert float(sum(each.sums for each in parts)) == pytest.approx(float(whole.sums), rel=1e-9)
    assert float(sum(each.counts for each in parts)) == float(whole.counts)
    assert float(whole.counts) == float(objective.count(batch)) > 0


@pytest.mark.parametrize("case", [segmentation_case, depth_case])
def test_unknown_pixels_get_no_gradient(case: Any) -> None:
    objective, batch, outputs = case()
    leaves = [each.clone().requires_grad_() for each in outputs]
    objective(Fixed(*leaves), batch).sums.backward()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.isfinite().all()
        assert not leaf.grad[0, :, :3].any() and not leaf.grad[3].any()
        assert (leaf.grad[1].abs().sum(0) > 0).all()


def test_the_reverse_huber_loss_is_its_two_branches() -> None:
    errors = drawn(3, 8, 8).double() * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
    found = reverse_huber(errors)
    for row in range(3):
        c = 0.2 * float(errors[row].abs().max())
        expected = [abs(e) if abs(e) <= c else (e * e + c * c) / (2 * c) for e in errors[row].flatten().tolist()]
        assert found[row].flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(reverse_huber(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


def test_the_threshold_is_a_constant_to_the_gradient() -> None:
    errors = torch.tensor([[1.0, 0.1, -0.5]], dtype=torch.float64, requires_grad=True)
    reverse_huber(errors).sum().backward()
    assert errors.grad[0].tolist() == pytest.approx([1.0 / 0.2, 1.0, -0.5 / 0.2])


@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(n, n + 1) for n in range(4)]])
def test_the_threshold_of_the_batch_is_the_same_however_it_is_split(parts: list[slice]) -> None:
    """That of the largest error of all rows, which a hook finds before the step; several ranks: tests/distributed."""
    _, batch, (outputs,) = depth_case()
    objective = DepthObjective(SPACE, "batch")
    window = [replace(part(batch, rows), start=rows.start) for rows in parts]
    shown = torch.cat([outputs, outputs])  # for the pass beforehand, and for that of the losses
    engine = Fixed(shown[4 if len(parts) == 1 else 0 :])
    run = RunContext(config=PosBertConfig(), objective=objective, engine=engine)
    hooks = Hooks(Balancer(), [LargestError(objective)])
    ctx = StepContext(run=run, hooks=hooks, step=0, window=window, counts=objective.count(batch), lr=0.1)
    hooks.before_step(ctx)
    found = sum(float(ctx.compute_losses(micro).sums) for micro in window)
    errors = torch.where(batch["depth"] > 0, outputs[:, 0] - (batch["depth"] - 3.0) / 2.0, 0.0).double().flatten()
    c = 0.2 * float(errors.abs().max())
    by_hand = [abs(e) if abs(e) <= c else (e * e + c * c) / (2 * c) for e in errors.tolist()]
    assert found == pytest.approx(sum(by_hand), rel=1e-6)
    per_image = float(DepthObjective(SPACE)(Fixed(outputs), batch).sums)
    assert abs(per_image - found) > 0.01 * found


def test_threshold_pass_and_weighted_pass_have_the_same_dropout() -> None:
    _, batch, (outputs,) = depth_case()

    class Dropping(Fixed):
        def __call__(self, images: Tensor) -> list[Tensor]:
            return [torch.nn.functional.dropout(each) for each in super().__call__(images)]

    objective = DepthObjective(SPACE, "batch")
    window = [replace(part(batch, rows), start=rows.start) for rows in (slice(0, 2), slice(2, 4))]
    run = RunContext(config=PosBertConfig(), objective=objective, engine=Dropping(torch.cat([outputs, outputs])))
    hooks = Hooks(Balancer(), [LargestError(objective)])
    ctx = StepContext(run=run, hooks=hooks, step=0, window=window, counts=objective.count(batch), lr=0.1)
    hooks.before_step(ctx)
    seen = [ctx.prepare_batch(micro) for micro in window]
    again = Dropping(torch.cat([outputs, outputs]))
    errors = []
    for micro in window:
        ctx.prepare_batch(micro)
        errors.append(objective.errors(again, micro).abs().max())
    assert all(torch.equal(each.extras[LARGEST], torch.stack(errors).max()) for each in seen)


def test_depth_target_is_standardised_or_inverse() -> None:
    true = torch.tensor([[[1.0, 4.0], [0.0, 2.0]]])
    assert SPACE.target(true).tolist() == true.tolist()
    inverse = DepthSpace(inverse=True, mean=0.0, deviation=1.0, low=0.1, high=10.0)
    assert inverse.target(true).tolist() == [[[1.0, 0.25], [0.0, 0.5]]]
    assert inverse.depth(torch.tensor([0.5, 0.0, -1.0, 100.0])).tolist() == pytest.approx([2.0, 10.0, 10.0, 0.1])
    right = ((true - 3.0) / 2.0).unsqueeze(1)
    assert float(DepthObjective(SPACE)(Fixed(right), batch_of("depth", true)).sums) == 0.0


def classification_case() -> tuple[Any, Batch, list[Tensor]]:
    images = torch.arange(4 * 3 * 36).remainder(256).view(4, 3, 6, 6).byte()
    fields = {"images": images, "targets": drawn(4, 5, seed=1).softmax(1), "row_weights": torch.tensor([1.0, 1, 1, 0])}
    return ImageClassification(), Batch(fields=fields, keys=torch.arange(4), start=0), [drawn(4, 5)]


def sentences_case(classes: int) -> tuple[Any, Batch, list[Tensor]]:
    labels = torch.tensor([0.5, 1.5, 0.0, 2.0]) if classes == 1 else torch.tensor([0, 2, 1, 0])
    fields = {name: torch.zeros(2, 3, dtype=torch.int64) for name in INPUTS}
    fields |= {"labels": labels, "row_weights": torch.tensor([1.0, 1, 1, 0])}
    return (
        SentenceClassification("t", classes),
        Batch(fields=fields, keys=torch.arange(4), start=0),
        [drawn(4, classes)],
    )


@pytest.mark.parametrize(
    "case",
    [segmentation_case, depth_case, classification_case, lambda: sentences_case(1), lambda: sentences_case(3)],
)
def test_compiled_losses_and_gradients_equal_eager(case: Any) -> None:
    objective, batch, outputs = case()
    assert objective.in_a_graph
    several = "images" in batch.fields and "targets" not in batch.fields
    found = []
    for whole in (False, True):
        leaves = [each.clone().requires_grad_() for each in outputs]

        def forward(*inputs: Tensor, leaves: list[Tensor] = leaves) -> Any:
            scale = inputs[0].float().mean()
            made = [each * (1.0 + scale) for each in leaves]
            return made if several else made[0]

        losses_of = torch.compile(objective, backend="aot_eager", fullgraph=True) if whole else objective
        losses = losses_of(forward, batch)
        losses.sums.sum().backward()
        found.append([losses.sums.detach(), losses.counts, *(leaf.grad for leaf in leaves)])
    torch._dynamo.reset()
    for own, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, own, rtol=1e-6, atol=1e-7)
        assert own.abs().sum() > 0
