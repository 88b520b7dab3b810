"""Which kind of input was given, and its listing; rendered scenes are one, made when they are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from trp_scale.data.images.png import write_png
from trp_scale.data.images.reader import CLASS, IMAGE, ordered_suffixes
from trp_scale.data.index import DataError
from trp_scale.modalities import modalities
from trp_scale.modalities.base import MapFiles, Modality
from trp_scale.preparation.dataset_directory import is_dataset_directory
from trp_scale.preparation.images.dataset_libraries import TORCHVISION, list_directory, list_torchvision
from trp_scale.preparation.images.files import find_tars, list_folder, list_tars
from trp_scale.preparation.images.samples import Listing, Loaded, Sample
from trp_scale.preparation.images.scenes import SCENE_CLASSES, render_scene
from trp_scale.preparation.images.settings import ShardImagesConfig


def list_input(config: ShardImagesConfig) -> Listing:
    """Find all images of the input.

    Raises:
        DataError: the input is of no known kind, or a setting does not go with it.
    """
    listing = _list(config)
    describe_maps(config, listing)
    return listing


def _list(config: ShardImagesConfig) -> Listing:
    if config.embedded:
        _refuse_tied_settings(config, "--embedded")
        return list_scenes(config.seed, config.count, config.size)
    first = Path(config.inputs[0])
    folder = first.is_dir() and not any(first.glob("*.tar"))
    if config.inputs[0].startswith(TORCHVISION):
        _refuse_tied_settings(config, "a torchvision dataset")
        return list_torchvision(config.inputs[0], config.split)
    if folder and is_dataset_directory(first):
        _refuse_tied_settings(config, "a dataset directory")
        return list_directory(config.inputs[0], config.split, config.image_column, config.label_column)
    if folder:
        _refuse_tied_settings(config, "an image folder", modality=True)
        return list_folder(first, config.modality_folders())
    _refuse_tied_settings(config, "tars", several=True, class_names=True)
    return list_tars(find_tars(config.inputs), config.class_names)


def _refuse_tied_settings(
    config: ShardImagesConfig, kind: str, *, several: bool = False, modality: bool = False, class_names: bool = False
) -> None:
    """Refuse settings that only another kind of input has: they would silently do nothing."""
    if len(config.inputs) > 1 and not several:
        raise DataError(f"--inputs {' '.join(config.inputs)}: {kind} is given alone; only tars may be several")
    if config.modality and not modality:
        raise DataError(f"--modality {config.modality[0]}: goes with an image folder, not with {kind}")
    if config.class_names and not class_names:
        raise DataError(f"--class_names {config.class_names}: goes with tars, not with {kind}")


def describe_maps(config: ShardImagesConfig, listing: Listing) -> None:
    """Fill `listing.maps` for maps that come from files, and let what describes them into its fingerprint.

    Raises:
        DataError: a setting for maps that there are none of, or one that is missing.
    """
    said = config.of_maps()
    for name, kind in modalities().items():
        if kind.format is None:
            continue
        there = kind.format.suffix in listing.suffixes and name not in listing.maps
        setting = next((each for each in said if each.startswith(f"{name}.")), None)
        if setting is not None and not there:
            raise DataError(
                f"--{setting} {said[setting]}: goes with {name} maps from files, --modality {name}=FOLDER of an image "
                f"folder or .{kind.format.suffix} members of tars; there are none"
            )
        if there:
            files = listing.maps[name] = kind.from_files(config.section(name))
            if files.content:
                listing.fingerprint = hashlib.sha256(listing.fingerprint.encode() + files.content).hexdigest()


class SceneSource:
    """Synthetic scenes by number.

    Args:
        maps: modalities by the suffix of their maps.
    """

    def __init__(self, seed: int, size: int, maps: dict[str, type[Modality]]) -> None:
        self._seed = seed
        self._size = size
        self._maps = maps

    def read(self, sample: Sample) -> Loaded:
        scene = render_scene(self._seed, sample.row, self._size)
        found = {suffix: kind.of_scene(scene) for suffix, kind in self._maps.items()}
        maps = {suffix: write_png(one.numbers) for suffix, one in found.items() if one is not None}
        return Loaded(image=Image.fromarray(scene.image), label=scene.label, maps=maps)


def list_scenes(seed: int, count: int, size: int) -> Listing:
    """`count` scenes of size x size pixels, as many of each class, with the maps of every modality that has some."""
    scene = render_scene(seed, 0, size)
    kinds: dict[str, type[Modality]] = {}
    maps: dict[str, MapFiles] = {}
    for name, kind in modalities().items():
        found = kind.of_scene(scene)
        if found is not None and kind.format is not None:
            kinds[kind.format.suffix] = kind
            maps[name] = MapFiles(name=name, format=kind.format, description={**found.description, "exact": True})
    source = SceneSource(seed, size, kinds)
    samples = [Sample(f"scene-{number:08d}", f"scene {number}", None, number) for number in range(count)]
    # Another renderer, or another numpy that rounds otherwise, is another input, and so is one with other maps.
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
