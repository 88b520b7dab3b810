"""Shards as they are written: a plain WebDataset tar of the same bytes each time, its index, and the binary index of a
data set."""

from __future__ import annotations

import io
import logging
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from trp_scale.config.schema import Fields
from trp_scale.data.images.maps import OWN_TAR, second_directories
from trp_scale.data.index import Block, ShardIndex, StoredMember, write_index, write_json
from trp_scale.data.samples import write_binary_index
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError, escape_name, shorten
from trp_scale.storage.files import atomic_write

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
