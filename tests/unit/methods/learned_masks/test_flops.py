"""FLOPs of steps with learned masks against what torch counts in whole cycles of the real hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.synthetic import Layout
from tests.synthetic_images import CROPS, PATCHES, VISIBLE
from tests.synthetic_masks import mask_config, masks_run
from tests.unit.models.small_images import config as small_config
from trp_scale.config import Config
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.methods.learned_masks.flops import multilevel_step_flops
from trp_scale.models.flops import encoder_forward_flops, mae_step_flops
from trp_scale.pretraining.mae.model import MaskedAutoencoder

ROWS = 8


def counted_cycle(config: Config) -> int:
    """What torch counts in the model and the masking network in a cycle with one update of the network."""
    run = masks_run(Layout(micro_size=config.batch.micro_size), config)
    assert run.hook is not None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in range(config.multilevel.unroll * config.multilevel.every):
            run.trainer.train_step()
    assert run.hook.outer_steps == 1
    counts = counter.get_flop_counts()
    return sum(sum(counts[type(module).__name__].values()) for module in (run.model, run.networks[0]))


def of_pixels(config: Config, patches: int) -> int:
    """The gradient of the patch embedding's input, which nobody needs, for `patches` patches."""
    return 2 * patches * 3 * config.vision.patch_size**2 * config.model.hidden_size


CASES: list[dict[str, Any]] = [
    {},
    {"multilevel": {"micro_size": 4}},
    {"multilevel": {"unroll": 1, "every": 3, "batch_size": 4, "micro_size": 4}},
    {"multilevel": {"unroll": 2, "every": 2, "micro_size": 2, "network": "patchwise"}},
    {"multilevel": {"selection": "softsort"}},
    {"multilevel": {"mode": "look_ahead", "every": 2}},
    {"multilevel": {"mode": "look_ahead", "derivative": "full", "unroll": 3, "micro_size": 2}},
    {"multilevel": {"kind": "joint", "batch_size": 4, "micro_size": 2}},
    {"multilevel": {"kind": "fine_tuning", "unroll": 1, "every": 2}},
    {"multilevel": {"kind": "reconstruction", "unroll": 1, "every": 2}},
    {"multilevel": {"kind": "reconstruction", "selection": "straight_through"}},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_cycle_is_what_torch_counts_in_it(changes: dict[str, Any]) -> None:
    config = mask_config(Layout(micro_size=8), **changes)
    settings = config.multilevel
    steps = settings.unroll * settings.every
    backward = steps  # passes through the model with masks
    if config.multilevel.selection != "hard":
        backward += 1 if settings.kind == "reconstruction" else 2
    if settings.kind == "head" and settings.mode == "look_ahead":
        backward += settings.unroll + (2 * (settings.unroll - 1) if settings.derivative == "full" else 0)
    unneeded = backward * of_pixels(config, ROWS * CROPS * VISIBLE)
    if settings.reads_labels:
        images, _ = settings.batches(config)
        on_train = {"head": 1, "joint": steps, "fine_tuning": settings.every}[settings.kind]
        unneeded += (on_train + 1) * of_pixels(config, images * CROPS * PATCHES)
    expected = steps * multilevel_step_flops(config, ranks=1, computed=True) - unneeded
    assert counted_cycle(config) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("positions", ["absolute", "relative"])
def test_the_encoder_alone_is_what_torch_counts(positions: Any) -> None:
    config = small_config(positions=positions)
    model = MaskedAutoencoder(config)
    every = torch.arange(25).expand(3, -1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(3, 25, 48), every, every[:, :0], give="features")
    interpolated = 2 * 56 * 50 * 12 * 2 if positions == "relative" else 0  # the tables of two blocks, of any rows
    assert counter.get_total_flops() == 3 * encoder_forward_flops(config) + interpolated


def imagenet(**multilevel: Any) -> Config:
    """ViT-B/16 with a decoder of 8 x 512 on 256 images of 224 px, which one rank holds in one pass."""
    config = load_recipe("mae_vit_b")
    config.batch.global_size = config.batch.micro_size = 256
    config.multilevel = make_settings("multilevel", "head", **multilevel)
    return config


def over_plain(ranks: int = 1, **multilevel: Any) -> float:
    config = imagenet(**multilevel)
    return multilevel_step_flops(config, ranks=ranks) / mae_step_flops(config, rows=256)


def test_vit_base_over_plain_mae() -> None:
    """By hand: F = 19.35 GFLOP, W = 35.13, so that at unroll 2 with an update of everything 1 + (2 F + 6 W) / 2 / 3 F,
    and 0.01 for the masking network, its comparisons with 0.003 among it."""
    assert over_plain(unroll=2) == pytest.approx(1 + (2 * 19.35 + 6 * 35.13) / 2 / 58.05 + 0.012, abs=0.001)
    assert over_plain(unroll=2) == pytest.approx(3.161, abs=0.001)
    assert over_plain(unroll=2, every=5) == pytest.approx(1.680, abs=0.001)
    assert over_plain(unroll=2, micro_size=64) == pytest.approx(3.463, abs=0.001)
    assert over_plain(4, unroll=2, micro_size=64) == over_plain(unroll=2)
    assert over_plain(unroll=1) == pytest.approx(5.314, abs=0.001)
