"""The sum of squares neither overflows in fp16 nor rounds in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trp_scale.engines.shards import sum_of_squares

CPU = torch.device("cpu")


def test_fp16_gradients_whose_norm_fp16_cannot_hold() -> None:
    gradient = torch.full((4096,), 60_000.0, dtype=torch.float16)  # norm 3.8e6
    assert float(sum_of_squares([gradient], CPU)) == pytest.approx(4096 * 60_000.0**2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_against_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in ((100, 7), (3,), (1,))]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(sum_of_squares(gradients, CPU)) == pytest.approx(expected, rel=1e-5)


def test_one_nan_is_seen() -> None:
    assert sum_of_squares([torch.ones(3), torch.tensor([1.0, torch.nan])], CPU).isnan()


def test_a_rank_without_gradients() -> None:
    assert float(sum_of_squares([], CPU)) == 0.0


class Operations(TorchDispatchMode):
    """Counts operations, of lists of tensors too: on a GPU each is a kernel, or a few for a long list."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += 1
        return function(*arguments, **(named or {}))


def test_the_norm_takes_as_many_operations_whatever_the_parameters() -> None:
    found = []
    for parameters in (3, 300):
        operations = Operations()
        with operations:
            sum_of_squares([torch.ones(2) for _ in range(parameters)], CPU)
        found.append(operations.count - parameters)  # less those that make the gradients
    assert found[0] == found[1] <= 6
