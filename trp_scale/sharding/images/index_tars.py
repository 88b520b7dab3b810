"""Index of external tars: they are read once and stay in place.

DATASET/
  dataset.json                  as written by shard-images, with the settings; written last
  shards/places.json            location of each tar (data/tars.py)
  shards/NAME.index.json        index of a tar and its source; a resumed run skips these tars
  shards/index.bin
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trp_scale.config.files import parse_json
from trp_scale.config.schema import Fields, record
from trp_scale.data.binary_index import NAME
from trp_scale.data.images.maps import CLASS, IMAGE, OWN_TAR, read_names
from trp_scale.data.index import (
    INDEX_FORMAT,
    Block,
    ShardIndex,
    StoredMember,
    index_path,
    read_fields,
    read_index_document,
    write_json,
)
from trp_scale.data.tars import PLACES, ExternalTar, open_stream, stat_tar, write_places
from trp_scale.errors import DataError, escape_name, quote, shorten
from trp_scale.sharding.images.files import SKIP_REASONS, ImageReport, UnusableError, list_members, make_key
from trp_scale.sharding.images.reencode import open_image
from trp_scale.sharding.images.settings import AUTO, IMAGE_MEMBERS, NONE, IndexConfig
from trp_scale.sharding.images.tars import TarMember, find_tars, tar_members, unique_names
from trp_scale.sharding.job import DataKind, ShardingJob
from trp_scale.sharding.parts import Part, started_parts
from trp_scale.sharding.workers import Advance, Portion, start_sample
from trp_scale.storage.files import remove_leftovers
from trp_scale.storage.transfer import MAX_REQUESTS

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TarReport(ImageReport):
    """Counts of indexed tars. `ignored`: members that are not read, by suffix."""

    ignored: dict[str, int] = field(default_factory=dict)


DECODED = ("JPEG", "MPO", "PNG", "WEBP")
"""Pillow formats that training decodes. MPO is a JPEG followed by more pictures, as written by phones."""

MAX_MEMBER_BYTES = (1 << 32) - 1
"""Maximum bytes of a member; the index stores 32 bits."""

REASONS = {
    **SKIP_REASONS,
    "no_image": f"no {', '.join(f'.{suffix}' for suffix in IMAGE_MEMBERS)} member under this key",
    "other_format": "neither JPEG, PNG nor WebP; trp-scale shard-images converts other formats to JPEG",
}
"""Why an image is skipped."""


@dataclass(frozen=True, kw_only=True)
class MemberChoice:
    """Members of a sample to read.

    Attributes:
        image: suffix of the image; "auto": any of IMAGE_MEMBERS.
        label: "none"; suffix of a member with the class as text, such as "cls"; or "json:FIELD".
        max_pixels: of an image.
    """

    image: str
    label: str
    max_pixels: int

    def part(self, suffix: str) -> str:
        """Return the stored suffix of a member: image, class, or "" if ignored."""
        if suffix == self.image or (self.image == AUTO and suffix in IMAGE_MEMBERS):
            return IMAGE
        return CLASS if suffix == self.label_suffix else ""

    @property
    def label_suffix(self) -> str:
        """Suffix of the class member; "" without classes."""
        return "" if self.label == NONE else self.label.partition(":")[0]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Members of the data set's samples."""
        return (IMAGE, CLASS) if self.label_suffix else (IMAGE,)


@dataclass(kw_only=True)
class _Sample:
    """Members of one key."""

    members: dict[str, TarMember] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    label: int | None = None
    unusable: UnusableError | None = None

    def block(self, key: str, suffixes: Sequence[str]) -> Block:
        """Return the index entry; raise UnusableError if the image or class is missing."""
        if self.unusable is not None:
            raise self.unusable
        for suffix in suffixes:
            if suffix not in self.members:
                raise UnusableError("no_image" if suffix == IMAGE else "no_class")
        members = {
            suffix: StoredMember(
                offset=self.members[suffix].offset,
                length=self.members[suffix].length,
                crc32=self.checksums[suffix],
            )
            for suffix in suffixes
        }
        return Block(key=make_key(key), rows=1, members=members, label=self.label)


