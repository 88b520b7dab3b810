"""Which kind of input was given, and its listing."""

from __future__ import annotations

from pathlib import Path

from trp_scale.data.index import DataError
from trp_scale.preparation.dataset_directory import is_dataset_directory
from trp_scale.preparation.images.dataset_libraries import TORCHVISION, list_directory, list_torchvision
from trp_scale.preparation.images.files import list_folder
from trp_scale.preparation.images.map_descriptions import describe_maps
from trp_scale.preparation.images.samples import Listing
from trp_scale.preparation.images.scenes_source import list_scenes
from trp_scale.preparation.images.settings import ShardImagesConfig
from trp_scale.preparation.images.tars import find_tars, list_tars


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
