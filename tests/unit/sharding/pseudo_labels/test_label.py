"""Labels are the same bytes however the runs went, never half there, and never of another image."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.images.stored import jpeg, photograph, sample, write_images, write_tar
from tests.unit.sharding.pseudo_labels.labelled import Models, files, label, maps, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import depth_anything
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.depth import StoredDepth
from trp_scale.sharding.merge import merge
from trp_scale.sharding.pseudo_labels.label import LabelStream
from trp_scale.sharding.verify import verify_dataset

DIRECTORIES = ("depth", "semseg")


def keys(data: Path, directory: str) -> list[list[str]]:
    """Keys of each tar in order."""
    return [[block.key for block in read_index(shard).blocks] for shard in sorted((data / directory).glob("*.tar"))]


def stop_after(monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    """Make the run end by an error when it writes its next window."""
    finish, done = LabelStream.finish, []

    def interrupted(stream: LabelStream, window: object) -> None:
        done.append(window)
        if len(done) > windows:
            raise KeyboardInterrupt
        finish(stream, window)  # type: ignore[arg-type]

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
        stop_after(context, 3)  # the first shard, and one model's labels of the second
        with pytest.raises(KeyboardInterrupt):
            label(data, models)
    assert (data / "dataset.json").read_bytes() == before
    for directory in DIRECTORIES:
        assert [path.name for path in (data / directory).glob("image-*.tar")] == ["image-000000.tar"]
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
    monkeypatch.setattr("trp_scale.sharding.pseudo_labels.label.load_model", lambda *_: 1 / 0)  # needs no model
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
    data = nine_images(tmp_path / "data")
    with monkeypatch.context() as context:
        stop_after(context, 3)  # the first shard, and one model's labels of the second
        with pytest.raises(KeyboardInterrupt):
            label(data, models)
    before = maps(data, "depth", "depth.png")["n00000"]
    other = [sample(number, 40, 60, jpg=jpeg(photograph(40, 60, 77))) for number in range(5)]
    write_tar(data / "shards" / "image-000000.tar", other)
    assert label(data, models)
    after = maps(data, "depth", "depth.png")["n00000"]
    assert after.shape == before.shape and (after != before).any()
    write_tar(data / "shards" / "image-000002.tar", [sample(42, 40, 60)])  # when the labels are finished, too
    assert keys(data, "depth") != keys(data, "shards")
    assert label(data, models)
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
    assert label(data, models, max_skipped=0.2)
    entry = read_json(data / "dataset.json")["modalities"]["semseg"]
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


def test_another_making_is_refused_half_way_too(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    label(data, models, num_shards=3, semseg={"model": ""})
    with pytest.raises(DataError, match=r"part-00000-of-00003\.json: .*larger_is 'nearer'.*--depth\.directory"):
        label(data, models, depth={"larger_is": "farther"}, semseg={"model": ""})
    (data / "semseg").mkdir()
    (data / "semseg" / "image-000000.tar").write_bytes(b"")
    with pytest.raises(DataError, match="semseg"):
        label(data, models, depth={"model": ""})


def test_exact_maps_are_kept_unless_they_are_to_be_replaced(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    document = read_json(data / "dataset.json")
    exact = {"unit": "1/1000 metre", "scale": 0.001, "exact": True}
    write_json(data / "dataset.json", {**document, "modalities": {"depth": exact}})
    with pytest.raises(DataError, match=r"shards/ \(exact\).*--replace"):
        label(data, models)
    assert not (data / "depth").exists()
    assert label(data, models, replace=True)
    assert read_json(data / "dataset.json")["modalities"]["depth"]["replaced"] == exact


def test_a_model_that_was_refused_leaves_the_directory_to_another(tmp_path: Path, models: Models) -> None:
    data = nine_images(tmp_path / "data")
    bad = depth_anything(tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(DataError, match=r"--depth\.model"):
        label(data, models._replace(depth=bad), semseg={"model": ""})
    assert label(data, models, semseg={"model": ""})
