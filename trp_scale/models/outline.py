"""Outline of a model by the names and shapes of its tensors: inputs, blocks and widths. For messages about another
model's weights, whichever library has named them. For messages about weights that are another model's, whichever
library has named them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_STACKED = re.compile(r"((?:.*\.)?(?:layer|layers|block|blocks|h|encoder))\.(\d+)\.")

_POSITIONS = "position_embeddings.weight"

_MARKS = {
    "text": ("word_embeddings", "embed_tokens", "wte."),
    "images": ("patch_embed", "input_adapters", "tokenisers"),
}
"""Parts of names that tell what a model reads."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Attributes: reads: text or images, empty: not known. layers, hidden_size, intermediate_size: of the encoder's
    blocks, max_positions: of text; 0 where they cannot be told. heads: no tensor tells them; 0: not known."""

    reads: str = ""
    layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    max_positions: int = 0
    heads: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], heads: int = 0) -> ModelOutline:
        """The outline of a model's tensors, by name, and of what else is said of it."""
        reads = next((kind for kind, marks in _MARKS.items() if any(mark in n for n in shapes for mark in marks)), "")
        stacks: dict[str, set[int]] = defaultdict(set)
        for match in filter(None, map(_STACKED.match, shapes)):
            stacks[match[1]].add(int(match[2]))
        if not stacks:
            return cls(reads=reads, heads=heads)
        table = next((shape for name, shape in shapes.items() if name.endswith(_POSITIONS) and len(shape) == 2), (0,))
        encoder = max(stacks, key=lambda prefix: ("decoder" not in prefix, len(stacks[prefix])))
        within = [shape for name, shape in shapes.items() if name.startswith(f"{encoder}.")]
        widths = Counter(shape[0] for shape in within if len(shape) == 1)  # most are of norms and biases
        width = widths.most_common(1)[0][0] if widths else 0
        both = {shape for shape in within if len(shape) == 2 and shape[::-1] in within and shape[0] != shape[1]}
        inner = max((side for shape in both for side in shape if width in shape and side != width), default=0)
        return cls(
            reads=reads,
            layers=len(stacks[encoder]),
            hidden_size=width,
            intermediate_size=inner,
            max_positions=table[0],
            heads=heads,
        )

    def differs_from(self, here: ModelOutline) -> str:
        """Return why these weights do not fit the model `here`, and the settings that do; "" if nothing is known."""
        if self.reads and here.reads and self.reads != here.reads:
            return (
                f"weights of a model that reads {self.reads}, this one reads {here.reads}; give those of another model"
            )
        names = ("layers", "hidden_size", "intermediate_size", "max_positions", "heads")
        pairs = {name: (getattr(self, name), getattr(here, name)) for name in names}
        known = {name: pair for name, pair in pairs.items() if all(pair)}
        other = [f"--model.{name} {theirs}" for name, (theirs, ours) in known.items() if theirs != ours]
        differences = [f"{self} there, {here} here"] if str(self) != str(here) else []
        differences += [
            f"{known[name][0]} {name.removeprefix('max_')} there, {known[name][1]} here"
            for name in ("max_positions", "heads")
            if name in known and known[name][0] != known[name][1]
        ]
        return f"{'; '.join(differences)}; give {' '.join(other)}, or other weights" if other else ""

    def __str__(self) -> str:
        within = f" ({self.intermediate_size} within)" if self.intermediate_size else ""
        return f"{self.layers} layer{'s' * (self.layers != 1)} of {self.hidden_size}{within}"
