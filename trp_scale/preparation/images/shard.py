"""Images -> a data set of shards, in parallel, resumable, the same bytes for any number of processes.

DATASET/
  dataset.json                  what was made, from what, the classes, the counts, and what was left out and why
  shards/image-000000.tar       WebDataset tar; one sample = one image
      KEY.jpg                   upright RGB or grey JPEG
      KEY.cls                   class number in ASCII, if there are classes
      KEY.depth.png             aligned map of 16-bit numbers, if there are depth maps (scenes: millimetres)
      KEY.semseg.png            aligned map of 8-bit class numbers, if there are segmentation maps
  shards/image-000000.index.json

Every sample has the members that "suffixes" in dataset.json names. Samples lie in the order of a hash of their keys, so
that classes mix within a shard: inputs are read out of order for that once, here, and in order ever after.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from trp_scale.data.images.members import VOID
from trp_scale.data.index import DataError, write_json
from trp_scale.preparation.images.detection_scenes import write_coco_scenes
from trp_scale.preparation.images.inputs import list_input
from trp_scale.preparation.images.portion import PortionReport, PortionWorker, shard_stem
from trp_scale.preparation.images.reencode import EncodeSettings
from trp_scale.preparation.images.samples import SKIP_REASONS, Listing, Portion, cut_into_portions
from trp_scale.preparation.images.settings import ShardImagesConfig
from trp_scale.preparation.sharding.directory import (
    DATASET_FORMAT,
    MAX_LISTED,
    check_skipped,
    finish_shards,
    finished_report,
    is_finished,
    refuse_other_content,
)
from trp_scale.preparation.sharding.lock import only_run
from trp_scale.preparation.sharding.workers import Progressed, run_portions

__all__ = ["ShardImagesConfig", "shard_images"]

log = logging.getLogger(__name__)


def shard_images(config: ShardImagesConfig) -> Path:
    """Make a data set and return its directory. A finished one of the same settings and input is left as it is.

    Raises:
        DataError: a setting or the input cannot be used, the directory holds something else, or too many images had to
            be skipped (finished shards stay, dataset.json is not written), or another run is at it.
    """
    config.check()
    if config.coco:
        return write_coco_scenes(config.output, count=config.count, size=config.size, seed=config.seed)
    refuse_other_content(config.output, config.identity())
    listing = list_input(config)
    with only_run(config.output):
        _make(config, listing)
    return config.output


def _make(config: ShardImagesConfig, listing: Listing) -> None:
    """Make the data set, or what is missing of it."""
    output = config.output
    identity = {**config.identity(), "input": listing.fingerprint}
    (output / "shards").mkdir(exist_ok=True)
    if is_finished(output, identity):
        log.info("%s is finished: nothing to do", output)
        shutil.rmtree(output / "progress")
        return
    write_json(output / "progress" / "settings.json", identity)
    portions = cut_into_portions(listing.samples, config.samples_per_shard, config.rows_per_block)
    reports = {
        portion.number: report
        for portion in portions
        if (report := finished_report(output, shard_stem(portion.number), PortionReport))
    }
    if reports:
        log.info("%d of %d shards are there already", len(reports), len(portions))
    reports |= _run(config, listing, [portion for portion in portions if portion.number not in reports])
    total = PortionReport()
    for reason, place in listing.skipped:
        total.skip(reason, place)
    for number in sorted(reports):
        total.add(reports[number])
    check_skipped("images", total.images, total.skipped, total.skipped_places, SKIP_REASONS, config.max_skipped)
    if total.images == 0:
        raise DataError("the input holds no image that can be used")
    _write_dataset(config, listing, portions, identity, total)


def _run(config: ShardImagesConfig, listing: Listing, portions: list[Portion]) -> dict[int, PortionReport]:
    def text(values: Sequence[int], seconds: float) -> str:
        stored, images = values
        return f"{images:,} images  {images / seconds:,.0f} images/s  {stored / seconds / 1e6:,.1f} MB/s"

    encode = EncodeSettings(
        short_side=config.short_side,
        quality=config.quality,
        max_pixels=config.max_pixels,
        segmentation_classes=len(listing.described["semseg"]["classes"]) if "semseg" in listing.described else VOID,
        void_label=config.void_label,
    )
    classes = None if listing.classes is None else len(listing.classes)
    return run_portions(
        portions,
        PortionWorker,
        (config.output, listing.source, listing.suffixes, classes, encode),
        processes=config.processes,
        progressed=Progressed(
            counters=2,
            total=sum(len(portion.samples) for portion in portions),
            text=text,
            shown=config.progress,
        ),
    )


def _write_dataset(
    config: ShardImagesConfig,
    listing: Listing,
    portions: list[Portion],
    identity: dict[str, object],
    total: PortionReport,
) -> None:
    """Write dataset.json, the mark of a finished data set, and clear what only an unfinished one needs."""
    output = config.output
    shards, rows = finish_shards(output, (shard_stem(portion.number) for portion in portions))
    counts = {name: getattr(total, name) for name in ("images", "unchanged", "bytes", "pixels", "per_class")}
    write_json(
        output / "dataset.json",
        {
            "format": DATASET_FORMAT,
            "kind": "image",
            "synthetic": config.embedded,
            "suffixes": list(listing.suffixes),
            "classes": listing.classes,
            "modalities": listing.described,
            "shards": shards,
            "rows": rows,
            "rows_per_block": config.rows_per_block,
            "counts": counts,
            "skipped": total.skipped,
            "skipped_places": [{"reason": reason, "place": place} for reason, place in total.skipped_places],
            "skipped_places_limit": MAX_LISTED,
            "settings": identity,
        },
    )
    shutil.rmtree(output / "progress")
    log.info("%s: %d images, %d stored unchanged, %d shards", output, total.images, total.unchanged, len(shards))
