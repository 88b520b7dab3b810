"""Initial weights from (seed, the tensor's name), so that sharded and unsharded models start equal (invariant 1).

A model can be made without content: its parameters are shapes, on torch's meta device, and each knows what its first
value is. An engine then fills what this rank holds, one tensor after the other, so that no rank ever has the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.core.seeds import tensor_seed
from trp_scale.models.positions import sine_cosine


def initial_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values with standard deviation `std`, drawn on the CPU from a generator of this tensor's own, fp32."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return torch.randn(shape, generator=generator) * std


def xavier_uniform_tensor(seed: int, name: str, shape: tuple[int, ...], *, parts: int = 1) -> Tensor:
    """Uniform values within sqrt(6 / (inputs + outputs)) of 0 for a matrix [outputs, inputs] (Glorot and Bengio).

    Args:
        parts: matrices of outputs / parts rows that are stored as one; the bound is that of one of them.
    """
    bound = math.sqrt(6.0 / (shape[0] / parts + sum(shape[1:])))
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound


Value = Tensor | float
"""Of all elements of a parameter, or of each."""

SHOWN = 4
"""Names of tensors that a message shows."""

NOTED = "first_value"
"""Attribute of a parameter without content: what makes its first value, and how often it had been written to by then.
torch writes to a shape without complaint and without effect; it counts, though."""


def give(parameter: Tensor, make: Callable[[], Value]) -> None:
    """Give a parameter this value; where it has no content, note what makes it."""
    if parameter.is_meta:
        setattr(parameter, NOTED, (make, parameter._version))
        return
    value = make()
    with torch.no_grad():
        if isinstance(value, Tensor):
            parameter.copy_(value)
        else:
            parameter.fill_(value)


def current_value(parameter: Tensor) -> Tensor:
    """The parameter's value now; where it has no content, what it would be filled with."""
    if not parameter.is_meta:
        return parameter.detach()
    value = getattr(parameter, NOTED)[0]()
    return value if isinstance(value, Tensor) else torch.full(parameter.shape, value)


class OtherTensorsError(ValueError):
    """Tensors that are not those of a model; its text names the first SHOWN of each kind.

    Args:
        tensors: by what is wrong with them ("missing", say), their names, and shapes where these differ.
    """

    def __init__(self, tensors: Mapping[str, Sequence[str]]) -> None:
        self.tensors = {what: names for what, names in tensors.items() if names}
        super().__init__("; ".join(f"{what}: {_some(names)}" for what, names in self.tensors.items()))

    def in_full(self) -> str:
        """Each name, in a line of its own."""
        lines = ([f"{what}, {len(names)}:", *(f"  {name}" for name in names)] for what, names in self.tensors.items())
        return "\n".join(line for several in lines for line in several)

    @property
    def are_shortened(self) -> bool:
        """Whether the text lacks names."""
        return any(len(names) > SHOWN for names in self.tensors.values())


def check_names(wanted: Collection[str], names: Collection[str]) -> None:
    """
    Raises:
        OtherTensorsError: names that are missing or unexpected.
    """
    missing, unexpected = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
    if missing or unexpected:
        raise OtherTensorsError({"missing": missing, "unexpected": unexpected})


