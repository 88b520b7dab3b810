"""What dataset.json says about the aligned maps of a data set, and where they lie.

"modalities": {"depth": {...}, "semseg": {...}} in dataset.json, each with what is known of it:
    depth: "scale": metres per unit of the 16-bit map, null if it is relative; "unit": for people to read;
        "larger_is": "farther" (or absent), or "nearer" of inverse depth.
    semseg: "classes": their names, in the order of their numbers.
    both: "exact": rendered, not measured or predicted; "directory": "shards" (or absent) if the maps are members of the
        image's own sample, else a directory of DATASET with tars of the same names, keys and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from trp_scale.config import Config, RefusedError
from trp_scale.data.images.members import MODALITIES, VOID
from trp_scale.data.index import DataError

OWN_TAR = "shards"
"""Directory of the image's own tar."""

Direction = Literal["farther", "nearer"]
"""What a larger number of a depth map means."""


@dataclass(frozen=True, kw_only=True)
class StoredModality:
    """The maps of one modality.

    Attributes:
        name: in MODALITIES.
        directory: relative to the data set.
        scale: metres per unit of a depth map; None: relative, or no depth map.
        classes: of a segmentation map, by number; None: not written down, or no segmentation map.
        larger_is: of a depth map, what a larger number means. Nothing that is made of one data set depends on it, so it
            is not in repr, hence not in the digest that checkpoints hold.
    """

    name: str
    directory: str
    scale: float | None
    classes: tuple[str, ...] | None
    larger_is: Direction = field(default="farther", repr=False)

    @property
    def suffix(self) -> str:
        """Suffix of the members that hold the maps."""
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
    if not isinstance(described, dict):
        raise DataError(f"{path}: modalities {described!r} found, descriptions by name expected: {{...}}")
    found = {}
    for name, suffix in MODALITIES.items():
        if name in described or suffix in suffixes:
            found[name] = _read(path, name, described.get(name, {}))
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


def class_names(path: Path, place: str, found: object) -> tuple[str, ...] | None:
    """Names of classes in dataset.json, or None.

    Args:
        path: of dataset.json, for messages.
        place: where they stand in it, for messages.
        found: what stands there.

    Raises:
        DataError: neither a list of names nor null.
    """
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise DataError(f'{path}: {place} {found!r} found, a list of names expected, such as ["wall", "sky"], or null')
    return tuple(found)


def _read(path: Path, name: str, description: Any) -> StoredModality:
    if not isinstance(description, dict):
        raise DataError(f"{path}: modalities.{name} {description!r} found, its description expected: {{...}}")
    directory, scale = description.get("directory", OWN_TAR), description.get("scale")
    classes = class_names(path, f"modalities.{name}.classes", description.get("classes")) if name == "semseg" else None
    larger_is = description.get("larger_is", "farther")
    if not isinstance(directory, str) or Path(directory).name != directory:
        raise DataError(f"{path}: directory {directory!r} of modality {name}: a plain name expected")
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise DataError(f"{path}: scale {scale!r} of modality {name}: metres per unit expected, or null")
    if classes is not None and not 0 < len(classes) <= VOID:
        raise DataError(f"{path}: {len(classes)} classes of modality {name} found, 1 to {VOID} allowed ({VOID}: void)")
    if larger_is not in get_args(Direction):
        raise DataError(
            f"{path}: larger_is {larger_is!r} of modality {name}: {' or '.join(get_args(Direction))} expected"
        )
    return StoredModality(name=name, directory=directory, scale=scale, classes=classes, larger_is=larger_is)


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
                f"maps with trp-scale pseudo-label, or leave {name} out of both"
            )
    if "semseg" in used and found["semseg"].classes is None:
        raise RefusedError(
            f"--modalities.inputs or --modalities.outputs has semseg, but {directory / 'dataset.json'} has no list of "
            f"its classes; shard the images again with --semseg_classes"
        )
    return tuple(found[name] for name in used)
