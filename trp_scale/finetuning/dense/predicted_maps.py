"""Predicted maps that are saved: a PNG for each image, of its size, in the numbers of the data set's own maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from trp_scale.checkpoint.agreement import on_rank_zero
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import ImageDataset
from trp_scale.data.images.png import Map, write_png
from trp_scale.data.plan import Plan
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.predictions import image_names

Numbers = Callable[[Tensor, int], Map]
"""From what was predicted of an image [H, W], and the number of its data set in the mixture, to what is stored."""


class PredictedMaps:
    """DIRECTORY/KEY.png, one for each image; see `Predictions`. They are written batch by batch: there may be many.

    Args:
        directory: for the files.
        numbers: of a map.
        plan: of the measured rows.
        datasets: that they are of.
        group: ranks that predict.
    """

    def __init__(
        self, directory: Path, numbers: Numbers, plan: Plan, datasets: Sequence[ImageDataset], group: Group
    ) -> None:
        self._directory, self._numbers, self._plan, self._group = directory, numbers, plan, group
        self._names = on_rank_zero(group, "reading the keys of the images", lambda: image_names(plan, datasets))

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Each row's prediction [H, W]."""
        members = self._plan.locate(np.arange(batch.start, batch.start + len(outputs))).member.tolist()
        own = [
            (batch.start + row, write_png(self._numbers(output, member)))
            for row, (output, member, there) in enumerate(
                zip(outputs, members, batch["row_weights"].tolist(), strict=True)
            )
            if there > 0
        ]
        gathered = self._group.gather_objects(own)

        def write() -> None:
            for position, content in (one for part in gathered for one in part):
                path = self._directory / f"{self._names[position]}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

        on_rank_zero(self._group, f"writing {self._directory}", write)

    def finish(self) -> list[Path]:
        return [self._directory]
