"""Heads of pixels: shapes, that every parameter learns, that images do not see each other, and against transformers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DPTConfig, DPTForDepthEstimation

from trp_scale.engines.optimizer import layer_scales
from trp_scale.finetuning.dense.model import (
    DptHead,
    PixelModel,
    as_map,
    group_norm,
    load_multimae_head,
    quarters,
)
from trp_scale.finetuning.dense.settings import DenseConfig, DenseTaskConfig

CASES: dict[str, dict[str, Any]] = {
    "linear": {"head": "linear"},
    "convnext": {"head": "convnext", "width": 16},
    "upernet": {"head": "upernet", "width": 32, "auxiliary_weight": 0.4},
    "dpt": {"head": "dpt", "width": 32},
    "multimae_convnext": {"head": "convnext", "width": 16, "raw_tokens": True},
    "multimae_dpt": {"head": "dpt", "width": 32, "class_token": False},
    "mmsegmentation": {
        "head": "upernet",
        "width": 32,
        "auxiliary_weight": 0.4,
        "norm": "batch",
        "dropout": 0.1,
        "position_bias": True,
    },
}


def build_model(head: str, layers: int = 4, seed: int = 0) -> PixelModel:
    config = DenseTaskConfig()
    config.training.seed = seed
    config.model.layers, config.model.hidden_size, config.model.heads = layers, 32, 2
    config.model.intermediate_size, config.model.layer_norm_eps = 64, 1e-6
    config.crops.size, config.vision.patch_size = 32, 8
    for name, value in CASES[head].items():
        setattr(config.dense, name, value)
    return PixelModel(config, outputs(head))


def outputs(head: str) -> int:
    return 1 if "dpt" in head else 5


def images(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("head", CASES)
def test_every_pixel_gets_its_values_and_every_parameter_a_gradient(head: str, layers: int) -> None:
    model = build_model(head, layers)
    found = model(images())
    assert [each.shape[1:] for each in found] == [(outputs(head), 32, 32)] * len(found)
    assert len(found) == (2 if head in ("upernet", "mmsegmentation") else 1)
    sum((each * images(seed=1)[:, :1]).sum() for each in found).backward()
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not lacking, "ZeRO-3 needs every parameter in every pass"
    still = [name for name, p in model.named_parameters() if not p.grad.any() and not name.startswith("encoder.norm")]  # type: ignore[union-attr]
    assert not still


@pytest.mark.parametrize("head", [head for head in CASES if head != "mmsegmentation"])
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
        found, again, other = (build_model(head, seed=seed).eval()(images())[0] for seed in (0, 0, 1))
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
    ours = DptHead(width, 1, (0, 1, 2, 3), DenseConfig(head="dpt", width=channels))
    stored = {name.replace("head.head", "decoder.head"): value for name, value in theirs.state_dict().items()}
    missing, unexpected = ours.load_state_dict(stored, strict=False)
    assert not missing
    assert all(name.startswith(("dpt.", "neck.fusion_stage.layers.0.residual_layer1.")) for name in unexpected)
    tokens = [torch.randn(2, 17, width, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = theirs.head(theirs.neck(tokens))
    found = ours(tokens)[0].squeeze(1)
    torch.testing.assert_close(found.clamp(min=0), expected)
    assert (found < 0).any() and (expected > 0).any()


State = dict[str, Tensor]


def layer(name: str, *shape: int, bias: bool = True) -> State:
    generator = torch.Generator().manual_seed(len(name) + sum(shape))
    weight = torch.randn(*shape, generator=generator, dtype=torch.float64) / math.prod(shape[1:]) ** 0.5
    return {f"{name}.weight": weight} | ({f"{name}.bias": weight.flatten()[: shape[0]].clone()} if bias else {})


def convnext_state(width: int, cell: int, classes: int) -> State:
    """Names and shapes of MultiMAE's ConvNeXt head."""
    state = layer("proj_dec", 16 * cell, width) | layer("final_layer", classes, cell, 1, 1)
    for block in (f"blocks.{number}" for number in range(4)):
        state |= layer(f"{block}.dwconv", cell, 1, 7, 7) | layer(f"{block}.norm", cell)
        state |= layer(f"{block}.pwconv1", 4 * cell, cell) | layer(f"{block}.pwconv2", cell, 4 * cell)
    return state


