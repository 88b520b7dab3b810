"""Index an external tar: its images, their classes, and the skipped members.

One sample is the members of one key. Of those one is the image (JPEG, PNG or WebP) and one may hold its class, as text
or as a field of JSON; the others are counted and never read.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from trp_scale.config.json_files import parse_json
from trp_scale.data.images.maps import CLASS, IMAGE
from trp_scale.data.index import Block, StoredMember
from trp_scale.errors import DataError, escape_name, quote, shorten
from trp_scale.sharding.images.files import SKIP_REASONS, UnusableError, plain_key
from trp_scale.sharding.images.reencode import open_image
from trp_scale.sharding.images.settings import AUTO, IMAGE_MEMBERS, NONE
from trp_scale.sharding.images.tars import TarMember, tar_members
from trp_scale.sharding.job.workers import begun

FORMATS = ("JPEG", "MPO", "PNG", "WEBP")
"""Pillow's names of what a run decodes; MPO: a JPEG with further pictures behind it, as phones write."""

LARGEST_MEMBER = (1 << 32) - 1
"""Bytes of a member: what an index says in 32 bits."""

REASONS = {
    **SKIP_REASONS,
    "no_image": f"no {', '.join(f'.{suffix}' for suffix in IMAGE_MEMBERS)} member under this key",
    "other_format": "neither JPEG, PNG nor WebP; trp-scale shard-images makes JPEGs of others",
}
"""Why an image is left out."""


@dataclass(frozen=True, kw_only=True)
class MemberChoice:
    """Members of a sample to read.

    Attributes:
        image: suffix of the image; "auto": the one of IMAGE_MEMBERS that a sample has.
        label: "none"; the suffix of a member that holds the class as text, such as "cls"; or "json:FIELD".
        max_pixels: of an image.
    """

    image: str
    label: str
    max_pixels: int

    def part(self, suffix: str) -> str:
        """Return the part that a suffix stores: image, class, or "" for an ignored member."""
        if suffix == self.image or (self.image == AUTO and suffix in IMAGE_MEMBERS):
            return IMAGE
        return CLASS if suffix == self.label_suffix else ""

    @property
    def label_suffix(self) -> str:
        """Suffix of the member that stores the class; "" without classes."""
        return "" if self.label == NONE else self.label.partition(":")[0]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Members of the data set's samples."""
        return (IMAGE, CLASS) if self.label_suffix else (IMAGE,)


@dataclass(kw_only=True)
class ReadTar:
    """Contents of a tar.

    Attributes:
        blocks: its images in the order of their first members; the image is the member "jpg" whatever its format, what
            holds the class the member "cls".
        skipped: (reason, place) of each key that is left out.
        ignored: number of members that are not read, by suffix; "": those that are hidden or have none.
        pixels: of all images.
    """

    blocks: list[Block] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    pixels: int = 0


@dataclass(kw_only=True)
class _Sample:
    """Members of one key, read so far."""

    members: dict[str, TarMember] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    label: int | None = None
    unusable: UnusableError | None = None


def read_tar(
    where: str,
    stream: BinaryIO,
    choice: MemberChoice,
    *,
    advance: Callable[[int, int], None] = lambda images, size: None,
    check: Callable[[str, bytes], None] = lambda where, content: None,
) -> ReadTar:
    """Read the headers of a tar, its images and its classes, once from its first byte to its last.

    Args:
        where: the tar's path or URL, for messages.
        advance: called with (1, bytes) for each image.
        check: called with the place and the content of each image.

    Raises:
        DataError: not a tar, one that is cut short, a key that comes twice, two images under one key, or a class that
            is no number; or what `check` raises.
    """
    contents = ReadTar()
    samples: dict[str, _Sample] = {}
    for member in tar_members(where, stream):
        if member.kind == "folder":
            continue
        suffix = "" if member.hidden else member.suffix
        part = choice.part(suffix) if suffix else ""
        sample = samples.setdefault(member.key, _Sample()) if suffix else _Sample()
        if not part:
            contents.ignored[escape_name(suffix)] += 1
            continue
        name = f"{where}: {shorten(member.name)}"
        _refuse_second(where, member, sample.members.get(part))
        if not member.plain:
            sample.unusable = UnusableError("not_a_file", member.kind)
            continue
        content = _content(name, stream, member)
        sample.members[part], sample.checksums[part] = member, zlib.crc32(content)
        if part == CLASS:
            sample.label = read_label(name, content, choice.label)
        else:
            try:
                if not begun(name):
                    raise UnusableError("damaged", "it ends the process that reads it")
                contents.pixels += _pixels(content, choice.max_pixels)
            except UnusableError as error:
                sample.unusable = error
            else:
                check(name, content)
            advance(1, len(content))
    for key, sample in samples.items():
        _add(contents, f"{where}: {shorten(key)}", key, sample, choice)
    return contents


