"""benchmarks/memory.py --of masks: a rank's run in small, and how its excess is told in copies of the weights."""

from __future__ import annotations

import pytest

from benchmarks.memory import Options, Peak, masks_settings, measure_masks, row_of
from trp_scale.methods.learned_masks.masks import NETWORKS
from trp_scale.pretraining.mae.model import MaskedAutoencoder

SMALL = Options(layers=1, hidden_size=64, decoder_layers=1)


@pytest.mark.parametrize("masks", [False, True])
def test_a_rank_trains_both_ways_and_says_how_large_its_networks_are(masks: bool) -> None:
    config = masks_settings(SMALL, 1, masks=True)
    found = measure_masks("plain", SMALL, masks=masks)
    assert found.parameters == sum(p.numel() for p in MaskedAutoencoder(config).parameters())
    network = sum(p.numel() for p in NETWORKS["patchwise"](config).parameters())
    assert found.network == (network if masks else 0) and found.peak >= 0


def test_the_excess_is_counted_in_a_rank_s_share_of_the_weights_without_the_network_s_states() -> None:
    megabyte = 2**20
    plain = Peak(peak=1000 * megabyte, parameters=25 * megabyte, network=0)  # a copy is 100 MB
    masks = Peak(peak=1170 * megabyte, parameters=25 * megabyte, network=megabyte)
    assert row_of("plain", plain, masks) == ("plain", "1", "100", "1000", "1170", "170", "16", "1.54")
    assert row_of("zero3", plain, masks) == ("zero3", "2", "50", "1000", "1170", "170", "10", "3.20")
