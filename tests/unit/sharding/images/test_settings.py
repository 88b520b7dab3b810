"""Settings and stored descriptions of depth and segmentation maps from files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.source_images import (
    HEIGHT,
    WIDTH,
    class_folder,
    class_map,
    depth_map,
    jpeg,
    maps_folder,
    png,
    shard,
)
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """images/, depth/ and semseg/ of six images; the classes 0 to 19 are named in names.txt."""
    images = class_folder(tmp_path / "images", classes=1, each=6)
    maps_folder(tmp_path / "depth", images, lambda number: png(depth_map(number)))
    maps_folder(tmp_path / "semseg", images, lambda number: png(class_map(number)))
    (tmp_path / "names.txt").write_text("".join(f"kind {number}\n" for number in range(20)))
    return tmp_path


def modality(folder: Path, *names: str) -> list[str]:
    return [f"{name}={folder / name}" for name in names]


def test_scale_and_classes_are_written_down(folder: Path) -> None:
    names = str(folder / "names.txt")
    maps = modality(folder, "depth", "semseg")
    shard(folder / "out", folder / "images", modality=maps, semseg={"classes": names}, depth={"scale": 0.001})
    described = read_json(folder / "out" / "dataset.json")["modalities"]
    assert described == {
        "depth": {"scale": 0.001, "unit": "0.001 metres", "exact": False},
        "semseg": {"classes": [f"kind {number}" for number in range(20)], "exact": False},
    }
    shard(folder / "relative", folder / "images", modality=maps[:1])
    assert read_json(folder / "relative" / "dataset.json")["modalities"]["depth"]["scale"] is None
    for changes, message in (
        ({"depth": {"scale": 0.01}}, r"{'depth\.scale': 0\.001} .*{'depth\.scale': 0\.01}"),
        ({"semseg": {"classes": names, "void_label": 3}}, r"'semseg\.void_label': 3"),
        ({"depth": {}}, r"{'depth\.scale': 0\.001} .*{}"),
    ):
        settings = {"modality": maps, "semseg": {"classes": names}, "depth": {"scale": 0.001}, **changes}
        with pytest.raises(DataError, match=message):
            shard(folder / "out", folder / "images", **settings)
    (folder / "names.txt").write_text("".join(f"sort {number}\n" for number in range(20)))
    with pytest.raises(DataError, match="input"):
        shard(folder / "out", folder / "images", modality=maps, semseg={"classes": names}, depth={"scale": 0.001})


@pytest.mark.parametrize(
    ("maps", "settings", "message"),
    [
        (("semseg",), {}, "--semseg.classes"),
        (("depth",), {"semseg": {"classes": "names.txt"}}, r"--semseg\.classes names\.txt"),
        (("depth",), {"semseg": {"void_label": 11}}, "void_label 11: .*--modality semseg="),
        (("semseg",), {"depth": {"scale": 0.1}}, r"scale 0\.1: .*\.depth\.png"),
        (("depth",), {"depth": {"scale": 0.0}}, r"--depth\.scale .*0\.0"),
        (("semseg",), {"semseg": {"void_label": 256}}, "--semseg.void_label .*256"),
        (("semseg",), {"semseg": {"classes": "nowhere.txt"}}, r"--semseg\.classes nowhere\.txt"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path, maps: tuple[str, ...], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        shard(folder / "out", folder / "images", modality=modality(folder, *maps), **settings)
    assert not (folder / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("a\n\nb\n", "names.txt.* 2 "), (" \n", "names.txt"), ("".join(f"{n}\n" for n in range(256)), "names.txt.* 256 ")],
)
def test_lists_of_classes_that_cannot_be_are_refused(folder: Path, content: str, message: str) -> None:
    (folder / "names.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        shard(
            folder / "out",
            folder / "images",
            modality=modality(folder, "semseg"),
            semseg={"classes": str(folder / "names.txt")},
        )


def test_unnamed_classes_are_skipped_and_void_is_stored_as_255(folder: Path) -> None:
    numbers = class_map(0)
    numbers[0, 0] = 255
    (folder / "semseg" / "c0" / "image0.png").write_bytes(png(numbers))
    numbers[5, 7] = 20
    (folder / "semseg" / "c0" / "image4.png").write_bytes(png(numbers))
    coloured = Image.frombytes("P", (WIDTH, HEIGHT), class_map(2).tobytes())
    coloured.putpalette([value for number in range(256) for value in (number, 255 - number, 7)])
    coloured.save(folder / "semseg" / "c0" / "image2.png")
    names = {"classes": str(folder / "names.txt")}
    settings = {"modality": modality(folder, "semseg"), "max_skipped": 0.5}
    plain = shard(folder / "plain", folder / "images", semseg=names, **settings)
    assert plain["c0/image0"]["semseg.png"] == (folder / "semseg" / "c0" / "image0.png").read_bytes()
    found = shard(folder / "out", folder / "images", semseg={**names, "void_label": 11}, **settings)
    for output in ("plain", "out"):
        dataset = read_json(folder / output / "dataset.json")
        assert dataset["skipped"] == {"bad_map_number": 1} and dataset["rows"] == 5
        unnamed = "semseg.png: class 20 found, 0 to 19 or 255 (void) expected"
        assert dataset["skipped_places"][0]["place"] == f"{folder}/images/c0/image4.jpg ({unnamed})"
    for number in (1, 2, 3, 5):
        stored = np.asarray(Image.open(io.BytesIO(found[f"c0/image{number}"]["semseg.png"])))
        wanted = class_map(number)
        assert 11 in wanted and (stored == np.where(wanted == 11, 255, wanted)).all()
    verify_dataset(folder / "out")


def test_numbers_above_the_void_label_may_have_no_name(tmp_path: Path) -> None:
    """As in CamVid: 11 classes, void is 11."""
    for name in ("images", "semseg"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(jpeg())
    (tmp_path / "semseg" / "a.png").write_bytes(png(class_map() % 12))
    (tmp_path / "names.txt").write_text("\n".join("abcdefghijk"))
    maps, names = modality(tmp_path, "semseg"), {"classes": str(tmp_path / "names.txt")}
    with pytest.raises(DataError, match=r"1 bad_map_number .*--semseg"):
        shard(tmp_path / "refused", tmp_path / "images", modality=maps, semseg=names)
    found = shard(tmp_path / "out", tmp_path / "images", modality=maps, semseg={**names, "void_label": 11})
    stored = np.asarray(Image.open(io.BytesIO(found["a"]["semseg.png"])))
    assert set(np.unique(stored).tolist()) == {*range(11), 255}
