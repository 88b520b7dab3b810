"""How large gradients are: this rank's part of the reduced one, and each micro-batch's own before it is reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-dimensional float64 on `device`; 0 where there are no gradients.

    Norms are taken in fp32 at least: in fp16 the norm of a scaled gradient passes 65504, and no step would be applied.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(gradients), 2, wide)
    return torch.stack([norm.double().square() for norm in norms]).sum().to(device)


class MicroBatchSquares:
    """Sums the squared norms of the micro-batches' own gradients while the backward passes compute them.

    A backward pass hands each parameter the whole gradient of its micro-batch, before libraries add it to the window's
    or reduce it. A hook on the parameter takes its norm there: no further pass, no copy, no wait for the device.
    """

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._norms: list[Tensor] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these leaves too, from the next backward pass on."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: Tensor) -> None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=wide))

    def clear(self) -> None:
        """The window is over."""
        self._norms.clear()

    def total(self, device: torch.device) -> Tensor:
        """0-dimensional float64: the sum over this rank's backward passes since the last `clear`."""
        if not self._norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(self._norms).double().square().sum().to(device)
