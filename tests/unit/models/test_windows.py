"""Attention in windows: trp_scale/models/vit.py and attention.py, against one softmax over all tokens with a mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.models.encoder_peers import finetune_config
from tests.unit.models.small_images import GRID, PATCH, images, randomise_weights
from trp_scale.finetuning.detection.settings import DetectionTaskConfig
from trp_scale.models.attention import cut_windows, join_windows
from trp_scale.models.counting import count_flops
from trp_scale.models.patches import patchify
from trp_scale.models.vit import ImageEncoder


def encoder(window: int, whole: tuple[int, ...] = (), *, layers: int = 3, positions: str = "absolute") -> ImageEncoder:
    settings = finetune_config()
    settings.model.layers = layers
    settings.vision.positions = "absolute" if positions == "absolute" else "relative"
    if positions == "bias_and_values":
        settings.vision.relative_mode, settings.vision.relative_values = "bias", True
    made = ImageEncoder(settings, window=window, whole=whole).double().eval()
    randomise_weights(made)
    return made


def windows_of_patches(window: int) -> Tensor:
    places = torch.arange(GRID) // window
    return (places[:, None] * GRID + places[None, :]).flatten()


def masked_reference(model: ImageEncoder, pixels: Tensor, window: int, whole: tuple[int, ...]) -> Tensor:
    """The encoder by scores of all pairs of tokens in float64, those of other windows masked."""
    tokens = model.patch_embed(patchify(pixels, PATCH))
    tokens = torch.cat([model.cls_token.expand(len(tokens), 1, -1), tokens], dim=1) + model.fixed_positions
    relative = model._relative_inputs(len(tokens), GRID)
    numbers = windows_of_patches(window)
    seen = torch.ones(1 + GRID**2, 1 + GRID**2, dtype=torch.bool)
    seen[1:, 1:] = numbers[:, None] == numbers[None, :]
    for number, block in enumerate(model.blocks):
        queries, keys, values = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
        )
        scores = queries @ keys.transpose(-1, -2) / keys.shape[-1] ** 0.5
        if block.relative_positions is not None:
            scores = scores + block.relative_positions(queries, relative)

        def attend(rows: Tensor, block: Any = block, values: Tensor = values) -> Tensor:
            shares = rows.softmax(-1)
            every = 0.0 if block.relative_values is None else block.relative_values(shares, relative)
            return shares @ values + every

        if number in whole:
            context = attend(scores)
        else:
            context = attend(scores.masked_fill(~seen, -torch.inf))
            others = [~F.pad(numbers == window_number, (1, 0), value=True) for window_number in numbers.unique()]
            of_windows = [attend(scores.masked_fill(other, -torch.inf))[:, :, :1] for other in others]
            context = torch.cat([torch.stack(of_windows).mean(0), context[:, :, 1:]], dim=2)
        tokens = tokens + block.attn.proj(context.transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.norm(tokens)


@pytest.mark.parametrize("positions", ["absolute", "relative", "bias_and_values"])
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_windows_equal_attention_with_a_mask(window: int, positions: str) -> None:
    """A grid of 5 x 5 patches: windows of 2, 3 and 4 are padded."""
    model = encoder(window, whole=(1,), positions=positions)
    with torch.no_grad():
        expected = masked_reference(model, images(), window, (1,))
        torch.testing.assert_close(model(images())[0], expected, rtol=0, atol=1e-10)
        assert (model(images())[0] - encoder(0, positions=positions)(images())[0]).abs().max() > 0.01


@pytest.mark.parametrize("positions", ["absolute", "relative", "bias_and_values"])
@pytest.mark.parametrize("window", [GRID, GRID + 1, 14])
def test_a_window_of_the_whole_grid_is_no_window(window: int, positions: str) -> None:
    with torch.no_grad():
        ours, plain = (encoder(size, positions=positions)(images())[0] for size in (window, 0))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_joined_windows_are_what_was_cut(window: int) -> None:
    part = torch.randn(2, 3, 1 + GRID**2, 4, generator=torch.Generator().manual_seed(0))
    cut = cut_windows(part, window)
    assert cut.shape == (2 * (-(-GRID // window)) ** 2, 3, 1 + window**2, 4)
    torch.testing.assert_close(join_windows(cut, 2, GRID), part)


def test_gradients_of_padded_windows_are_finite_and_those_of_the_mask() -> None:
    model = encoder(3)
    pixels = images().requires_grad_()
    (ours,) = torch.autograd.grad(model(pixels)[0].square().sum(), pixels)
    (theirs,) = torch.autograd.grad(masked_reference(model, pixels, 3, ()).square().sum(), pixels)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_windows_in_sixteen_bits_stay_near() -> None:
    model = encoder(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model.float()(images().float())[0]
    with torch.no_grad():
        exact = encoder(3)(images())[0]
    assert (rounded.double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("grid", "window"), [(64, 14), (28, 14)])
def test_flops_of_windows_equal_a_closed_form(grid: int, window: int) -> None:
    """ViTDet's ViT-B: blocks 2, 5, 8 and 11 of 12 attend to all tokens, the others in windows."""
    config = DetectionTaskConfig()
    config.model.layers, config.model.hidden_size, config.model.heads = 12, 768, 12
    config.model.intermediate_size, config.vision.patch_size, config.crops.size = 3072, 16, 16 * grid
    pixels = torch.empty(1, 3, 16 * grid, 16 * grid, device="meta")
    counted = count_flops(
        partial(ImageEncoder, config, window=window, whole=(2, 5, 8, 11)), lambda model: model(pixels)
    )
    tokens, width, count, inside = 1 + grid**2, 768, (-(-grid // window)) ** 2, 1 + window**2
    layer = 8 * tokens * width**2 + 4 * tokens * width * 3072
    attention = 4 * 4 * tokens**2 * width + 8 * 4 * count * inside**2 * width
    assert counted == 2 * grid**2 * 768 * width + 12 * layer + attention
