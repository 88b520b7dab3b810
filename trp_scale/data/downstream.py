"""Labelled images that a run learns from beside its own rows: D_tr and D_val of learned masks."""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.data.train_source import TrainSource

TRAIN, VALIDATION = "downstream_train", "downstream_validation"
"""Names of the two sources, in cursors and in the hash of their orders."""


@dataclass(frozen=True, kw_only=True)
class Downstream:
    """The sources of levels II and III (MLO-MAE 3.2): endless, each shuffled in an order of its own.

    Attributes:
        train: D_tr.
        validation: D_val; never what data.validation_fraction holds out.
        classes: number of classes.
        notices: what a user should know of the split.
    """

    train: TrainSource
    validation: TrainSource
    classes: int
    notices: list[str]

    def close(self) -> None:
        """End the workers of both."""
        self.train.close()
        self.validation.close()
