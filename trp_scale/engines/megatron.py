"""Tensor parallelism with megatron-core: the ranks of a tensor group split every large matrix, groups split the batch.

megatron-core's layers replace the model's layers by its plan (models/tensor_plan.py). Other parameters are replicated
in the group; its first rank counts them in norms and writes them to checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import STATE_NAMES, Box, Piece, whole_tensors
from trp_scale.core.run import per_member_rng
from trp_scale.distributed.groups import Group
from trp_scale.engines.ddp import DdpEngine, GradientReduction, OwnRows
from trp_scale.engines.optimizer import MatrixOptimizer
from trp_scale.engines.plain import Masters
from trp_scale.engines.sequence_parallel import (
    DropoutApart,
    Operation,
    exchange,
    gather_tokens,
    products,
    reduce_scatter_tokens,
    split_tokens,
)
from trp_scale.engines.shards import sum_of_squares
from trp_scale.models.initialise import Value, allocate, initialisers
from trp_scale.models.tensor_plan import Cut, declared_plan

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing Transformer Engine and Apex, which are not used
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
            VocabParallelEmbedding,
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
            vocab_parallel_cross_entropy,
        )
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
except ImportError as error:
    raise EngineError(
        f"--engine megatron needs megatron-core ({error}): pip install 'trp-scale[megatron]'; or --engine ddp or fsdp"
    ) from error


def megatron_groups(tensor_parallel: int, *, local_world: int) -> tuple[Group, Group]:
    """Return the data group and the tensor group of this rank. Consecutive ranks of a node form a tensor group.

    Args:
        tensor_parallel: ranks of a tensor group.
        local_world: ranks of a node.

    Raises:
        EngineError: `tensor_parallel` does not divide the ranks of the run or of a node.
    """
    world = dist.get_world_size()
    for ranks, where in ((world, "of this run"), (local_world, "of a node, and a tensor group must be on one node")):
        if ranks % tensor_parallel:
            raise EngineError(
                f"--megatron.tensor_parallel is {tensor_parallel} and does not divide the {ranks} ranks {where}; "
                f"allowed: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
            )
    initialised = parallel_state.model_parallel_is_initialized()
    if initialised and parallel_state.get_tensor_model_parallel_world_size() != tensor_parallel:
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()  # leaves the groups' threads and connections
        for group in filter(None, groups):
            dist.destroy_process_group(group)
        initialised = False
    if not initialised:
        parallel_state.initialize_model_parallel(tensor_parallel, create_gloo_process_groups=False)
    return (
        _group("data", parallel_state.get_data_parallel_group()),
        _group("tensor", parallel_state.get_tensor_model_parallel_group()),
    )


def _group(name: str, handle: Any) -> Group:
    return Group(name, rank=handle.rank(), size=handle.size(), handle=handle)


def product(layer: Any, inputs: Tensor, bias: Tensor | None, *, sum_gradient: bool) -> Tensor:
    """Compute inputs weight^T + bias with megatron-core, which overlaps the sum of the inputs' gradient over the ranks.

    Its backward pass ignores autocast on a CPU, so weights and inputs are cast here, as in torch's layer.
    """
    weight, kind = layer.weight, inputs.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return linear_with_grad_accumulation_and_async_allreduce(  # type: ignore[no-any-return]
            input=inputs,
            weight=weight,
            bias=bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=sum_gradient and layer.tp_group.size() > 1,
            sequence_parallel=False,
            tp_group=layer.tp_group,
        )


class ColumnParallel(ColumnParallelLinear):  # type: ignore[misc]
    """Linear layer [..., I] on all ranks -> [..., O / ranks]."""

    def forward(self, inputs: Tensor) -> Tensor:
        return product(self, inputs, self.bias, sum_gradient=True)


class RowParallel(RowParallelLinear):  # type: ignore[misc]
    """Linear layer [..., T, I / ranks] -> [..., T, O] on all ranks, or [..., share(T), O] if ranks split tokens."""

    splitting: Group | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        part = product(self, inputs, None, sum_gradient=False)
        if self.splitting is None:
            whole = reduce_from_tensor_model_parallel_region(part, group=self.tp_group)
        else:
            back = partial(gather_tokens, group=self.splitting, count=part.shape[-2])
            whole = exchange(part, partial(reduce_scatter_tokens, group=self.splitting), back)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)  # type: ignore[no-any-return]


class Vocabulary(VocabParallelEmbedding):  # type: ignore[misc]
    """Embedding [...] int64 -> [..., D] on all ranks. The padding row gets no gradient, as in torch's embedding."""

    padding_idx: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        if self.padding_idx is None:
            return output  # type: ignore[no-any-return]
        return torch.where((tokens == self.padding_idx).unsqueeze(-1), output.detach(), output)


