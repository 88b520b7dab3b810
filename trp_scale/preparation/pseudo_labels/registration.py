"""The entry of new labels in dataset.json: made once, by the run that finds all their shards there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from typing import Any

from trp_scale.data.index import index_path, write_json
from trp_scale.preparation.pseudo_labels.directory import LabelDirectory, LabelReport, turn
from trp_scale.preparation.sharding.directory import MAX_LISTED, check_skipped

REASONS = {"unreadable": "an image that cannot be decoded or labelled: its label is empty"}

log = logging.getLogger(__name__)


def complete(directory: LabelDirectory, document: dict[str, Any], *, max_skipped: float, replace: bool) -> bool:
    """Add the labels to dataset.json if all are there; whether it names them now. Asking again changes nothing.

    Args:
        directory: of the labels.
        document: dataset.json as it was; only what never changes is taken from it.
        max_skipped: largest share of empty labels.
        replace: the labels may stand for others of the modality.

    Raises:
        DataError: too many labels are empty, or the data set has the modality from elsewhere by now.
    """
    shards: list[str] = document["shards"]
    if not all(index_path(directory.tar(shard)).exists() for shard in shards):  # no lock needed to see this
        _log_parts(directory, shards)
        _check_empty(directory, _written_reports(directory, shards), document["rows"], max_skipped)
        return False
    with turn(directory.dataset) as current:
        if not directory.listed(current):
            reports = {shard: directory.report(shard) for shard in shards}
            found = [report for report in reports.values() if report is not None]
            _check_empty(directory, found, document["rows"], max_skipped)
            if len(found) < len(shards):
                _log_parts(directory, [shard for shard, report in reports.items() if report is not None])
                return False
            directory.refuse_present(current, replace=replace)
            _write(directory, current, found)
        shutil.rmtree(directory.path / "progress", ignore_errors=True)
        for leftover in directory.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
    return True


def _written_reports(directory: LabelDirectory, shards: Iterable[str]) -> list[LabelReport]:
    """Reports as they lie there, of finished shards or not."""
    found = []
    for shard in shards:
        report = directory.written_report(shard)
        if report is not None:
            found.append(report)
    return found


def _log_parts(directory: LabelDirectory, shards: list[str]) -> None:
    there = sum(index_path(directory.tar(shard)).exists() for shard in shards)
    log.info(
        "%s: %d shards are labelled, not yet all: dataset.json is left as it is until the last part is done",
        directory.path,
        there,
    )


def _check_empty(directory: LabelDirectory, reports: list[LabelReport], rows: int, max_skipped: float) -> None:
    count = sum(report.unreadable for report in reports)
    places = [["unreadable", f"{place} ({why})"] for report in reports for why, place in report.places]
    if count:
        check_skipped(f"images of {directory.path}", rows - count, {"unreadable": count}, places, REASONS, max_skipped)


def _write(directory: LabelDirectory, document: dict[str, Any], reports: list[LabelReport]) -> None:
    before = directory.entry(document)
    entry: dict[str, object] = {
        **directory.description,
        "exact": False,
        "directory": directory.name,
        "labels": sum(report.labels for report in reports),
        "unreadable": sum(report.unreadable for report in reports),
        "unreadable_places": [{"place": place, "why": why} for report in reports for why, place in report.places][
            :MAX_LISTED
        ],
        "missing_pixels": sum(report.missing for report in reports),
        "clipped_pixels": sum(report.clipped for report in reports),
        "settings": dict(directory.identity),
    }
    if before is not None:
        entry["replaced"] = before
    document["modalities"] = {**(document.get("modalities") or {}), directory.modality: entry}
    write_json(directory.dataset / "dataset.json", document)
    log.info("%s: %d labels, %d of them empty", directory.path, entry["labels"], entry["unreadable"])
