"""Initial weights from (seed, tensor name), so that sharded and unsharded models start equal (invariant 1).

A model can be built on the meta device, where each parameter stores its initialiser. An engine then fills this rank's
shard, one tensor at a time, so that no rank ever holds the full model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.core.run import tensor_seed
from trp_scale.models.positions import sine_cosine


def initial_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Draw normal fp32 values with standard deviation `std` on the CPU, from a generator for this tensor."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return torch.randn(shape, generator=generator) * std


def xavier_uniform_tensor(seed: int, name: str, shape: tuple[int, ...], *, parts: int = 1) -> Tensor:
    """Draw uniform values in +-sqrt(6 / (inputs + outputs)) for a matrix [outputs, inputs] (Glorot and Bengio), or for
    `parts` matrices of outputs / parts rows that are stored as one."""
    bound = math.sqrt(6.0 / (shape[0] / parts + sum(shape[1:])))
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound


Value = Tensor | float
"""Value of a parameter: a tensor, or one number for all elements."""

LISTED_NAMES = 4
"""Most names of tensors in a message."""

INITIALISER = "first_value"
"""Attribute of a meta parameter: its initialiser, and its version at that time. Writes to a meta tensor have no effect,
but they increase its version."""


def set_value(parameter: Tensor, make: Callable[[], Value]) -> None:
    """Set a parameter to the value of `make`; on the meta device, store `make` as its initialiser."""
    if parameter.is_meta:
        setattr(parameter, INITIALISER, (make, parameter._version))
        return
    value = make()
    with torch.no_grad():
        if isinstance(value, Tensor):
            parameter.copy_(value)
        else:
            parameter.fill_(value)


def current_value(parameter: Tensor) -> Tensor:
    """Return the parameter's value; on the meta device, the value of its initialiser."""
    if not parameter.is_meta:
        return parameter.detach()
    value = getattr(parameter, INITIALISER)[0]()
    return value if isinstance(value, Tensor) else torch.full(parameter.shape, value)


class OtherTensorsError(ValueError):
    """Tensors do not fit a model: {kind of error, for example "missing": names, with shapes if these differ}. The
    message has the first LISTED_NAMES names of each kind."""

    def __init__(self, tensors: Mapping[str, Sequence[str]]) -> None:
        self.tensors = {what: names for what, names in tensors.items() if names}
        parts = []
        for what, listed in self.tensors.items():
            more = f" and {len(listed) - LISTED_NAMES} more" if len(listed) > LISTED_NAMES else ""
            parts.append(f"{what}: {', '.join(listed[:LISTED_NAMES])}{more}")
        super().__init__("; ".join(parts))

    def in_full(self) -> str:
        """Return a message with all names, one per line."""
        lines = ([f"{what}, {len(names)}:", *(f"  {name}" for name in names)] for what, names in self.tensors.items())
        return "\n".join(line for several in lines for line in several)

    @property
    def are_shortened(self) -> bool:
        """Whether the message leaves names out."""
        return any(len(names) > LISTED_NAMES for names in self.tensors.values())


def check_names(wanted: Collection[str], names: Collection[str]) -> None:
    """Raise OtherTensorsError if names are missing or unexpected."""
    missing, unexpected = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
    if missing or unexpected:
        raise OtherTensorsError({"missing": missing, "unexpected": unexpected})


