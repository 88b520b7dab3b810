"""Runs that start from the weights of other libraries: their sizes, what the encoder computes, what the log names.

Files are those that timm and transformers write, and state dicts with the names of MAE's and MultiMAE's public code.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models._hub import save_for_hf
from torch import Tensor, nn
from transformers import ViTMAEForPreTraining

from tests.grids import grid
from tests.runs import image_flags, pretrain_here
from tests.unit.models.multimae_peer import random_weights
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.initial_weights import read_given_weights
from trp_scale.config import Config, PretrainConfig, RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.config.run_flags import Arguments, make_arguments, parse
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, patchify
from trp_scale.models.positions import interpolate
from trp_scale.planning.clusters import parse_plan
from trp_scale.pretraining.mae.image_weights import is_encoder
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.weights import load_weights, stored_positions, vitmae_config
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.weights import load_multimae

SIDE, PATCH = 32, 8
SIZES = {"model.layers": 2, "model.hidden_size": 64, "model.heads": 4, "model.intermediate_size": 96}


def randomise(model: nn.Module) -> nn.Module:
    """Draw vectors and tokens anew, so that all of them matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("pos_embed", "_token")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_timm(**changes: Any) -> Any:
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    return randomise(timm.create_model("vit_base_patch16_224", **{**sizes, "num_classes": 3, **changes}))


def save_timm(directory: Path, **changes: Any) -> Any:
    peer = make_timm(**changes)
    save_for_hf(peer, directory, safe_serialization="registers" not in directory.name)
    return peer


def settings_of(weights: Path, recipe: str = "mae_tiny", **changes: Any) -> Config:
    values = {"model.weights": weights, "data.path": "none", "crops.size": SIDE, **changes}
    if "bert" in recipe or "modern" in recipe:
        del values["crops.size"]
    return parse(
        ["--recipe", recipe, *(word for name, value in values.items() for word in (f"--{name}", str(value)))]
    ).config


def encoder_of(weights: Path, settings: Config) -> tuple[MaskedAutoencoder, list[str]]:
    model, given = MaskedAutoencoder(settings), read_given_weights(str(weights))
    return model.eval(), load_weights(model, given.tensors, given.fields)


def features(model: MaskedAutoencoder, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return model.features(patchify(pixels, PATCH), torch.arange(model.grid**2).expand(len(pixels), -1))


def pixels(side: int = SIDE) -> Tensor:
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(4))


def normalised(values: Tensor, mean: Any, deviation: Any) -> Tensor:
    return (values - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)


def assert_sizes(settings: Any, **changes: Any) -> None:
    for name, value in {**SIZES, "vision.patch_size": PATCH, **changes}.items():
        section, _, field = name.partition(".")
        assert getattr(getattr(settings, section), field) == value, name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_pool": "avg"},
        {"global_pool": "map"},
        {"no_embed_class": True},
        {"init_values": 0.5},
        {"qkv_bias": False},
        {"img_size": 64},
    ],
    ids=str,
)
def test_the_encoder_computes_what_timms_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """Pixels in [0, 1], each normalised as its model expects; on the grid of the file."""
    peer = save_timm(tmp_path, **changes)
    side = changes.get("img_size", SIDE)
    settings = settings_of(tmp_path, **{"crops.size": side})
    assert_sizes(settings, **{"vision.learned_positions": True, "model.layer_norm_eps": 1e-6})
    model, lines = encoder_of(tmp_path, settings)
    cfg = peer.pretrained_cfg
    with torch.no_grad():
        expected = peer.fc_norm(peer.forward_features(normalised(pixels(side), cfg["mean"], cfg["std"])))
    found = features(model, normalised(pixels(side), CHANNEL_MEAN, CHANNEL_DEVIATION))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert any("left at their start" in line and "decoder" in line for line in lines)
    assert not any("interpolated" in line for line in lines)


@pytest.mark.parametrize(
    ("prefix", "side"), grid([{}, {"reg_tokens": 3}, {"reg_tokens": 3, "no_embed_class": True}], [24, 64]), ids=str
)
def test_positions_are_interpolated_as_by_timm(side: int, prefix: dict[str, Any], tmp_path: Path) -> None:
    peer = save_timm(tmp_path / "registers", **prefix)
    settings = settings_of(tmp_path / "registers", **{"crops.size": side})
    model, lines = encoder_of(tmp_path / "registers", settings)
    grid, before = side // PATCH, 0 if "no_embed_class" in prefix else peer.num_prefix_tokens
    expected = resample_abs_pos_embed(peer.pos_embed.detach(), [grid, grid], num_prefix_tokens=before)[0, before:]
    torch.testing.assert_close(model.pos_embed.detach()[1:], expected, rtol=0, atol=1e-6)
    assert model.pos_embed[0].eq(0).all(), "the class token has its position already"
    own = peer.cls_token[0, 0] + (peer.pos_embed[0, 0] if before else 0.0)
    torch.testing.assert_close(model.cls_token, own)
    assert any(f"4 x 4 patches: interpolated to {grid} x {grid}" in line for line in lines)
    assert any("reg_token" in line for line in lines) is ("reg_tokens" in prefix)


