"""Parts of a data set, each made by one run, on one or several machines: settings, files, shards and reports.

Part i of n makes the shards i, i + n, ... Parts share only the directory: each has a lock and a file with its settings,
so parts never wait for each other. Running a part twice makes the same bytes.

DATASET/progress/
  part-00001-of-00003.json      settings of part 1 and number of all shards; when finished, also the description
  part-00001-of-00003.lock      while the part runs
  text-000001.json              report of a finished shard

A shard is a plain WebDataset tar with deterministic bytes, next to its index.
"""

from __future__ import annotations

import io
import logging
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from trp_scale.config.registry import setting
from trp_scale.config.schema import Fields
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

MAX_PARTS = 99_999

ItemT = TypeVar("ItemT")


@dataclass(kw_only=True)
class SpreadSettings:
    """Execution settings of the commands that prepare data."""

    executor: Literal["local", "ray", "slurm-array"] = "local"
    """local: processes of this machine. ray: nodes of a Ray cluster with shared storage (RAY_ADDRESS, or the cluster on
    this machine; otherwise one is started); the work of a lost node is retried elsewhere. slurm-array: submit one job
    for each of --num_shards parts, and a job that merges them."""
    sbatch: str = ""
    """slurm-array: additional sbatch options, such as --sbatch='--partition=cpu --cpus-per-task=16 --time=4:00:00'."""
    shard_index: int = setting(0, at_least=0)
    """Several machines: index of the part that this run makes, from 0. Run every part with the same other flags, in any
    order; run a stopped part again. `trp-scale merge` joins the parts."""
    num_shards: int = setting(1, at_least=1, at_most=MAX_PARTS)
    """Several machines: number of parts. Part i makes the shards i, i + num_shards, ..."""
    processes: int = setting(0, at_least=0, at_most=4096)
    """Shards made, tars read or labels predicted in parallel; 0 = one per core of this machine or of the Ray cluster,
    for labels one per GPU (without GPUs one on this machine). The output does not depend on it."""
    max_skipped: float = setting(0.01, at_least=0, at_most=1)
    """Largest share of skipped documents or images; for labels, of images that cannot be decoded."""
    progress: bool = True
    """Show a progress bar."""

    def own_part(self) -> Part:
        """Return the part selected by the flags.

        Raises:
            DataError: the part does not exist.
        """
        if self.shard_index >= self.num_shards:
            raise DataError(
                f"--shard_index {self.shard_index}: 0 to {self.num_shards - 1} is allowed with --num_shards "
                f"{self.num_shards}"
            )
        return Part(count=self.num_shards, index=self.shard_index)


@dataclass(frozen=True, order=True)
class Part:
    """Part `index` (from 0) of `count`. A single run is part 0 of 1."""

    count: int
    index: int

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"

    @property
    def name(self) -> str:
        """File name without suffix, such as part-00001-of-00003."""
        return f"part-{self.index:05d}-of-{self.count:05d}"

    @property
    def lock(self) -> str:
        """Name of the lock."""
        return "lock" if self.count == 1 else f"{self.name}.lock"

    @property
    def flags(self) -> str:
        """Command-line flags that select this part."""
        return f"--shard_index {self.index} --num_shards {self.count}"

    def select(self, whole: Sequence[ItemT]) -> Sequence[ItemT]:
        """Return the portions, or shards, of this part."""
        return whole[self.index :: self.count]

    def path(self, directory: Path) -> Path:
        """Return the path of the part file in a data set."""
        return directory / "progress" / f"{self.name}.json"

    def write(self, directory: Path, document: dict[str, object]) -> None:
        """Write the part file."""
        self.path(directory).parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path(directory), document)


def started_parts(directory: Path) -> dict[Part, dict[str, Any]]:
    """Return the files of all started parts, in order."""
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
    """Return `started_parts` if all parts have started.

    Raises:
        DataError: parts are missing.
    """
    parts = started_parts(directory)
    if not parts:
        raise DataError(
            f"{directory}: no part of a data set found; first run shard-text, shard-images, index or pseudo-label with "
            "--shard_index and --num_shards"
        )
    count = next(iter(parts)).count
    missing = [part for index in range(count) if (part := Part(count=count, index=index)) not in parts]
    if missing:
        raise missing_parts(directory, [f"{part.flags} (not begun)" for part in missing], count)
    return parts


def unfinished_line(part: Part, names: list[str]) -> str:
    """Format the missing shards of a part."""
    return f"{part.flags} (unfinished: {len(names)} shards are missing{', ' * bool(names)}{format_names(names)})"


