"""Readers of files that others made: text, images, tars, annotations, tokenizers, weights, hostfiles."""

from __future__ import annotations

import gzip
import io
import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.faults.readers import Case, Reader, Target, files_below, of_contents, tar_file, tensor_file
from tests.unit.data.images.foreign_tars import encoded, three_tars
from tests.unit.data.images.source_images import class_map, depth_map, jpeg, pixels, png
from tests.unit.finetuning.detection.small_sets import coco_document, write_coco, write_voc
from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.config import ModelConfig
from trp_scale.config.schema import Fields
from trp_scale.data.text.tokenizer import load_for_sharding, save_trained, special_tokens, train_word_piece
from trp_scale.diagnostics import machine
from trp_scale.errors import DataError, RefusedError
from trp_scale.evaluation.figures.trained_images import read_square
from trp_scale.finetuning.detection.annotations import check_images, read_coco, read_voc
from trp_scale.finetuning.detection.batch import read_image
from trp_scale.finetuning.glue.batch import load_tokenizer
from trp_scale.finetuning.glue.folders import FORMATS, read_splits, read_tsv
from trp_scale.pretraining.modalities import modalities
from trp_scale.pretraining.modalities.base import MapFiles
from trp_scale.pretraining.modalities.settings import DepthFileSettings
from trp_scale.sharding.images.files import Loaded, UnusableError, list_tars
from trp_scale.sharding.images.index_tars import MemberChoice, read_label, read_tar
from trp_scale.sharding.images.reencode import EncodeSettings, encode_sample
from trp_scale.sharding.images.tars import find_tars
from trp_scale.sharding.text.corpus import plan_corpus
from trp_scale.sharding.text.documents import ReadSettings, read_portion

DOCUMENTS = ["The first text is here.\n", "A second one, a little longer than that.\n", "And a third."]


def _read_documents(path: Path) -> None:
    settings = ReadSettings(text_field="text", split="train", one_document_per_file=False, max_line_bytes=1 << 20)
    for portion in plan_corpus([str(path)], "auto", "train", False, 0).portions:
        for _ in read_portion(portion, settings):
            pass


def jsonl(directory: Path) -> Case:
    path = directory / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in DOCUMENTS))
    return Case(targets=[Target(path=path, kind="jsonl")], read=partial(_read_documents, path))


def gzipped(directory: Path) -> Case:
    """As bytes of the file, and with other content in a sound file."""
    path = directory / "text.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()))
    packed = Target(
        path=path, kind="jsonl", within=gzip.decompress, joined=lambda found, _: gzip.compress(found, compresslevel=1)
    )
    return Case(targets=[packed, Target(path=path, kind="bytes")], read=partial(_read_documents, path))


def parquet(directory: Path) -> Case:
    import pyarrow
    from pyarrow import parquet as files

    path = directory / "text.parquet"
    files.write_table(pyarrow.table({"text": DOCUMENTS * 4, "n": list(range(12))}), path, row_group_size=5)
    return Case(targets=[Target(path=path, kind="bytes")], read=partial(_read_documents, path))


def dataset_directory(directory: Path) -> Case:
    """A directory that save_to_disk wrote, as text to shard."""
    import datasets

    path = directory / "saved"
    datasets.Dataset.from_dict({"text": DOCUMENTS * 4}).save_to_disk(str(path))
    return Case(targets=files_below(path), read=partial(_read_documents, path))


def glue_directory(directory: Path) -> Case:
    import datasets

    path = directory / "sst2"
    split = datasets.Dataset.from_dict({"sentence": DOCUMENTS, "label": [0, 1, 0], "idx": [0, 1, 2]})
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(path))
    wanted = {"train": ("train",), "": ("dev",)}
    return Case(targets=files_below(path), read=lambda: read_splits(path, FORMATS["sst2"], wanted))


