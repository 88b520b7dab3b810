"""The picture of fine-tuned segmentation and depth has the names of what its colours mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.unit.evaluation.small_encoder import GRID, SIZE, small_config, with_large_weights
from trp_scale.evaluation.figures import finetuned
from trp_scale.evaluation.figures.finetuned import PixelMaps, class_activation, grad_cam
from trp_scale.evaluation.figures.pictures import draw_legend
from trp_scale.finetuning.classification.task import ImageClassifier


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_the_legend_names_classes_that_are_predicted_or_true(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def watched(figure: Any, entries: Any) -> None:
        draw_legend(figure, entries)
        shown.extend(text.get_text() for legend in figure.legends for text in legend.get_texts())

    monkeypatch.setattr(finetuned, "draw_legend", watched)
    segmented = kind == "segmentation"
    true = torch.tensor([[0, 0], [255, 3]]) if segmented else torch.rand(2, 2)
    maps = PixelMaps(
        kind=kind,
        modality="semseg" if segmented else "depth",
        images=[torch.rand(3, 2, 2)],
        predicted=[torch.tensor([[1, 0], [0, 0]]) if segmented else torch.rand(2, 2)],
        true=[true],
        relative=False,
        classes=("sky", "wall", "floor", "box") if segmented else (),
    )
    finetuned._draw({"run": maps}, tmp_path / "picture.png")
    assert shown == (["sky", "wall", "box"] if segmented else [])
    with Image.open(tmp_path / "picture.png") as picture:
        assert min(picture.size) > 100


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
    step = 1e-5
    kept: list[torch.Tensor] = []
    handle = model.encoder.blocks[-1].norm1.register_forward_hook(lambda *arguments: kept.append(arguments[2].detach()))
    with torch.no_grad():
        predicted = model(images).argmax(1)
    handle.remove()
    (features,) = kept  # [1, 1 + N, D]
    explained = int(predicted)

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
    maps, guessed = class_activation(model, images)
    assert expected.max() > 0 and expected.shape == (1, GRID, GRID)
    assert torch.allclose(maps, expected, rtol=1e-5, atol=1e-7 * float(expected.max()))
    assert torch.equal(guessed, predicted)


def test_each_image_has_its_own_map_of_its_predicted_class() -> None:
    model = with_large_weights(ImageClassifier(small_config()))
    assert isinstance(model, ImageClassifier)
    images = torch.randn(4, 3, SIZE, SIZE, dtype=torch.float64)
    together, _ = class_activation(model, images)
    for number in range(4):
        alone, _ = class_activation(model, images[number : number + 1])
        assert torch.allclose(alone[0], together[number], rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.encoder.blocks[-1].norm1._forward_hooks, "nothing is left behind"
