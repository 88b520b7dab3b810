"""One model's labels of one shard, window by window: batches to the device, maps back, PNGs into the tar in order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trp_scale.data.images.png import Map, write_png
from trp_scale.preparation.pseudo_labels.directory import UNREADABLE, LabelReport
from trp_scale.preparation.pseudo_labels.labeller import InFlight, Labeller
from trp_scale.preparation.pseudo_labels.reading import Prepared, batches_of_one_shape
from trp_scale.preparation.pseudo_labels.settings import labelled
from trp_scale.preparation.sharding.writing import OpenShard


@dataclass(frozen=True, kw_only=True)
class WindowOfLabels:
    """Consecutive images whose maps are on their way.

    Attributes:
        places: of the images in their shard.
        prepared: sizes and flaws; the inputs are gone.
        batches: places in the window, and their maps.
    """

    places: range
    prepared: list[Prepared]
    batches: list[tuple[list[int], InFlight]]


class LabelStream:
    """Labels the images of a shard with one model.

    Args:
        labeller: the model.
        opened: the new shard.
        keys: of the images.
        name: of the images' shard, for the list of what is empty.
        digest: of the images' index.
        pool: threads that encode.
        batch: images that the model sees at once.
    """

    def __init__(
        self,
        labeller: Labeller,
        opened: OpenShard,
        *,
        keys: Sequence[str],
        name: str,
        digest: str,
        pool: ThreadPoolExecutor,
        batch: int,
    ) -> None:
        self._labeller = labeller
        self._opened = opened
        self._keys = keys
        self._name = name
        self._pool = pool
        self._batch = batch
        self._modality = labeller.modality
        self._report = LabelReport(images=digest)

    def start(self, places: range, prepared: Sequence[Prepared]) -> WindowOfLabels:
        """Give the images of a window to the model, without waiting for it."""
        inputs = [image.inputs.get(self._modality) for image in prepared]
        batches = []
        for batch in batches_of_one_shape(inputs, self._batch):
            values = [values for place in batch if (values := inputs[place]) is not None]
            batches.append((batch, self._labeller.start(values, [prepared[place].size for place in batch])))
        kept = [Prepared(size=image.size, flaws=image.flaws) for image in prepared]
        return WindowOfLabels(places=places, prepared=kept, batches=batches)

    def finish(self, window: WindowOfLabels) -> None:
        """Wait for the maps of a window and write them."""
        found: dict[int, tuple[Map, int]] = {}
        for batch, flight in window.batches:
            found.update(zip(batch, flight.wait(self._labeller.dtype), strict=True))
        form = self._labeller.format
        maps = []
        for number, (place, image) in enumerate(zip(window.places, window.prepared, strict=True)):
            flaw = image.flaws.get(self._modality, "")
            numbers, clipped = found.get(number) or (np.full(image.size, form.empty, dtype=self._labeller.dtype), 0)
            missing = int((numbers == form.empty).sum())
            if not flaw and missing == numbers.size:
                flaw = "the model's output has no value that can be stored"
            self._count(place, flaw, missing, clipped)
            maps.append(numbers)
        level = labelled()[self._modality].png_level
        contents = self._pool.map(lambda numbers: write_png(numbers, level), maps)
        for place, content in zip(window.places, contents, strict=True):
            self._opened.writer.add(self._keys[place], 1, {form.suffix: content})

    def _count(self, place: int, flaw: str, missing: int, clipped: int) -> None:
        report = self._report
        report.labels += 1
        if flaw:
            report.skip(UNREADABLE, f"{self._name}/{self._keys[place]}", flaw)
        else:
            report.missing += missing
            report.clipped += clipped

    def close(self) -> None:
        """Hand over the report, which is written with the shard."""
        self._opened.report = dict(vars(self._report))
