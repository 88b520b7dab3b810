"""What is written down about the maps of an input: the scale of depth, the classes of segmentation."""

from __future__ import annotations

import dataclasses
import hashlib

from trp_scale.data.index import DataError
from trp_scale.modalities import modalities
from trp_scale.preparation.images.samples import Listing
from trp_scale.preparation.images.settings import ShardImagesConfig


def describe_maps(config: ShardImagesConfig, listing: Listing) -> None:
    """Fill `listing.maps` for maps that come from files, and let what describes them into its fingerprint.

    Raises:
        DataError: a setting for maps that there are none of, or one that is missing.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, kind in modalities().items():
        if kind.format is None:
            continue
        there = kind.format.suffix in listing.suffixes and name not in listing.maps
        for setting in kind.file_settings:
            if getattr(config, setting) != defaults[setting] and not there:
                raise DataError(
                    f"--{setting} {getattr(config, setting)}: goes with {name} maps from files, --modality "
                    f"{name}=FOLDER of an image folder or .{kind.format.suffix} members of tars; there are none"
                )
        if there:
            files = listing.maps[name] = kind.from_files(config)
            if files.content:
                listing.fingerprint = hashlib.sha256(listing.fingerprint.encode() + files.content).hexdigest()
