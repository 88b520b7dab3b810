"""Stored labels are what the model itself says of each image alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForDepthEstimation,
    AutoModelForSemanticSegmentation,
    AutoModelForUniversalSegmentation,
)

from tests.unit.sharding.pseudo_labels.labelled import SIZES, Models, images, label, maps, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import SWATCHES, depth_anything, segformer
from trp_scale.data.index import read_json
from trp_scale.pretraining.modalities.depth import depth_maps, metric_units, relative_units
from trp_scale.pretraining.modalities.semseg import class_maps


def outputs(auto: Any, model: Path, image: Image.Image) -> tuple[Any, Any]:
    """The image processor, and the model's output of one image, as transformers' own examples get it."""
    processor = AutoImageProcessor.from_pretrained(model)
    with torch.inference_mode():
        output = auto.from_pretrained(model).eval()(**processor(images=image.convert("RGB"), return_tensors="pt"))
    return processor, output


def estimated_depth(model: Path, image: Image.Image) -> np.ndarray:
    """float64 [H, W]."""
    processor, output = outputs(AutoModelForDepthEstimation, model, image)
    (found,) = processor.post_process_depth_estimation(output, target_sizes=[image.size[::-1]])
    return found["predicted_depth"].reshape(image.size[::-1]).double().numpy()


def estimated_classes(auto: Any, model: Path, image: Image.Image) -> np.ndarray:
    """int64 [H, W]."""
    processor, output = outputs(auto, model, image)
    return processor.post_process_semantic_segmentation(output, target_sizes=[image.size[::-1]])[0].numpy()


def test_relative_depth_is_the_models_own_over_each_images_range(whole: Path, models: Models) -> None:
    stored = maps(whole, "depth", "depth.png")
    for key, image in images(whole).items():
        depth = estimated_depth(models.depth, image)
        spread = depth.max() - depth.min()
        expected = 1 + (depth - depth.min()) / (spread or 1) * 65534
        assert stored[key].shape == image.size[::-1]
        # Batches and single images differ by rounding in fp32, which an image of a small range magnifies.
        assert np.abs(stored[key] - expected).max() <= 1
        if depth.size > 1:
            assert spread > 0.1 and (stored[key].min(), stored[key].max()) == (1, 65535)


def test_classes_are_the_models_own(whole: Path, models: Models) -> None:
    stored = maps(whole, "semseg", "semseg.png")
    seen: set[int] = set()
    for key, image in images(whole).items():
        expected = estimated_classes(AutoModelForUniversalSegmentation, models.semseg, image)
        assert stored[key].shape == image.size[::-1]
        assert (stored[key] != expected).mean() < 0.001  # ties, decided by rounding
        seen |= set(expected.flat)
    assert len(seen) > 2
    assert read_json(whole / "dataset.json")["modalities"]["semseg"]["classes"] == SWATCHES


def test_a_model_for_semantic_segmentation_is_told_by_its_configuration(tmp_path: Path, models: Models) -> None:
    model = segformer(tmp_path / "segformer")
    data = nine_images(tmp_path / "data")
    assert label(data, models._replace(semseg=model), depth={"model": ""})
    stored = maps(data, "semseg", "semseg.png")
    for key, image in images(data).items():
        expected = estimated_classes(AutoModelForSemanticSegmentation, model, image)
        assert (stored[key] != expected).mean() < 0.001
    modalities = read_json(data / "dataset.json")["modalities"]
    assert list(modalities) == ["semseg"]
    assert modalities["semseg"]["classes"] == ["part 0", "part 1", "part 2", "part 3"]


def test_metres_are_stored_in_units_of_the_scale_and_clipped(tmp_path: Path, models: Models) -> None:
    model = depth_anything(tmp_path / "metric", depth_estimation_type="metric", max_depth=20)
    data = nine_images(tmp_path / "data")
    depths = {key: estimated_depth(model, image) for key, image in images(data).items()}
    scale = float(np.median(np.concatenate([depth.ravel() for depth in depths.values()]))) / 65535  # half are beyond
    assert label(data, models._replace(depth=model), semseg={"model": ""}, depth={"scale": scale})
    stored = maps(data, "depth", "depth.png")
    for key, depth in depths.items():
        assert np.abs(stored[key] - np.clip(depth / scale, 1, 65535)).max() <= 1
    entry = read_json(data / "dataset.json")["modalities"]["depth"]
    assert entry["scale"] == scale and entry["larger_is"] == "farther" and "metre" in entry["unit"]
    beyond = sum(int((depth / scale > 65535.5).sum()) for depth in depths.values())
    assert entry["clipped_pixels"] == pytest.approx(beyond, abs=20) and beyond > 5000


@pytest.mark.parametrize("batch", [1, 9])
def test_the_batch_changes_labels_by_rounding_alone(tmp_path: Path, whole: Path, models: Models, batch: int) -> None:
    data = nine_images(tmp_path / "data")
    assert label(data, models, batch=batch)
    ours, theirs = (maps(path, "depth", "depth.png") for path in (data, whole))
    assert list(ours) == list(theirs)
    assert max(np.abs(ours[key] - theirs[key]).max() for key in ours) <= 1
    ours, theirs = (maps(path, "semseg", "semseg.png") for path in (data, whole))
    assert max((ours[key] != theirs[key]).mean() for key in ours) < 0.001


def test_bf16_labels_are_near_those_of_fp32(tmp_path: Path, whole: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    assert label(data, models, precision="bf16", semseg={"model": ""})
    ours, theirs = (maps(path, "depth", "depth.png") for path in (data, whole))
    # About three digits of an image's range; a single pixel has none.
    shares = [np.abs(ours[key] - theirs[key]).mean() / 65535 for key in ours if ours[key].size > 1]
    assert 1e-5 < np.mean(shares) < 0.03


def test_relative_units_of_odd_outputs() -> None:
    depth = torch.tensor([[2.0, float("nan"), 3.0], [float("inf"), 4.0, -float("inf")]])
    assert relative_units(depth).tolist() == [[1, 0, 32768], [0, 65535, 0]]
    assert relative_units(torch.full((2, 2), 7.0)).tolist() == [[1, 1], [1, 1]]
    assert relative_units(torch.full((1, 2), float("nan"))).tolist() == [[0, 0]]
    random = torch.randn(50, 60, generator=torch.Generator().manual_seed(0))
    exact = random.double()
    exact = 1 + (exact - exact.min()) / (exact.max() - exact.min()) * 65534
    assert (relative_units(random) - exact).abs().max() <= 0.51


def test_metric_units_of_odd_outputs() -> None:
    depth = torch.tensor([[0.0, 0.001, 65.535], [65.6, float("nan"), -3.0]])
    units, clipped = metric_units(depth, 0.001)
    assert units.tolist() == [[1, 1, 65535], [65535, 0, 1]]
    assert clipped.item() == 3


def test_what_is_no_class_is_void() -> None:
    found = [torch.tensor([[-1, 0], [2, 3]]), torch.tensor([[255], [1]])]
    processor = SimpleNamespace(post_process_semantic_segmentation=lambda output, target_sizes: found)
    classes, _ = class_maps(processor, 3)(None, [(2, 2), (2, 1)])
    assert [each.tolist() for each in classes] == [[[255, 0], [2, 255]], [[255], [1]]]


def test_a_processor_without_depth_of_its_own_is_scaled_as_the_others(whole: Path, models: Models) -> None:
    image = images(whole)["n00000"]
    processor, output = outputs(AutoModelForDepthEstimation, models.depth, image)
    (plain,), _ = depth_maps(SimpleNamespace(), None)(output, [SIZES[0]])
    (own,), _ = depth_maps(processor, None)(output, [SIZES[0]])
    assert torch.equal(plain, own)


def test_a_processor_that_padded_is_told_the_images_sizes() -> None:
    def post_process(output, source_sizes, target_sizes):  # type: ignore[no-untyped-def]
        assert source_sizes == target_sizes == [(1, 3)]
        return [{"predicted_depth": torch.tensor([1.0, 2.0, 3.0])}]

    processor = SimpleNamespace(post_process_depth_estimation=post_process)
    (found,), _ = depth_maps(processor, None)(None, [(1, 3)])
    assert found.tolist() == [[1, 32768, 65535]]
