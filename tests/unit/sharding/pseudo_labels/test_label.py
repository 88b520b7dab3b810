"""Pseudo-labels: deterministic bytes, no incomplete labels, no labels of another image."""

from __future__ import annotations

import errno
import os
import shutil
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

from tests.unit.data.images.stored import jpeg, photograph, sample, write_images, write_tar
from tests.unit.sharding.pseudo_labels.conftest import SIZES, Models, files, images, label, maps, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import SWATCHES, depth_anything, segformer
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.depth import StoredDepth, depth_maps, metric_units, relative_units
from trp_scale.pretraining.modalities.semseg import class_maps
from trp_scale.sharding.pseudo_labels.label import LabelStream
from trp_scale.sharding.verify import merge, verify_dataset

DIRECTORIES = ("depth", "semseg")


def keys(data: Path, directory: str) -> list[list[str]]:
    """Keys of each tar in order."""
    return [[block.key for block in read_index(shard).blocks] for shard in sorted((data / directory).glob("*.tar"))]


def stop_after(monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    """Interrupt the run after this number of windows."""
    finish, done = LabelStream.finish, []

    def interrupted(stream: LabelStream, window: Any) -> int:
        done.append(window)
        if len(done) > windows:
            raise KeyboardInterrupt
        return finish(stream, window)

    monkeypatch.setattr(LabelStream, "finish", interrupted)


def test_labels_lie_beside_their_images_as_the_loader_wants_them(whole: Path) -> None:
    for directory in DIRECTORIES:
        assert keys(whole, directory) == keys(whole, "shards")
        assert {path.name for path in (whole / directory).iterdir()} == {
            "index.bin",
            *(path.name for path in (whole / "shards").iterdir()),
        }
    assert sorted(path.name for path in whole.iterdir()) == ["dataset.json", "depth", "semseg", "shards"]
    modalities = read_json(whole / "dataset.json")["modalities"]
    depth, semseg = modalities["depth"], modalities["semseg"]
    assert (depth["scale"], depth["larger_is"], depth["directory"]) == (None, "nearer", "depth")
    for entry in (depth, semseg):
        assert (entry["exact"], entry["labels"], entry["unreadable"], entry["clipped_pixels"]) == (False, 9, 0, 0)
    assert verify_dataset(whole).rows == 9
    opened = open_image_dataset(whole, used=DIRECTORIES)
    assert [table.rows for table in opened.aligned] == [9, 9]
    assert isinstance(opened.maps[0], StoredDepth) and opened.maps[0].larger_is == "nearer"


def test_parts_of_a_job_array_make_what_one_run_makes(tmp_path: Path, whole: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    before = (data / "dataset.json").read_bytes()
    assert not label(data, models, shard_index=1, num_shards=2)
    assert (data / "dataset.json").read_bytes() == before
    assert [path.name for path in sorted((data / "depth").glob("*.tar"))] == ["image-000001.tar"]
    for directory in DIRECTORIES:
        (data / directory / "image-000001.tar").write_bytes(b"cut short by a full disk")
    assert not label(data, models, shard_index=0, num_shards=2)
    with pytest.raises(DataError, match=r"(?s)depth.*1 of 2 parts.*image-000001\.tar"):
        merge(data)
    assert (data / "dataset.json").read_bytes() == before
    assert not label(data, models, shard_index=1, num_shards=2)
    for _ in range(2):
        merge(data)
        assert files(data) == files(whole)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the tar that was dropped
def test_a_stopped_run_goes_on_to_the_same_bytes(
    tmp_path: Path, whole: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = nine_images(tmp_path / "data")
    before = (data / "dataset.json").read_bytes()
    with monkeypatch.context() as context:
        stop_after(context, 4)  # the three shards of one model, and the first of the other
        with pytest.raises(KeyboardInterrupt):
            label(data, models)
    assert (data / "dataset.json").read_bytes() == before
    for directory, count in zip(DIRECTORIES, (3, 1), strict=True):
        tars = sorted(path.name for path in (data / directory).glob("image-*.tar"))
        assert tars == [f"image-00000{number}.tar" for number in range(count)]
    kept = (data / "depth" / "image-000000.tar").stat().st_mtime_ns
    (data / "depth" / ".image-000002.tar.1.tmp").write_bytes(b"half of one")  # of a process that was killed
    (data / "semseg" / "image-000000.index.json").unlink()  # as if it had been stopped before this one's last step
    assert label(data, models)
    assert files(data) == files(whole)
    assert (data / "depth" / "image-000000.tar").stat().st_mtime_ns == kept


def test_a_run_stopped_before_its_last_word_says_it_later(
    tmp_path: Path, whole: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = nine_images(tmp_path / "data")
    with monkeypatch.context() as context:
        context.setattr("trp_scale.sharding.pseudo_labels.directory.write_binary_index", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            label(data, models)
    assert "modalities" not in read_json(data / "dataset.json")
    monkeypatch.setattr("trp_scale.sharding.pseudo_labels.models.load_model", lambda *_: 1 / 0)  # needs no model
    assert label(data, models)
    assert files(data) == files(whole)
    assert label(data, models)
    assert files(data) == files(whole)


def test_a_finished_directory_gets_back_what_it_lost(tmp_path: Path, whole: Path, models: Models) -> None:
    data = shutil.copytree(whole, tmp_path / "data")
    (data / "depth" / "image-000001.tar").unlink()
    with (data / "semseg" / "image-000002.tar").open("ab") as stream:
        stream.write(bytes(512))
    assert label(data, models)
    assert files(data) == files(whole)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the tar that was dropped
def test_labels_of_other_images_are_made_again(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    data, alone = nine_images(tmp_path / "data"), {"semseg": {"model": ""}}
    with monkeypatch.context() as context:
        stop_after(context, 1)  # the first shard
        with pytest.raises(KeyboardInterrupt):
            label(data, models, **alone)
    before = maps(data, "depth", "depth.png")["n00000"]
    other = [sample(number, 40, 60, jpg=jpeg(photograph(40, 60, 77))) for number in range(5)]
    write_tar(data / "shards" / "image-000000.tar", other)
    assert label(data, models, **alone)
    after = maps(data, "depth", "depth.png")["n00000"]
    assert after.shape == before.shape and (after != before).any()
    write_tar(data / "shards" / "image-000002.tar", [sample(42, 40, 60)])  # when the labels are finished, too
    assert keys(data, "depth") != keys(data, "shards")
    assert label(data, models, **alone)
    verify_dataset(data)


def test_images_that_cannot_be_labelled_get_empty_labels(
    tmp_path: Path, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    photo = jpeg(photograph(48, 64, 3))
    bad = {1: photo[:-300], 3: b"nothing", 4: jpeg(photograph(2, 60, 4))}  # the last too thin for the depth estimator
    samples = [sample(number, 40, 60, **({"jpg": bad[number]} if number in bad else {})) for number in range(8)]
    data = write_images(tmp_path / "data", [samples[:5], samples[5:]])
    with pytest.raises(DataError, match=r"3 of 8 .*--max_skipped 0\.3") as raised:
        label(data, models, max_skipped=0.3)
    for number in bad:
        assert f"image-000000/n0000{number} (" in str(raised.value)
    assert "modalities" not in read_json(data / "dataset.json")
    assert label(data, models, max_skipped=0.5)
    assert "2 of 8 images" in caplog.text
    for directory in DIRECTORIES:
        assert keys(data, directory) == keys(data, "shards")
    depth, semseg = maps(data, "depth", "depth.png"), maps(data, "semseg", "semseg.png")
    assert {key for key, numbers in depth.items() if (numbers == 0).all()} == {f"n0000{number}" for number in bad}
    assert {key for key, numbers in semseg.items() if (numbers == 255).all()} == {"n00001", "n00003"}
    assert depth["n00001"].shape == semseg["n00001"].shape == (48, 64)
    assert all((numbers > 0).all() for key, numbers in depth.items() if int(key[1:]) not in bad)
    modalities = read_json(data / "dataset.json")["modalities"]
    listed = {entry["place"].partition(" ")[0] for entry in modalities["depth"]["unreadable_places"]}
    assert listed == {f"image-000000/n0000{number}" for number in bad}
    assert (modalities["depth"]["unreadable"], modalities["semseg"]["unreadable"]) == (3, 2)
    assert modalities["depth"]["missing_pixels"] == 0


def test_a_damaged_byte_is_seen_by_its_checksum(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    tar = data / "shards" / "image-000000.tar"
    member = read_index(tar).blocks[2].members["jpg"]
    content = bytearray(tar.read_bytes())
    content[member.offset + member.length - 30] ^= 1
    tar.write_bytes(content)
    assert label(data, models, max_skipped=0.2, semseg={"model": ""})
    entry = read_json(data / "dataset.json")["modalities"]["depth"]
    assert [(place["place"], "checksum" in place["why"]) for place in entry["unreadable_places"]] == [
        ("image-000000/n00002", True)
    ]
    assert (maps(data, "depth", "depth.png")["n00002"] == np.zeros((33, 33))).all()


def test_storage_that_fails_makes_no_empty_labels(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = nine_images(tmp_path / "data")

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.preadv", fails)
    with pytest.raises(DataError, match="cannot be read"):
        label(data, models, max_skipped=1.0)
    assert not list((data / "depth").glob("image-*.tar"))


def test_a_model_that_gives_no_number_is_seen(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from trp_scale.pretraining.modalities import depth

    measured = depth._estimates
    monkeypatch.setattr(depth, "_estimates", lambda *given: [one * np.nan for one in measured(*given)])
    data = nine_images(tmp_path / "data")
    with pytest.raises(DataError, match="9 of 9"):
        label(data, models, semseg={"model": ""})


def test_labels_of_another_making_need_another_directory(tmp_path: Path, whole: Path, models: Models) -> None:
    data = shutil.copytree(whole, tmp_path / "data")
    other = models._replace(depth=depth_anything(tmp_path / "other", seed=5))
    with pytest.raises(DataError, match=r"another model.*--depth\.directory"):
        label(data, other)
    with pytest.raises(DataError, match="precision 'fp32'"):
        label(data, models, precision="bf16")
    with pytest.raises(DataError, match=r"depth.*--replace"):
        label(data, other, depth={"directory": "depth-other"}, semseg={"model": ""})
    assert files(data) == files(whole)
    assert label(data, other, depth={"directory": "depth-other"}, semseg={"model": ""}, replace=True)
    entry = read_json(data / "dataset.json")["modalities"]["depth"]
    assert entry["directory"] == "depth-other" and entry["replaced"]["directory"] == "depth"
    ours, theirs = (maps(data, directory, "depth.png") for directory in ("depth-other", "depth"))
    assert any((ours[key] != theirs[key]).any() for key in ours)
    # A copy of the model elsewhere is the same model.
    assert label(
        data,
        other._replace(depth=shutil.copytree(other.depth, tmp_path / "moved")),
        semseg={"model": ""},
        depth={"directory": "depth-other"},
    )


def test_exact_maps_are_kept_unless_they_are_to_be_replaced(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    document = read_json(data / "dataset.json")
    exact = {"unit": "1/1000 metre", "scale": 0.001, "exact": True}
    write_json(data / "dataset.json", {**document, "modalities": {"depth": exact}})
    with pytest.raises(DataError, match=r"shards/ \(exact\).*--replace"):
        label(data, models)
    assert not (data / "depth").exists()
    assert label(data, models, replace=True, semseg={"model": ""})
    assert read_json(data / "dataset.json")["modalities"]["depth"]["replaced"] == exact


def test_a_model_that_was_refused_leaves_the_directory_to_another(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    bad = depth_anything(tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(DataError, match=r"--depth\.model"):
        label(data, models._replace(depth=bad), semseg={"model": ""})
    assert label(data, models, semseg={"model": ""})


def outputs(auto: Any, model: Path, image: Image.Image) -> tuple[Any, Any]:
    """Return the image processor and the output of a model, as in the examples of transformers."""
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


def test_the_batch_changes_labels_by_rounding_alone(tmp_path: Path, whole: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    assert label(data, models, batch=9)
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
