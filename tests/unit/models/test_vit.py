"""Attention in windows against one softmax over all tokens with a mask; the encoder of downstream tasks against timm's
vision transformer, transformers' ViTMAE, and our own pre-training."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from tests.unit.models import small_modalities
from tests.unit.models.encoder_peers import copy_timm_weights, finetune_config, timm_vit
from tests.unit.models.small_images import GRID, PATCH, config, images, randomise_weights, small_model
from trp_scale.finetuning.detection.settings import DetectionTaskConfig
from trp_scale.models import vit
from trp_scale.models.attention import attend, cut_windows, join_windows
from trp_scale.models.counting import count_flops
from trp_scale.models.initialise import initialise_vision
from trp_scale.models.patches import patchify
from trp_scale.models.positions import sine_cosine
from trp_scale.models.vit import ImageEncoder
from trp_scale.pretraining.mae.image_weights import is_encoder


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


def encoder_with(weights: dict[str, Tensor], **settings: object) -> ImageEncoder:
    """In double precision, with fixed positions as exact."""
    given = finetune_config()
    for name, value in settings.items():
        setattr(given.vision, name, value)
    encoder = ImageEncoder(given).double().eval()
    encoder.fixed_positions[1:] = sine_cosine(GRID, given.model.hidden_size)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(weights[name])
    return encoder


def test_timm_computes_the_same_forward_features() -> None:
    peer = timm_vit().double()
    encoder = ImageEncoder(finetune_config(learned_positions=True)).double()
    copy_timm_weights(encoder, peer)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images())[0], peer.forward_features(images()), rtol=0, atol=1e-10)
        inner = peer.get_intermediate_layers(images(), n=[0, 1], return_prefix_tokens=True)
        found = encoder(images(), after=[0, 1])
    for ours, (patches, classes) in zip(found, inner, strict=True):
        torch.testing.assert_close(ours, torch.cat([classes, patches], dim=1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("index", ["rounded", "relaxed"])
@pytest.mark.parametrize("positions", ["absolute", "relative"])
def test_encoder_equals_the_pre_trained_encoder(positions: str, index: str) -> None:
    model = small_model(config(positions=positions, index=index))  # type: ignore[arg-type]
    weights = {name: tensor for name, tensor in model.state_dict().items() if is_encoder(name)}
    encoder = encoder_with(weights, positions=positions, index=index)
    with torch.no_grad():
        expected = model.features(patchify(images(), PATCH), torch.arange(GRID**2).expand(3, -1))
        torch.testing.assert_close(encoder(images())[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", ["absolute", "relative"])
def test_a_position_bias_is_added_to_attention_by_head_and_offset(positions: str) -> None:
    """Against attention written out pair by pair; at zero, nothing changes."""
    given = finetune_config()
    given.vision.positions = positions  # type: ignore[assignment]
    plain, biased = (ImageEncoder(given, biased=is_biased).double().eval() for is_biased in (False, True))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    unset = biased.load_state_dict(plain.state_dict(), strict=False)
    assert unset.missing_keys == [f"blocks.{number}.position_bias.table" for number in range(len(biased.blocks))]
    with torch.no_grad():
        torch.testing.assert_close(biased(images())[0], plain(images())[0], rtol=0, atol=1e-12)
    block, heads = biased.blocks[0], given.model.heads
    with torch.no_grad():
        table = block.position_bias.table  # type: ignore[union-attr]
        table.copy_(torch.randn(table.shape, generator=generator))
        table = table.detach()
    cells = [None, *((row, column) for row in range(GRID) for column in range(GRID))]
    span = 2 * GRID - 1
    expected = torch.empty(1, heads, len(cells), len(cells), dtype=torch.float64)
    for (i, query), (j, key) in product(enumerate(cells), enumerate(cells)):
        number = span**2 + (query is None) + (query is None and key is None)  # the class token's three rows
        if query is not None and key is not None:
            number = span * (query[0] - key[0] + GRID - 1) + query[1] - key[1] + GRID - 1
        expected[0, :, i, j] = table[number]
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit, "attend", lambda q, k, v, bias: (seen.append(bias), attend(q, k, v, bias))[1])
        for encoder in (plain, biased):
            encoder(images())
    without, with_bias = seen[0], seen[len(plain.blocks)]
    torch.testing.assert_close(with_bias, expected if without is None else without + expected, rtol=0, atol=1e-12)


def test_encoder_equals_the_multimodal_encoder_on_images() -> None:
    settings = small_modalities.config(encoder_norm=True)
    model = small_modalities.small_model(settings)
    own = finetune_config()
    own.model, own.crops.size = settings.model, settings.crops.size
    own.vision.patch_size = settings.vision.patch_size
    encoder = ImageEncoder(own).double()
    encoder.fixed_positions[1:] = model.positions  # type: ignore[index]
    state = {name.replace("tokenisers.rgb.", "patch_embed."): tensor for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(state[name])
        side, patch = settings.crops.size, settings.vision.patch_size
        pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        every = torch.arange(model.grid**2).expand(2, -1) + model.inputs.index("rgb") * model.grid**2
        expected = model.features({"rgb": patchify(pixels, patch)}, every)
        torch.testing.assert_close(encoder(pixels)[0], expected, rtol=0, atol=1e-12)


def test_images_of_a_batch_share_their_offsets() -> None:
    settings = finetune_config()
    settings.vision.positions = "relative"
    inputs = ImageEncoder(settings)._relative_inputs(5, GRID)
    assert inputs is not None and inputs.pairs.shape == (5, 1 + GRID**2, 1 + GRID**2)
    assert inputs.pairs.untyped_storage().nbytes() == (1 + GRID**2) ** 2 * 8, "whole images are all alike"


def test_fixed_positions_of_another_grid_are_recomputed_or_stretched() -> None:
    width, grid = 24, GRID + 2
    computed = ImageEncoder(finetune_config(grid, pretraining_grid=GRID)).fixed_positions
    torch.testing.assert_close(computed[1:].double(), sine_cosine(grid, width), rtol=0, atol=1e-6)
    stretched = ImageEncoder(finetune_config(grid, pretraining_grid=GRID, positions="interpolated")).fixed_positions
    before = torch.cat([torch.zeros(1, width), sine_cosine(GRID, width).float()])[None]
    torch.testing.assert_close(stretched, resample_abs_pos_embed(before, [grid, grid])[0], rtol=0, atol=1e-6)
    assert (computed - stretched).abs().max() > 0.1


def test_trained_positions_start_as_sine_cosine() -> None:
    encoder = ImageEncoder(finetune_config(positions="learned"))
    initialise_vision(encoder, seed=0, std=0.02)
    assert encoder.fixed_positions is None and encoder.pos_embed.requires_grad
    torch.testing.assert_close(encoder.pos_embed[1:].double(), sine_cosine(GRID, 24), rtol=0, atol=1e-6)
    assert not encoder.pos_embed[0].any()


def test_drop_path_rates_are_timms() -> None:
    settings = finetune_config(drop_path=0.3)
    settings.model.layers = 5
    encoder, peer = ImageEncoder(settings), timm_vit(depth=5, drop_path_rate=0.3)
    for number in range(1, 5):
        for branch in ("drop_path1", "drop_path2"):
            mine, theirs = (getattr(model.blocks[number], branch) for model in (encoder, peer))
            assert mine.drop_prob == pytest.approx(theirs.drop_prob) == pytest.approx(0.3 * number / 4)
            assert mine.scale_by_keep == theirs.scale_by_keep is True
    assert isinstance(encoder.blocks[0].drop_path1, nn.Identity)


def test_without_a_last_norm_the_tokens_are_as_they_are() -> None:
    encoder = ImageEncoder(finetune_config(), norm=False)
    assert not [name for name, _ in encoder.named_parameters() if name.startswith("norm")]
    with torch.no_grad():
        pixels = images().float()
        assert encoder(pixels)[0].equal(encoder(pixels, after=[1])[0])
