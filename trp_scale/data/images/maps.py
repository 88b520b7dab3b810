"""Maps aligned with the images of a data set: their storage and their description in dataset.json.

A map is a PNG of its image's size. It is a member of the image's own sample, or of a tar in another directory.
dataset.json describes each modality: "modalities": {"depth": {...}, "semseg": {...}}. Every description may have:
    "exact": rendered, neither measured nor predicted;
    "directory": "shards" (default) if the maps are members of the image's own sample, else a directory of DATASET with
        tars of the same names, keys and order;
and fields of its own format, such as the classes of segmentation (trp_scale/pretraining/modalities).
A text file may name classes, one name a line, in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trp_scale.config import RefusedError
from trp_scale.config.files import read_content
from trp_scale.config.registry import find, names
from trp_scale.config.schema import Fields, FileName
from trp_scale.data.images.formats import GREY, RGB, Map, png_format, png_size, read_png, refuse_too_many_pixels
from trp_scale.errors import DataError, error_text

IMAGE, CLASS = "jpg", "cls"
"""Members of a sample: the image, and its class as an ASCII integer."""

OWN_MODALITY = "; --module registers a modality of your own"
"""End of the message about a member of an unknown modality."""

OWN_TAR = "shards"
"""Directory of the image's own tar."""


@dataclass(frozen=True, kw_only=True)
class StoredMaps:
    """Maps of one modality in one data set. Its repr is part of the digest that checkpoints hold.

    Attributes:
        name: modality.
        suffix: suffix of the members with the maps.
        directory: directory of their tars, relative to the data set.
    """

    name: str
    suffix: str
    directory: str


class MapFormat:
    """Storage format of the maps of a modality. A modality with its own description overrides `stored`; if the
    description limits the numbers, also `check`.

    Args:
        suffix: suffix of the members.
        bits: bits of a number; a tuple allows any of them.
        channels: 1 for a grey PNG, 3 for RGB.
        empty: number that marks an unknown pixel, in all channels.
    """

    def __init__(self, suffix: str, *, bits: int | tuple[int, ...] = 8, channels: int = 1, empty: int = 0) -> None:
        self.suffix, self.channels, self.empty = suffix, channels, empty
        self.bits = (bits,) if isinstance(bits, int) else bits
        self.colour_type = GREY if channels == 1 else RGB

    def fits(self, content: bytes | bytearray) -> bool:
        """Whether the header is that of a PNG in this format."""
        bits, colour_type = png_format(content)
        return bits in self.bits and colour_type == self.colour_type

    def readable(self, content: bytes | bytearray) -> bool:
        """Whether such a file can be sharded, directly or after conversion."""
        return self.fits(content)

    def decode(self, content: bytes | bytearray, size: tuple[int, ...] | None) -> Map:
        """Decode a map, [H, W] or [H, W, 3], uint8 or uint16, read-only.

        Pillow does not detect every changed number; `SampleReader` therefore compares the map's checksum.

        Args:
            size: (H, W) of its image; `None` allows any.

        Raises:
            DataError: not a decodable PNG of this format, or another size.
        """
        if not self.fits(content):
            bits, colour_type = png_format(content)
            description = (
                f"a PNG of {bits} bits and colour type {colour_type}" if bits else "not a PNG that can be decoded"
            )
            kind = "grey" if self.channels == 1 else "red, green, blue"
            raise DataError(
                f".{self.suffix}: {description}; {' or '.join(map(str, self.bits))} bits and colour type "
                f"{self.colour_type} ({kind}) expected"
            )
        height, width = png_size(content)  # from the header, before decoding
        if size is not None and (height, width) != tuple(size):
            raise DataError(f".{self.suffix}: {width} x {height} pixels, the image has {size[1]} x {size[0]}")
        refuse_too_many_pixels(height, width)
        try:
            return read_png(content)
        except Exception as error:  # decoders raise many types on a damaged file
            raise DataError(f".{self.suffix}: not a PNG that can be decoded ({error_text(error)})") from error

    def stored(self, name: str, description: Fields) -> StoredMaps:
        """Parse the description of the maps in dataset.json.

        Args:
            name: modality.
            description: its fields.

        Raises:
            DataError: the description is invalid.
        """
        return StoredMaps(name=name, suffix=self.suffix, directory=own_directory(description))

    def check(self, numbers: Map, stored: Any) -> None:
        """Raise DataError if a map has a number that its description excludes."""

    def require(self, path: Path, stored: Any) -> None:
        """Raise RefusedError if a run cannot learn from the maps of the data set with dataset.json at `path`."""

    def agree(self, members: Sequence[tuple[str, Any]]) -> None:
        """Raise DataError if the maps of the members of a mixture are incompatible.

        Args:
            members: (name, stored maps) of each member.
        """


