"""What is written down about the maps of an input: the scale of depth, the classes of segmentation."""

from __future__ import annotations

import hashlib

from trp_scale.data.images.members import MODALITIES, VOID
from trp_scale.data.index import DataError
from trp_scale.preparation.images.name_lists import read_names
from trp_scale.preparation.images.samples import Listing
from trp_scale.preparation.images.settings import ShardImagesConfig

_SETTINGS: dict[str, tuple[str, object]] = {
    "depth_scale": ("depth", None),
    "semseg_classes": ("semseg", ""),
    "void_label": ("semseg", VOID),
}
"""Settings that describe maps: of which modality, and the value that says nothing."""


def describe_maps(config: ShardImagesConfig, listing: Listing) -> None:
    """Fill `listing.described` for maps that come from files, and let the classes into its fingerprint.

    Raises:
        DataError: a setting for maps that there are none of, or segmentation maps without a list of their classes.
    """
    maps = [name for name, suffix in MODALITIES.items() if suffix in listing.suffixes and name not in listing.described]
    for setting, (name, default) in _SETTINGS.items():
        if getattr(config, setting) != default and name not in maps:
            raise DataError(
                f"--{setting} {getattr(config, setting)}: goes with {name} maps from files, --modality {name}=FOLDER "
                f"of an image folder or .{MODALITIES[name]} members of tars; there are none"
            )
    if "depth" in maps:
        unit = "relative" if config.depth_scale is None else f"{config.depth_scale} metres"
        listing.described["depth"] = {"scale": config.depth_scale, "unit": unit, "exact": False}
    if "semseg" in maps:
        names, content = _segmentation_classes(config)
        listing.described["semseg"] = {"classes": names, "exact": False}
        listing.fingerprint = hashlib.sha256(listing.fingerprint.encode() + content).hexdigest()


def _segmentation_classes(config: ShardImagesConfig) -> tuple[list[str], bytes]:
    if not config.semseg_classes:
        raise DataError(
            "the input has segmentation maps, and nothing says what their numbers mean: give --semseg_classes FILE, a "
            "text file with the name of each number, one a line from 0 on"
        )
    names, content = read_names("--semseg_classes", config.semseg_classes)
    if len(names) > VOID:
        raise DataError(f"--semseg_classes {config.semseg_classes}: {len(names)} names, at most {VOID} are allowed")
    return names, content
