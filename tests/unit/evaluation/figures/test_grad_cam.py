"""Grad-CAM against finite differences, and by hand."""

from __future__ import annotations

import pytest
import torch

from tests.unit.evaluation.figures.small_encoder import GRID, SIZE, small_config, with_large_weights
from trp_scale.evaluation.figures.grad_cam import class_activation, grad_cam
from trp_scale.finetuning.classification.task import ImageClassifier


def test_the_formula_by_hand() -> None:
    """Two features on four patches: weights are mean gradients, 1 and -1/2; negative sums are 0."""
    gradients = torch.tensor([[[4.0, -1.0], [0.0, -1.0], [0.0, 0.0], [0.0, 0.0]]])
    activations = torch.tensor([[[3.0, 2.0], [0.0, 4.0], [-1.0, -6.0], [1.0, 0.0]]])
    assert grad_cam(activations, gradients).tolist() == [[[2.0, 0.0], [2.0, 1.0]]]


@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_gradients_are_the_logit_s_own(pooling: str) -> None:
    """The class's logit as a function of what the last block's first norm gives, moved one number at a time."""
    model = with_large_weights(ImageClassifier(small_config(pooling=pooling)))
    assert isinstance(model, ImageClassifier)
    images = torch.randn(1, 3, SIZE, SIZE, dtype=torch.float64)
    explained, step = 2, 1e-5
    kept: list[torch.Tensor] = []
    handle = model.encoder.blocks[-1].norm1.register_forward_hook(lambda *arguments: kept.append(arguments[2].detach()))
    with torch.no_grad():
        predicted = model(images).argmax(1)
    handle.remove()
    (features,) = kept  # [1, 1 + N, D]

    def logits(moved: torch.Tensor) -> torch.Tensor:
        """[P] of P moved features, all at once."""
        hook = model.encoder.blocks[-1].norm1.register_forward_hook(lambda *arguments: moved)
        with torch.no_grad():
            found: torch.Tensor = model(images.expand(len(moved), -1, -1, -1))[:, explained]
        hook.remove()
        return found

    moves = step * torch.eye(features.numel(), dtype=torch.float64).view(-1, *features.shape[1:])
    gradients = ((logits(features + moves) - logits(features - moves)) / (2 * step)).view_as(features)
    expected = grad_cam(features[:, 1:], gradients[:, 1:])
    found = class_activation(model, images, torch.tensor([explained]))
    assert expected.max() > 0 and expected.shape == (1, GRID, GRID)
    assert torch.allclose(found.maps, expected, rtol=1e-5, atol=1e-7 * float(expected.max()))
    assert torch.equal(found.predicted, predicted)


def test_each_image_has_its_own_map_of_its_predicted_class() -> None:
    model = with_large_weights(ImageClassifier(small_config()))
    assert isinstance(model, ImageClassifier)
    images = torch.randn(4, 3, SIZE, SIZE, dtype=torch.float64)
    together = class_activation(model, images)
    for number in range(4):
        alone = class_activation(model, images[number : number + 1], together.predicted[number : number + 1])
        assert torch.allclose(alone.maps[0], together.maps[number], rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.encoder.blocks[-1].norm1._forward_hooks, "nothing is left behind"
