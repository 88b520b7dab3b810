"""The sum of squares neither overflows in fp16 nor rounds in bf16."""

from __future__ import annotations

import pytest
import torch

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
