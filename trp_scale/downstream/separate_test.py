"""A test set beside the run's data: another data set, of the same classes, that the run has not learned from."""

from __future__ import annotations

import logging
from pathlib import Path

from trp_scale.config import Config, RefusedError
from trp_scale.data.images.dataset import ImageDataset, agree_images, open_image_dataset
from trp_scale.data.images.kept_for_tests import refuse_shared_images
from trp_scale.data.index import read_json
from trp_scale.data.mixture import parse_paths

log = logging.getLogger(__name__)


def check_test(config: Config, test: Path) -> None:
    """Refuse a test set on which a run's accuracy would say nothing.

    Args:
        config: of the run, whose data is there.
        test: directory of the test set.

    Raises:
        DataError: one of the two is missing or damaged.
        RefusedError: it holds no images, no classes or other ones than the run's data, or images of the run's data.
    """
    kind = read_json(test / "dataset.json").get("kind")
    if kind != "image":
        raise RefusedError(
            f"--test {test}: kind {kind!r} found, 'image' allowed: a directory that trp-scale shard-images wrote"
        )
    train = [open_image_dataset(path.path, path.name) for path in parse_paths(config.data.path)]
    found = open_image_dataset(test)
    if "cls" not in found.meta.suffixes:
        raise RefusedError(f"--test {test}: the images have no classes; accuracy needs those of --data.path")
    _check_classes(train, found, test)
    if shared := refuse_shared_images(train, found):
        log.warning("%s: %d of its %d images are in the run's data too", test, shared, found.samples.rows)


def _check_classes(train: list[ImageDataset], found: ImageDataset, test: Path) -> None:
    known, names = agree_images(train).classes, found.meta.classes
    if known != names:
        raise RefusedError(
            f"--test {test}: classes {_listed(names)} found, those of --data.path are {_listed(known)}; a test set has "
            "the same, in the same order: shard it from a folder with the same sub-folders, or with the same "
            "--class_names"
        )
    most, highest = max(int(each.samples.labels.max()) for each in train), int(found.samples.labels.max())
    if names is None and highest > most:
        raise RefusedError(
            f"--test {test}: class {highest} found, the highest of --data.path is {most}; give the test set of "
            "the run's data"
        )


def _listed(names: tuple[str, ...] | None) -> str:
    if names is None:
        return "without names"
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
