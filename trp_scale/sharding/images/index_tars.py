"""A data set of tars that others made: they are read once, indexed, and stay where they are.

DATASET/
  dataset.json                  as of shard-images, and what was asked for; written last
  shards/places.json            where each tar lies (data/stores/tars.py)
  shards/NAME.index.json        of each tar, and what it was made of: a run that was stopped goes on with the others
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

from trp_scale.config.json_files import parse_json
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
from trp_scale.data.stores.tars import PLACES, ExternalTar, look_up, open_stream, write_places
from trp_scale.errors import DataError, escape_name, quote, shorten
from trp_scale.sharding.images.files import SKIP_REASONS, UnusableError, list_members, plain_key
from trp_scale.sharding.images.reencode import open_image
from trp_scale.sharding.images.settings import AUTO, IMAGE_MEMBERS, NONE, IndexConfig
from trp_scale.sharding.images.tars import TarMember, find_tars, tar_members, unique_names
from trp_scale.sharding.job.job import DataKind, FinishedShard, ShardingJob
from trp_scale.sharding.job.parts import Part, PortionReport, begun_parts, sharding_settings
from trp_scale.sharding.job.workers import Advance, Progressed, begun
from trp_scale.storage.files import remove_leftovers
from trp_scale.storage.transfer import AT_ONCE

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TarReport(PortionReport):
    """Counts of indexed tars.

    Attributes:
        images: indexed.
        bytes: of them.
        pixels: of them.
        per_class: images by class number (a string, as in JSON).
        ignored: members that are not read, by suffix.
    """

    images: int = 0
    bytes: int = 0
    pixels: int = 0
    per_class: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)

    def count(self, size: int, label: int | None) -> None:
        """Count an image of `size` bytes."""
        self.images += 1
        self.bytes += size
        if label is not None:
            self.per_class[str(label)] = self.per_class.get(str(label), 0) + 1


DECODED = ("JPEG", "MPO", "PNG", "WEBP")
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
class _Sample:
    """Members of one key, read so far."""

    members: dict[str, TarMember] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    label: int | None = None
    unusable: UnusableError | None = None

    def block(self, key: str, suffixes: Sequence[str]) -> Block:
        """Return the entry in the index; raise UnusableError if there is no image or no class."""
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
        return Block(key=plain_key(key), rows=1, members=members, label=self.label)


def read_tar(
    where: str,
    stream: BinaryIO,
    choice: MemberChoice,
    *,
    advance: Callable[[int, int], None] = lambda images, size: None,
    check: Callable[[str, bytes], None] = lambda where, content: None,
) -> tuple[list[Block], TarReport]:
    """Read the headers of a tar, its images and its classes, once from its first byte to its last.

    One sample is the members of one key. Of those one is the image (JPEG, PNG or WebP) and one may hold its class, as
    text or as a field of JSON; the others are counted and never read.

    Args:
        where: the tar's path or URL, for messages.
        advance: called with (1, bytes) for each image.
        check: called with the place and the content of each image.

    Returns:
        its images in the order of their first members (the image is the member "jpg" whatever its format, what holds
        the class the member "cls"), and what was counted and skipped.

    Raises:
        DataError: not a tar, one that is cut short, a key that comes twice, two images under one key, or a class that
            is no number; or what `check` raises.
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
                if not begun(name):
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
    if image.format not in DECODED:
        raise UnusableError("other_format", str(image.format))
    return int(image.width * image.height)


TARS = "tars"
"""Kind of the parts of such a data set."""


def is_indexed(directory: Path) -> bool:
    """Whether a directory holds a data set that this file made."""
    return (directory / OWN_TAR / PLACES).exists()


def index_settings(directory: Path) -> dict[str, Any]:
    """Return the settings that a data set was indexed with.

    Raises:
        DataError: dataset.json is missing or says nothing of it.
    """
    path = directory / "dataset.json"
    return _identity(
        read_fields(path).section("settings"), f"give the tars that it was made of, and --output {directory}"
    )


def _identity(settings: Fields, advice: str) -> dict[str, Any]:
    names = ("tars", *IndexConfig.choices)
    if any(name not in settings for name in names):
        raise settings.refusal(f"does not say which tars it was made of; {advice}")
    return {name: settings.take(name, int if name in ("rows_per_block", "max_pixels") else str) for name in names}


@dataclass(frozen=True, kw_only=True)
class _Tar:
    number: int
    name: str
    source: ExternalTar


def index_tars(config: IndexConfig) -> Path:
    """Index tars where they lie, or the part of them that is asked for, and return the directory of the data set. Tars
    that were indexed before, and that are the same, are not read again.

    Raises:
        DataError: there are no tars, one cannot be read or used (`read_tar`), too many images had to be left out, or
            the directory holds another data set.
        RemoteError: a URL cannot be read.
    """
    config.check()
    output = config.directory
    path = output / "dataset.json"
    if path.exists() and not is_indexed(output):
        raise DataError(f"{path}: a data set that was not made of tars of others is there; choose another --output")
    kind = _look_up_tars(config)
    try:
        (output / "progress").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--output {output}: cannot be written ({error.strerror}); give another one, the tars stay where they are"
        ) from error
    job = ShardingJob(sharding_settings(config, output), kind, config.identity())
    with job.only_run():
        tars = list(kind.tars.values())
        job.begin("", tars)
        job.run(tars, _Indexer, (output, kind.choice), _progress_bar(config, job.mine(tars)))
        finished = job.finish({})
    if finished is not None:
        log.info("%s: %d images of %d tars", output, finished[1].images, len(finished[0]))
    return output


