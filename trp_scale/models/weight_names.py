"""Tables of weight names that convert weights from and to other libraries (tables: pretraining/*/weights.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn

from trp_scale.models.initialise import check_names, set_converted

COLOURS = 3
"""Channels of an image in an exported patch embedding."""


@dataclass(frozen=True)
class WeightLayout:
    """Conversion of a tensor's layout; `to_theirs` is `None` if export is unsupported."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor] | None = None


def linear_from_convolution(tensor: Tensor) -> Tensor:
    """[D, channel, row, column] -> [D, (row, column, channel)]; other tensors stay."""
    return tensor.permute(0, 2, 3, 1).flatten(1) if tensor.ndim == 4 else tensor


def convolution_from_linear(tensor: Tensor) -> Tensor:
    """[D, (row, column, channel)] of images -> [D, channel, row, column]; a bias stays."""
    if tensor.ndim == 1:
        return tensor
    side = isqrt(tensor.shape[1] // COLOURS)
    return tensor.reshape(-1, side, side, COLOURS).permute(0, 3, 1, 2).contiguous()


SAME = WeightLayout(lambda tensor: tensor, lambda tensor: tensor)
TOKEN = WeightLayout(lambda tensor: tensor.flatten(), lambda tensor: tensor.reshape(1, 1, -1))
"""Our vector [D], their [1, 1, D]."""
PATCHES = WeightLayout(linear_from_convolution, convolution_from_linear)
"""Patch embedding: our matrix, their convolution."""


@dataclass(frozen=True)
class Pair:
    """One line of a table.

    Attributes:
        ours: name of a parameter; `*` matches any text.
        theirs: names of the tensors that are concatenated to it, with the texts of `*` in the same order.
        layout: layout of the concatenated tensor.
    """

    ours: str
    theirs: str | tuple[str, ...]
    layout: WeightLayout = SAME

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


def _translate(name: str, pattern: str, template: str) -> str | None:
    """Return the template with the texts of the pattern's `*`; `None` without a match."""
    match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.+)"), name)
    if match is None:
        return None
    texts = iter(match.groups())
    return re.sub(r"\*", lambda _: next(texts), template)


class WeightNames:
    """Table of weight names; the first matching pair applies."""

    def __init__(self, *pairs: Pair) -> None:
        self.pairs = pairs

    def has(self, name: str) -> bool:
        """Whether the table contains our parameter."""
        return any(_translate(name, pair.ours, "") is not None for pair in self.pairs)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the source tensors of our parameter; raise KeyError if the table lacks it."""
        pair = self._pair(name)
        return tuple(filter(None, (_translate(name, pair.ours, source) for source in pair.sources)))

    def our_name(self, source: str) -> str | None:
        """Return the parameter with this tensor as its only source; `None` if the table has none."""
        names = (_translate(source, p.theirs, p.ours) for p in self.pairs if isinstance(p.theirs, str))
        return next(filter(None, names), None)

    def to_ours(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the value of our parameter from its source tensors."""
        joined = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        return self._pair(name).layout.to_ours(joined)

    def export_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the other library's tensors for our weights."""
        state: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            convert, names = self._pair(name).layout.to_theirs, self.sources(name)
            assert convert is not None, f"{name} is not exported"
            state |= zip(names, convert(tensor).chunk(len(names)), strict=True)
        return state

    def import_weights(self, model: nn.Module, state: Mapping[str, Tensor], *, kept: Collection[str] = ()) -> None:
        """Set the model's parameters, except `kept`, to the other library's tensors.

        Raises:
            OtherTensorsError: names are missing, unexpected or of another shape; then nothing has changed.
        """
        sources = {name: self.sources(name) for name, _ in model.named_parameters() if name not in kept}
        check_names({source for names in sources.values() for source in names}, state)
        set_converted(model, sources, state, self.to_ours)

    def _pair(self, name: str) -> Pair:
        for pair in self.pairs:
            if _translate(name, pair.ours, "") is not None:
                return pair
        raise KeyError(name)
