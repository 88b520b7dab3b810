"""Sharding of images (sharding/job.py).

  shards/image-000000.tar       WebDataset tar; one sample = one image
      KEY.jpg                   upright RGB or grey JPEG
      KEY.cls                   class number in ASCII (optional)
      KEY.depth.png             aligned 16-bit depth map (optional; scenes: millimetres)
      KEY.semseg.png            aligned 8-bit map of class numbers (optional)

Every sample has the members listed in "suffixes" of dataset.json. Samples are ordered by a hash of their keys, so that
classes mix within a shard. Inputs are read in random order once, here, so that training reads sequentially.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trp_scale.data.images.maps import CLASS, IMAGE
from trp_scale.errors import shorten
from trp_scale.sharding.images.files import (
    SKIP_REASONS,
    ImagePortion,
    ImageReport,
    ImageSource,
    Listing,
    Loaded,
    Sample,
    UnusableError,
    cut_into_portions,
)
from trp_scale.sharding.images.inputs import list_input
from trp_scale.sharding.images.reencode import Encoded, EncodeSettings, encode_sample
from trp_scale.sharding.images.scenes import write_coco_scenes
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.job import DataKind, ShardingJob, shard_sources, source_folders
from trp_scale.sharding.parts import PortionReport, ShardWriter
from trp_scale.sharding.workers import Advance, start_sample

__all__ = ["ShardImagesConfig", "shard_images"]

log = logging.getLogger(__name__)


def shard_images(config: ShardImagesConfig) -> Path:
    """Make a data set, or a part of it, and return its directory. A finished data set of the same settings and input
    does not change.

    Raises:
        DataError: a setting or the input cannot be used, the directory contains something else, too many images were
            skipped (finished shards stay, dataset.json is not written), or another run writes the directory.
    """
    config.check()
    if config.source_field:
        return _shard_sources(config)
    if config.coco:
        return write_coco_scenes(config.output, count=config.count, size=config.size, seed=config.seed)
    identity = config.identity()
    job = ShardingJob(config, config.output, IMAGES, identity)
    listing = list_input(config)
    with job.only_run():
        portions = cut_into_portions(listing.samples, config.samples_per_shard, config.rows_per_block)
        skipped = PortionReport()
        for reason, sample in listing.skipped:
            skipped.skip(reason, sample)
        if not job.begin(listing.fingerprint, portions, skipped):
            return config.output
        settings = EncodeSettings(
            short_side=config.short_side,
            quality=config.quality,
            max_pixels=config.max_pixels,
            maps={files.format.suffix: files for files in listing.maps.values()},
        )
        arguments = (listing.source, listing.suffixes, listing.classes, settings)
        job.make(portions, _ImageWriter, arguments, ("bytes", "images"))
        finished = job.finish(_description(config, listing))
    if finished is not None:
        shards, total = len(finished[0]), finished[1]
        classes = _format_classes(listing.classes)
        log.info(
            "%s: %d images, %d stored unchanged, %d shards%s",
            *(config.output, total.images, total.unchanged, shards, classes),
        )
    return config.output


def _shard_sources(config: ShardImagesConfig) -> Path:
    """Make the data set of each folder in the input."""
    folders = source_folders(config.inputs)

    def shard(source: str, output: Path) -> None:
        modality = [f"{name}={folder / source}" for name, folder in config.modality_folders().items()]
        inputs = [str(folders[source])]
        shard_images(replace(config, output=output, inputs=inputs, modality=modality, source_field=""))

    return shard_sources(config.output, folders, shard)


SMALLEST_SIDE, LONGEST_SHAPE = 8, 16
"""Shortest side in pixels and largest aspect ratio of usual photographs."""

PARTS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
"""Folder names of dataset splits, unlikely as class names."""


def _format_classes(classes: Sequence[str] | None) -> str:
    """Format the class names; log a warning if they look like splits."""
    if not classes:
        return ""
    if len(classes) > 1 and {name.lower() for name in classes} <= PARTS:
        log.warning(
            "the classes are %s: sub-folders of --inputs are classes; if these are splits of a data set, shard each "
            "one: --inputs .../%s",
            *(", ".join(classes), classes[0]),
        )
    first = ", ".join(map(shorten, classes[:4]))
    return f", {len(classes)} classes: {first}{', ...' if len(classes) > 4 else ''}"


def _description(config: ShardImagesConfig, listing: Listing) -> dict[str, object]:
    """Return the fields of dataset.json that describe images."""
    return {
        "synthetic": config.embedded,
        "suffixes": list(listing.suffixes),
        "classes": listing.classes,
        "modalities": {name: files.description for name, files in listing.maps.items()},
        "rows_per_block": config.rows_per_block,
    }


@dataclass(kw_only=True)
class EncodedReport(ImageReport):
    """Counts of a portion of encoded images.

    Attributes:
        unchanged: images stored with the bytes of their file.
        odd: images of an unusual size or shape.
        first_odd: location and size of the first of these.
    """

    unchanged: int = 0
    odd: int = 0
    first_odd: str = ""

    def count_encoded(self, name: str, label: int | None, encoded: Encoded) -> None:
        """Count a stored image."""
        self.count(len(encoded.image), label)
        self.unchanged += encoded.unchanged
        self.pixels += encoded.size[0] * encoded.size[1]
        short, long = sorted(encoded.size)
        if short < SMALLEST_SIDE or long > LONGEST_SHAPE * short:
            self.odd += 1
            self.first_odd = self.first_odd or f"{name} ({encoded.size[0]} x {encoded.size[1]})"

    def add(self, other: PortionReport) -> None:
        """Add the counts of another portion."""
        super().add(other)
        if isinstance(other, EncodedReport):
            self.first_odd = self.first_odd or other.first_odd


def _count_rows(total: EncodedReport) -> dict[str, object]:
    """Return the counts in dataset.json."""
    counts = ("images", "unchanged", "bytes", "pixels", "per_class")
    return {"rows": total.images, "counts": {name: getattr(total, name) for name in counts}}


def _warn(total: EncodedReport) -> None:
    if total.odd:
        log.warning(
            "%d of %d images have a side below %d pixels or an aspect ratio above %d; they are stored, but little can "
            "be learned from them; the first is %s",
            *(total.odd, total.images, SMALLEST_SIDE, LONGEST_SHAPE, total.first_odd),
        )


IMAGES = DataKind(
    name="image", report=EncodedReport, items="images", reasons=SKIP_REASONS, counted=_count_rows, warn=_warn
)


class _ImageWriter:
    """Worker that fills the shard of a portion.

    Args:
        suffixes: members of every stored sample.
        classes: class names; None allows any class number >= 0.
        advance: called with (stored bytes, 1) for each stored or skipped image.
    """

    def __init__(
        self,
        source: ImageSource,
        suffixes: tuple[str, ...],
        classes: Sequence[str] | None,
        settings: EncodeSettings,
        advance: Advance,
    ) -> None:
        self._source, self._settings, self._advance = source, settings, advance
        self._suffixes, self._classes = suffixes, classes

    def __call__(self, portion: ImagePortion, shard: ShardWriter) -> EncodedReport:
        report = EncodedReport()
        for sample in portion.items:
            try:
                if not start_sample(sample.origin):
                    raise UnusableError("damaged", "it ends the process that decodes it")
                members, label = self._sample(sample, report)
            except UnusableError as error:
                report.skip(error.reason, error.located(sample.origin))
                members = {}
            else:
                shard.add(sample.key, 1, members, label)
            self._advance(sum(map(len, members.values())), 1)
        return report

    def _sample(self, sample: Sample, report: EncodedReport) -> tuple[dict[str, bytes], int | None]:
        """Return the members and the class."""
        loaded = self._source.read(sample)
        self._check(loaded)
        encoded = encode_sample(loaded, self._settings)
        report.count_encoded(sample.origin, loaded.label, encoded)
        members = {IMAGE: encoded.image, **encoded.maps}
        if loaded.label is not None:
            members[CLASS] = str(loaded.label).encode()
        stored = {suffix: members[suffix] for suffix in self._suffixes}
        return stored, loaded.label if CLASS in stored else None

    def _check(self, loaded: Loaded) -> None:
        """Raise UnusableError for a missing or unknown class. The listing has checked that the maps exist."""
        if CLASS in self._suffixes:
            if loaded.label is None:
                raise UnusableError("no_class")
            if loaded.label < 0 or (self._classes is not None and loaded.label >= len(self._classes)):
                raise UnusableError("bad_class", str(loaded.label))
