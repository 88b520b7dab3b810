"""Which parts of a model can be cut over the ranks of a tensor parallel group: what a model declares, and no library.

A matrix is cut by columns where its outputs are independent of one another (heads, hidden units of a feed-forward), and
the matrix that reads them by rows; between the two no rank needs another (Shoeybi et al., Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Names may have * in them.

    Attributes:
        columns: linear layers of which each rank computes a part of the outputs, heads whole.
        rows: linear layers that read such parts; the ranks' products are summed.
        vocabulary: embeddings of which each rank holds a range of the rows.
        first_dimension: parameters and buffers beside these that are cut as the vocabulary is.
        entered: modules whose whole output is read by what is cut: its gradient is summed over the ranks.
        losses: attribute of the model that takes a function: logits whose columns are cut [N, V / ranks] and labels [N]
            -> cross-entropies [N].
        divided: sizes that the number of ranks must divide, by the flag that sets them.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    first_dimension: tuple[str, ...] = ()
    entered: tuple[str, ...] = ()
    losses: str = ""
    divided: Mapping[str, int] = field(default_factory=dict)

    def kind(self, module: str) -> str:
        """columns, rows, vocabulary, entered, or nothing."""
        for kind in ("columns", "rows", "vocabulary", "entered"):
            if matches(module, getattr(self, kind)):
                return kind
        return ""


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns stands for this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@runtime_checkable
class DrawsInHeads(Protocol):
    """A module with dropout inside what is cut.

    Attributes:
        drawing: it makes one of these contexts around what it draws there. Ranks, whose heads differ, must not draw the
            same; an engine puts in what makes them draw apart.
    """

    drawing: Callable[[], AbstractContextManager[None]]
