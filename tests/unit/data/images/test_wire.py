"""What travels from a loader worker to the device, in which types, and that the device makes the same numbers of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.images.multimodal import multimodal_config, samples, write_multimodal
from tests.unit.data.images.stored import config_for, write_images
from tests.unit.data.images.stored import sample as image_sample
from trp_scale.config import Config
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, ImagePatches, patchify
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.modalities.depth import crop_statistics, standardised


def bytes_a_row(config: Config) -> dict[str, int]:
    """Of each field of a batch that a worker has made."""
    config.data.workers = 1
    sources = open_sources(config, rank=0, world=1)
    batch = sources.train.next_window()[0]
    sources.close()
    return {name: value.nbytes // batch.rows for name, value in batch.fields.items()}


@pytest.mark.exhaustive  # maps below are made beside pixels
def test_pixels_travel_as_bytes(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[image_sample(number, 40, 40) for number in range(24)]])
    assert bytes_a_row(config_for(data))["images"] == 2 * 3 * 32 * 32, "two crops of 32"


def test_maps_travel_in_their_stored_types(tmp_path: Path) -> None:
    found = bytes_a_row(multimodal_config(write_multimodal(tmp_path / "data", [samples(24)])))
    assert (found["images"], found["depth"], found["semseg"]) == (3 * 32 * 32, 2 * 32 * 32, 8 * 8)


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


def on_the_host(depth: np.ndarray, scale: float) -> np.ndarray:
    """As the loader did it before depth travelled in 16 bits."""
    middle, rest, factor = crop_statistics(depth, scale)
    result: np.ndarray = depth.astype(np.float32) - np.float32(middle)
    result -= np.float32(rest)
    result *= np.float32(factor)
    result[depth == 0] = np.nan
    return result


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_device_standardises_depth_to_the_bit_as_the_host_did(precision: torch.dtype) -> None:
    random = np.random.default_rng(0)
    crops = np.stack([random.integers(low, 65536, (24, 24)).astype(np.uint16) for low in (0, 60_000, 65_534)])
    crops[0, random.random((24, 24)) < 0.3] = 0
    statistics = torch.tensor([crop_statistics(crop, 0.001) for crop in crops], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        found = standardised(torch.from_numpy(crops), statistics)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), np.stack([on_the_host(crop, 0.001) for crop in crops]))
