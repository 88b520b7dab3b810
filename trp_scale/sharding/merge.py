"""Merge of a data set that was made in parts: check that all parts exist, then write the index and dataset.json."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from trp_scale.data.images.maps import map_formats
from trp_scale.data.index import read_json
from trp_scale.errors import DataError, quote
from trp_scale.sharding.images.index_tars import TARS, stored_tars
from trp_scale.sharding.images.shard import IMAGES
from trp_scale.sharding.job.job import DataKind, finish_dataset
from trp_scale.sharding.job.parts import Part, all_parts
from trp_scale.sharding.pseudo_labels.directory import label_kind
from trp_scale.sharding.text.shard import TEXT
from trp_scale.storage.files import only_run

log = logging.getLogger(__name__)


def merge(directory: Path, max_skipped: float | None = None) -> None:
    """Merge the parts of a data set or of its labels. The result has the bytes of a single run; a finished data set
    does not change.

    Args:
        max_skipped: largest share of skipped items; None: the setting of the parts.

    Raises:
        DataError: parts are missing, still running or have different settings, or too many items were skipped.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; give that of --output or --data of the parts")
    labels = sorted({path.parent.parent for path in directory.glob("*/progress/part-*.json")})
    if not labels and (directory / "dataset.json").exists() and not (directory / "progress").exists():
        log.info("%s is finished: nothing to merge", directory)
        return
    for output in labels or [directory]:
        parts = all_parts(output)
        kind = _kind(directory, output, *next(iter(parts.items())))
        with ExitStack() as stack:
            stack.enter_context(only_run(output, "merge.lock"))
            for part in parts:
                stack.enter_context(only_run(output, part.lock))
            shards, _ = finish_dataset(output, kind, max_skipped)
        with suppress(OSError):
            (output / "progress").rmdir()
        log.info("%s: %d parts are one data set of %d shards", output, len(parts), len(shards))


def _kind(directory: Path, output: Path, part: Part, document: dict[str, Any]) -> DataKind[Any]:
    name = document["kind"]
    if output != directory:
        if name not in map_formats():
            raise DataError(
                f"{part.path(output)}: modality {quote(name)} found, one of {', '.join(map_formats())} expected; run "
                "pseudo-label again with the same flags"
            )
        return label_kind(directory, read_json(directory / "dataset.json"), name)
    if name == TARS:
        return stored_tars(directory, part, document)
    return TEXT if name == "text" else IMAGES