def _look_up_tars(config: IndexConfig) -> TarKind:
    """Find all tars as they are now, and which of their members are read."""
    places = find_tars(config.tars)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = list(pool.map(look_up, places))
    tars = [_Tar(number=n, name=name, source=looked[n]) for n, name in enumerate(unique_names(places))]
    choice = MemberChoice(image=config.image, label=_label(config, tars[0].source), max_pixels=config.max_pixels)
    return TarKind(
        name=TARS,
        report=TarReport,
        items="images",
        reasons=REASONS,
        renewable=True,
        config=config,
        tars={tar.name: tar for tar in tars},
        choice=choice,
    )


def stored_tars(directory: Path, part: Part, stored: Mapping[str, Any]) -> TarKind:
    """Return the kind of a data set of tars by the file of a part.

    Raises:
        DataError: the file lacks settings; or as `index_tars`.
    """
    settings = Fields(stored["settings"], f"{part.path(directory)}: settings", DataError)
    config = IndexConfig(output=directory, **_identity(settings, "run the parts again"))
    config.check()
    return _look_up_tars(config)


@dataclass(frozen=True, kw_only=True)
class TarKind(DataKind[TarReport]):
    """External tars as a kind of data set.

    Attributes:
        config: its settings.
        tars: all of them, by name.
        choice: which members are read.
    """

    config: IndexConfig
    tars: dict[str, _Tar]
    choice: MemberChoice

    def shard_names(self, count: int) -> list[str]:
        return list(self.tars)

    def finished_shard(self, output: Path, name: str) -> FinishedShard[TarReport] | None:
        try:
            index = read_index_document(output / OWN_TAR / name).fields
            if index.document.get("source") != _source(self.tars[name], self.choice):
                return None
            report = record(TarReport, index.document.get("report"), "report", DataError)
        except DataError:
            return None
        return FinishedShard(report=report, blocks=report.images)

    def document(self, part: Mapping[str, Any], shards: list[str], blocks: int, total: TarReport) -> dict[str, object]:
        if total.ignored:
            log.info("members that are not read: %s", list_members(total.ignored))
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
            f"{self.config.tars}: no image in {len(self.tars)} tars; {', '.join(IMAGE_MEMBERS)} are looked for"
        )

    def store(self, output: Path, document: dict[str, Any]) -> None:
        write_places(output / OWN_TAR, {name: self.tars[name].source for name in document["shards"]})
        (output / OWN_TAR / NAME).unlink(missing_ok=True)
        super().store(output, document)

    def clear(self, output: Path) -> None:
        """Remove the indexes of tars that are no longer among them, and the files of parts."""
        kept = {index_path(Path(name)).name for name in self.tars}
        for path in (output / OWN_TAR).glob("*.index.json"):
            if path.name not in kept:
                path.unlink()
        for directory in (output, output / OWN_TAR):
            remove_leftovers(directory)
        for part in begun_parts(output):
            part.path(output).unlink(missing_ok=True)


def _label(config: IndexConfig, source: ExternalTar) -> str:
    """Resolve `--label auto`: `.cls` if the first images have one."""
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
        log.warning("images have no .cls, so they get no classes; --label json:FIELD reads them from the .json")
    return NONE


def _open_tar(source: ExternalTar) -> Any:
    try:
        return open_stream(source)
    except OSError as error:
        raise DataError(f"{source.place}: cannot be opened ({error.strerror})") from error


def _source(tar: _Tar, choice: MemberChoice) -> dict[str, object]:
    """Identify the source of an index."""
    return {"place": asdict(tar.source), "choice": asdict(choice)}


class _Indexer:
    """Write the index of a tar when called with it."""

    def __init__(self, output: Path, choice: MemberChoice, advance: Advance) -> None:
        self._output, self._choice, self._advance = output, choice, advance

    def __call__(self, tar: _Tar) -> None:
        with _open_tar(tar.source) as stream:
            blocks, report = read_tar(tar.source.place, stream, self._choice, advance=self._advance)
        index = ShardIndex(shard=tar.name, size=tar.source.size, blocks=blocks)
        document = {"format": INDEX_FORMAT, **asdict(index), "source": _source(tar, self._choice)}
        write_json(index_path(self._output / OWN_TAR / tar.name), {**document, "report": vars(report)})


def _progress_bar(config: IndexConfig, tars: Sequence[_Tar]) -> Progressed:
    def text(values: Sequence[int], seconds: float) -> str:
        images, size = values
        return f"{images:,} images  {images / seconds:,.0f} images/s  {size / seconds / 1e6:,.1f} MB/s"

    total = sum(tar.source.size for tar in tars)
    return Progressed(counters=2, total=total, text=text, shown=config.progress, title="indexing")


def _class_names(config: IndexConfig, total: TarReport) -> list[str] | None:
    if not config.class_names:
        return None
    names, _ = read_names("--class_names", config.class_names)
    highest = max(map(int, total.per_class), default=-1)
    if highest >= len(names):
        raise DataError(
            f"--class_names {config.class_names}: {len(names)} names, and an image of class {highest}; classes are "
            f"numbered from 0"
        )
    return names
