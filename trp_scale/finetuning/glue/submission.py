"""Predictions in the files that GLUE's server takes (gluebenchmark.com): a line for each example, with its number and
the label as GLUE's own files spell it, or a score from 0 to 5."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from trp_scale.checkpoint.agreement import on_rank_zero
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.glue.examples import FORMATS, Examples
from trp_scale.finetuning.predictions import write_table
from trp_scale.finetuning.task import GatheredRows

logger = logging.getLogger(__name__)

LEAST_SCORE, LARGEST_SCORE = 0.0, 5.0
"""Of STS-B."""


class GlueSubmission:
    """One file for each measured set; see `Predictions`.

    Args:
        task: name of the task.
        measured: its examples by the name of the set, in the order of their numbers in batches.
        directory: for the files.
        group: ranks that predict.
    """

    def __init__(self, task: str, measured: Mapping[str, Examples], directory: Path, group: Group) -> None:
        self._form, self._measured = FORMATS[task], measured
        self._directory, self._group = directory, group
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """[R, C] logits, or one score for each row."""
        predicted = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)  # [R]
        self._rows.add(batch, predicted=predicted, measured_set=batch["measured_set"])

    def finish(self) -> list[Path]:
        """CoLA.tsv, or MNLI-m.tsv and MNLI-mm.tsv."""
        rows = self._rows.gather(self._group)

        def write() -> list[Path]:
            found = []
            for number, (name, examples) in enumerate(self._measured.items()):
                path = self._directory / f"{self._form.submitted.get(name, self._form.folder)}.tsv"
                spelt = [self.spelt(value) for value in rows["predicted"][rows["measured_set"] == number]]
                indices = examples.indices or [str(row) for row in range(len(spelt))]
                if examples.left_out:
                    logger.warning("%s lacks %d lines that could not be read", path, len(examples.left_out))
                write_table(path, ("index", "prediction"), zip(indices, spelt, strict=True), separator="\t")
                found.append(path)
            return found

        return on_rank_zero(self._group, f"writing {self._directory}", write)

    def spelt(self, predicted: float) -> str:
        """A label's number as GLUE's files spell it, or a score within its limits."""
        if self._form.values:
            return self._form.values[int(predicted)]
        return f"{np.clip(float(predicted), LEAST_SCORE, LARGEST_SCORE):.3f}"
