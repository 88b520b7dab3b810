"""Images out of a Hugging Face dataset directory or a torchvision dataset, both imported only when asked for."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trp_scale.data.index import DataError
from trp_scale.preparation.dataset_directory import directory_fingerprint, load_dataset
from trp_scale.preparation.images.samples import Listing, Loaded, Sample, UnusableError

TORCHVISION = "torchvision:"
"""What an input of a torchvision dataset begins with."""


class DirectorySource:
    """Rows of a directory written by datasets.save_to_disk; image files come as the bytes that were stored."""

    def __init__(self, path: str, split: str, image_column: str, label_column: str) -> None:
        self._arguments = (path, split, image_column, label_column)
        self._image_column = image_column
        self._label_column = label_column
        self._rows: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def read(self, sample: Sample) -> Loaded:
        if self._rows is None:
            self._rows = open_columns(*self._arguments)
        row = self._rows[sample.row]
        image, label = row[self._image_column], row[self._label_column] if self._label_column else None
        if isinstance(image, dict) and image.get("bytes") is None and image.get("path"):
            try:
                image = Path(image["path"]).read_bytes()
            except OSError as error:
                raise UnusableError("unreadable") from error
        content = image["bytes"] if isinstance(image, dict) else image
        if not isinstance(content, bytes):
            raise UnusableError("no_image")
        return Loaded(image=content, label=None if label is None else int(label))


def open_columns(path: str, split: str, image_column: str, label_column: str) -> Any:
    """The two columns of a dataset directory, images undecoded."""
    import datasets

    rows = load_dataset(path, split)
    rows = rows.select_columns([image_column, *([label_column] if label_column else [])])
    if isinstance(rows.features[image_column], datasets.Image):
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    return rows


def list_directory(path: str, split: str, image_column: str, label_column: str) -> Listing:
    """All rows of a directory written by datasets.save_to_disk.

    Raises:
        DataError: the extra is not installed, or there is no such split or column, or the labels are no numbers.
    """
    columns = load_dataset(path, split).column_names
    for flag, name in (("image_column", image_column), ("label_column", label_column)):
        if name and name not in columns:
            hint = "; --label_column '' if there are no classes" if flag == "label_column" else ""
            raise DataError(f"--{flag} {name}: the columns of {path} are {', '.join(columns)}{hint}")
    rows = open_columns(path, split, image_column, label_column)
    feature = rows.features[label_column] if label_column else None
    if feature is not None and not str(getattr(feature, "dtype", "")).startswith(("int", "uint")):
        raise DataError(f"--label_column {label_column}: {feature} found in {path}, whole numbers expected")
    return Listing(
        source=DirectorySource(path, split, image_column, label_column),
        samples=[Sample(f"row-{row:08d}", f"{path}:{row}", None, row) for row in range(len(rows))],
        suffixes=("jpg", "cls") if label_column else ("jpg",),
        classes=list(feature.names) if feature is not None and hasattr(feature, "names") else None,
        fingerprint=directory_fingerprint(Path(path)),
    )


class TorchvisionSource:
    """A torchvision dataset by number; it is opened anew in each process."""

    def __init__(self, name: str, root: str, split: str) -> None:
        self._arguments = (name, root, split)
        self._dataset: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def read(self, sample: Sample) -> Loaded:
        if self._dataset is None:
            self._dataset = open_torchvision(*self._arguments)
        try:
            image, label = self._dataset[sample.row]
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken image files
            raise UnusableError("damaged") from error
        return Loaded(image=image, label=int(label))


def open_torchvision(name: str, root: str, split: str) -> Any:
    """torchvision.datasets.NAME at `root`, never downloading.

    Raises:
        DataError: no such dataset, or it is not there or not whole.
    """
    import torchvision.datasets

    known = [each for each in torchvision.datasets.__all__ if inspect.isclass(getattr(torchvision.datasets, each))]
    if name not in known:
        raise DataError(f"--inputs {TORCHVISION}{name}: no such dataset in torchvision; there are {', '.join(known)}")
    make = getattr(torchvision.datasets, name)
    parameters = inspect.signature(make).parameters
    if "root" not in parameters:
        raise DataError(f"--inputs {TORCHVISION}{name}: this one reads no files")
    arguments: dict[str, object] = {"root": root}
    if "train" in parameters:
        if split not in ("train", "test"):
            raise DataError(f"--split {split}: {name} has train and test")
        arguments["train"] = split == "train"
    elif "split" in parameters:
        arguments["split"] = split
    try:
        return make(**arguments)
    except (RuntimeError, OSError, ValueError, TypeError, ModuleNotFoundError) as error:
        raise DataError(f"--inputs {TORCHVISION}{name}={root}: torchvision says: {error}") from error


def list_torchvision(item: str, split: str) -> Listing:
    """All images of torchvision:NAME=ROOT.

    Raises:
        DataError: it cannot be opened, or does not give an image with a class number.
    """
    name, given, root = item.removeprefix(TORCHVISION).partition("=")
    if not given:
        raise DataError(f"--inputs {item}: {TORCHVISION}NAME=ROOT expected, e.g. {TORCHVISION}CIFAR10=data/cifar10")
    dataset = open_torchvision(name, root, split)
    digest = hashlib.sha256(f"{name} {split} {len(dataset)}".encode())
    for row in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        image, label = dataset[row]
        if not isinstance(image, Image.Image) or not isinstance(label, int | np.integer):
            found = f"{type(image).__name__} and {type(label).__name__}"
            raise DataError(f"--inputs {item}: an image and a class number expected of each sample, {found} found")
        digest.update(f"{label} {image.size} ".encode() + image.tobytes())
    classes = getattr(dataset, "classes", None)
    return Listing(
        source=TorchvisionSource(name, root, split),
        samples=[Sample(f"{split}-{row:08d}", f"{item}:{row}", None, row) for row in range(len(dataset))],
        suffixes=("jpg", "cls"),
        classes=None if classes is None else [str(each) for each in classes],
        fingerprint=digest.hexdigest(),
    )
