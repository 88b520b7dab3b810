"""One shard while it is written: a tar of the same bytes each time, its checksums, and its index."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trp_scale.data.index import Block, Member, ShardIndex, write_index, write_json

LONGEST_NAME = 100
"""Bytes of a member's name, key and suffix: what one tar header holds."""


class ShardWriter:
    """Adds samples to an open tar, in the order they come."""

    def __init__(self, stream: IO[bytes]) -> None:
        from webdataset.writer import TarWriter  # imports torch: only processes that write shards pay for it

        # Fixed owner, mode and time: the bytes depend on the contents alone.
        self._tar = TarWriter(stream, user="trp", group="trp", mode=0o444, mtime=0, encoder=False, compress=False)
        self._checksums: dict[str, int] = {}
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        """Samples written."""
        return len(self._rows)

    def add(self, key: str, rows: int, members: dict[str, bytes]) -> None:
        """Write one sample; `members` maps suffixes without the leading dot to contents."""
        self._tar.write({"__key__": key, **members})
        self._rows[key] = rows
        self._checksums.update((f"{key}.{suffix}", zlib.crc32(content)) for suffix, content in members.items())

    def close(self) -> None:
        """Write the end of the tar."""
        self._tar.close()

    def index(self, tar: Path, name: str) -> ShardIndex:
        """Read the places of the members back from the tar that was written; `name` is the tar's final name."""
        members: dict[str, dict[str, Member]] = {key: {} for key in self._rows}
        with tarfile.open(tar, "r:") as archive:
            for entry in archive:
                folder, slash, file = entry.name.rpartition("/")
                key, _, suffix = file.partition(".")
                members[folder + slash + key][suffix] = Member(
                    offset=entry.offset_data, length=entry.size, crc32=self._checksums[entry.name]
                )
        blocks = [Block(key=key, rows=rows, members=members[key]) for key, rows in self._rows.items()]
        return ShardIndex(shard=name, size=tar.stat().st_size, blocks=blocks)


class OpenShard:
    """What `new_shard` hands out: the writer, and the report that is written down with the shard."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self.report: dict[str, object] = {}


@contextmanager
def new_shard(directory: Path, stem: str) -> Iterator[OpenShard]:
    """A shard of the data set `directory`, and its report among the data set's."""
    with new_tar(directory / "shards" / f"{stem}.tar", report_path(directory, stem)) as opened:
        yield opened


@contextmanager
def new_tar(shard: Path, report: Path) -> Iterator[OpenShard]:
    """The tar, then its report, then its index; each appears under its name when it is whole. The index is last: it
    marks a finished shard."""
    temporary = shard.with_name(f".{shard.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        opened = OpenShard(ShardWriter(stream))
        yield opened
        opened.writer.close()
        stream.flush()
        os.fsync(stream.fileno())
    index = opened.writer.index(temporary, shard.name)
    temporary.replace(shard)
    write_json(report, opened.report)
    write_index(shard, index)


def report_path(directory: Path, stem: str) -> Path:
    """Where the report of a finished shard lies until the data set is finished."""
    return directory / "progress" / f"{stem}.json"