def check_shapes(parameters: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors whose shapes are not those of the model's parameters. Both are by name.

    Raises:
        OtherTensorsError: those of another shape.
    """
    pairs = {name: (tuple(shape), tuple(parameters[name].shape)) for name, shape in shapes.items()}
    if other := [f"{name} {theirs}, here {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]:
        raise OtherTensorsError({"of another shape": other})


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def take(
    module: nn.Module,
    sources: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Tensor],
    ours: Callable[[str, Sequence[Tensor]], Tensor],
) -> None:
    """Give parameters another model's tensors. One without content makes its own of them when it is filled.

    Args:
        sources: by parameter, the names of what it is made of.
        tensors: by these names.
        ours: makes a parameter's value of its sources, or its shape of theirs, which are then on the meta device.

    Raises:
        OtherTensorsError: values of another shape; then nothing has been given.
    """
    parameters = dict(module.named_parameters())
    check_shapes(
        parameters,
        {name: ours(name, [tensors[k].to("meta") for k in several]).shape for name, several in sources.items()},
    )

    def value(name: str) -> Tensor:
        return ours(name, [tensors[source] for source in sources[name]])

    for name in sources:
        give(parameters[name], partial(value, name))


def write(module: nn.Module, rule: Callable[[str, nn.Parameter], Value]) -> None:
    """Give every parameter what the rule says for its name, whatever its module drew before."""
    for name, parameter in module.named_parameters():
        give(parameter, partial(rule, name, parameter))


def without_content(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` makes, its parameters shapes whose first values are noted; or the model as it is, where
    some first value is not noted, or was changed in place after it was."""
    with parameters_as_shapes():
        module = make()
    for parameter in module.parameters():
        noted = getattr(parameter, NOTED, None)
        if noted is None or noted[1] != parameter._version:
            return make()
    return module


@contextmanager
def parameters_as_shapes() -> Iterator[None]:
    """Parameters that modules register meanwhile go to the meta device; buffers stay."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def first_values(module: nn.Module) -> dict[str, Callable[[], Value]]:
    """Return the initialisers of parameters without content, by name; call it before the module is sharded."""
    return {name: getattr(parameter, NOTED)[0] for name, parameter in module.named_parameters() if parameter.is_meta}


def allocate(
    module: nn.Module,
    device: torch.device,
    weights: torch.device | None = None,
    make: Callable[[Tensor], Tensor] | None = None,
) -> nn.Module:
    """Move the module to the device, with memory for parameters that have no content: there, or on `weights`, or what
    `make` makes for one."""
    make = make or partial(torch.empty_like, device=weights or device)

    def placed(tensor: Tensor) -> Tensor:
        return make(tensor) if tensor.is_meta else tensor.to(device)

    return module._apply(placed)  # type: ignore[no-untyped-call, no-any-return]


def fill_module(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on the device with all its content."""
    values = first_values(module)
    allocate(module, device)
    for name, parameter in module.named_parameters():
        if name in values:
            give(parameter, values[name])
    return module


def initialise(module: nn.Module, *, seed: int, std: float) -> None:
    """BERT's initialisation: matrices normal with `std`, biases 0, norm weights 1.

    The row of an embedding's padding token is zero, as in transformers.
    """
    padding: dict[str, Any] = {
        f"{name}.weight": child.padding_idx
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding) and child.padding_idx is not None
    }

    def rule(name: str, parameter: nn.Parameter) -> Value:
        if parameter.ndim < 2:
            return 1.0 if name.endswith("LayerNorm.weight") else 0.0
        value = initial_tensor(seed, name, tuple(parameter.shape), std)
        if name in padding:
            value[padding[name]].zero_()
        return value

    write(module, rule)


def initialise_vision(module: nn.Module, *, seed: int, std: float) -> None:
    """The masked autoencoder's initialisation (He et al., A.1; Wu et al.): matrices xavier uniform, class and mask
    tokens and embeddings normal with `std`, biases and relative tables 0, norm weights 1; positions that are trained
    begin at sines and cosines.

    Queries, keys and values are one matrix of 3 D rows, as there.
    """
    write(module, lambda name, parameter: vision_weights(seed, name, parameter, std))


def initialise_multimodal(module: nn.Module, *, seed: int, std: float) -> None:
    """MultiMAE's initialisation (Bachmann et al., public code): the masked autoencoder's, but queries, keys and values
    are matrices of D rows each, and mask tokens start at 0."""

    def rule(name: str, parameter: nn.Parameter) -> Value:
        if name.endswith("mask_token"):
            return 0.0
        parts = 3 if name.endswith("qkv.weight") else 2 if name.endswith("key_value.weight") else 1
        return vision_weights(seed, name, parameter, std, parts=parts)

    write(module, rule)


def vision_weights(seed: int, name: str, parameter: nn.Parameter, std: float, *, parts: int = 1) -> Value:
    """Return the values that `initialise_vision` assigns to one parameter; `parts` as in `xavier_uniform_tensor`."""
    if name.endswith(("_token", "_embedding")):
        return initial_tensor(seed, name, tuple(parameter.shape), std)
    if name.endswith(".table"):
        return 0.0
    if name.endswith("pos_embed"):
        rows, width = parameter.shape
        return torch.cat([torch.zeros(1, width), sine_cosine(math.isqrt(rows - 1), width).float()])
    if parameter.ndim >= 2:
        return xavier_uniform_tensor(seed, name, tuple(parameter.shape), parts=parts)
    return 1.0 if name.endswith(".weight") else 0.0  # the only vectors called weight are the norms'
