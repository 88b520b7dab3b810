"""What dataset.json says about the aligned maps of a data set, and where they lie.

"modalities": {"depth": {...}, "semseg": {...}} in dataset.json, each with what is known of it:
    depth: "scale": metres per unit of the 16-bit map, null if it is relative; "unit": for people to read.
    semseg: "classes": their names, in the order of their numbers.
    both: "exact": rendered, not measured or predicted; "directory": "shards" (or absent) if the maps are members of the
        image's own sample, else a directory of DATASET with tars of the same names, keys and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trp_scale.config import Config, RefusedError
from trp_scale.data.images.members import MODALITIES, VOID
from trp_scale.data.index import DataError

OWN_TAR = "shards"
"""Directory of the image's own tar."""


@dataclass(frozen=True, kw_only=True)
class StoredModality:
    """The maps of one modality.

    Attributes:
        name: in MODALITIES.
        directory: relative to the data set.
        scale: metres per unit of a depth map; None: relative, or no depth map.
        classes: of a segmentation map, by number; None: not written down, or no segmentation map.
    """

    name: str
    directory: str
    scale: float | None
    classes: tuple[str, ...] | None

    @property
    def suffix(self) -> str:
        """Of the members that hold the maps."""
        return MODALITIES[self.name]


def used_modalities(config: Config) -> tuple[str, ...]:
    """The modalities beside the image that the objective reads, in the order of MODALITIES."""
    if config.objective.kind != "mm_mae":
        return ()
    asked = {*config.modalities.inputs, *config.modalities.outputs}
    return tuple(name for name in MODALITIES if name in asked)


def stored_modalities(path: Path, document: dict[str, Any]) -> dict[str, StoredModality]:
    """The modalities of a data set.

    Args:
        path: of dataset.json, for messages.
        document: its content.

    Raises:
        DataError: a description that cannot be.
    """
    described, suffixes = document.get("modalities") or {}, document.get("suffixes", ())
    found = {}
    for name, suffix in MODALITIES.items():
        if name in described or suffix in suffixes:
            found[name] = _read(path, name, described.get(name) or {})
            if found[name].directory == OWN_TAR and suffix not in suffixes:
                raise DataError(
                    f"{path}: modality {name} is described, but samples have no member .{suffix} and no other "
                    f"directory is named for it; shard the images again"
                )
    return found


def second_directories(path: Path, document: dict[str, Any]) -> dict[str, StoredModality]:
    """The modalities whose maps lie in tars of their own, by directory; none of a data set of text.

    Raises:
        DataError: as `stored_modalities`.
    """
    every = stored_modalities(path, document).values()
    return {modality.directory: modality for modality in every if modality.directory != OWN_TAR}


def _read(path: Path, name: str, description: dict[str, Any]) -> StoredModality:
    directory, scale = description.get("directory", OWN_TAR), description.get("scale")
    classes = description.get("classes") if name == "semseg" else None
    if not isinstance(directory, str) or Path(directory).name != directory:
        raise DataError(f"{path}: directory {directory!r} of modality {name}: a plain name expected")
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise DataError(f"{path}: scale {scale!r} of modality {name}: metres per unit expected, or null")
    if classes is not None and not 0 < len(classes) <= VOID:
        raise DataError(f"{path}: {len(classes)} classes of modality {name} found, 1 to {VOID} allowed ({VOID}: void)")
    return StoredModality(
        name=name, directory=directory, scale=scale, classes=None if classes is None else tuple(classes)
    )


def required(directory: Path, found: dict[str, StoredModality], used: Sequence[str]) -> tuple[StoredModality, ...]:
    """Those of a data set's modalities that the objective reads.

    Raises:
        RefusedError: one is not there, or its classes are not known.
    """
    for name in used:
        if name not in found:
            there = ", ".join(["rgb", *found])
            raise RefusedError(
                f"--modalities.inputs or --modalities.outputs has {name}, but {directory} has {there} only; make the "
                f"maps with data_tools/pseudo_label.py, or leave {name} out of both"
            )
    if "semseg" in used and found["semseg"].classes is None:
        raise RefusedError(
            f"--modalities.inputs or --modalities.outputs has semseg, but {directory / 'dataset.json'} has no list of "
            f"its classes; shard the images again with --semseg_classes"
        )
    return tuple(found[name] for name in used)
