"""The images of one portion -> one shard with its index and its report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trp_scale.data.images.members import SUFFIXES
from trp_scale.preparation.images.reencode import Encoded, EncodeSettings, encode_sample
from trp_scale.preparation.images.samples import Loaded, Portion, Sample, Source, UnusableError
from trp_scale.preparation.sharding.directory import MAX_LISTED
from trp_scale.preparation.sharding.workers import Advance
from trp_scale.preparation.sharding.writing import new_shard


@dataclass(kw_only=True)
class PortionReport:
    """What was made of a portion; added up into dataset.json.

    Attributes:
        images: stored.
        unchanged: of them, stored with the bytes of their file.
        bytes: of the stored images, without maps.
        pixels: of the stored images.
        per_class: images by class number (a string, as in JSON).
    """

    images: int = 0
    unchanged: int = 0
    bytes: int = 0
    pixels: int = 0
    per_class: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_places: list[list[str]] = field(default_factory=list)

    def add(self, other: PortionReport) -> None:
        """Add the counts of another portion."""
        for name in ("images", "unchanged", "bytes", "pixels"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.per_class = dict(Counter(self.per_class) + Counter(other.per_class))
        self.skipped = dict(Counter(self.skipped) + Counter(other.skipped))
        self.skipped_places = (self.skipped_places + other.skipped_places)[:MAX_LISTED]

    def skip(self, reason: str, place: str) -> None:
        """Count an image that cannot be used, and list it while there is room."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.skipped_places) < MAX_LISTED:
            self.skipped_places.append([reason, place])

    def count(self, label: int | None, encoded: Encoded) -> None:
        """Count a stored image."""
        self.images += 1
        self.unchanged += encoded.unchanged
        self.bytes += len(encoded.image)
        self.pixels += encoded.size[0] * encoded.size[1]
        if label is not None:
            self.per_class[str(label)] = self.per_class.get(str(label), 0) + 1


class PortionWorker:
    """What a process keeps between portions. Called with a portion, it makes its shard.

    Args:
        directory: the data set.
        suffixes: members of every stored sample.
        classes: number of class names; None: any class number from 0 on may be.
        advance: called with (1, bytes stored) for each image that was stored or skipped.
    """

    def __init__(
        self,
        directory: Path,
        source: Source,
        suffixes: tuple[str, ...],
        classes: int | None,
        settings: EncodeSettings,
        advance: Advance,
    ) -> None:
        self._directory = directory
        self._source = source
        self._suffixes = suffixes
        self._classes = classes
        self._settings = settings
        self._advance = advance

    def __call__(self, portion: Portion) -> PortionReport:
        report = PortionReport()
        with new_shard(self._directory, shard_stem(portion.number)) as shard:
            for sample in portion.samples:
                try:
                    members = self._members(sample, report)
                except UnusableError as error:
                    report.skip(error.reason, f"{sample.place} ({error.detail})" if error.detail else sample.place)
                    members = {}
                else:
                    shard.writer.add(sample.key, 1, members)
                self._advance(sum(map(len, members.values())), 1)
            shard.report = dict(vars(report))
        return report

    def _members(self, sample: Sample, report: PortionReport) -> dict[str, bytes]:
        loaded = self._source.read(sample)
        self._check(loaded)
        encoded = encode_sample(loaded, self._settings)
        report.count(loaded.label, encoded)
        members = {"jpg": encoded.image, **encoded.maps}
        if loaded.label is not None:
            members["cls"] = str(loaded.label).encode()
        return {suffix: members[suffix] for suffix in SUFFIXES if suffix in self._suffixes}

    def _check(self, loaded: Loaded) -> None:
        """A class that there is, where the data set has classes. (Maps are looked for when the input is listed.)"""
        if "cls" in self._suffixes:
            if loaded.label is None:
                raise UnusableError("no_class")
            if loaded.label < 0 or (self._classes is not None and loaded.label >= self._classes):
                raise UnusableError("bad_class", str(loaded.label))


def shard_stem(number: int) -> str:
    """0 -> image-000000"""
    return f"image-{number:06d}"