def tsv(directory: Path) -> Case:
    first, second = directory / "sst2.tsv", directory / "stsb.tsv"
    first.write_text("sentence\tlabel\n" + "".join(f"{text.strip()}\t{n % 2}\n" for n, text in enumerate(DOCUMENTS)))
    second.write_text("sentence1\tsentence2\tscore\na b\tc d\t2.5\ne f\tg h\t4\n")

    def read() -> None:
        read_tsv(first, FORMATS["sst2"])
        read_tsv(second, FORMATS["stsb"])

    return Case(targets=[Target(path=first, kind="text"), Target(path=second, kind="text")], read=read)


def images(*forms: str) -> dict[str, bytes]:
    """A picture in each of these formats, by the format."""
    from PIL import Image

    return {form: encoded(Image.fromarray(pixels()), form) for form in forms}


def encode(directory: Path) -> Case:
    """Images and maps of every kind that is sharded."""
    found = {name: kind.format for name, kind in modalities().items() if kind.format is not None}
    files = {
        form.suffix: MapFiles(name=name, format=form, description={})
        for name, form in found.items()
        if name in ("depth", "semseg")
    }
    contents = {"JPEG": jpeg(), **images("PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")}
    contents |= {"map.depth.png": png(depth_map()), "map.semseg.png": png(class_map())}
    settings = EncodeSettings(short_side=16, quality=0, max_pixels=1_000_000, maps=files)

    def read(name: str, content: bytes) -> None:
        is_map = name.startswith("map.")
        maps = {name.removeprefix("map."): content} if is_map else {}
        encode_sample(Loaded(image=jpeg() if is_map else content, maps=maps), settings)

    return of_contents(directory, contents, read)


def label(directory: Path) -> Case:
    described, number = directory / "x.json", directory / "x.cls"
    described.write_bytes(b'{"label": 3, "caption": ["a", {"b": 1}]}')
    number.write_bytes(b"3")

    def read() -> None:
        read_label("x.json", described.read_bytes(), "json:label")
        read_label("x.cls", number.read_bytes(), "cls")

    return Case(targets=[Target(path=described, kind="json"), Target(path=number, kind="text")], read=read)


def tar_listing(directory: Path) -> Case:
    """Tars of others that are sharded anew."""
    tar = three_tars(directory / "tars", each=2)[0]
    return Case(targets=tar_file(tar), read=lambda: list_tars([tar], ""))


def foreign_tar(directory: Path) -> Case:
    """Tars of others that are indexed."""
    tar = three_tars(directory / "tars", each=2)[0]
    choice = MemberChoice(image="auto", label="json:label", max_pixels=1_000_000)

    def read() -> None:
        with tar.open("rb") as stream:
            read_tar(str(tar), stream, choice)

    return Case(targets=tar_file(tar), read=read)


def tar_list(directory: Path) -> Case:
    path = directory / "tars.txt"
    path.write_text("# all\na-{000..002}.tar\nb/{x,y}.tar\n/data/c.tar\n")
    return Case(targets=[Target(path=path, kind="text")], read=lambda: find_tars(str(path)))


def coco(directory: Path) -> Case:
    path = write_coco(directory, coco_document())

    def read() -> None:
        found = read_coco(path)
        check_images(found)
        found.counts()

    return Case(targets=[Target(path=path, kind="json")], read=read)


def voc(directory: Path) -> Case:
    objects = [("cat", 0, (1, 2, 10, 12)), ("dog", 1, (3, 4, 20, 18))]
    path = write_voc(directory, {"a": objects, "b": objects[:1]})
    listed = Target(path=path, kind="text")
    xml = [Target(path=each, kind="xml") for each in sorted((directory / "Annotations").iterdir())]
    return Case(targets=[*xml, listed], read=lambda: check_images(read_voc(path)))


def detection_image(directory: Path) -> Case:
    contents = images("PNG", "GIF", "WEBP", "JPEG")
    return of_contents(directory, contents, lambda name, _: read_image(directory / name, (0, 0)))


