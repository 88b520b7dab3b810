"""Heads of pixels: shapes, that every parameter learns, that images do not see each other, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DPTConfig, DPTForDepthEstimation

from trp_scale.engines.optimizer import layer_scales
from trp_scale.finetuning.dense.model import (
    NORM_CHANNELS,
    DptHead,
    PixelModel,
    as_map,
    finer_map,
    group_norm,
    quarters,
)
from trp_scale.finetuning.dense.settings import DenseTaskConfig

CASES: dict[str, dict[str, Any]] = {
    "linear": {"head": "linear"},
    "convnext": {"head": "convnext", "width": 16},
    "upernet": {"head": "upernet", "width": 32, "auxiliary_weight": 0.4},
    "dpt": {"head": "dpt", "width": 32},
}


def build_model(head: str, layers: int = 4, seed: int = 0) -> PixelModel:
    config = DenseTaskConfig()
    config.training.seed = seed
    config.model.layers, config.model.hidden_size, config.model.heads = layers, 32, 2
    config.model.intermediate_size, config.model.layer_norm_eps = 64, 1e-6
    config.crops.size, config.vision.patch_size = 32, 8
    for name, value in CASES[head].items():
        setattr(config.dense, name, value)
    return PixelModel(config, 1 if head == "dpt" else 5)


def images(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("head", CASES)
def test_every_pixel_gets_its_values_and_every_parameter_a_gradient(head: str, layers: int) -> None:
    model = build_model(head, layers)
    found = model(images())
    assert [each.shape[1:] for each in found] == [(1 if head == "dpt" else 5, 32, 32)] * len(found)
    assert len(found) == (2 if head == "upernet" else 1)
    sum((each * images(seed=1)[:, :1]).sum() for each in found).backward()
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not lacking, "ZeRO-3 needs every parameter in every pass"
    still = [name for name, p in model.named_parameters() if not p.grad.any() and not name.startswith("encoder.norm")]  # type: ignore[union-attr]
    assert not still


@pytest.mark.parametrize("head", CASES)
def test_an_image_s_result_does_not_depend_on_its_batch(head: str) -> None:
    """What a batch norm would break: the same global batch may be split in any way."""
    model = build_model(head).double()
    together = model(images().double())
    alone = [model(images().double()[row : row + 1]) for row in range(3)]
    for number, each in enumerate(together):
        joined = torch.cat([one[number] for one in alone])
        torch.testing.assert_close(joined, each, rtol=1e-9, atol=1e-12)
    assert not list(model.head.buffers()), "a buffer is in no checkpoint"


@pytest.mark.parametrize("head", CASES)
def test_heads_start_near_zero_and_differ_by_seed_alone(head: str) -> None:
    with torch.no_grad():
        found, again, other = (build_model(head, seed=seed)(images())[0] for seed in (0, 0, 1))
    assert 0 < float(found.abs().max()) < 0.2
    assert torch.equal(found, again) and not torch.equal(found, other)


@pytest.mark.parametrize("head", CASES)
def test_the_head_learns_at_the_full_rate(head: str) -> None:
    model = build_model(head)
    scale = layer_scales(model, 0.5)
    assert {scale(name) for name, _ in model.named_parameters() if name.startswith("head.")} == {1.0}
    assert scale("encoder.blocks.3.norm1.weight") == 0.5 and scale("encoder.patch_embed.weight") == 0.5**5


def test_the_dpt_head_is_transformers_but_for_its_last_relu() -> None:
    """Neck and head of a DPTForDepthEstimation with the same weights, fed the same tokens."""
    width, channels = 32, 32
    settings = DPTConfig(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        is_hybrid=False,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[12, 24, 48, 96],
        fusion_hidden_size=channels,
        readout_type="project",
    )
    torch.manual_seed(0)
    theirs = DPTForDepthEstimation(settings).eval()
    ours = DptHead(width, 1, (0, 1, 2, 3), channels)
    stored = {name.replace("head.head", "decoder.head"): value for name, value in theirs.state_dict().items()}
    missing, unexpected = ours.load_state_dict(stored, strict=False)
    assert not missing
    assert all(name.startswith(("dpt.", "neck.fusion_stage.layers.0.residual_layer1.")) for name in unexpected)
    tokens = [torch.randn(2, 17, width, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = theirs.head(theirs.neck(tokens))
    found = ours(tokens)[0].squeeze(1)
    torch.testing.assert_close(found.clamp(min=0), expected)
    assert (found < 0).any() and (expected > 0).any()


def test_upernet_reads_its_maps_from_the_finest_on_and_its_second_head_the_third() -> None:
    model = build_model("upernet")
    given: list[list[Tensor]] = []
    seen: list[Tensor] = []
    model.head.decoder.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))  # type: ignore[union-attr]
    first = next(module for module in model.head.auxiliary.modules() if isinstance(module, torch.nn.Conv2d))  # type: ignore[union-attr]
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(images())
    assert [each.shape[-1] for each in given[0]] == [16, 8, 4, 2]
    assert torch.equal(seen[0], given[0][2])


def test_cells_lie_within_their_patch() -> None:
    """Cell (i, j) of patch (row, column) is at (4 row + i, 4 column + j)."""
    grid, width = 3, 2
    places = torch.arange(grid * grid * 16, dtype=torch.float32).view(1, grid * grid, 16, 1)
    found = finer_map(places.expand(-1, -1, -1, width).reshape(1, grid * grid, 16 * width))
    assert found.shape == (1, width, 12, 12)
    for line in range(12):
        for column in range(12):
            patch = grid * (line // 4) + column // 4
            assert found[0, :, line, column].tolist() == [16 * patch + 4 * (line % 4) + column % 4] * width


def test_tokens_become_maps_row_by_row_without_the_class_token() -> None:
    tokens = torch.arange(1 + 9, dtype=torch.float32).view(1, 10, 1)
    assert as_map(tokens).tolist() == [[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]]


def test_blocks_are_the_last_of_each_quarter() -> None:
    assert quarters(12) == (2, 5, 8, 11) and quarters(24) == (5, 11, 17, 23)
    assert quarters(4) == (0, 1, 2, 3) and quarters(2) == (0, 0, 1, 1)


@pytest.mark.parametrize("channels", [3, 8, 40, 64, 512, 768])
def test_groups_are_wide_enough_for_a_map_of_one_pixel(channels: int) -> None:
    norm = group_norm(channels)
    assert channels % norm.num_groups == 0 and norm.num_groups <= 32
    assert channels // norm.num_groups >= min(channels, NORM_CHANNELS)
