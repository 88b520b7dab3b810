"""Plan of the parts of a model that can be cut over a tensor-parallel group: declared by a model, independent of
libraries.

A matrix is cut by columns where its outputs are independent of one another (heads, hidden units of a feed-forward), and
the matrix that reads them by rows; between the two no rank needs another (Shoeybi et al., Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Names may have * in them.

    Attributes:
        columns: linear layers of which each rank computes a part of the outputs, heads whole.
        packed: linear layers that are several such, their outputs one after the other, and each is cut: how many.
        rows: linear layers that read such parts; the ranks' products are summed.
        vocabulary: embeddings of which each rank holds a range of the rows.
        first_dimension: parameters and buffers beside these that are cut as the vocabulary is.
        entered: modules whose whole output is read by what is cut: its gradient is summed over the ranks.
        split: names, without *, of blocks and parts that can compute on some of the tokens outside attention and
            feed-forward (sequence parallelism, Korthikanti et al. 2022).
        losses: attribute of the model that takes a function: logits whose columns are cut [N, V / ranks] and labels [N]
            -> cross-entropies [N].
        divided: sizes that the number of ranks must divide, by the flag that sets them.
    """

    columns: tuple[str, ...] = ()
    packed: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    first_dimension: tuple[str, ...] = ()
    entered: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    losses: str = ""
    divided: Mapping[str, int] = field(default_factory=dict)

    def kind(self, module: str) -> str:
        """columns, rows, vocabulary, entered, or nothing."""
        if self.parts(module) > 1:
            return "columns"
        for kind in ("columns", "rows", "vocabulary", "entered"):
            if matches(module, getattr(self, kind)):
                return kind
        return ""

    def parts(self, module: str) -> int:
        """Number of layers in this one, each of which is cut."""
        return next((parts for pattern, parts in self.packed.items() if fnmatchcase(module, pattern)), 1)

    def splitting(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules whose `cut` splits tokens: what is split, and what has such parts."""
        for name, module in model.named_modules():
            parts = f"{name}." if name else ""
            if hasattr(module, "cut") and any(path == name or path.startswith(parts) for path in self.split):
                yield module

    def partial(self, model: nn.Module) -> Iterator[str]:
        """Names of the parameters of which a rank that splits tokens makes the gradient of its own alone; some may be
        cut. Not those of a module inside that has a `cut`: all heads read these, by `Cut.shared`."""
        for path in self.split:
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                if not hasattr(module, "cut"):
                    yield from (parameter for parameter, _ in module.named_parameters(name, recurse=False))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns stands for this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Cut:
    """Operations on a module whose heads and hidden units may be on several ranks. This one cuts nothing.

    An engine puts its own in the place of a module's attribute `cut`.
    """

    def drawing(self) -> AbstractContextManager[None]:
        """Around dropout inside what is cut: ranks, which have different heads, must not draw the same."""
        return nullcontext()

    def share_input(self, tensor: Tensor) -> Tensor:
        """Return the input that all heads share: its gradient is summed over the ranks."""
        return tensor

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """[..., T, D], of a rank that has some of the tokens [..., T / ranks, D] -> of each layer, whose outputs may be
        cut, [..., T, O]. A rank's share of tokens is rounded up."""
        return tuple(layer(tokens) for layer in layers)

    def split(self, tokens: Tensor) -> Tensor:
        """[..., T, D] that all ranks have -> this rank's [..., T / ranks, D]."""
        return tokens

    def whole(self, tokens: Tensor) -> Tensor:
        """Return the tokens that `split` has split."""
        return tokens

    def join_features(self, tensor: Tensor) -> Tensor:
        """[..., K / ranks] of each rank -> [..., K] of all; without a graph."""
        return tensor


WHOLE = Cut()