def depth_array(directory: Path) -> Case:
    stream, path = io.BytesIO(), directory / "depth.npy"
    np.save(stream, depth_map().astype(np.float32) / 1000, allow_pickle=False)
    path.write_bytes(stream.getvalue())
    depth = modalities()["depth"]
    files = {"depth.png": depth.from_files(DepthFileSettings(scale=0.001))}
    settings = EncodeSettings(short_side=16, quality=0, max_pixels=1_000_000, maps=files)

    def read() -> None:
        content = path.read_bytes()
        files["depth.png"].refuse(content, "image")
        encode_sample(Loaded(image=jpeg(), maps={"depth.png": content}), settings)

    return Case(targets=[Target(path=path, kind="bytes")], read=read)


def own_image(directory: Path) -> Case:
    contents = images("PNG", "WEBP", "JPEG")
    return of_contents(directory, contents, lambda name, _: read_square(directory / name, 16, "bicubic"))


def tokenizer(directory: Path) -> Case:
    place = directory / "tokenizer"
    save_trained(train_word_piece(lambda: DOCUMENTS, 60, True), place, True, 32)

    def read() -> None:
        load_for_sharding(place).encode("a text of a few words")
        special_tokens(place)
        load_tokenizer(place, length=16)

    targets = [Target(path=place / name, kind="json") for name in ("tokenizer.json", "tokenizer_config.json")]
    return Case(targets=targets, read=read)


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))


def _take(model: nn.Module, found: dict[str, Tensor], fields: Fields) -> list[str]:
    if set(found) != {"weight"} or found["weight"].shape != (3, 4):
        raise ValueError(f"tensors {sorted(found)}, weight [3, 4] expected")
    model.load_state_dict(found)
    return []


def given_torch_file(directory: Path) -> Case:
    path = directory / "weights.pth"
    torch.save({"model": {"weight": torch.zeros(3, 4)}}, path)
    read = partial(give_weights, _Linear(), ModelConfig(weights=str(path)), _take)
    return Case(targets=[Target(path=path, kind="bytes")], read=read)


def given_weights(directory: Path) -> Case:
    path = directory / "model.safetensors"
    save_file({"weight": torch.zeros(3, 4)}, path)
    read = partial(give_weights, _Linear(), ModelConfig(weights=str(directory)), _take)
    return Case(targets=tensor_file(path), read=read)


def hosts(directory: Path) -> Case:
    path = directory / "hostfile"
    path.write_text("# hosts\nnode1 slots=8\nnode2 slots=8 # second\n")

    def read() -> None:
        with patch.object(machine, "_try_login", lambda host: ""):  # no host is asked
            list(machine.examine_hostfile(path))

    return Case(targets=[Target(path=path, kind="text")], read=read)


READERS = [
    Reader(name="jsonl", make=jsonl, documented=(DataError,)),
    Reader(name="gzip_text", make=gzipped, documented=(DataError,)),
    Reader(name="parquet", make=parquet, documented=(DataError,)),
    Reader(name="dataset_directory", make=dataset_directory, documented=(DataError,), share=0.3),
    Reader(name="glue_directory", make=glue_directory, documented=(RefusedError,), share=0.3),
    Reader(name="tsv", make=tsv, documented=(DataError,)),
    Reader(name="encode", make=encode, documented=(UnusableError,)),
    Reader(name="label", make=label, documented=(DataError,)),
    Reader(name="tar_listing", make=tar_listing, documented=(DataError,)),
    Reader(name="foreign_tar", make=foreign_tar, documented=(DataError,)),
    Reader(name="tar_list", make=tar_list, documented=(DataError,), share=0.5),
    Reader(name="coco", make=coco, documented=(RefusedError,)),
    Reader(name="voc", make=voc, documented=(RefusedError,)),
    Reader(name="detection_image", make=detection_image, documented=(DataError,)),
    Reader(name="depth_array", make=depth_array, documented=(UnusableError, DataError)),
    Reader(name="own_image", make=own_image, documented=(RefusedError,)),
    Reader(name="tokenizer", make=tokenizer, documented=(RefusedError,), share=0.3),
    Reader(name="given_weights", make=given_weights, documented=(RefusedError,), share=0.7),
    Reader(name="given_torch_file", make=given_torch_file, documented=(RefusedError,), share=0.7),
    Reader(name="hostfile", make=hosts, documented=(RefusedError,), share=0.5),
]
