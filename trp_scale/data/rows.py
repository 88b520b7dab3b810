"""Opened data sets of one kind: order, split, cursors and workers are the same, whatever a batch of them holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Blocks, MixtureMember
from trp_scale.data.raw_files import require_dataset
from trp_scale.data.stores.prefetch import StoredTars
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.data.images.dataset import ImageMeta
    from trp_scale.data.text.dataset import TextMeta

KINDS = ("text", "image")
"""Kinds in dataset.json."""


Chosen = npt.NDArray[np.bool_]
"""[n] which blocks of a data set a source takes."""


class OpenedDataset(StoredTars, Protocol):
    """A data set of text or of images."""

    @property
    def blocks(self) -> Blocks: ...
    def digest(self) -> str:
        """Return the digest of everything that determines the rows."""
        ...


class LimitedBuilder(BatchBuilder, Protocol):
    """A batch builder that predicts at most `limit` places of a sequence."""

    @property
    def limit(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Opened data sets of one kind.

    Attributes:
        blocks: of each data set.
        meta: what all rows have in common; None for labelled sentences.
        limit: predicted places of a sequence: masked slots of a text row, masked patches of a crop (of all input
            modalities together).
        builder: makes batches of their rows.
        digests: of each data set.
        labels: of images: the class of each, in stored order, for each data set; -1 where they have none.
        stored: the data sets, whose tars are fetched ahead if they lie under URLs; empty: none are.
    """

    blocks: Sequence[Blocks]
    meta: TextMeta | ImageMeta | None
    limit: int
    builder: BatchBuilder
    digests: list[str]
    labels: list[Integers] | None = None
    stored: Sequence[StoredTars] = ()

    @classmethod
    def from_datasets(
        cls,
        datasets: Sequence[OpenedDataset],
        meta: TextMeta | ImageMeta,
        builder: LimitedBuilder,
        labels: list[Integers] | None = None,
    ) -> Rows:
        """The rows of opened data sets, which `builder` makes batches of."""
        return cls(
            blocks=[dataset.blocks for dataset in datasets],
            meta=meta,
            limit=builder.limit,
            builder=builder,
            digests=[dataset.digest() for dataset in datasets],
            labels=labels,
            stored=datasets,
        )

    def digest(self) -> str:
        """Hash of what this process sees of the storage (names, sizes, indexes)."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.digests:
            digest.update(part.encode())
        return digest.hexdigest()

    def members(self, paths: Sequence[MemberPath], chosen: Sequence[Chosen]) -> list[MixtureMember]:
        """The data sets with the blocks that one source takes of each."""
        return [
            MixtureMember(name=path.name, weight=path.weight, table=blocks, chosen=mask)
            for path, blocks, mask in zip(paths, self.blocks, chosen, strict=True)
        ]


def require_kind(paths: Sequence[MemberPath], wanted: str) -> None:
    """Refuse data of another kind than the encoder reads.

    Raises:
        DataError: there is no data.
        RefusedError: it is of another kind.
    """
    for path in paths:
        require_dataset(path.path)
        kind = read_json(path.path / "dataset.json").get("kind")
        if kind != wanted and isinstance(kind, str) and kind in KINDS:
            raise RefusedError(
                f"{path.path}: kind {kind!r} found, but this run's encoder reads kind "
                f"{wanted!r}; give other data (--data.path), or choose a recipe for {kind} data"
            )