def read_tar(
    where: str,
    stream: BinaryIO,
    choice: MemberChoice,
    *,
    advance: Callable[[int, int], None] = lambda images, size: None,
    check: Callable[[str, bytes], object] = lambda where, content: None,
) -> tuple[list[Block], TarReport]:
    """Read the headers, images and classes of a tar in one pass.

    The members of one key are one sample: one is the image (JPEG, PNG or WebP), one may contain the class as text or
    as a JSON field. Other members are counted and never read.

    Args:
        where: path or URL of the tar, for messages.
        advance: called with (1, bytes) for each image.
        check: called with the location and content of each image.

    Returns:
        Images in the order of their first members, and counts. The image member is named "jpg" in every format, the
        class member "cls".

    Raises:
        DataError: the tar is damaged or truncated, a key occurs twice, a key has two images, or a class is no number;
            and errors of `check`.
    """
    report = TarReport()
    samples: dict[str, _Sample] = {}
    for member in tar_members(where, stream):
        if member.kind == "folder":
            continue
        suffix = "" if member.hidden else member.suffix
        part = choice.part(suffix) if suffix else ""
        sample = samples.setdefault(member.key, _Sample()) if suffix else _Sample()
        if not part:
            ignored = escape_name(suffix)
            report.ignored[ignored] = report.ignored.get(ignored, 0) + 1
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
                if not start_sample(name):
                    raise UnusableError("damaged", "it ends the process that reads it")
                report.pixels += _pixels(content, choice.max_pixels)
            except UnusableError as error:
                sample.unusable = error
            else:
                check(name, content)
            advance(1, len(content))
    blocks = []
    for key, sample in samples.items():
        try:
            blocks.append(sample.block(key, choice.suffixes))
        except UnusableError as error:
            report.skip(error.reason, error.located(f"{where}: {shorten(key)}"))
            continue
        report.count(blocks[-1].members[IMAGE].length, sample.label)
    return blocks, report


def _refuse_second(where: str, member: TarMember, before: TarMember | None) -> None:
    if before is None:
        return
    if before.suffix != member.suffix:
        raise DataError(
            f"{where}: {shorten(before.name)} and {shorten(member.name)} are two images under one key; choose with "
            f"--image {before.suffix} or --image {member.suffix}"
        )
    raise DataError(
        f"{where}: key {quote(member.key)} occurs twice, as {shorten(before.name)} at byte {before.offset} and "
        f"{shorten(member.name)} at byte {member.offset}; keys must be unique in a tar. Write the tar again"
    )


def _content(name: str, stream: BinaryIO, member: TarMember) -> bytes:
    if member.length > MAX_MEMBER_BYTES:
        raise DataError(f"{name}: {member.length} bytes, at most {MAX_MEMBER_BYTES} allowed; remove it from the tar")
    try:
        stream.seek(member.offset)
        content = stream.read(member.length)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error
    if len(content) != member.length:
        raise DataError(f"{name}: the tar ends after {len(content)} of {member.length} bytes; make or copy it again")
    return content


