"""Images become patches: the device normalises what travels as bytes, in fp32."""

from __future__ import annotations

import pytest
import torch

from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, ImagePatches, patchify


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_device_normalises_in_fp32(precision: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    mean, deviation = (
        torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (CHANNEL_MEAN, CHANNEL_DEVIATION)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        found = ImagePatches(8)(every)
    assert found.dtype == torch.float32
    exact = patchify((every.double() / 255 - mean) / deviation, 8)
    torch.testing.assert_close(found.double(), exact, rtol=1e-7, atol=5e-7)  # of numbers up to 2.6
