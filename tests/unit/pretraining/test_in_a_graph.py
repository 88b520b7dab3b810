"""Fine-tuning's objectives that say so are one graph with their model, without a break; pre-training's are run whole in
tests/parity/test_compiled.py and tests/unit/benchmarks/test_step_counts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.pretraining.test_dense_objectives import depth_case, drawn, segmentation_case
from trp_scale.core.batch import Batch
from trp_scale.finetuning.classification.task import ImageClassification
from trp_scale.finetuning.glue.task import INPUTS, SentenceClassification


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