def test_without_a_class_token_ours_is_a_fresh_one(tmp_path: Path) -> None:
    peer = save_timm(tmp_path, class_token=False, global_pool="avg", reg_tokens=2)
    settings = settings_of(tmp_path)
    model, lines = encoder_of(tmp_path, settings)
    assert model.cls_token.equal(MaskedAutoencoder(settings).cls_token)
    torch.testing.assert_close(model.pos_embed.detach()[1:], peer.pos_embed.detach()[0, 2:])
    assert any("cls_token" in line and "start" in line for line in lines)


def test_other_activations_are_named_and_other_blocks_refused(tmp_path: Path) -> None:
    save_timm(tmp_path / "tanh", act_layer="quick_gelu")
    assert any("QuickGELU" in line for line in encoder_of(tmp_path / "tanh", settings_of(tmp_path / "tanh"))[1])
    for name, changes in {"norm before": {"pre_norm": True}, "normalised queries": {"qk_norm": True}}.items():
        save_timm(tmp_path / name, **changes)
        with pytest.raises(RefusedError, match=name):
            settings_of(tmp_path / name)


def write_torch_file(path: Path, state: dict[str, Tensor], **beside: Any) -> Path:
    torch.save({"model": state, **beside}, path) if beside else torch.save(state, path)
    return path