def cut_layer(kind: str, layer: nn.Module, tensor_group: Group) -> nn.Module:
    """Return megatron-core's replacement of a layer, with uninitialised parameters."""
    settings: dict[str, Any] = {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=tensor_group.size,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.float32,
        ),
        "init_method": lambda weight: None,
        "tp_group": tensor_group.handle,
    }
    if kind == "vocabulary":
        assert isinstance(layer, nn.Embedding)
        embedding = Vocabulary(layer.num_embeddings, layer.embedding_dim, **settings)
        embedding.padding_idx = layer.padding_idx
        return embedding
    assert isinstance(layer, nn.Linear)
    settings |= {"bias": layer.bias is not None, "skip_bias_add": False}
    if kind == "columns":
        return ColumnParallel(layer.in_features, layer.out_features, gather_output=False, **settings)
    return RowParallel(layer.in_features, layer.out_features, input_is_parallel=True, **settings)


class CutOverRanks(Cut):
    """Split of a module's heads and hidden units over the ranks of a tensor group."""

    def __init__(self, tensor_group: Group, device: torch.device) -> None:
        self.group, self.device = tensor_group, device

    def drawing(self) -> AbstractContextManager[None]:
        return per_member_rng(self.device, self.group.rank)

    def share_input(self, tensor: Tensor) -> Tensor:
        read = copy_to_tensor_model_parallel_region(tensor, group=self.group.handle)
        if read.requires_grad:  # megatron-core loses the sum of a gradient that is not contiguous
            read.register_hook(torch.Tensor.contiguous)
        return read  # type: ignore[no-any-return]

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """Apply layers that read the same tokens, with one sum of the tokens' gradient."""
        if len(layers) == 1:
            return (layers[0](tokens),)
        kind = tokens.device.type
        if torch.is_autocast_enabled(kind):  # sum in the type that the products read
            tokens = tokens.to(torch.get_autocast_dtype(kind))
        read, cut = self.share_input(tokens), cast(tuple[ColumnParallel, ...], layers)
        return tuple(product(layer, read, layer.bias, sum_gradient=False) for layer in cut)

    def join_features(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.group.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group.handle)  # megatron-core's needs a GPU
        return torch.cat(parts, dim=-1)

    def enter(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Forward hook for an output that each rank reads for its part."""
        return self.share_input(output)


class SplitTokens(CutOverRanks):
    """Sequence parallelism: each rank has a share of the tokens outside of the split layers.

    Attributes:
        count: T of the last split tokens. A model has one such object, since it runs its blocks one after the other.
    """

    def __init__(self, tensor_group: Group, device: torch.device) -> None:
        super().__init__(tensor_group, device)
        self.scatter, self.own = (
            partial(operation, group=tensor_group) for operation in (reduce_scatter_tokens, split_tokens)
        )
        self.count = 0

    @property
    def gather(self) -> Operation:
        """Gather for the current count; a backward pass keeps it."""
        return partial(gather_tokens, group=self.group, count=self.count)

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        return products(tokens, self.gather, self.scatter, layers)

    def split(self, tokens: Tensor) -> Tensor:
        self.count = tokens.shape[-2]
        return exchange(tokens, self.own, self.gather)

    def whole(self, tokens: Tensor) -> Tensor:
        return exchange(tokens, self.gather, self.own)


class MegatronEngine(DdpEngine):
    """Tensor parallelism in groups of `megatron.tensor_parallel` ranks, data parallelism between them (`data_group` of
    `megatron_groups`), for a model with a `tensor_plan`.

    Attributes:
        cut: names of the parameters that are split over a tensor group.
        partial: replicated parameters whose gradient on each rank is of its own tokens only.
    """

    name = "megatron"
    plain_forward = False

    def __init__(self, module: nn.Module, config: Config, *, device: torch.device, data_group: Group) -> None:
        ranks = config.megatron.tensor_parallel
        self.world = Group("world", dist.get_rank(), dist.get_world_size())
        plan = declared_plan(module, split=config.megatron.sequence_parallel)
        for flag, size in plan.divided.items():
            if size % ranks:
                raise EngineError(
                    f"--megatron.tensor_parallel is {ranks} and does not divide {flag} {size}; allowed: a number that "
                    "divides it"
                )
        self.plan = plan
        self.tensor_group = megatron_groups(ranks, local_world=ranks)[1]
        self.boxes: dict[str, list[Box]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        super().__init__(module, config, device=device, data_group=data_group)

    @property
    def shards_moments(self) -> bool:
        """Whether each data rank updates only its rows of each parameter."""
        return self.config.megatron.shard_moments and self.data_group.size > 1

    def place(self, module: nn.Module) -> nn.Module:
        """Insert megatron-core's layers and fill each parameter with this rank's part of its initial value."""
        values: dict[str, Callable[[], Value]] = {
            name: partial(lambda value: value, parameter.detach()) for name, parameter in module.named_parameters()
        }
        values |= initialisers(module)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        cut = CutOverRanks(self.tensor_group, self.device)
        for name, layer in list(module.named_modules()):
            kind = self.plan.kind(name)
            if kind == "entered":
                layer.register_forward_hook(cut.enter)
            elif kind:
                module.set_submodule(name, cut_layer(kind, layer, self.tensor_group))
            if self.tensor_group.size > 1 and isinstance(getattr(layer, "cut", None), Cut):
                layer.cut = cut
        if self.config.megatron.sequence_parallel:
            self._split_tokens(module)
        self.plan.cut_first_dimension(module, self.tensor_group.size, self.tensor_group.rank)
        if self.plan.losses and self.tensor_group.size > 1:  # one rank needs no three sums
            setattr(module, self.plan.losses, vocab_parallel_cross_entropy)
        allocate(module, self.device)
        for name, parameter in module.named_parameters():
            self.boxes[name] = self._boxes(name, tuple(parameter.shape))
            value = values[name]()
            with torch.no_grad():
                if isinstance(value, Tensor):
                    parameter.copy_(torch.cat([box.of(value) for box in self.boxes[name]]))
                else:
                    parameter.fill_(value)
        return module

    def _split_tokens(self, module: nn.Module) -> None:
        """Make blocks compute on this rank's tokens outside of the split layers."""
        cut = SplitTokens(self.tensor_group, self.device)
        for path in self.plan.split:
            for name, layer in list(module.get_submodule(path).named_modules(prefix=path)):
                if isinstance(layer, RowParallel):
                    layer.splitting = self.tensor_group
                elif isinstance(layer, nn.Dropout):
                    module.set_submodule(name, DropoutApart(layer, cut))
        for layer in self.plan.splitting(module):
            layer.cut = cut  # type: ignore[assignment]

    def build_masters(self, module: nn.Module) -> Masters | None:
        self.cut = {
            name for name, parameter in module.named_parameters() if tuple(parameter.shape) != self.shapes[name]
        }
        if not self.shards_moments:
            return super().build_masters(module)
        masters = OwnRows(module, self.data_group, rounded=self.rounds_weights)
        for (name, parameter), rows in zip(module.named_parameters(), masters.rows, strict=True):
            self.boxes[name] = list(rows_of_boxes(self.boxes[name], parameter, rows))
        return masters

    def build_reduction(self, module: nn.Module, dtype: torch.dtype | None) -> GradientReduction:
        if isinstance(self.masters, OwnRows):
            return self.masters.reduction(dtype)
        return super().build_reduction(module, dtype)

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(module)
        partial = set(self.plan.partial(module) if self.config.megatron.sequence_parallel else ()) - self.cut
        self.partial = [parameter for name, parameter in self.named_parameters() if name in partial]
        if isinstance(optimizer, MatrixOptimizer):
            # Replicated parameters are counted on each rank; this cancels in LAMB's ratio of two norms.
            parameters = [parameter for _, parameter in self.named_parameters()]
            group = self.world if self.shards_moments else self.tensor_group
            optimizer.shard(parameters, lambda tensor: tensor, lambda _: 0, group)
        return optimizer

    def _boxes(self, name: str, shape: tuple[int, ...]) -> list[Box]:
        """Return this rank's elements of a whole parameter, in its order: a range of the split dimension, for each of
        the packed matrices."""
        whole, parts = self.shapes[name], self.plan.parts(name.rpartition(".")[0])
        bounds = [(0, size) for size in whole]
        cut = next((number for number, size in enumerate(whole) if shape[number] != size), None)
        if cut is None:
            return [Box(tuple(bounds))]
        size, boxes = shape[cut] // parts, []
        for part in range(parts):
            start = whole[cut] // parts * part + size * self.tensor_group.rank
            boxes.append(Box((*bounds[:cut], (start, start + size), *bounds[cut + 1 :])))
        return boxes

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last:
            self._sum_partial_gradients()

    @torch.no_grad()
    def _sum_partial_gradients(self) -> None:
        """Sum the gradients of `partial` over the tensor group, in one collective."""
        gradients = [parameter.grad.view(-1) for parameter in self.partial if parameter.grad is not None]
        if gradients:
            whole = self.tensor_group.sum(torch.cat(gradients))
            torch._foreach_copy_(gradients, torch.split(whole, [gradient.numel() for gradient in gradients]))

    def check_gradients(self) -> Tensor:
        cut: list[Tensor] = []
        alike: list[Tensor] = []
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                (cut if name in self.cut else alike).append(parameter.grad)
        # Count each element once: replicated parameters on the first rank of the tensor group only.
        speaking = self.tensor_group.rank == 0
        squares = sum_of_squares([*cut, *(alike if speaking else [])], self.device)
        self._norm = (self.world if self.shards_moments else self.tensor_group).sum(squares).sqrt()
        return self._norm

    def pieces(self) -> Iterator[Piece]:
        """Yield a piece for each box. Data ranks with the same elements own the parameters in turn."""
        for number, (name, parameter) in enumerate(self.named_parameters()):
            state = self.optimizer.state.get(parameter, {})
            tensors = {"weight": parameter.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            parts = {key: self._by_box(name, tensor) for key, tensor in tensors.items()}
            speaks = name in self.cut or self.tensor_group.rank == 0
            turn = self.shards_moments or number % self.data_group.size == self.data_group.rank
            for place, box in enumerate(self.boxes[name]):
                yield Piece(
                    name=name,
                    shape=self.shapes[name],
                    region=box,
                    tensors={key: flat[place] for key, flat in parts.items()},
                    owner=speaks and turn,
                )

    def _by_box(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor.reshape(-1), [box.size for box in self.boxes[name]])

    def piece_gradients(self) -> list[Tensor]:
        return [
            part
            for name, parameter in self.named_parameters()
            for part in self._by_box(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        ]

    @property
    def shard_group(self) -> Group:
        return self.world

    def watch_micro_batches(self) -> None:
        raise EngineError(
            "--engine megatron has no whole gradients of micro-batches; allowed: --engine ddp or fsdp, or without "
            "--logging.noise_scale and other hooks that read them"
        )

    def full_weights(self) -> dict[str, Tensor]:
        pieces = list(self.pieces())
        tensors = whole_tensors(pieces, [piece.tensors["weight"] for piece in pieces], self.world)
        return tensors if self.world.rank == 0 else {}


def rows_of_boxes(boxes: list[Box], tensor: Tensor, rows: tuple[int, int]) -> Iterator[Box]:
    """Yield the parts of `boxes` in rows [first, last) of `tensor`, which stacks the boxes in its first dimension."""
    size = len(tensor) // len(boxes)  # rows of a box
    for number, box in enumerate(boxes):
        (first, _), *others = box.bounds
        start, stop = (min(max(row - number * size, 0), size) for row in rows)
        if start < stop:
            yield Box(((first + start, first + stop), *others))
