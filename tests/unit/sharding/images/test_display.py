"""Stored images and maps as trp-scale inspect shows them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.multimodal import DESCRIBED, SECOND, nine_beside, rewrite_maps, samples
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.stored import contact_sheet, is_image_shard, stored_images
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return nine_beside(tmp_path / "data")


def test_wrong_descriptions_are_refused_by_verifying_and_showing_too(data: Path) -> None:
    document = read_json(data / "dataset.json")
    modalities = {**document["modalities"], "semseg": {"classes": 5}}
    write_json(data / "dataset.json", {**document, "modalities": modalities})
    for check in (verify_dataset, lambda data: list(stored_images(data / "shards" / "image-000000.tar", 1))):
        with pytest.raises(DataError, match=r"dataset\.json: modalities\.semseg\.classes 5 "):
            check(data)


def test_which_shade_of_depth_is_near_is_told(data: Path) -> None:
    document = read_json(data / "dataset.json")
    for larger_is, shades in (("nearer", "black (far) to white (near)"), (None, "black (near) to white (far)")):
        said = {} if larger_is is None else {"larger_is": larger_is}
        depth = {**DESCRIBED["depth"], **said}
        write_json(data / "dataset.json", {**document, "modalities": {**document["modalities"], "depth": depth}})
        (shown,) = stored_images(data / "shards" / "image-000000.tar", 1)
        assert f" bytes, {shades}  semseg.png" in shown.line()
        picture = contact_sheet([shown], side=64).crop((64, 0, 128, 64)).convert("L")  # depth: beside the image
        stored = np.asarray(Image.open(io.BytesIO(shown.members["depth.png"])))
        row, column = np.unravel_index(int(stored.argmax()), stored.shape)
        top = 64 - stored.shape[0]
        assert picture.getpixel((int(column), top + int(row))) == 255  # the largest is white, whatever it means


def test_they_are_shown_with_their_images(data: Path) -> None:
    expected = [bytes(one["semseg.png"]) for one in samples(9)[6:8]]  # type: ignore[arg-type]
    for directory in ("shards", SECOND):
        tar = data / directory / "image-000001.tar"
        assert is_image_shard(read_index(tar).blocks)
        shown = list(stored_images(tar, 2, "n00006"))
        assert [one.key for one in shown] == ["n00006", "n00007"]
        assert [one.members["semseg.png"] for one in shown] == expected
        assert set(shown[0].members) == {"jpg", "cls", "depth.png", "semseg.png"}
    rewrite_maps(data, order=[0])
    with pytest.raises(DataError, match=r"\.semseg\.png .*'n00006'.* shards/image-000001\.tar"):
        list(stored_images(data / "shards" / "image-000001.tar", 2, "n00006"))