def mae_state(decoder: bool) -> dict[str, Tensor]:
    """A state dict with the names and shapes of MAE's public code, with or without its decoder."""
    peer = make_timm(num_classes=0)
    state = dict(peer.state_dict()) | {"pos_embed": stored_positions(SIDE // PATCH, 64)}
    if not decoder:
        return state
    block = randomise(timm.models.vision_transformer.Block(32, 1, qkv_bias=True)).state_dict()
    shapes = {"mask_token": (1, 1, 32), "decoder_embed.weight": (32, 64), "decoder_embed.bias": (32,)}
    shapes |= {f"decoder_norm.{kind}": (32,) for kind in ("weight", "bias")}
    shapes |= {"decoder_pred.weight": (3 * PATCH**2, 32), "decoder_pred.bias": (3 * PATCH**2,)}
    generator = torch.Generator().manual_seed(5)
    state |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state |= {f"decoder_blocks.0.{name}": tensor for name, tensor in block.items()}
    return state | {"decoder_pos_embed": stored_positions(SIDE // PATCH, 32)}


@pytest.mark.parametrize("decoder", [False, True])
def test_published_files_of_mae(decoder: bool, tmp_path: Path) -> None:
    """A checkpoint with the arguments of its training, as MAE's code writes it; the decoder as in ViTMAE."""
    state = mae_state(decoder)
    rest = {"optimizer": {}, "epoch": 7, "args": argparse.Namespace(lr=0.1)} if decoder else {"epoch": 7}
    path = write_torch_file(tmp_path / "mae.pth", state, **rest)
    heads = {"model.heads": 1}  # one per 64 of the width, since the file does not tell
    settings: Any = settings_of(path)
    assert_sizes(settings, **heads, **{"vision.learned_positions": False, "vision.position_order": "column_row"})
    settings = settings_of(path, **{"model.heads": 4})
    model, lines = encoder_of(path, settings)
    peer = make_timm(num_classes=0)
    peer.load_state_dict({name: tensor for name, tensor in state.items() if name in peer.state_dict()})
    with torch.no_grad():
        expected = peer.forward_features(pixels())
    torch.testing.assert_close(features(model, pixels()), expected, rtol=0, atol=1e-5)
    assert any("number of heads" in line for line in lines)
    assert any("left at their start" in line for line in lines) is not decoder
    if decoder:
        assert_sizes(settings, **{"vision.decoder_layers": 1, "vision.decoder_hidden_size": 32})
        assert settings.vision.decoder_heads == 1
        assert model.prediction.weight.equal(state["decoder_pred.weight"])
        assert model.mask_token.equal(state["mask_token"].flatten())


def test_decoders_of_another_kind_keep_their_initial_weights(tmp_path: Path) -> None:
    """MAE+ has mask tokens of the encoder's width, or no decoder at all."""
    path = write_torch_file(tmp_path / "mae.pth", mae_state(True), epoch=1)
    _, lines = encoder_of(path, settings_of(path, **{"vision.tokens": "all"}))
    assert any("left out: mask_token" in line for line in lines)
    linear = {"vision.tokens": "all", "vision.decoder": "linear"}
    _, lines = encoder_of(path, settings_of(path, **linear))
    assert any("left out" in line and "decoder" in line for line in lines)
    assert any("left at their start" in line and "decoder" in line for line in lines)


def test_vitmae_brings_its_sizes(tmp_path: Path) -> None:
    settings: Any = load_recipe("mae_tiny")
    settings.model.hidden_size, settings.model.heads, settings.vision.decoder_heads = 64, 2, 8
    peer = ViTMAEForPreTraining(vitmae_config(settings))
    with torch.no_grad():
        for positions in (peer.vit.embeddings.position_embeddings, peer.decoder.decoder_pos_embed):
            positions.copy_(stored_positions(settings.crops.size // PATCH, positions.shape[-1]))
    peer.save_pretrained(tmp_path)
    found: Any = settings_of(tmp_path, **{"crops.size": settings.crops.size})
    assert (found.model, found.vision) == (
        type(settings.model)(**{**vars(settings.model), "weights": str(tmp_path)}),
        settings.vision,
    )
    assert encoder_of(tmp_path, found)[1] == []


def multimae_state() -> dict[str, Tensor]:
    state = random_weights(
        {"rgb": 3, "depth": 1},
        {"norm_rgb": ("rgb", 3), "depth": ("depth", 1)},
        patch=PATCH,
        stride=4,
        width=64,
        feed_forward=96,
        layers=2,
        decoder=32,
        decoder_layers=2,
        grid=SIDE // PATCH,
        embedding=8,
    )
    return {name: tensor.float() for name, tensor in state.items()}


@pytest.mark.parametrize("recipe", ["mae_tiny", "mm_mae_tiny"])
def test_published_files_of_multimae(recipe: str, tmp_path: Path) -> None:
    """The encoder, and for MM-MAE the adapters and decoders of the file."""
    state = multimae_state()
    path = write_torch_file(tmp_path / "multimae.pth", state, epoch=1)
    settings: Any = settings_of(path, recipe)
    assert_sizes(settings, **{"model.heads": 1, "vision.position_order": "row_column"})
    if recipe == "mae_tiny":
        model: Any = encoder_of(path, settings)[0]
        assert model.patch_embed.bias.equal(state["input_adapters.rgb.proj.bias"])
    else:
        assert (settings.vision.decoder_hidden_size, settings.vision.decoder_layers) == (32, 2)
        model = MultimodalMaskedAutoencoder(settings, {"semseg": 5})
        lines = load_multimae(model, state)
        assert model.decoders["depth"].embed.weight.equal(state["output_adapters.depth.proj_context.weight"])
        assert any("tokenisers.semseg" in line and "decoders.semseg" in line for line in lines)
    assert model.blocks[1].mlp.fc1.weight.equal(state["encoder.1.mlp.fc1.weight"])


@pytest.mark.parametrize("norm", [False, True])
def test_a_multimodal_model_starts_from_an_encoder_of_images(norm: bool, tmp_path: Path) -> None:
    peer = save_timm(tmp_path)
    settings: Any = settings_of(tmp_path, "mm_mae_tiny", **{"modalities.encoder_norm": norm})
    assert_sizes(settings, **{"vision.learned_positions": True})
    model = MultimodalMaskedAutoencoder(settings, {"semseg": 5})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    given = read_given_weights(str(tmp_path))
    lines = load_multimae(model, given.tensors, given.fields)
    kept = {name for name, parameter in model.named_parameters() if parameter.equal(before[name])}
    assert kept and all(name.startswith(("decoders.", "tokenisers.depth.", "tokenisers.semseg.")) for name in kept)
    assert any(line.startswith("left out") and "norm" in line for line in lines) is not norm
    cfg = peer.pretrained_cfg
    with torch.no_grad():
        expected = peer.forward_features(normalised(pixels(), cfg["mean"], cfg["std"]))
        patches = patchify(normalised(pixels(), CHANNEL_MEAN, CHANNEL_DEVIATION), PATCH)
        found = model.features({"rgb": patches}, torch.arange(16).expand(2, -1))
    torch.testing.assert_close(found if norm else peer.norm(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["column_row", "row_column"])
def test_a_model_with_learned_positions_starts_from_fixed_ones(order: Any, tmp_path: Path) -> None:
    state = mae_state(False) | {"pos_embed": stored_positions(SIDE // PATCH, 64, order)}
    path = write_torch_file(tmp_path / "mae.pth", state, epoch=1)
    fixed, _ = encoder_of(path, settings_of(path))
    learned, _ = encoder_of(path, settings_of(path, **{"vision.learned_positions": True}))
    torch.testing.assert_close(features(learned, pixels()), features(fixed, pixels()), rtol=0, atol=1e-5)


def test_sizes_of_flags_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    save_timm(tmp_path)
    equal: Any = settings_of(tmp_path, **{"model.layers": 2})
    assert equal.model.layers == 2
    with pytest.raises(RefusedError, match=r"--model.layers is 3, there 2; --vision.patch_size is 4, there 8"):
        settings_of(tmp_path, **{"model.layers": 3, "vision.patch_size": 4})


def test_a_plan_and_printed_settings_have_the_sizes_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trp_scale.cli.main import main

    save_timm(tmp_path)
    arguments = ["--recipe", "mae_tiny", "--model.weights", str(tmp_path), "--crops.size", str(SIDE)]
    assert_sizes(parse_plan(arguments).config)
    sections: dict[str, Any] = {"model": {"weights": str(tmp_path)}, "crops": {"size": SIDE}, "data": {"path": "none"}}
    assert_sizes(make_arguments({"recipe": "mae_tiny", **sections}, Arguments, PretrainConfig, prog="pretrain").config)
    with pytest.raises(RefusedError, match=r"--model.heads is 2, there 4"):
        sections["model"]["heads"] = 2
        make_arguments({"recipe": "mae_tiny", **sections}, Arguments, PretrainConfig, prog="pretrain")
    assert main(["pretrain", *arguments, "--data.path", "none", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert "hidden_size: 64" in printed and "learned_positions: true" in printed


def small_run(dataset: Path, run_dir: Path, weights: Path, **changes: Any) -> list[str]:
    """Command line of a small run of mae_tiny without sizes."""
    words = image_flags("mae_tiny", dataset, run_dir, model__weights=weights, **changes)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    sizes = ("--vision.", *(f"--{name}" for name in SIZES))
    return [word for name, value in pairs if not name.startswith(sizes) for word in (name, value)]


def test_a_run_names_the_differences_once_and_resumes_without_the_file(
    image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRP_SCALE_PROGRESS", "plain")
    save_timm(tmp_path / "vit", reg_tokens=1)
    still = {"optimizer__lr": 1e-30, "optimizer__weight_decay": 0.0, "training__steps": 2}
    pretrain_here(small_run(image_dataset, tmp_path / "run", tmp_path / "vit", optimizer__schedule="constant", **still))
    out = capsys.readouterr().out
    assert out.count("starts from") == 1 and out.count("reg_token") == 1
    stored = read_full_state(find_checkpoint(tmp_path / "run"))
    model, _ = encoder_of(tmp_path / "vit", settings_of(tmp_path / "vit"))
    for name, parameter in model.named_parameters():
        if is_encoder(name) or name == "pos_embed":
            torch.testing.assert_close(stored[name], parameter.detach(), rtol=0, atol=1e-6)
    (tmp_path / "vit").rename(tmp_path / "gone")
    still["training__steps"] = 3
    pretrain_here(small_run(image_dataset, tmp_path / "run", tmp_path / "vit", optimizer__schedule="constant", **still))
    assert "starts from" not in capsys.readouterr().out
    assert find_checkpoint(tmp_path / "run").name.endswith("3")
    again = small_run(image_dataset, tmp_path / "again", tmp_path / "run", **still)
    assert_sizes(parse(again).config, **{"vision.learned_positions": True})
    pretrain_here(again)  # our own run, with its sizes
    with pytest.raises(RefusedError, match="vit"):
        parse(small_run(image_dataset, tmp_path / "new", tmp_path / "vit"))


class Harmful:
    """A pickle that would create a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


def test_files_of_torch_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"patch_embed.proj.weight": torch.zeros(4)}
    large = torch.zeros(1).expand(1 << 40)
    files: dict[str, Any] = {"code": {**state, "x": Harmful()}, "none": {"model": 3}, "large": {"x": large}}
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pth")
        with pytest.raises(RefusedError, match=f"{name}.pth"):
            read_given_weights(str(tmp_path / f"{name}.pth"))
    (tmp_path / "text.pth").write_text("not a file of torch")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("text", "old"):
        with pytest.raises(RefusedError, match=f"{name}.pth"):
            read_given_weights(str(tmp_path / f"{name}.pth"))
    assert not (tmp_path / "harmed").exists()


def test_interpolation_keeps_an_equal_grid() -> None:
    positions = torch.randn(17, 8)
    assert interpolate(positions, 4) is positions
