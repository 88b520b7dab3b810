"""FLOPs counted over shapes are those of the pass itself, and of our formula where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.finetuning.dense.test_model import CASES, built, images
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.models.flops import encoder_forward_flops, forward_flops


@pytest.mark.parametrize("head", CASES)
def test_shapes_alone_give_what_the_pass_gives(head: str) -> None:
    model = built(head)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images())
    assert forward_flops(model, images()) == counter.get_total_flops() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not next(iter(model.parameters())).is_meta


def test_encoder_and_linear_head_are_what_the_formula_says() -> None:
    config = ImageTaskConfig()
    model = built("linear")
    config.model = replace(config.model, layers=4, hidden_size=32, heads=2, intermediate_size=64)
    config.crops.size, config.vision.patch_size = 32, 8
    head = 2 * (32 // 8) ** 2 * 32 * 5
    assert forward_flops(model, images(rows=1)) == encoder_forward_flops(config) + head