def read_label(location: str, content: bytes, label: str) -> int:
    """Return the class in a member.

    Args:
        label: as in `MemberChoice`.

    Raises:
        DataError: the class is not a whole number >= 0.
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
            raise DataError(f"{location}: no field {name!r}, as --label {label} expects; it contains {fields[:200]}")
        value = document[name]
    else:
        text = content.strip()
        value = int(text) if text.isdigit() and len(text) < 19 else text[:20].decode("utf-8", "replace")
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise DataError(
            f"{location}: class {quote(value)} found, a whole number from 0 expected; select another member than "
            f"{suffix!r} with --label, or give --label none"
        )
    return value


def _pixels(content: bytes, max_pixels: int) -> int:
    """Return the number of pixels from the image header; raise UnusableError if training cannot decode the format."""
    if not content:
        raise UnusableError("empty")
    image = open_image(content, max_pixels)
    if image.format not in DECODED:
        raise UnusableError("other_format", str(image.format))
    return int(image.width * image.height)


TARS = "tars"
"""Kind in the part files of an indexed data set."""


def is_indexed(directory: Path) -> bool:
    """Whether a directory is a data set of external tars."""
    return (directory / OWN_TAR / PLACES).exists()


def index_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of an indexed data set.

    Raises:
        DataError: dataset.json or the settings are missing.
    """
    path = directory / "dataset.json"
    return _identity(read_fields(path).section("settings"), f"give its tars and --output {directory}")


def _identity(settings: Fields, advice: str) -> dict[str, Any]:
    names = ("tars", *IndexConfig.choices)
    if any(name not in settings for name in names):
        raise settings.refusal(f"does not name its tars; {advice}")
    return {name: settings.take(name, int if name in ("rows_per_block", "max_pixels") else str) for name in names}


def index_tars(config: IndexConfig) -> Path:
    """Index tars in place, or one part of them, and return the directory of the data set. Unchanged indexed tars are
    not read again.

    Raises:
        DataError: no tar exists, a tar cannot be used (`read_tar`), too many images were skipped, or the directory
            contains another data set.
        RemoteError: a URL cannot be read.
    """
    config.check()
    output = config.directory
    path = output / "dataset.json"
    if path.exists() and not is_indexed(output):
        raise DataError(f"{path}: a sharded data set, not one of external tars; choose another --output")
    kind = _look_up_tars(config)
    try:
        (output / "progress").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--output {output}: cannot be written ({error.strerror}); give another directory, the tars stay in place"
        ) from error
    job = ShardingJob(config, output, kind, config.identity())
    with job.only_run():
        portions = [Portion(number, (tar,), tar[1].size) for number, tar in enumerate(kind.tars.items())]
        job.begin("", portions)
        job.run(portions, _Indexer, (output, kind.choice), ("images", "bytes"), "indexing")
        finished = job.finish({})
    if finished is not None:
        log.info("%s: %d images of %d tars", output, finished[1].images, len(finished[0]))
    return output


def _look_up_tars(config: IndexConfig) -> TarKind:
    """Look up all tars and select the members to read."""
    places = find_tars(config.tars)
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        sources = list(pool.map(stat_tar, places))
    tars = dict(zip(unique_names(places), sources, strict=True))
    choice = MemberChoice(image=config.image, label=_label(config, sources[0]), max_pixels=config.max_pixels)
    return TarKind(
        name=TARS,
        report=TarReport,
        items="images",
        reasons=REASONS,
        renewable=True,
        config=config,
        tars=tars,
        choice=choice,
    )


def stored_tars(directory: Path, part: Part, stored: Mapping[str, Any]) -> TarKind:
    """Return the data kind described by a part file.

    Raises:
        DataError: the file lacks settings; also as `index_tars`.
    """
    settings = Fields(stored["settings"], f"{part.path(directory)}: settings", DataError)
    config = IndexConfig(output=directory, **_identity(settings, "run the parts again"))
    config.check()
    return _look_up_tars(config)