def format_names(names: list[str]) -> str:
    """Format the first five names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def missing_parts(directory: Path, missing: list[str], count: int) -> DataError:
    """Return the error of a merge with missing parts."""
    lines = "".join(f"\n  {line}" for line in missing)
    return DataError(
        f"{directory}: {len(missing)} of {count} parts are missing; run the command of each, then merge again:{lines}"
    )


def first_shard(directory: Path) -> Path:
    """Return the first tar of a data set.

    Raises:
        DataError: the data set is unfinished, or has no tar.
    """
    refuse_unfinished(directory)
    require_dataset(directory)
    shards = read_fields(directory / "dataset.json", "give a tar, or the directory of a data set").file_names("shards")
    if not shards:
        raise DataError(f"{directory / 'dataset.json'}: no shards are listed; shard the data again")
    return directory / "shards" / shards[0]


def refuse_unfinished(directory: Path) -> None:
    """Raise DataError with progress and skipped samples if a data set is unfinished (has no dataset.json)."""
    if (directory / "dataset.json").exists() or not (parts := started_parts(directory)):
        return
    kind = next(iter(parts.values()))["kind"]
    tars = sorted((directory / "shards").glob("*.tar"))
    done = [shard for shard in tars if index_path(shard).is_file()]
    blocks = sum(len(read_index(shard).blocks) for shard in done)
    skipped: Counter[str] = Counter()
    for shard in done:
        report = report_path(directory, shard.stem)
        if report.is_file():
            skipped.update(read_fields(report).take("skipped", dict[str, int]))
    listed = ", ".join(f"{count} {shorten(reason)}" for reason, count in sorted(skipped.items()))
    raise DataError(
        f"{directory}: the sharding of kind {shorten(str(kind))!r} is unfinished, there is no dataset.json: "
        f"{len(done)} shards are finished, with {blocks} samples; skipped so far: "
        f"{listed or 'nothing'}. Run the same command again to resume"
    )


MAX_LISTED = 1000
"""Skipped samples listed by location in a shard report and in dataset.json. All are counted."""

log = logging.getLogger(__name__)


class ShardWriter:
    """Writer of samples to an open tar.

    WebDataset only needs the members of a key to be adjacent, so the standard library writes the tar.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        # ustar: each member has one 512-byte header; too long names raise an error.
        self._stream = stream
        self._tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._blocks: list[Block] = []
        self.report: dict[str, object] = {}  # stored by `new_tar` with the shard

    def __len__(self) -> int:
        """Number of written samples."""
        return len(self._blocks)

    def add(self, key: str, rows: int, members: Mapping[str, bytes], label: int | None = None) -> None:
        """Write one sample. `members` maps suffixes without the leading dot to contents."""
        written = {}
        for suffix, content in sorted(members.items()):
            # Fixed owner, mode and time: the bytes depend only on the contents.
            entry = tarfile.TarInfo(f"{key}.{suffix}")
            entry.size, entry.mode, entry.uname, entry.gname = len(content), 0o444, "trp", "trp"
            offset = self._tar.offset + tarfile.BLOCKSIZE
            self._tar.addfile(entry, io.BytesIO(content))
            written[suffix] = StoredMember(offset=offset, length=len(content), crc32=zlib.crc32(content))
        self._blocks.append(Block(key=key, rows=rows, members=written, label=label))

    def finish(self, name: str) -> ShardIndex:
        """Write the end of the tar; `name` is its final file name."""
        self._tar.close()
        return ShardIndex(shard=name, size=self._stream.tell(), blocks=self._blocks)


@contextmanager
def new_tar(shard: Path, report: Path) -> Iterator[ShardWriter]:
    """Write a tar, then its report, then its index, each atomically. The index marks a finished shard."""
    with atomic_write(shard) as stream:
        writer = ShardWriter(stream)
        yield writer
        index = writer.finish(shard.name)
    write_json(report, writer.report)
    write_index(shard, index)


def report_path(directory: Path, stem: str) -> Path:
    """Return the path of a shard report, which is removed when the data set is finished."""
    return directory / "progress" / f"{stem}.json"


def write_dataset_index(directory: Path, document: Mapping[str, Any]) -> list[Path]:
    """Write the binary indexes of a data set and return their paths.

    Args:
        document: content of dataset.json; the file may not exist yet.

    Raises:
        DataError: a tar or JSON index is missing, damaged or inconsistent.
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


MAX_SHOWN = 10
"""Skipped samples listed in a message."""


@dataclass(kw_only=True)
class PortionReport:
    """Counts of a portion. Each kind of data set adds its fields; dataset.json stores the sums.

    Attributes:
        skipped: number of skipped samples by reason.
        skipped_places: (reason or details, location) of the first MAX_LISTED skipped samples.
    """

    skipped: dict[str, int] = field(default_factory=dict)
    skipped_places: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, reason: str, sample: str, why: str = "") -> None:
        """Count a skipped sample, and list it if there are fewer than MAX_LISTED."""
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
            else:  # not summed
                continue
            setattr(self, name, total)


def check_skipped(items: str, used: int, report: PortionReport, reasons: Mapping[str, str], max_skipped: float) -> None:
    """Log a warning about skipped samples.

    Args:
        items: "documents" or "images".
        used: number of stored samples.
        reasons: description of each reason.
        max_skipped: largest share of skipped samples.

    Raises:
        DataError: more than `max_skipped` were skipped.
    """
    count = sum(report.skipped.values())
    total = used + count
    # Reasons are read from files and may be unknown.
    named = "; ".join(
        f"{number} {shorten(reason)} ({reasons.get(reason, 'unknown reason')})"
        for reason, number in sorted(report.skipped.items())
    )
    if count > max_skipped * total:
        first = "\n".join(f"  {sample} ({why})" for why, sample in report.skipped_places[:MAX_SHOWN])
        raise DataError(
            f"{count} of {total} {items} were skipped, more than --max_skipped {max_skipped} allows: "
            f"{named}. The first ones:\n{first}"
        )
    if count:
        log.warning("%d of %d %s were skipped: %s", count, total, items, named)
