"""Parts of the work on one data set, made by as many runs on one machine or on many; their settings, and the shards and
reports that they write.

Part i of n has the shards i, i + n, ... Parts share nothing but the directory: each has a lock and a file with its
settings, so none has to wait for another, and a part that is run twice makes the same bytes twice.

DATASET/progress/
  part-00001-of-00003.json      the settings of part 1, the number of all shards; when it is made, the description too
  part-00001-of-00003.lock      while it is at work
  text-000001.json              the report of a finished shard

A shard is a plain WebDataset tar of the same bytes each time, beside its index.
"""

from __future__ import annotations

import io
import logging
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Literal

from trp_scale.config.schema import Fields
from trp_scale.config.settings import setting
from trp_scale.data.images.maps import OWN_TAR, second_directories
from trp_scale.data.index import (
    Block,
    ShardIndex,
    StoredMember,
    index_path,
    read_fields,
    read_index,
    write_index,
    write_json,
)
from trp_scale.data.raw_files import require_dataset
from trp_scale.data.samples import write_binary_index
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError, escape_name, shorten
from trp_scale.storage.files import atomic_write

_NAME = re.compile(r"part-(\d{5})-of-(\d{5})\.json")

MOST_PARTS = 99_999


@dataclass(kw_only=True)
class SpreadSettings:
    """Settings of every command that prepares data: where its work is done."""

    executor: Literal["local", "ray", "slurm-array"] = "local"
    """local: by processes of this machine. ray: by the nodes of a Ray cluster (RAY_ADDRESS, or the one that runs here;
    else one is started), which all see the same storage; the work of a node that is lost is done by another.
    slurm-array: a job for each of --num_shards parts is submitted, and a last one that merges them."""
    sbatch: str = ""
    """slurm-array: further options of sbatch, such as --sbatch='--partition=cpu --cpus-per-task=16 --time=4:00:00'."""
    shard_index: int = 0
    """On many machines: which part of the work this run does, from 0. Every part is given the same other flags, in any
    order, at any time, again if it was stopped; `trp-scale merge` joins them."""
    num_shards: int = 1
    """On many machines: number of parts. Part i makes the shards i, i + num_shards, ..."""
    progress: bool = True
    """Show a progress bar."""

    def own_part(self) -> Part:
        """The part that the flags name.

        Raises:
            DataError: there is no such part.
        """
        if not 1 <= self.num_shards <= MOST_PARTS:
            raise DataError(f"--num_shards {self.num_shards}: 1 to {MOST_PARTS} is allowed")
        if not 0 <= self.shard_index < self.num_shards:
            raise DataError(
                f"--shard_index {self.shard_index}: 0 to {self.num_shards - 1} is allowed with --num_shards "
                f"{self.num_shards}"
            )
        return Part(count=self.num_shards, index=self.shard_index)