@dataclass(frozen=True, kw_only=True)
class TarKind(DataKind[TarReport]):
    """Data kind of external tars.

    Attributes:
        tars: locations of all tars by name.
        choice: members to read.
    """

    config: IndexConfig
    tars: dict[str, ExternalTar]
    choice: MemberChoice

    def shard_names(self, count: int) -> list[str]:
        return list(self.tars)

    def finished_shard(self, output: Path, name: str) -> tuple[TarReport, int] | None:
        try:
            index = read_index_document(output / OWN_TAR / name).fields
            if index.document.get("source") != _source(self.tars[name], self.choice):
                return None
            report = record(TarReport, index.document.get("report"), "report", DataError)
        except DataError:
            return None
        return report, report.images

    def document(self, part: Mapping[str, Any], shards: list[str], blocks: int, total: TarReport) -> dict[str, object]:
        if total.ignored:
            log.info("ignored members: %s", list_members(total.ignored))
        return {
            **super().document(part, shards, blocks, total),
            "kind": "image",
            "rows": total.images,
            "rows_per_block": self.config.rows_per_block,
            "suffixes": list(self.choice.suffixes),
            "classes": _class_names(self.config, total),
            "modalities": {},
            "synthetic": False,
            "counts": {name: getattr(total, name) for name in ("images", "bytes", "pixels", "per_class")},
            "skipped_places": total.skipped_places,
            "ignored": total.ignored,
            "settings": self.config.identity(),
        }

    def refuse_empty(self, output: Path) -> None:
        raise DataError(
            f"{self.config.tars}: no image in {len(self.tars)} tars; members {', '.join(IMAGE_MEMBERS)} expected"
        )

    def store(self, output: Path, document: dict[str, Any]) -> None:
        write_places(output / OWN_TAR, {name: self.tars[name] for name in document["shards"]})
        (output / OWN_TAR / NAME).unlink(missing_ok=True)
        super().store(output, document)

    def clear(self, output: Path) -> None:
        """Remove indexes of tars that were dropped from the data set, and part files."""
        kept = {index_path(Path(name)).name for name in self.tars}
        for path in (output / OWN_TAR).glob("*.index.json"):
            if path.name not in kept:
                path.unlink()
        for directory in (output, output / OWN_TAR):
            remove_leftovers(directory)
        for part in started_parts(output):
            part.path(output).unlink(missing_ok=True)


def _label(config: IndexConfig, source: ExternalTar) -> str:
    """Resolve `--label auto`: `.cls` if the first image has one."""
    if config.label != AUTO:
        return config.label
    suffixes: set[str] = set()
    key = None
    with _open_tar(source) as stream:
        for member in tar_members(source.place, stream):
            if member.hidden:
                continue
            if key is not None and member.key != key:
                break
            suffixes.add(member.suffix)
            if member.suffix in IMAGE_MEMBERS:
                key = member.key
    if "cls" in suffixes:
        return "cls"
    if "json" in suffixes:
        log.warning("no .cls members: images get no classes; --label json:FIELD reads them from the .json")
    return NONE


def _open_tar(source: ExternalTar) -> Any:
    try:
        return open_stream(source)
    except OSError as error:
        raise DataError(f"{source.place}: cannot be opened ({error.strerror})") from error


def _source(tar: ExternalTar, choice: MemberChoice) -> dict[str, object]:
    """Identify the source of an index."""
    return {"place": asdict(tar), "choice": asdict(choice)}


class _Indexer:
    """Worker that writes the index of each tar."""

    def __init__(self, output: Path, choice: MemberChoice, advance: Advance) -> None:
        self._output, self._choice, self._advance = output, choice, advance

    def __call__(self, portion: Portion[tuple[str, ExternalTar]]) -> None:
        ((name, tar),) = portion.items
        with _open_tar(tar) as stream:
            blocks, report = read_tar(tar.place, stream, self._choice, advance=self._advance)
        index = ShardIndex(shard=name, size=tar.size, blocks=blocks)
        document = {"format": INDEX_FORMAT, **asdict(index), "source": _source(tar, self._choice)}
        write_json(index_path(self._output / OWN_TAR / name), {**document, "report": vars(report)})


def _class_names(config: IndexConfig, total: TarReport) -> list[str] | None:
    if not config.class_names:
        return None
    names, _ = read_names("--class_names", config.class_names)
    highest = max(map(int, total.per_class), default=-1)
    if highest >= len(names):
        raise DataError(
            f"--class_names {config.class_names}: {len(names)} names, but an image has class {highest}; classes are "
            f"numbered from 0"
        )
    return names
