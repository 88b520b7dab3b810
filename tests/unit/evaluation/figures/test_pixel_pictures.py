"""The picture of fine-tuned segmentation and depth has the names of what its colours mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from trp_scale.evaluation.figures import pixel_pictures
from trp_scale.evaluation.figures.drawing import draw_legend
from trp_scale.evaluation.figures.pixel_pictures import PixelMaps


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_the_legend_names_classes_that_are_predicted_or_true(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def watched(figure: Any, entries: Any) -> None:
        draw_legend(figure, entries)
        shown.extend(text.get_text() for legend in figure.legends for text in legend.get_texts())

    monkeypatch.setattr(pixel_pictures, "draw_legend", watched)
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
    pixel_pictures._draw({"run": maps}, tmp_path / "picture.png")
    assert shown == (["sky", "wall", "box"] if segmented else [])
    with Image.open(tmp_path / "picture.png") as picture:
        assert min(picture.size) > 100
