"""Arithmetic of a model that no formula of ours describes, such as a head from a library, counted as it runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(model: nn.Module, *inputs: Tensor) -> float:
    """FLOPs of one forward pass, one multiply-add being 2: matrix products, convolutions and attention.

    Nothing is computed: the pass goes over shapes alone, on torch's `meta` device, and leaves the model as it is.

    Args:
        model: on any device; what it does may depend on the shapes of its inputs, not on their values.
        inputs: of `forward`; only their shapes and types matter.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, {name: each.to("meta") for name, each in named}, tuple(x.to("meta") for x in inputs))
    return float(counter.get_total_flops())
