"""Pictures over time: what `trp-scale report --pictures` draws, from a run's checkpoints while it goes on.

They are PNG files in RUN/pictures/step_00000123; the report page shows them, Weights & Biases and TensorBoard get them.
The run's model takes no part, and no other rank: a checkpoint has all that is drawn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.errors import error_text
from trp_scale.evaluation.figures.drawing import figure_class
from trp_scale.evaluation.figures.pictures import draw_pictures
from trp_scale.evaluation.online.settings import PicturesSettings

log = logging.getLogger(__name__)


class OnlinePictures(Hook):
    """Draws checkpoints; see the head of this file.

    Args:
        settings: of the pictures.
        run: of the run.

    Raises:
        RefusedError: matplotlib is not installed.
    """

    name = "pictures"

    def __init__(self, settings: PicturesSettings, run: RunContext) -> None:
        figure_class()
        self.settings, self.draws = settings, run.world.rank == 0
        self.seen = 0
        self.latest: dict[str, Any] = {}

    def after_checkpoint(self, path: Path) -> None:
        self.seen += 1
        if self.draws and (self.seen - 1) % self.settings.every == 0:
            self.draw(path)

    def draw(self, checkpoint: Path) -> None:
        """Pictures of a checkpoint beside its run. What cannot be drawn is told, and ends nothing."""
        began, folder = time.monotonic(), checkpoint.parent.parent / PICTURES / checkpoint.name
        self.latest = {"step": int(checkpoint.name.rpartition("_")[2])}
        try:
            with torch.random.fork_rng(devices=[]):
                drawn = draw_pictures(checkpoint, folder, rows=self.settings.rows)
            self.latest["files"] = len(drawn)
        except Exception as error:  # whatever it is, the other ranks wait at the next step
            self.latest["notice"] = f"no pictures of {checkpoint.name}: {error_text(error)}"
            log.warning("%s", self.latest["notice"])  # a line of metrics may not come
        self.latest["seconds"] = time.monotonic() - began

    def metrics(self) -> Mapping[str, Any]:
        """Return the newest drawing, in the first line after it. step: of the checkpoint; files: that were drawn;
        seconds: it took; notice: why there are none."""
        latest, self.latest = self.latest, {}
        return latest
