"""Read a data set whose sharding is not finished."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trp_scale.data.index import index_path, read_fields, read_index
from trp_scale.data.raw_files import require_dataset
from trp_scale.errors import DataError, shorten
from trp_scale.sharding.job.parts import begun_parts
from trp_scale.sharding.job.writing import report_path


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
