"""The directory of a data set while it is made: what may go on there, what is finished, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from trp_scale.data.index import DataError, index_path, read_index, read_json
from trp_scale.preparation.sharding.writing import report_path

DATASET_FORMAT = 1

MAX_LISTED = 1000
"""Skipped things that are listed by place, in a shard's report and in dataset.json; all are counted."""

ReportT = TypeVar("ReportT")

log = logging.getLogger(__name__)


def refuse_other_content(output: Path, identity: Mapping[str, object]) -> None:
    """Refuse a directory that holds something else than a data set of these settings.

    Raises:
        DataError: naming the settings that differ.
    """
    if not output.exists():
        return
    for path in (output / "dataset.json", output / "progress" / "settings.json"):
        if path.exists():
            found = read_json(path)
            refuse_differences(path, found.get("settings", found), identity)
            return
    if any(entry.name not in ("progress", "shards") for entry in output.iterdir()):
        raise DataError(f"--output {output}: the directory is not empty and holds no data set; choose another one")


def refuse_differences(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise DataError naming each setting of `wanted` that `found` (from the file `path`) has otherwise."""
    differences = [
        f"{name} {found.get(name)!r} there, {value!r} asked for"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise DataError(
            f"{path}: a data set with other settings or input: {'; '.join(differences)}. "
            "Ask for the same, choose another --output, or remove the directory"
        )


def is_finished(output: Path, identity: Mapping[str, object]) -> bool:
    """Whether dataset.json is there, of this input, and all its shards too.

    Raises:
        DataError: it is of another input or other settings, or a shard is gone.
    """
    path = output / "dataset.json"
    if not path.exists():
        settings = output / "progress" / "settings.json"
        if settings.exists():
            refuse_differences(settings, read_json(settings), identity)
        return False
    document = read_json(path)
    refuse_differences(path, document["settings"], identity)
    for name in document["shards"]:
        shard = output / "shards" / name
        if not shard.exists() or shard.stat().st_size != read_index(shard).size:
            raise DataError(f"{shard}: missing or of another size than its index says; remove {path} to make it again")
    return True


def finished_report(output: Path, stem: str, make: Callable[..., ReportT]) -> ReportT | None:
    """The report `make(**fields)` of a shard that is finished, or None; the index is written last, so it is the mark of
    that. A report with other fields is of another version, and its shard is made again."""
    shard = output / "shards" / f"{stem}.tar"
    try:
        if shard.stat().st_size != read_index(shard).size:
            return None
        return make(**read_json(report_path(output, stem)))
    except (OSError, DataError, TypeError):
        return None


def finish_shards(output: Path, stems: Iterable[str]) -> tuple[list[str], int]:
    """Names of the shards that hold rows, and the number of their blocks; the others and half-written ones go."""
    shards, blocks = [], 0
    for stem in stems:
        shard = output / "shards" / f"{stem}.tar"
        index = read_index(shard)
        if index.blocks:
            shards.append(shard.name)
            blocks += len(index.blocks)
        else:  # nothing of the portion could be used
            index_path(shard).unlink()
            shard.unlink()
    for leftover in (output / "shards").glob(".*.tmp"):
        leftover.unlink()
    return shards, blocks


def check_skipped(
    what: str,
    used: int,
    skipped: Mapping[str, int],
    places: Iterable[list[str]],
    reasons: Mapping[str, str],
    max_skipped: float,
) -> None:
    """Warn of what was skipped.

    Args:
        what: "documents", "images".
        used: how many were not skipped.
        skipped: count by reason.
        places: (reason, place) of the first ones.
        reasons: what each reason means.
        max_skipped: largest share that may be skipped.

    Raises:
        DataError: more were skipped than `max_skipped` allows.
    """
    count = sum(skipped.values())
    found = used + count
    named = "; ".join(f"{number} {reason} ({reasons[reason]})" for reason, number in sorted(skipped.items()))
    if count:
        log.warning("%d of %d %s were skipped: %s", count, found, what, named)
    if count > max_skipped * found:
        first = "\n".join(f"  {place}: {reason}" for reason, place in list(places)[:20])
        raise DataError(
            f"{count} of {found} {what} were skipped, more than --max_skipped {max_skipped} allows: "
            f"{named}. The first ones:\n{first}"
        )
