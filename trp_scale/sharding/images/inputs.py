"""Listing of Hugging Face datasets, torchvision datasets and rendered scenes (files.py lists files).

Libraries are imported when needed. Scenes are rendered when they are read.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trp_scale.data.images.formats import write_png
from trp_scale.data.images.maps import CLASS, IMAGE, ordered_suffixes
from trp_scale.data.raw_files import (
    all_files,
    check_rows,
    file_kind,
    files_fingerprint,
    is_dataset_directory,
    load_dataset,
    open_regular,
)
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities import modalities
from trp_scale.pretraining.modalities.base import MapFiles, Modality
from trp_scale.sharding.images.files import Listing, Loaded, Sample, UnusableError, list_folder, list_tars, tars_on_disk
from trp_scale.sharding.images.scenes import SCENE_CLASSES, render_scene
from trp_scale.sharding.images.settings import ShardImagesConfig

TORCHVISION = "torchvision:"
"""Prefix of an input that names a torchvision dataset."""


def _list(config: ShardImagesConfig) -> Listing:
    if config.embedded:
        _refuse_inapplicable_settings(config, "--embedded")
        return list_scenes(config.seed, config.count, config.size)
    first = Path(config.inputs[0])
    folder = first.is_dir() and not any(first.glob("*.tar"))
    if file_kind(first) == "image" and not first.is_dir():
        raise DataError(
            f"--inputs {config.inputs[0]}: a single image; give its folder, {first.parent}; sub-folders become classes"
        )
    if config.inputs[0].startswith(TORCHVISION):
        _refuse_inapplicable_settings(config, "a torchvision dataset")
        return list_torchvision(config.inputs[0], config.split)
    if folder and is_dataset_directory(first):
        _refuse_inapplicable_settings(config, "a dataset directory")
        return list_directory(config.inputs[0], config.split, config.image_column, config.label_column)
    if folder:
        _refuse_inapplicable_settings(config, "an image folder", modality=True)
        return list_folder(first, config.modality_folders())
    _refuse_inapplicable_settings(config, "tars", several=True, class_names=True)
    return list_tars(tars_on_disk(config.inputs), config.class_names)


def _refuse_inapplicable_settings(
    config: ShardImagesConfig, kind: str, *, several: bool = False, modality: bool = False, class_names: bool = False
) -> None:
    """Raise DataError for settings of another kind of input, which would have no effect."""
    if len(config.inputs) > 1 and not several:
        raise DataError(f"--inputs {' '.join(config.inputs)}: {kind} must be the only input; only tars can be combined")
    if config.modality and not modality:
        raise DataError(f"--modality {config.modality[0]}: needs an image folder, not {kind}; remove the flag")
    if config.class_names and not class_names:
        raise DataError(f"--class_names {config.class_names}: needs tars, not {kind}; remove the flag")


def list_input(config: ShardImagesConfig) -> Listing:
    """List all images of the input. Describe maps that are read from files, and add their description to the
    fingerprint.

    Raises:
        DataError: the kind of input is unknown, a setting does not apply to it or has no maps, or a required setting is
            missing.
    """
    listing = _list(config)
    flags = config.map_settings()
    for name, kind in modalities().items():
        if kind.format is None:
            continue
        is_stored = kind.format.suffix in listing.suffixes and name not in listing.maps
        setting = next((flag for flag in flags if flag.startswith(f"{name}.")), None)
        if setting is not None and not is_stored:
            raise DataError(
                f"--{setting} {flags[setting]}: the input has no {name} maps; give --modality {name}=FOLDER with an "
                f"image folder, or tars with .{kind.format.suffix} members"
            )
        if is_stored:
            files = listing.maps[name] = kind.from_files(config.section(name))
            _check_first_map(listing, files)
            if files.content:
                listing.fingerprint = hashlib.sha256(listing.fingerprint.encode() + files.content).hexdigest()
    return listing


def _check_first_map(listing: Listing, files: MapFiles) -> None:
    """Check the first readable map, so that a missing setting is reported before any map is stored."""
    for sample in listing.samples:
        try:
            content = listing.source.read(sample).maps[files.format.suffix]
        except UnusableError:
            continue
        files.refuse(content, sample.origin)
        return


class SceneSource:
    """Reader of synthetic scenes.

    Args:
        maps: modalities by the suffix of their maps.
    """

    def __init__(self, seed: int, size: int, maps: dict[str, type[Modality]]) -> None:
        self._seed = seed
        self._size = size
        self._maps = maps

    def read(self, sample: Sample) -> Loaded:
        scene = render_scene(self._seed, sample.row, self._size)
        maps_by_suffix = {suffix: kind.of_scene(scene) for suffix, kind in self._maps.items()}
        maps = {suffix: write_png(map_.numbers) for suffix, map_ in maps_by_suffix.items() if map_ is not None}
        return Loaded(image=Image.fromarray(scene.image), label=scene.label, maps=maps)


def list_scenes(seed: int, count: int, size: int) -> Listing:
    """List `count` scenes of size x size pixels, balanced over the classes, with maps of every modality that can make
    them from a scene."""
    scene = render_scene(seed, 0, size)
    kinds: dict[str, type[Modality]] = {}
    maps: dict[str, MapFiles] = {}
    for name, kind in modalities().items():
        map_ = kind.of_scene(scene)
        if map_ is not None and kind.format is not None:
            kinds[kind.format.suffix] = kind
            maps[name] = MapFiles(name=name, format=kind.format, description={**map_.description, "exact": True})
    source = SceneSource(seed, size, kinds)
    samples = [Sample(f"scene-{number:08d}", f"scene {number}", None, number) for number in range(count)]
    # The fingerprint changes with the renderer, the rounding of numpy and the set of maps.
    first = source.read(samples[0])
    digest = hashlib.sha256(np.asarray(first.image).tobytes())
    for suffix, content in first.maps.items():
        digest.update(suffix.encode() + content)
    return Listing(
        source=source,
        samples=samples,
        suffixes=ordered_suffixes({IMAGE, CLASS, *kinds}),
        classes=list(SCENE_CLASSES),
        fingerprint=digest.hexdigest(),
        maps=maps,
    )


class DirectorySource:
    """Reader of rows written by datasets.save_to_disk. Image files keep their bytes."""

    def __init__(self, path: str, split: str, image_column: str, label_column: str) -> None:
        self._arguments = (path, split, image_column, label_column)
        self._image_column = image_column
        self._label_column = label_column

    @cached_property
    def _rows(self) -> Any:
        return open_columns(*self._arguments)

    def read(self, sample: Sample) -> Loaded:
        row = self._rows[sample.row]
        image, label = row[self._image_column], row[self._label_column] if self._label_column else None
        if isinstance(image, dict) and image.get("bytes") is None and image.get("path"):
            try:
                with open_regular(image["path"]) as stream:
                    image = stream.read()
            except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
                raise UnusableError("unreadable") from error
        content = image["bytes"] if isinstance(image, dict) else image
        if not isinstance(content, bytes):
            raise UnusableError("no_image")
        return Loaded(image=content, label=None if label is None else int(label))


def open_columns(path: str, split: str, image_column: str, label_column: str) -> Any:
    """Open the image and label columns of a dataset directory, with undecoded images."""
    import datasets

    rows = load_dataset(path, split)
    rows = rows.select_columns([image_column, *([label_column] if label_column else [])])
    if isinstance(rows.features[image_column], datasets.Image):
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    return rows


def list_directory(path: str, split: str, image_column: str, label_column: str) -> Listing:
    """List all rows of a directory written by datasets.save_to_disk.

    Raises:
        DataError: the extra is not installed, the split or column does not exist, or the labels are no integers.
    """
    columns = load_dataset(path, split).column_names
    for flag, name in (("image_column", image_column), ("label_column", label_column)):
        if name and name not in columns:
            hint = "; give --label_column '' without classes" if flag == "label_column" else ""
            raise DataError(f"--{flag} {name}: the columns of {path} are {', '.join(columns)}{hint}")
    rows = open_columns(path, split, image_column, label_column)
    check_rows(rows, 0, len(rows), f"input {path}")
    feature = rows.features[label_column] if label_column else None
    if feature is not None and not str(getattr(feature, "dtype", "")).startswith(("int", "uint")):
        raise DataError(f"--label_column {label_column}: {feature} found in {path}, whole numbers expected")
    return Listing(
        source=DirectorySource(path, split, image_column, label_column),
        samples=[Sample(f"row-{row:08d}", f"{path}:{row}", None, row) for row in range(len(rows))],
        suffixes=("jpg", "cls") if label_column else ("jpg",),
        classes=list(feature.names) if feature is not None and hasattr(feature, "names") else None,
        fingerprint=files_fingerprint(all_files(Path(path))).hex(),
    )


class TorchvisionSource:
    """Reader of a torchvision dataset, opened once in each process."""

    def __init__(self, name: str, root: str, split: str) -> None:
        self._arguments = (name, root, split)

    @cached_property
    def _dataset(self) -> Any:
        return open_torchvision(*self._arguments)

    def read(self, sample: Sample) -> Loaded:
        try:
            image, label = self._dataset[sample.row]
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken image files
            raise UnusableError("damaged") from error
        return Loaded(image=image, label=int(label))


def open_torchvision(name: str, root: str, split: str) -> Any:
    """Open torchvision.datasets.NAME at `root` without downloading.

    Raises:
        DataError: the dataset is unknown, missing or incomplete.
    """
    import torchvision.datasets

    known = [
        kind_name
        for kind_name in torchvision.datasets.__all__
        if inspect.isclass(getattr(torchvision.datasets, kind_name))
    ]
    if name not in known:
        raise DataError(f"--inputs {TORCHVISION}{name}: no such dataset in torchvision; allowed: {', '.join(known)}")
    make = getattr(torchvision.datasets, name)
    parameters = inspect.signature(make).parameters
    if "root" not in parameters:
        raise DataError(f"--inputs {TORCHVISION}{name}: this dataset reads no files; give one stored on disk")
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
    """List all images of torchvision:NAME=ROOT.

    Raises:
        DataError: the dataset cannot be opened, or its samples are not (image, class number).
    """
    name, arguments, root = item.removeprefix(TORCHVISION).partition("=")
    if not arguments:
        raise DataError(f"--inputs {item}: {TORCHVISION}NAME=ROOT expected, e.g. {TORCHVISION}CIFAR10=data/cifar10")
    dataset = open_torchvision(name, root, split)
    digest = hashlib.sha256(f"{name} {split} {len(dataset)}".encode())
    for row in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        image, label = dataset[row]
        if not isinstance(image, Image.Image) or not isinstance(label, int | np.integer):
            types = f"{type(image).__name__} and {type(label).__name__}"
            raise DataError(f"--inputs {item}: an image and a class number expected of each sample, {types} found")
        digest.update(f"{label} {image.size} ".encode() + image.tobytes())
    classes = getattr(dataset, "classes", None)
    return Listing(
        source=TorchvisionSource(name, root, split),
        samples=[Sample(f"{split}-{row:08d}", f"{item}:{row}", None, row) for row in range(len(dataset))],
        suffixes=("jpg", "cls"),
        classes=None if classes is None else [str(class_name) for class_name in classes],
        fingerprint=digest.hexdigest(),
    )
