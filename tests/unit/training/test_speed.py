"""Device peaks and memory."""

from __future__ import annotations

import pytest
import torch

from trp_scale.training.speed import peak_flops, peak_memory_bytes


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks(name: str, teraflops: float) -> None:
    assert peak_flops(name, "bf16") == teraflops * 1e12


@pytest.mark.parametrize(("name", "precision"), [("cpu", "bf16"), ("NVIDIA A10G", "bf16"), ("NVIDIA H200", "fp32")])
def test_unknown_peaks(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory_bytes(on_gpu=False)
    block = torch.ones(before // 8 + 2**25)  # fp32: half of what was used so far, and 128 MiB
    assert peak_memory_bytes(on_gpu=False) > before + 2**26
    assert block.sum() == len(block)
