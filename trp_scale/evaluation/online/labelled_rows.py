"""The labelled rows of online probes: what is common to images and sentences."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.run import RunContext
from trp_scale.evaluation.online.settings import ProbesSettings
from trp_scale.evaluation.probe.features import LabelledFeatures

NAME = "this run"
"""What messages call the encoder."""

Weights = dict[str, Tensor]
"""Of the run's model, by its names; on rank 0 alone."""

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of the rows that are learned from, and of those that are measured."""


class LabelledRows(Protocol):
    """Rows with labels, as the run's encoder sees them."""

    def features(self, weights: Weights) -> Pair | None:
        """Compute features with the current weights; `None` except on rank 0. Collective."""
        ...


def require_two_classes(labels: npt.NDArray[Any], where: str) -> None:
    """Raises:
    RefusedError: a classifier has nothing to tell apart."""
    if len(np.unique(labels)) < 2:
        raise RefusedError(
            f"--probes.data: the {len(labels):,} rows of {where} that a probe would learn from are all of one class; "
            "give other data, or more --probes.rows"
        )


def open_rows(settings: ProbesSettings, run: RunContext) -> LabelledRows:
    """Open the rows that a run's encoder is probed on.

    Raises: as `LabelledImages` and `LabelledSentences`.
    """
    if run.config.reads == "text":
        from trp_scale.evaluation.online.labelled_sentences import LabelledSentences

        return LabelledSentences(settings, run)
    from trp_scale.evaluation.online.labelled_images import LabelledImages

    return LabelledImages(settings, run)
