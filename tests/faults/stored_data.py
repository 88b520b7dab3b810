"""Readers of data sets: their JSON, their tars, their indexes, and what else lies beside them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.faults.mutations import index_repaired, png_repaired, tar_repaired
from tests.faults.readers import Case, Reader, Target, of_content, of_contents, repaired, whole
from tests.unit.data.images.foreign_tars import encoded, three_tars
from tests.unit.data.images.multimodal import (
    first_window,
    maps,
    multimodal_config,
    sample,
    write_beside,
    write_multimodal,
)
from tests.unit.data.images.source_images import png
from tests.unit.data.stored import config_for, npy, write_dataset
from trp_scale.data.images.dataset import decode_image, decode_scaled, jpeg_size, open_image_dataset
from trp_scale.data.images.formats import write_png
from trp_scale.data.images.maps import map_formats, read_names
from trp_scale.data.index import index_path, write_json
from trp_scale.data.mirror import MARKER, find_mirror
from trp_scale.data.tar_reader import ArrayReader, SampleReader, parse_npy
from trp_scale.data.tars import PLACES, find_external_tars
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.errors import DataError, RefusedError
from trp_scale.pretraining.base import open_sources
from trp_scale.sharding.display import stored_images
from trp_scale.sharding.images.index_tars import index_settings, index_tars
from trp_scale.sharding.images.settings import IndexConfig, ShardImagesConfig
from trp_scale.sharding.images.shard import shard_images
from trp_scale.sharding.parts import Part, PortionReport, report_path, write_dataset_index
from trp_scale.sharding.pseudo_labels.directory import LabelReport, digest_of_images
from trp_scale.sharding.verify import merge, verify_dataset
from trp_scale.storage.cache import cache_root


def text_data(directory: Path) -> Path:
    """Two tars of few rows, all full."""
    return write_dataset(directory / "text", block_rows=[[3, 2], [4]], shortest=21)


def image_data(directory: Path) -> Path:
    """Two tars of two images, depth in them, segmentation beside them."""
    shards = [[sample(number + 2 * shard, 24, 30) for number in range(2)] for shard in range(2)]
    return write_beside(directory / "images", shards)


def read_text(directory: Path) -> None:
    """Open a data set of text and every block of it; what cannot be read is left out, as in a run."""
    dataset = open_text_dataset(directory)
    dataset.digest()
    reader = ArrayReader(dataset.samples, dataset.blocks, verify=False)
    for block in range(len(dataset.blocks.rows)):
        reader.arrays(block)


def read_images(directory: Path, used: tuple[str, ...] = ("depth", "semseg")) -> None:
    """Open a data set of images and each image's members, and what order and split see."""
    dataset = open_image_dataset(directory, used=used)
    dataset.digest()
    for number in range(min(16, len(dataset.blocks.keys))):
        dataset.tars(number)
        str(dataset.blocks.keys[number])
    for table in (dataset.samples, *dataset.aligned):
        reader = SampleReader(table, verify=False, blocks=dataset.blocks)
        for number in range(min(8, table.rows)):
            reader.members(number)
            table.key(number)


def of_json(made: Callable[[Path], Path], files: str, read: Callable[[Path], Any]) -> Callable[[Path], Case]:
    """Mutate the JSON files that a pattern names."""

    def make(directory: Path) -> Case:
        data = made(directory)
        targets = [Target(path=path, kind="json") for path in sorted(data.glob(files))]
        return Case(targets=targets, read=partial(read, data))

    return make


def _tars(made: Callable[[Path], Path], read: Callable[[Path], Any]) -> Callable[[Path], Case]:
    def make(directory: Path) -> Case:
        data = made(directory)
        paths = sorted(data.glob("*/*.tar"))
        plain = [Target(path=path, kind="bytes") for path in paths]
        mended = [Target(path=path, kind="bytes", within=whole, joined=repaired(tar_repaired)) for path in paths]
        return Case(targets=plain + mended, read=partial(read, data))

    return make


def rows_of_text(directory: Path) -> None:
    """A batch of a run."""
    open_sources(config_for(directory), rank=0, world=1).train.next_window()


def rows_of_images(directory: Path) -> None:
    """A batch of a run on three modalities."""
    first_window(multimodal_config(directory))


def _packed_image_data(directory: Path) -> Path:
    return write_multimodal(directory / "images", [[sample(number, 24, 30) for number in range(3)]])


