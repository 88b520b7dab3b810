"""FLOPs of steps with learned masks against what torch counts in whole cycles of the real hook."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import always
from tests.synthetic import Layout
from tests.synthetic_images import CROPS, PATCHES, VISIBLE
from tests.synthetic_masks import mask_config, masks_run
from trp_scale.config import Config
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.mae.upstream import ImageUpstream

ROWS = 8
LAYOUT = Layout(micro_size=ROWS)


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


def step_flops(config: Config, ranks: int = 1) -> float:
    return ImageUpstream.outline(config, DataFacts()).step_flops(ranks)


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


@pytest.mark.parametrize("changes", always(CASES, *(CASES[number] for number in (0, 1, 3, 6, 7, 8, 10))), ids=str)
def test_a_cycle_is_what_torch_counts_in_it(changes: dict[str, Any]) -> None:
    config = mask_config(LAYOUT, model={"layers": 1}, **changes)
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
    expected = steps * step_flops(config) - unneeded
    assert counted_cycle(config) == pytest.approx(expected, rel=1e-12)


def test_ranks_that_hold_their_share_in_one_pass_need_no_pass_for_the_head_alone() -> None:
    one, parts = mask_config(LAYOUT), mask_config(LAYOUT, multilevel={"micro_size": ROWS // 4})
    assert step_flops(parts, ranks=4) == step_flops(one) < step_flops(parts, ranks=1)