def convnext_of(state: State, tokens: Tensor, grid: int) -> Tensor:
    """Bachmann et al. 2022, C.2, with ConvNeXt's block (Liu et al. 2022) without layer scale. Tokens [B, G^2, D]."""

    def linear(name: str, values: Tensor) -> Tensor:
        return values @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    cell = state["final_layer.weight"].shape[1]
    cells = linear("proj_dec", tokens).reshape(len(tokens), grid, grid, 4, 4, cell)
    maps = cells.new_empty(len(tokens), cell, 4 * grid, 4 * grid)
    for row, column, down, across in product(range(grid), range(grid), range(4), range(4)):
        maps[:, :, 4 * row + down, 4 * column + across] = cells[:, row, column, down, across]
    for number in range(4):
        name = f"blocks.{number}"
        inner = F.conv2d(maps, state[f"{name}.dwconv.weight"], state[f"{name}.dwconv.bias"], padding=3, groups=cell)
        inner = inner.permute(0, 2, 3, 1)
        inner = (inner - inner.mean(-1, keepdim=True)) / (inner.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        inner = inner * state[f"{name}.norm.weight"] + state[f"{name}.norm.bias"]
        inner = linear(f"{name}.pwconv1", inner)
        inner = linear(f"{name}.pwconv2", inner * (1 + torch.erf(inner / 2**0.5)) / 2)
        maps = maps + inner.permute(0, 3, 1, 2)
    classes = state["final_layer.weight"][:, :, 0, 0]
    return torch.einsum("kc,bchw->bkhw", classes, maps) + state["final_layer.bias"].view(-1, 1, 1)


def dpt_state(width: int, channels: int) -> State:
    """Names and shapes of MultiMAE's DPT head, second names and an unused unit included."""
    sizes = [channels * eighths // 8 for eighths in (3, 6, 12, 24)]
    state: State = {}
    for level, size in enumerate(sizes, 1):
        state |= layer(f"act_{level}_postprocess.0", size, width, 1, 1)
        kernel = {1: 4, 2: 2, 4: 3}.get(level)
        state |= layer(f"act_{level}_postprocess.1", size, size, kernel, kernel) if kernel else {}
        state |= layer(f"scratch.layer{level}_rn", channels, size, 3, 3, bias=False)
        fusion = f"scratch.refinenet{level}"
        state |= layer(f"{fusion}.out_conv", channels, channels, 1, 1)
        for unit, number in product((1, 2), (1, 2)):
            state |= layer(f"{fusion}.resConfUnit{unit}.conv{number}", channels, channels, 3, 3)
    for level in range(1, 5):
        second = {f"act_{level}_postprocess": f"act_postprocess.{level - 1}"}
        second |= {f"scratch.layer{level}_rn": f"scratch.layer_rn.{level - 1}"}
        for name, other in second.items():
            state |= {key.replace(name, other): value for key, value in state.items() if key.startswith(name)}
    state |= layer("head.0", channels // 2, channels, 3, 3)
    return state | layer("head.2", 32, channels // 2, 3, 3) | layer("head.4", 1, 32, 1, 1)


def dpt_of(state: State, maps: list[Tensor]) -> Tensor:
    """Ranftl et al. 2021, section 3, without class token and batch norm. Maps of four blocks [B, D, G, G]."""

    def convolve(name: str, values: Tensor, **settings: Any) -> Tensor:
        return F.conv2d(values, state[f"{name}.weight"], state.get(f"{name}.bias"), **settings)

    def unit(name: str, values: Tensor) -> Tensor:
        inner = convolve(f"{name}.conv1", values.clamp(min=0), padding=1)
        return values + convolve(f"{name}.conv2", inner.clamp(min=0), padding=1)

    def doubled(values: Tensor) -> Tensor:
        return F.interpolate(values, scale_factor=2, mode="bilinear", align_corners=True)

    path = None
    for level in (4, 3, 2, 1):
        name = f"act_{level}_postprocess"
        values = convolve(f"{name}.0", maps[level - 1])
        if level < 3:
            stride = state[f"{name}.1.weight"].shape[-1]
            values = F.conv_transpose2d(values, state[f"{name}.1.weight"], state[f"{name}.1.bias"], stride=stride)
        elif level == 4:
            values = convolve(f"{name}.1", values, stride=2, padding=1)
        values = convolve(f"scratch.layer{level}_rn", values, padding=1)
        fusion = f"scratch.refinenet{level}"
        path = values if path is None else path + unit(f"{fusion}.resConfUnit1", values)
        path = convolve(f"{fusion}.out_conv", doubled(unit(f"{fusion}.resConfUnit2", path)))
    assert path is not None
    path = convolve("head.2", doubled(convolve("head.0", path, padding=1)), padding=1)
    return convolve("head.4", path.clamp(min=0))


def published(state: State, task: str) -> State:
    """A whole model of theirs: the head beside encoder and input."""
    named = {f"output_adapters.{task}.{name}": value for name, value in state.items()}
    return {"global_tokens": torch.zeros(1, 1, 32), "encoder.0.norm1.weight": torch.ones(32), **named}


@pytest.mark.parametrize("head", ["multimae_convnext", "multimae_dpt"])
def test_multimae_s_heads_load_and_compute_what_theirs_do(head: str) -> None:
    """From the same encoder's raw tokens of four blocks; float64, an image of 4 x 4 patches."""
    model = build_model(head).double().eval()
    is_dpt = head == "multimae_dpt"
    state = dpt_state(32, 32) if is_dpt else convnext_state(32, 16, 5)
    task = "depth" if is_dpt else "semseg"
    load_multimae_head(model.head, published(state, task), task)
    pixels = images().double()
    with torch.no_grad():
        tokens = [block[:, 1:] for block in model.encoder(pixels, after=[0, 1, 2, 3])]
        if is_dpt:
            expected = dpt_of(state, [block.transpose(1, 2).reshape(3, 32, 4, 4) for block in tokens])
        else:
            expected = convnext_of(state, tokens[-1], 4)
        expected = F.interpolate(expected, size=(32, 32), mode="bilinear")
        assert expected.std() > 0.1
        torch.testing.assert_close(model(pixels)[0], expected, rtol=0, atol=1e-6)


def test_dropout_drops_whole_channels_of_the_last_layer_in_training_alone() -> None:
    model = build_model("mmsegmentation")
    before: list[Tensor] = []
    seen: list[Tensor] = []
    for part, last in (("decoder", "fpn_bottleneck"), ("auxiliary", "convs")):
        head = model.head.get_submodule(part)
        head.get_submodule(last).register_forward_hook(lambda *results: before.append(results[2]))
        head.get_submodule("classifier").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    model(images(16))
    for whole, kept in zip(before, seen, strict=True):
        dropped = (kept == 0).flatten(2).all(-1)  # [B, C]
        torch.testing.assert_close(kept, torch.where(dropped[:, :, None, None], 0.0, whole / 0.9))
        gone = dropped & (whole > 0).flatten(2).any(-1)
        assert 0.05 < gone.double().mean() < 0.15
    before.clear()
    seen.clear()
    model.eval()(images(16))
    assert all(torch.equal(whole, kept) for whole, kept in zip(before, seen, strict=True))


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
    assert channels // norm.num_groups >= min(channels, 16)
