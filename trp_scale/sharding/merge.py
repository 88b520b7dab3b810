"""The last step of a data set that was made in parts: check that all are there, and write what makes it one."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.index_tars import TARS, stored_tars
from trp_scale.sharding.images.shard import IMAGES
from trp_scale.sharding.job.job import DataKind, finish_dataset
from trp_scale.sharding.job.parts import Part, all_parts, some
from trp_scale.sharding.pseudo_labels.directory import LabelDirectory, complete, unfinished_labels
from trp_scale.sharding.text.shard import TEXT
from trp_scale.storage.files import only_run

log = logging.getLogger(__name__)


def merge(directory: Path, max_skipped: float | None = None) -> None:
    """Join the parts of a data set, or add labels that were made in parts to it: it is then the same, byte for byte, as
    if one run had made it. A data set that is whole is left as it is.

    Args:
        max_skipped: largest share of items that may be skipped; None: as the parts were told.

    Raises:
        DataError: parts are missing (they are named), at work, or of different settings, or too much was skipped.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; give that of --output or --data of the parts")
    labels = unfinished_labels(directory)
    for label in labels:
        _merge_labels(label if max_skipped is None else replace(label, max_skipped=max_skipped))
    if not labels:
        _merge_shards(directory, max_skipped)


def _merge_labels(directory: LabelDirectory) -> None:
    document = read_json(directory.dataset / "dataset.json")
    if not complete(directory, document, alone=False):
        missing = [shard for shard in document["shards"] if directory.report(shard) is None]
        raise DataError(
            f"{directory.path}: the labels of {len(missing)} of {len(document['shards'])} shards are missing, "
            f"{some(missing)}; run pseudo-label with the same flags again, which makes them, then merge again"
        )


def _merge_shards(directory: Path, max_skipped: float | None) -> None:
    if (directory / "dataset.json").exists() and not (directory / "progress").exists():
        log.info("%s is finished: nothing to merge", directory)
        return
    parts = all_parts(directory)
    with ExitStack() as stack:
        stack.enter_context(only_run(directory, "merge.lock"))
        for part in parts:
            stack.enter_context(only_run(directory, part.lock))
        shards = len(finish_dataset(directory, _kind(directory, *next(iter(parts.items()))), max_skipped).shards)
    with suppress(OSError):
        (directory / "progress").rmdir()
    log.info("%s: %d parts are one data set of %d shards", directory, len(parts), shards)


def _kind(directory: Path, part: Part, document: dict[str, Any]) -> DataKind[Any]:
    if document["kind"] == TARS:
        return stored_tars(directory, part, document)
    return TEXT if document["kind"] == "text" else IMAGES