def _refuse_second(where: str, member: TarMember, before: TarMember | None) -> None:
    if before is None:
        return
    if before.suffix != member.suffix:
        raise DataError(
            f"{where}: {shorten(before.name)} and {shorten(member.name)} are two images under one key; choose with "
            f"--image {before.suffix} or --image {member.suffix}"
        )
    raise DataError(
        f"{where}: key {quote(member.key)} comes twice, {shorten(before.name)} at byte {before.offset} and "
        f"{shorten(member.name)} at byte {member.offset}; a key names one sample of a tar. Write the tar anew"
    )


def _content(name: str, stream: BinaryIO, member: TarMember) -> bytes:
    if member.length > LARGEST_MEMBER:
        raise DataError(f"{name}: {member.length} bytes, at most {LARGEST_MEMBER} are read; leave it out of the tar")
    try:
        stream.seek(member.offset)
        content = stream.read(member.length)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error
    if len(content) != member.length:
        raise DataError(f"{name}: the tar ends after {len(content)} of its {member.length} bytes; make or copy it anew")
    return content


def read_label(location: str, content: bytes, label: str) -> int:
    """The class that a member holds.

    Args:
        label: as in `MemberChoice`.

    Raises:
        DataError: no whole number from 0 on.
    """
    suffix, _, name = label.partition(":")
    value: Any
    if name:
        try:
            document = parse_json(content, location, DataError)
        except DataError as error:
            raise DataError(f"{error}, as --label {label} expects") from error
        if not isinstance(document, dict) or name not in document:
            fields = ", ".join(sorted(document)) if isinstance(document, dict) else f"a {type(document).__name__}"
            raise DataError(f"{location}: no field {name!r}, as --label {label} expects; there are {fields[:200]}")
        value = document[name]
    else:
        text = content.strip()
        value = int(text) if text.isdigit() and len(text) < 19 else text[:20].decode("utf-8", "replace")
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise DataError(
            f"{location}: class {quote(value)} found, a whole number from 0 expected; --label chooses another member "
            f"than {suffix!r}, --label none reads none"
        )
    return value


def _pixels(content: bytes, max_pixels: int) -> int:
    """Return the pixels of an image, from its header; raise UnusableError if a run could not decode it."""
    if not content:
        raise UnusableError("empty")
    image = open_image(content, max_pixels)
    if image.format not in FORMATS:
        raise UnusableError("other_format", str(image.format))
    return int(image.width * image.height)


def _add(contents: ReadTar, name: str, key: str, sample: _Sample, choice: MemberChoice) -> None:
    """Add a sample to the blocks, or to what is left out."""
    reason = ""
    if sample.unusable is not None:
        reason = sample.unusable.reason
        name = f"{name} ({sample.unusable.detail})" if sample.unusable.detail else name
    elif IMAGE not in sample.members:
        reason = "no_image"
    elif CLASS in choice.suffixes and CLASS not in sample.members:
        reason = "no_class"
    if reason:
        contents.skipped.append((reason, name))
        return
    members = {
        suffix: StoredMember(offset=member.offset, length=member.length, crc32=sample.checksums[suffix])
        for suffix, member in ((suffix, sample.members[suffix]) for suffix in choice.suffixes)
    }
    contents.blocks.append(Block(key=plain_key(key), rows=1, members=members, label=sample.label))
