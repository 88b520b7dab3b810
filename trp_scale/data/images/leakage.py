"""Keep test images out of training.

Learned masks use labels of images. If those were test images, accuracy on them would be training accuracy (MLO-MAE B.3
keeps them apart): data marked as a test set is refused for learned masks. For accuracy, a test set is refused if the
run's data contains its images, marked or not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trp_scale.config import Config, RefusedError
from trp_scale.data.hashing import Words
from trp_scale.data.images.dataset import ImageDataset, agree_images, open_image_dataset
from trp_scale.data.images.maps import list_classes
from trp_scale.data.index import read_json
from trp_scale.data.mixture import parse_paths
from trp_scale.data.raw_files import require_dataset
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import quote

KEPT_FOR_TESTS = ("test", "val", "dev", "eval")
"""Prefixes of words in the names of test splits: test, val, validation, dev, evaluation, test2017 ..."""

MOST_IN_COMMON = 0.01
"""Allowed share of test images in the training data; public data sets contain a few images twice."""


def is_test_set(split: str) -> bool:
    """Whether a split of this name is meant for validation or test."""
    return any(word.startswith(KEPT_FOR_TESTS) for word in re.findall("[a-z]+", split.lower()))


def refuse_test_sets(datasets: Sequence[ImageDataset], kind: str) -> None:
    """Refuse data that is marked as a test set.

    Args:
        datasets: data sets of the run.
        kind: multilevel.kind.

    Raises:
        RefusedError: a data set is marked.
    """
    for dataset in datasets:
        if is_test_set(dataset.split):
            raise RefusedError(
                f"{dataset.directory}: dataset.json marks these images as split {dataset.split!r} "
                f"(settings.split; --split of trp-scale shard-images); --multilevel.kind {kind} would learn "
                "masks from images that are kept for a test; give images of another split, such as train, or set "
                "--multilevel.kind none"
            )


def shared_images(train: Sequence[ImageDataset], test: ImageDataset) -> list[str]:
    """Return "SHARD/KEY" of the images of `test` whose .jpg is byte for byte in `train`.

    Bytes are only read if length and checksum in the indexes agree.
    """
    reader, words = SampleReader(test.samples, verify=False), _pack_checksums(test)
    names_by_row: dict[int, str] = {}
    for dataset in train:
        other, others = SampleReader(dataset.samples, verify=False), _pack_checksums(dataset)
        order = np.argsort(others)
        first = np.searchsorted(others, words, sorter=order)
        for number in np.flatnonzero(np.isin(words, others)).tolist():
            match = int(order[first[number]])
            if number not in names_by_row and reader.members(number)[0] == other.members(match)[0]:
                names_by_row[number] = test.samples.key(number)
    return list(names_by_row.values())


def refuse_shared_images(train: Sequence[ImageDataset], test: ImageDataset) -> int:
    """Refuse a test set with images of the run's data.

    Returns:
        Number of shared images, at most MOST_IN_COMMON of the test set.

    Raises:
        RefusedError: more images are shared.
    """
    shared = shared_images(train, test)
    if len(shared) > MOST_IN_COMMON * test.samples.rows:
        where = ", ".join(str(dataset.directory) for dataset in train)
        raise RefusedError(
            f"{test.directory}: {len(shared)} of its {test.samples.rows} images are in the run's data ({where}), for "
            f"example {', '.join(shared[:3])}; at most {MOST_IN_COMMON:.0%} may be; give images that the "
            "run has not learned from"
        )
    return len(shared)


def image_datasets(paths: str) -> list[ImageDataset]:
    """Open the image data sets of `paths`, which has the form of --data.path.

    Raises:
        DataError: a data set is missing or damaged.
    """
    return [
        open_image_dataset(member.path, member.name)
        for member in parse_paths(paths)
        if read_json(member.path / "dataset.json").get("kind") == "image"
    ]


def _pack_checksums(dataset: ImageDataset) -> Words:
    """Pack checksum and length of each image, [n]; the image is the first member."""
    table = dataset.samples
    words: Words = (table.checksums[:, 0].astype(np.uint64) << np.uint64(32)) | table.lengths[:, 0]
    return words


log = logging.getLogger(__name__)


def check_test(config: Config, test: Path) -> None:
    """Refuse a test set that is unsuitable for the accuracy of a run.

    Args:
        config: settings of the run.
        test: directory of the test set.

    Raises:
        DataError: a data set is missing or damaged.
        RefusedError: it has no images or no classes, other classes than the run's data, or images of the run's data.
    """
    require_dataset(test, f"--test {test}")
    kind = read_json(test / "dataset.json").get("kind")
    if kind != "image":
        raise RefusedError(
            f"--test {test}: kind {quote(kind)} found, 'image' allowed: a directory that trp-scale shard-images wrote"
        )
    train = [open_image_dataset(path.path, path.name) for path in parse_paths(config.data.path)]
    test_dataset = open_image_dataset(test)
    if "cls" not in test_dataset.meta.suffixes:
        raise RefusedError(f"--test {test}: the images have no classes; accuracy needs those of --data.path")
    _check_classes(train, test_dataset, test)
    if shared := refuse_shared_images(train, test_dataset):
        log.warning("%s: %d of its %d images are also in the run's data", test, shared, test_dataset.samples.rows)


def _check_classes(train: list[ImageDataset], test_dataset: ImageDataset, test: Path) -> None:
    known, names = agree_images(train).classes, test_dataset.meta.classes
    if known != names:
        raise RefusedError(
            f"--test {test}: classes {list_classes(names)} found, those of --data.path are {list_classes(known)}; "
            "give a test set with the same classes in the same order: shard it from a folder with the same "
            "sub-folders, or with the same --class_names"
        )
    most, highest = max(int(dataset.samples.labels.max()) for dataset in train), int(test_dataset.samples.labels.max())
    if names is None and highest > most:
        raise RefusedError(
            f"--test {test}: class {highest} found, the highest of --data.path is {most}; give the test set of "
            "the run's data"
        )