def verifiable(directory: Path) -> Path:
    """An image data set with all that verify looks at."""
    data = image_data(directory)
    _indexed(data)
    return data


def _indexed(data: Path) -> Path:
    write_dataset_index(data, json.loads((data / "dataset.json").read_text()))
    return data


def _description(content: bytes) -> bytes:
    _, _, place, length, _ = struct.unpack("<8sQQQ32s", content[:64])
    return content[place : place + length]


def binary_index(made: Callable[[Path], Path], read: Callable[[Path], Any]) -> Callable[[Path], Case]:
    """The description with its hash mended, and every other byte of the file."""

    def make(directory: Path) -> Case:
        data = _indexed(made(directory))
        targets = []
        for path in sorted(data.glob("*/index.bin")):
            targets += 3 * [Target(path=path, kind="json", within=_description, joined=index_repaired)]
            targets.append(Target(path=path, kind="bytes"))
        return Case(targets=targets, read=partial(read, data))

    return make


def foreign(directory: Path) -> Path:
    """An index of tars of others."""
    three_tars(directory / "tars", each=2)
    output = directory / "data"
    index_tars(
        IndexConfig(
            tars=str(directory / "tars"),
            output=output,
            label="json:label",
            rows_per_block=2,
            max_pixels=1_000_000,
            max_skipped=0.0,
            processes=1,
            progress=False,
        )
    )
    return output


def read_foreign(directory: Path) -> None:
    read_images(directory, used=())
    index_settings(directory)


def places(directory: Path) -> Case:
    data = foreign(directory)
    (data / "shards" / "index.bin").unlink()

    def read() -> None:
        external = find_external_tars(data / "shards")
        assert external is not None
        for name in external.tars:
            external.is_remote(Path(name))
            external.where(Path(name))
        read_images(data, used=())

    return Case(targets=[Target(path=data / "shards" / PLACES, kind="json")], read=read)


def remote_json(directory: Path) -> Case:
    data = text_data(directory)
    files = {str(path.relative_to(data)): path for path in sorted(data.rglob("*")) if path.is_file()}
    listed = {name: [path.stat().st_size, "1"] for name, path in files.items()}
    write_json(data / MARKER, {"url": "http://127.0.0.1:1/data", "cache": str(cache_root()), "files": listed})

    def read() -> None:
        mirror = find_mirror(data / "shards")
        assert mirror is not None
        for tar in sorted((data / "shards").glob("*.tar")):
            mirror.size(tar)
            mirror.where(tar)
        mirror.room()
        read_text(data)

    return Case(targets=[Target(path=data / MARKER, kind="json")], read=read)


def parts(directory: Path) -> Case:
    """One part of two that are made, and merged."""
    data = directory / "data"
    asked = ShardImagesConfig(output=data, embedded=True, count=4, size=16, processes=1, progress=False, num_shards=2)
    for index in range(2):
        shard_images(replace(asked, rows_per_block=2, samples_per_shard=2, shard_index=index))
    targets = [Target(path=path, kind="json") for path in sorted(data.glob("progress/*.json"))]
    targets += [Target(path=path, kind="json") for path in sorted(data.glob("shards/*.index.json"))]
    return Case(targets=targets, read=partial(merge, data), renewed=data)


def labels(directory: Path) -> Case:
    """Labels in the making: settings, reports and indexes."""
    data = write_beside(directory / "images", [[sample(number, 24, 30) for number in range(2)]])
    document = json.loads((data / "dataset.json").read_text())
    description = document["modalities"].pop("semseg")
    write_json(data / "dataset.json", document)
    (data / "semseg-made" / "progress").mkdir()
    made = data / "semseg-made"
    for shard in document["shards"]:
        report = LabelReport(images=2, digest=digest_of_images(data / "shards" / shard))
        write_json(report_path(made, Path(shard).stem), vars(report))
    part = {
        "kind": "semseg",
        "settings": {"model": "m", "input": ""},
        "shards": len(document["shards"]),
        "listing": vars(PortionReport()),
        "max_skipped": 0.1,
        "description": {"classes": description["classes"], "replace": False},
    }
    Part(count=1, index=0).write(made, part)
    targets = [Target(path=path, kind="json") for path in sorted((data / "semseg-made").rglob("*.json"))]
    targets.append(Target(path=data / "dataset.json", kind="json"))
    return Case(targets=targets, read=partial(merge, data), renewed=data)


