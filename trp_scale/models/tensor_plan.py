"""Tensor-parallel plan of a model, independent of libraries.

A matrix with independent outputs (heads, hidden units of a feed-forward layer) is cut by columns, the next matrix by
rows; between them no communication is needed (Shoeybi et al., Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from trp_scale.core.engine import EngineError


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Names of modules by their kind of cut; names may contain *.

    Attributes:
        columns: linear layers; each rank computes a part of the outputs, with whole heads.
        packed: linear layers that concatenate several such layers, each of which is cut; with their number.
        rows: linear layers on inputs that are cut; the ranks' outputs are summed.
        vocabulary: embeddings; each rank holds a range of rows.
        first_dimension: other parameters and buffers that are cut like the vocabulary.
        entered: modules whose output, which is not cut, enters layers that are; its gradient is summed over the ranks.
        split: blocks and parts, without *, that support sequence parallelism outside attention and feed-forward
            (Korthikanti et al. 2022).
        losses: attribute of the model for a function: logits with cut columns [N, V / ranks] and labels [N] ->
            cross-entropies [N].
        divided: sizes that the number of ranks must divide, by flag.
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
        """Return columns, rows, vocabulary, entered, or an empty string."""
        if self.parts(module) > 1:
            return "columns"
        for kind in ("columns", "rows", "vocabulary", "entered"):
            if matches(module, getattr(self, kind)):
                return kind
        return ""

    def parts(self, module: str) -> int:
        """Return the number of layers that this layer packs."""
        return next((parts for pattern, parts in self.packed.items() if fnmatchcase(module, pattern)), 1)

    def splitting(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules whose `cut` splits tokens: those in `split`, and their parents."""
        for name, module in model.named_modules():
            parts = f"{name}." if name else ""
            if hasattr(module, "cut") and any(path == name or path.startswith(parts) for path in self.split):
                yield module

    def cut_first_dimension(self, model: nn.Module, ranks: int, rank: int = 0) -> None:
        """Replace the parameters and buffers of `first_dimension` by copies of this rank's part."""
        for path, owner in model.named_modules():
            for name, tensor in [*owner.named_parameters(path, False), *owner.named_buffers(path, False)]:
                if matches(name, self.first_dimension):
                    part = tensor.detach().chunk(ranks)[rank].clone()
                    kept = nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part
                    setattr(owner, name.rpartition(".")[2], kept)

    def partial(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of parameters for which a rank that splits tokens has only the gradient of its tokens; some
        may be cut. Modules inside with their own `cut` are left out: all heads use them, by `Cut.share_input`."""
        for path in self.split:
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                if not hasattr(module, "cut"):
                    yield from (parameter for parameter, _ in module.named_parameters(name, recurse=False))


def declared_plan(model: nn.Module, *, split: bool = False) -> TensorPlan:
    """Return the plan that a model declares as `tensor_plan`. `split`: the ranks split tokens.

    Raises:
        EngineError: it has none, or no blocks whose tokens can be split.
    """
    plan, name = getattr(model, "tensor_plan", None), type(model).__name__
    if not isinstance(plan, TensorPlan):
        raise EngineError(
            f"--engine megatron: {name} has no tensor_plan; allowed: an upstream whose model has one (pos_bert, mae, "
            "mm_mae), or --engine ddp or fsdp"
        )
    if split and not plan.split:
        raise EngineError(
            f"--megatron.sequence_parallel: {name} has no blocks whose tokens can be split; allowed: several "
            "--model.layers, or without --megatron.sequence_parallel"
        )
    return plan


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Cut:
    """Operations on a module whose heads and hidden units may be on several ranks; this class is for one rank.

    An engine replaces the attribute `cut` of modules.
    """

    def drawing(self) -> AbstractContextManager[None]:
        """Context for dropout in a cut module: ranks have different heads and must draw differently."""
        return nullcontext()

    def share_input(self, tensor: Tensor) -> Tensor:
        """Return an input that all heads share; its gradient is summed over the ranks."""
        return tensor

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """Return the output [..., T, O] of each layer, which may be cut, for tokens [..., T, D], or [..., T / ranks, D]
        if they are split. T / ranks is rounded up."""
        return tuple(layer(tokens) for layer in layers)

    def split(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the tokens: [..., T, D] -> [..., T / ranks, D]."""
        return tokens

    def whole(self, tokens: Tensor) -> Tensor:
        """Gather tokens after `split`: [..., T / ranks, D] -> [..., T, D]."""
        return tokens

    def join_features(self, tensor: Tensor) -> Tensor:
        """Gather features of all ranks without a graph: [..., K / ranks] -> [..., K]."""
        return tensor


WHOLE = Cut()