def known_suffixes() -> tuple[str, ...]:
    """Return the members that a sample may have, in their order; all samples of a data set have the same members."""
    return (IMAGE, CLASS, *(form.suffix for form in map_formats().values()))


def ordered_suffixes(suffixes: Collection[str]) -> tuple[str, ...]:
    """Sort suffixes by the order of `known_suffixes`."""
    return tuple(suffix for suffix in known_suffixes() if suffix in suffixes)


def map_formats() -> dict[str, MapFormat]:
    """Return the format of each modality with maps, by name, in the order of a sample's members."""
    kinds = {name: find("modality", name).load() for name in names("modality")}
    return {name: kind.format for name, kind in kinds.items() if kind.format is not None}


def stored_maps(path: Path, document: Mapping[str, Any]) -> dict[str, StoredMaps]:
    """Parse the maps of a data set, by modality.

    Args:
        path: path of dataset.json, for messages.
        document: its content.

    Raises:
        DataError: a description is invalid.
    """
    fields = Fields(document, str(path), DataError, "shard the images again")
    described, suffixes = fields.section("modalities"), fields.texts("suffixes", [])
    maps_by_name = {}
    for name, form in map_formats().items():
        if name in described or form.suffix in suffixes:
            maps_by_name[name] = form.stored(name, described.section(name))
            if maps_by_name[name].directory == OWN_TAR and form.suffix not in suffixes:
                raise DataError(
                    f"{path}: modality {name} is described, but samples have no member .{form.suffix} and its "
                    f"description has no other directory; shard the images again"
                )
    return maps_by_name


def second_directories(path: Path, document: Mapping[str, Any]) -> dict[str, StoredMaps]:
    """Return the maps that are stored in tars of their own, by directory; empty for text."""
    return {maps.directory: maps for maps in stored_maps(path, document).values() if maps.directory != OWN_TAR}


def own_directory(description: Fields) -> str:
    """Return the directory of a modality's maps, relative to the data set.

    Raises:
        DataError: not a plain name.
    """
    directory: str = description.take("directory", FileName, OWN_TAR)
    return directory


def class_names(fields: Fields) -> tuple[str, ...] | None:
    """Return the names of classes in dataset.json or in the description of a modality; `None` without names.

    Raises:
        DataError: neither a list of names nor null.
    """
    names: list[str] | None = fields.take("classes", list[str] | None, None)
    return None if names is None else tuple(names)


def refuse_other_classes(what: str, named: Sequence[tuple[str, tuple[str, ...] | None]]) -> None:
    """Raise DataError if one of the (member of a mixture, classes) has other classes than the first."""
    for name, classes in named[1:]:
        if classes != named[0][1]:
            raise DataError(
                f"data.path: members of a mixture must have the same {what}: {named[0][0]} has "
                f"{list_classes(named[0][1])}, {name} has {list_classes(classes)}"
            )


def list_classes(names: tuple[str, ...] | None) -> str:
    """List the first names of classes, for a message."""
    if names is None:
        return "without names"
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def require_maps(directory: Path, stored: Mapping[str, StoredMaps], used: Sequence[str]) -> tuple[StoredMaps, ...]:
    """Return the maps of a data set that the objective reads.

    Raises:
        RefusedError: a modality is missing, or unsuitable for training.
    """
    for name in used:
        if name not in stored:
            available = ", ".join(["rgb", *stored])
            raise RefusedError(
                f"--modalities.inputs or --modalities.outputs has {name}, but {directory} has {available} only; "
                f"create the maps with trp-scale pseudo-label, or leave {name} out of both"
            )
        map_formats()[name].require(directory / "dataset.json", stored[name])
    return tuple(stored[name] for name in used)


def read_names(flag: str, file: str) -> tuple[list[str], bytes]:
    """Return the names in a file, one a line, and its content for a fingerprint.

    Args:
        flag: option that gives the file, for messages.
        file: path; empty lines at the end are ignored.

    Raises:
        DataError: the file cannot be read, has no name, or has an empty line between names.
    """
    content = read_content(Path(file), DataError, source=f"{flag} {file}")
    try:
        names = [line.strip() for line in content.decode("utf-8").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {file}: not a text file that can be read ({error})") from error
    if not names:
        raise DataError(f"{flag} {file}: the file has no names, one a line expected")
    if "" in names:
        raise DataError(f"{flag} {file}: line {names.index('') + 1} is empty; a name's line is its number")
    return names, content