@dataclass(kw_only=True)
class ShardingSettings(SpreadSettings):
    """Settings that every kind of data set has."""

    output: Path
    """Directory of the data set. A run that was stopped goes on there; one with other settings or other inputs is
    refused."""
    processes: int = setting(0, at_least=0, at_most=4096)
    """Shards that are made at once; 0 = one for each core, of this machine or of the Ray cluster. The output does not
    depend on it."""
    max_skipped: float = setting(0.01, at_least=0, at_most=1)
    """Largest share of documents or images that may be skipped."""
    patience: float = 0.0
    """Seconds to wait for another run that makes the same part: the lock of a machine that was lost may outlive it for
    a while on shared storage."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""


def sharding_settings(settings: Any, output: Path) -> ShardingSettings:
    """Return the settings of a job for a command with fields of its own for the directory."""
    names = [entry.name for entry in fields(SpreadSettings)]
    shared = {name: getattr(settings, name) for name in (*names, "processes", "max_skipped")}
    return ShardingSettings(**shared, output=output)


@dataclass(frozen=True, order=True)
class Part:
    """One part: `index` from 0, of `count`. A run that makes all is part 0 of 1."""

    count: int
    index: int

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"

    @property
    def name(self) -> str:
        """part-00001-of-00003"""
        return f"part-{self.index:05d}-of-{self.count:05d}"

    @property
    def lock(self) -> str:
        """Name of its lock."""
        return "lock" if self.count == 1 else f"{self.name}.lock"

    @property
    def flags(self) -> str:
        """Flags of the command line that select this part."""
        return f"--shard_index {self.index} --num_shards {self.count}"

    def path(self, directory: Path) -> Path:
        """Return the file of this part in the directory of a data set."""
        return directory / "progress" / f"{self.name}.json"

    def write(self, directory: Path, document: dict[str, object]) -> None:
        """Say what the part is asked for, or what it has made."""
        self.path(directory).parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path(directory), document)


def begun_parts(directory: Path) -> dict[Part, dict[str, Any]]:
    """Return the documents of all parts that have started, in order."""
    documents = {}
    for path in (directory / "progress").glob("part-*.json"):
        if match := _NAME.fullmatch(path.name):
            fields = read_fields(path, "remove it, and run the command of the part again")
            fields.text("kind")
            fields.take("settings", dict)
            fields.take("max_skipped", float)
            documents[Part(count=int(match[2]), index=int(match[1]))] = dict(fields.document)
    return dict(sorted(documents.items()))


def all_parts(directory: Path) -> dict[Part, dict[str, Any]]:
    """Return `begun_parts` of a data set if all parts have started.

    Raises:
        DataError: parts are missing (they are named), or there are none.
    """
    parts = begun_parts(directory)
    if not parts:
        raise DataError(
            f"{directory}: no part of a data set has been made here; run shard-text, shard-images, index or "
            "pseudo-label with --shard_index and --num_shards first"
        )
    count = next(iter(parts)).count
    missing = [part for index in range(count) if (part := Part(count=count, index=index)) not in parts]
    if missing:
        raise missing_parts(directory, [f"{part.flags} (not begun)" for part in missing], count)
    return parts


def unfinished_line(part: Part, names: list[str]) -> str:
    """A line of what a part lacks."""
    return f"{part.flags} (unfinished: {len(names)} shards are missing{', ' * bool(names)}{some(names)})"


def some(names: list[str]) -> str:
    """The first five."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def missing_parts(directory: Path, missing: list[str], count: int) -> DataError:
    """The refusal to merge a data set that lacks parts."""
    lines = "".join(f"\n  {line}" for line in missing)
    return DataError(
        f"{directory}: {len(missing)} of {count} parts are missing; run the command of each, then merge again:{lines}"
    )


def first_shard(directory: Path) -> Path:
    """The first tar of a data set.

    Raises:
        DataError: its sharding has not come to its end, or there is none.
    """
    refuse_unfinished(directory)
    require_dataset(directory)
    shards = read_fields(directory / "dataset.json", "give a tar, or the directory of a data set").file_names("shards")
    if not shards:
        raise DataError(f"{directory / 'dataset.json'}: no shards are listed; shard the data again")
    return directory / "shards" / shards[0]


def refuse_unfinished(directory: Path) -> None:
    """Say how far a sharding has come that has left no dataset.json, and what it has skipped so far.

    Raises:
        DataError: there is such a one.
    """
    if (directory / "dataset.json").exists() or not (parts := begun_parts(directory)):
        return
    kind = next(iter(parts.values()))["kind"]
    tars = sorted((directory / "shards").glob("*.tar"))
    done = [shard for shard in tars if index_path(shard).is_file()]
    blocks = {shard: len(read_index(shard).blocks) for shard in done}
    skipped: Counter[str] = Counter()
    for shard in done:
        report = report_path(directory, shard.stem)
        if report.is_file():
            skipped.update(read_fields(report).take("skipped", dict[str, int]))
    listed = ", ".join(f"{count} {shorten(reason)}" for reason, count in sorted(skipped.items()))
    seen = next((shard for shard, count in blocks.items() if count), None)
    look = "" if kind != "text" or seen is None else f"; to look at what is there: trp-scale inspect {seen}"
    raise DataError(
        f"{directory}: the sharding of kind {shorten(str(kind))!r} has not come to its end, and there is no "
        f"dataset.json: {len(done)} shards are finished, with {sum(blocks.values())} samples; skipped so far: "
        f"{listed or 'nothing'}. The same command again goes on, or says why it fails{look}"
    )


MAX_LISTED = 1000
"""Skipped things that are listed by place, in a shard's report and in dataset.json; all are counted."""

log = logging.getLogger(__name__)


class ShardWriter:
    """Adds samples to an open tar, in the order they come.

    WebDataset asks no more of a tar than members of one key side by side, so the standard library writes it.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        # ustar: a member has one header of 512 bytes, or is refused for its long name.
        self._stream = stream
        self._tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._blocks: list[Block] = []

    def __len__(self) -> int:
        """Samples written."""
        return len(self._blocks)

    def add(self, key: str, rows: int, members: Mapping[str, bytes], label: int | None = None) -> None:
        """Write one sample; `members` maps suffixes without the leading dot to contents, `label`: of an image."""
        written = {}
        for suffix, content in sorted(members.items()):
            # Fixed owner, mode and time: the bytes depend on the contents alone.
            entry = tarfile.TarInfo(f"{key}.{suffix}")
            entry.size, entry.mode, entry.uname, entry.gname = len(content), 0o444, "trp", "trp"
            offset = self._tar.offset + tarfile.BLOCKSIZE
            self._tar.addfile(entry, io.BytesIO(content))
            written[suffix] = StoredMember(offset=offset, length=len(content), crc32=zlib.crc32(content))
        self._blocks.append(Block(key=key, rows=rows, members=written, label=label))

    def finish(self, name: str) -> ShardIndex:
        """Write the end of the tar; `name` is its final one."""
        self._tar.close()
        return ShardIndex(shard=name, size=self._stream.tell(), blocks=self._blocks)


class OpenShard:
    """Writer of an open shard, and the report that is stored with it."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self.report: dict[str, object] = {}