def check_shapes(parameters: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise OtherTensorsError if shapes differ from those of the parameters; both are by name."""
    pairs = {name: (tuple(shape), tuple(parameters[name].shape)) for name, shape in shapes.items()}
    if other := [f"{name} {theirs}, here {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]:
        raise OtherTensorsError({"of another shape": other})


def set_converted(
    module: nn.Module,
    sources: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Tensor],
    ours: Callable[[str, Sequence[Tensor]], Tensor],
) -> None:
    """Set parameters to values from another model's tensors; meta parameters convert theirs when they are filled.

    Args:
        sources: {parameter: names of its source tensors}.
        tensors: source tensors by name.
        ours: converts a parameter's source tensors to its value; for its shape, called with tensors on the meta device.

    Raises:
        OtherTensorsError: a value has another shape; then nothing has changed.
    """
    parameters = dict(module.named_parameters())
    check_shapes(
        parameters,
        {name: ours(name, [tensors[k].to("meta") for k in several]).shape for name, several in sources.items()},
    )

    def value(name: str) -> Tensor:
        return ours(name, [tensors[source] for source in sources[name]])

    for name in sources:
        set_value(parameters[name], partial(value, name))


def set_all(module: nn.Module, rule: Callable[[str, nn.Parameter], Value]) -> None:
    """Set every parameter to the value of `rule`, whatever its module initialised."""
    for name, parameter in module.named_parameters():
        set_value(parameter, partial(rule, name, parameter))


def build_with_initialisers(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of `make` on the meta device with initialisers; or a model with content if a parameter has no
    initialiser, or was changed in place after it was set."""
    with parameters_as_shapes():
        module = make()
    for parameter in module.parameters():
        noted = getattr(parameter, INITIALISER, None)
        if noted is None or noted[1] != parameter._version:
            return make()
    return module


@contextmanager
def replace_attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def parameters_as_shapes() -> AbstractContextManager[None]:
    """Context in which parameters of new modules are on the meta device; buffers are not."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    return replace_attribute(nn.Module, "register_parameter", registered)


def initialisers(module: nn.Module) -> dict[str, Callable[[], Value]]:
    """Return the initialisers of meta parameters, by name; call this before the module is sharded."""
    return {
        name: getattr(parameter, INITIALISER)[0] for name, parameter in module.named_parameters() if parameter.is_meta
    }


def allocate(
    module: nn.Module,
    device: torch.device,
    weights: torch.device | None = None,
    make: Callable[[Tensor], Tensor] | None = None,
) -> nn.Module:
    """Move the module to the device. Allocate meta parameters there, or on `weights`, or with `make`."""
    make = make or partial(torch.empty_like, device=weights or device)

    def placed(tensor: Tensor) -> Tensor:
        return make(tensor) if tensor.is_meta else tensor.to(device)

    return module._apply(placed)  # type: ignore[no-untyped-call, no-any-return]


def fill_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the module to the device, and fill meta parameters."""
    values = initialisers(module)
    allocate(module, device)
    for name, parameter in module.named_parameters():
        if name in values:
            set_value(parameter, values[name])
    return module


def initialise(module: nn.Module, *, seed: int, std: float) -> None:
    """Initialise as BERT: matrices normal with `std`, biases 0, norm weights 1, embeddings of padding tokens 0 as in
    transformers."""
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

    set_all(module, rule)


def initialise_modern(module: nn.Module, *, seed: int, std: float, layers: int) -> None:
    """Initialise as ModernBERT (Warner et al. 2024, appendix A, public code): matrices normal with `std`, truncated at
    two of them; matrices that end a branch, and the head's, with std / sqrt(2 layers); norm weights 1; biases 0."""

    def rule(name: str, parameter: nn.Parameter) -> Value:
        if parameter.ndim < 2:
            return 1.0 if name.endswith(".weight") else 0.0
        ends = name.endswith((".Wo.weight", "head.dense.weight"))
        deviation = std / math.sqrt(2 * layers) if ends else std
        generator = torch.Generator().manual_seed(tensor_seed(seed, name))
        value = torch.empty(parameter.shape)
        return nn.init.trunc_normal_(value, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)

    set_all(module, rule)


def initialise_vision(module: nn.Module, *, seed: int, std: float) -> None:
    """Initialise as MAE (He et al., A.1; Wu et al.): matrices xavier uniform, with queries, keys and values as one
    matrix of 3 D rows; class and mask tokens and embeddings normal with `std`; biases and relative tables 0; norm
    weights 1; trained positions sine-cosine."""
    set_all(module, lambda name, parameter: vision_weights(seed, name, parameter, std))


def initialise_multimodal(module: nn.Module, *, seed: int, std: float) -> None:
    """Initialise as MultiMAE (Bachmann et al., public code): like MAE, but with queries, keys and values as matrices of
    D rows each, and mask tokens 0."""

    def rule(name: str, parameter: nn.Parameter) -> Value:
        if name.endswith("mask_token"):
            return 0.0
        parts = 3 if name.endswith("qkv.weight") else 2 if name.endswith("key_value.weight") else 1
        return vision_weights(seed, name, parameter, std, parts=parts)

    set_all(module, rule)


def vision_weights(seed: int, name: str, parameter: nn.Parameter, std: float, *, parts: int = 1) -> Value:
    """Return the initial value of one parameter (`initialise_vision`); for `parts` see `xavier_uniform_tensor`."""
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
