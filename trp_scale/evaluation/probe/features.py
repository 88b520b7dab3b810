"""Features of all images of a data set, computed by all ranks and cached in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from trp_scale.checkpoint.document import reading_tensors
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers
from trp_scale.distributed.groups import ALONE, Group, on_rank_zero
from trp_scale.errors import CheckpointError
from trp_scale.finetuning.measurement import GatheredRows
from trp_scale.storage.files import atomic_write

if TYPE_CHECKING:
    from trp_scale.evaluation.encoders import FrozenEncoder
    from trp_scale.evaluation.probe.images import ProbedImages

logger = logging.getLogger(__name__)

Features = npt.NDArray[np.float32]

FORMAT = 1
"""Version of the cache; part of the key."""


@dataclass(frozen=True, kw_only=True)
class LabelledFeatures:
    """Attributes: features: [n, D] fp32, in stored order; labels: [n] int64."""

    features: Features
    labels: Integers

    def take(self, rows: npt.NDArray[np.bool_]) -> LabelledFeatures:
        """Select the rows of a mask [n]."""
        return LabelledFeatures(features=self.features[rows], labels=self.labels[rows])


def extract(encoder: FrozenEncoder, batches: Iterable[Batch], group: Group = ALONE) -> LabelledFeatures:
    """Return features and classes of the rows of all ranks, in order, without padding rows. A micro-batch has the same
    rows on any number of ranks, so its features are bit-identical. Collective.

    Raises:
        RefusedError: on all ranks, for unreadable images or non-finite features, which some classifiers would accept.
    """
    rows, corrupt = GatheredRows(), set()
    for batch in batches:
        corrupt |= set(batch.corrupt)
        rows.add(batch, features=encoder(batch["images"]), labels=batch["labels"])
    if unread := sorted(set().union(*group.gather_objects(corrupt))):
        raise RefusedError(
            f"{len(unread)} images, {', '.join(unread[:3])}, cannot be read, but accuracy needs all images; copy or "
            "shard the data again"
        )
    gathered = rows.gather(group)
    features: Features = gathered["features"]
    if wrong := int((~np.isfinite(features).all(axis=1)).sum()):
        raise RefusedError(
            f"the features of {wrong} of {len(features)} images are not finite; check the training of the encoder"
        )
    return LabelledFeatures(features=features, labels=gathered["labels"])


def all_features(
    encoder: FrozenEncoder, images: ProbedImages, group: Group, cache: Path
) -> tuple[LabelledFeatures | None, bool]:
    """Return the features of all images, on rank 0 only, and whether they were cached. Collective. Raises
    RefusedError on all ranks, as `extract` or if the cache is not writable."""
    key = hashlib.blake2b(json.dumps([FORMAT, encoder.digest(), images.digest]).encode(), digest_size=16).hexdigest()
    path = cache / f"{key}.safetensors"
    parts: list[LabelledFeatures] = []

    def read() -> bool:
        cached = _read(path)
        if cached is None:
            _require_writable(cache)  # check before the encoder runs for hours
        parts.extend([] if cached is None else [cached])
        return cached is not None

    if on_rank_zero(group, f"reading {path}", read):
        return (parts[0] if parts else None), True
    labelled = extract(encoder, images.batches(group), group)
    on_rank_zero(group, f"writing {path}", lambda: _write(path, labelled))
    return (labelled if group.rank == 0 else None), False


def _read(path: Path) -> LabelledFeatures | None:
    if not path.is_file():
        return None
    try:
        with reading_tensors(path):
            stored = LabelledFeatures(**load_file(path))
        features, labels = stored.features, stored.labels
        kinds = (features.dtype.str, features.ndim, labels.dtype.str, labels.ndim)
        if kinds != ("<f4", 2, "<i8", 1) or len(features) != len(labels):
            raise CheckpointError(f"{path}: contains no features")
    except CheckpointError as error:
        logger.warning("%s; the features are computed again", error)
        return None
    return stored


def _require_writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise RefusedError(f"--cache {cache}: not writable ({error.strerror}); give another") from error


def _write(path: Path, features: LabelledFeatures) -> None:
    with atomic_write(path) as stream:
        stream.write(save({"features": np.ascontiguousarray(features.features), "labels": features.labels}))