@contextmanager
def new_tar(shard: Path, report: Path) -> Iterator[OpenShard]:
    """The tar, then its report, then its index; each appears under its name when it is whole. The index is last: it
    marks a finished shard."""
    with atomic_write(shard) as stream:
        opened = OpenShard(ShardWriter(stream))
        yield opened
        index = opened.writer.finish(shard.name)
    write_json(report, opened.report)
    write_index(shard, index)


def report_path(directory: Path, stem: str) -> Path:
    """Return the path of a shard's report, which is stored until the data set is finished."""
    return directory / "progress" / f"{stem}.json"


def write_dataset_index(directory: Path, document: Mapping[str, Any]) -> list[Path]:
    """Write the binary indexes of a data set; returns where.

    Args:
        directory: of the data set.
        document: the content of its dataset.json, which need not be there yet.

    Raises:
        DataError: a tar or a JSON index is missing, damaged or does not fit.
    """
    fields = Fields(document, str(directory / "dataset.json"), DataError)
    kind, shards = fields.take("kind", Literal["text", "image"]), fields.file_names("shards")
    if kind == "text":
        return [write_binary_index(directory / OWN_TAR, shards, SUFFIXES, None)]
    rows_per_block = fields.whole("rows_per_block", least=1)
    written = [write_binary_index(directory / OWN_TAR, shards, tuple(fields.texts("suffixes")), rows_per_block)]
    for name, maps in second_directories(directory / "dataset.json", document).items():
        written.append(write_binary_index(directory / name, shards, (maps.suffix,), rows_per_block))
    return written


MOST_SHOWN = 10
"""Skipped things that a message shows."""


@dataclass(kw_only=True)
class PortionReport:
    """Counts of a portion. Each kind of data set adds its own; dataset.json stores the sums.

    Attributes:
        skipped: how many could not be used, by reason.
        skipped_places: (reason, or what is known of it, and place) of the first of them.
    """

    skipped: dict[str, int] = field(default_factory=dict)
    skipped_places: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, reason: str, sample: str, why: str = "") -> None:
        """Count what cannot be used, and list it while there is room."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.skipped_places) < MAX_LISTED:
            self.skipped_places.append((why or reason, escape_name(sample)))

    def add(self, other: PortionReport) -> None:
        """Add the counts of another portion."""
        for name, theirs in vars(other).items():
            ours = getattr(self, name)
            if name == "skipped_places":
                total: object = (ours + theirs)[:MAX_LISTED]
            elif isinstance(ours, dict):
                total = dict(Counter(ours) + Counter(theirs))
            elif isinstance(ours, list):
                total = [a + b for a, b in zip(ours, theirs, strict=True)]
            elif isinstance(ours, int):
                total = ours + theirs
            else:  # said of one portion alone
                continue
            setattr(self, name, total)


def check_skipped(items: str, used: int, report: PortionReport, reasons: Mapping[str, str], max_skipped: float) -> None:
    """Refuse what was skipped if it is too much, else warn of it.

    Args:
        items: "documents", "images".
        used: how many were not skipped.
        report: what was skipped, and where.
        reasons: what each reason means.
        max_skipped: largest share that may be skipped.

    Raises:
        DataError: more were skipped than `max_skipped` allows.
    """
    count = sum(report.skipped.values())
    total = used + count
    # Reasons come from files, too.
    named = "; ".join(
        f"{number} {shorten(reason)} ({reasons.get(reason, 'not a reason known here')})"
        for reason, number in sorted(report.skipped.items())
    )
    if count > max_skipped * total:
        first = "\n".join(f"  {sample} ({why})" for why, sample in report.skipped_places[:MOST_SHOWN])
        raise DataError(
            f"{count} of {total} {items} were skipped, more than --max_skipped {max_skipped} allows: "
            f"{named}. The first ones:\n{first}"
        )
    if count:
        log.warning("%d of %d %s were skipped: %s", count, total, items, named)