def inspected(directory: Path) -> Case:
    """What `trp-scale inspect` shows of images."""
    data = _packed_image_data(directory)
    tar = next(data.glob("shards/*.tar"))

    def read() -> None:
        for shown in stored_images(tar, 3):
            shown.describe()
            shown.pictures()

    files = [Target(path=data / "dataset.json", kind="json"), Target(path=index_path(tar), kind="json")]
    return Case(targets=[*files, Target(path=tar, kind="bytes")], read=read)


def _decode(content: bytes) -> None:
    held = bytearray(content)
    decode_image(held)
    size = jpeg_size(held)
    if min(size) >= 4 and size != (1, 1):
        decode_scaled(held, 4)


def jpeg(directory: Path) -> Case:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC)
    return of_content(directory / "image.jpg", "bytes", encoded(image, "JPEG"), _decode)


def other_formats(directory: Path) -> Case:
    """PNG, with its checksums mended, and WebP."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((48, 40))
    contents = {"image.png": encoded(image, "PNG"), "image.webp": encoded(image.convert("RGB"), "WEBP")}
    return of_contents(directory, contents, lambda _, found: decode_image(bytearray(found)), mend=png_repaired)


def png_map(directory: Path) -> Case:
    size, forms = (20, 30), map_formats()
    stored = {name: png(numbers) for name, numbers in zip(("depth", "semseg"), maps(*size, seed=0), strict=True)}
    stored["normals"] = write_png(np.random.default_rng(0).integers(0, 1 << 16, (*size, 3)).astype(np.uint16))
    return of_contents(directory, stored, lambda name, found: forms[name].decode(found, size), mend=png_repaired)


def npy_member(directory: Path) -> Case:
    content = npy(np.arange(60, dtype=np.uint16).reshape(4, 15))
    return of_content(directory / "x.npy", "bytes", content, lambda found: parse_npy(memoryview(found), "x.npy"))


def names(directory: Path) -> Case:
    path = directory / "names.txt"
    path.write_text("wall\nsky\ntree\n")
    return Case(targets=[Target(path=path, kind="text")], read=lambda: read_names("--class_names", str(path)))


DATA = (RefusedError,)

READERS = [
    Reader(name="text_index", make=of_json(text_data, "shards/*.json", read_text), documented=DATA),
    Reader(name="text_dataset_json", make=of_json(text_data, "dataset.json", read_text), documented=DATA),
    Reader(name="text_rows", make=_tars(text_data, rows_of_text), documented=DATA, share=0.3),
    Reader(name="text_tar_verified", make=_tars(text_data, verify_dataset), documented=DATA, share=0.3),
    Reader(name="image_index", make=of_json(image_data, "*/*.index.json", read_images), documented=DATA),
    Reader(name="image_dataset_json", make=of_json(image_data, "dataset.json", read_images), documented=DATA),
    Reader(name="image_rows", make=_tars(_packed_image_data, rows_of_images), documented=DATA, share=0.2),
    Reader(name="verify_tar", make=_tars(verifiable, verify_dataset), documented=DATA, share=0.2),
    Reader(name="verify_json", make=of_json(verifiable, "**/*.json", verify_dataset), documented=DATA, share=0.5),
    Reader(name="binary_index_text", make=binary_index(text_data, read_text), documented=DATA),
    Reader(name="binary_index_images", make=binary_index(image_data, read_images), documented=DATA),
    Reader(name="foreign_index", make=of_json(foreign, "**/*.json", read_foreign), documented=DATA, share=0.5),
    Reader(name="foreign_verified", make=of_json(foreign, "**/*.json", verify_dataset), documented=DATA, share=0.3),
    Reader(name="places", make=places, documented=DATA),
    Reader(name="remote_json", make=remote_json, documented=DATA),
    Reader(name="parts", make=parts, documented=DATA, share=0.3),
    Reader(name="labels", make=labels, documented=DATA, share=0.3),
    Reader(name="inspect", make=inspected, documented=DATA, share=0.3),
    Reader(name="jpeg", make=jpeg, documented=(DataError,)),
    Reader(name="png_and_webp", make=other_formats, documented=(DataError,)),
    Reader(name="png_map", make=png_map, documented=(DataError,)),
    Reader(name="npy", make=npy_member, documented=(DataError,)),
    Reader(name="names", make=names, documented=(DataError,), share=0.3),
]
