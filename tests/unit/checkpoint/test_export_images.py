"""Exported image runs are the other library's models: transformers' ViTMAE and timm's ViT, loaded from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import ViTMAEForPreTraining

from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from tests.unit.models.small_images import GRID, PATCH, config, crops, small_model
from tests.unit.models.vitmae_peer import images_and_noise
from trp_scale.checkpoint.export import export
from trp_scale.checkpoint.tensor_file import CheckpointError
from trp_scale.cli import main
from trp_scale.config import Config, RefusedError
from trp_scale.models.patches import patchify
from trp_scale.recipes.loader import to_dict
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.settings import MaeConfig
from trp_scale.upstreams.mae.weights import published_name
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

MAE = config(tokens="visible")


def write_run(run_dir: Path, settings: Config, weights: dict[str, Tensor] | None = None) -> MaskedAutoencoder:
    """A run directory with a checkpoint of this model."""
    model = small_model(settings if isinstance(settings, MaeConfig) else MAE, dtype=torch.float32)
    if weights is None:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    split = {name: [(0, tensor.numel(), 0)] for name, tensor in weights.items()}
    save_step(run_dir, 4, engine=FakeEngine(0, split, {"weight": weights}, steps=0), config=to_dict(settings), extra={})
    return model


@pytest.mark.parametrize("target", ["normalised", "pixels"])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, target: Any) -> None:
    settings = config(tokens="visible")
    settings.objective.target = target
    model = write_run(tmp_path / "run", settings)
    export(tmp_path / "run", tmp_path / "hf", to="hf")
    peer, report = ViTMAEForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert (peer.config.norm_pix_loss, peer.config.mask_ratio) == (target == "normalised", 0.75)
    assert peer.config.layer_norm_eps == 1e-6
    batch = crops(2, dtype=torch.float32)
    images, noise = images_and_noise(batch)
    with torch.no_grad():
        logits = peer(images, noise=noise).logits.gather(1, batch.masked.unsqueeze(-1).expand(-1, -1, 3 * PATCH**2))
        torch.testing.assert_close(model(*batch).prediction, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [MAE, config(), config(decoder="linear")], ids=["MAE", "MAE+", "MAE+ linear"])
def test_timm_loads_it_and_computes_the_same(tmp_path: Path, settings: Config) -> None:
    model = write_run(tmp_path / "run", settings)
    arguments = ["--run", str(tmp_path / "run"), "--output", str(tmp_path / "timm")]
    assert main(["export", *arguments, "--to", "timm", "--image_size", str(GRID * PATCH)]) == 0
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.features(patchify(images, PATCH), torch.arange(GRID**2).expand(2, -1))
        torch.testing.assert_close(found, peer.forward_features(images), rtol=0, atol=1e-5)
    assert peer.num_classes == 0 and peer.norm.eps == 1e-6
    assert tuple(timm.data.resolve_model_data_config(peer)["mean"]) == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("to", ["hf", "timm"])
def test_the_printed_call_loads_the_weights(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """timm makes random weights of a local directory unless it is told otherwise, and says nothing."""
    write_run(tmp_path / "run", MAE)
    arguments = ["--run", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--to", to]
    assert main(["export", *arguments]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loaded by: ")]
    model = eval(printed[0].removeprefix("loaded by: "), {"timm": timm, "transformers": transformers})
    stored, loaded = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    ours = {published_name(name): tensor for name, tensor in loaded.items()} if to == "hf" else loaded
    assert ours.keys() == stored.keys() and all(torch.equal(ours[name], stored[name]) for name in stored)
    if to == "timm":
        without = timm.create_model(f"local-dir:{tmp_path / 'out'}").state_dict()
        assert not torch.equal(without["blocks.0.attn.qkv.weight"], stored["blocks.0.attn.qkv.weight"])


def test_whoever_is_told_of_timm_s_local_directories_is_told_to_ask_for_the_weights() -> None:
    """Documents, help and docstrings: every call that is shown has pretrained=True."""
    root = Path(__file__).parents[3]
    texts = [root / "README.md", *root.glob("docs/*.md"), *root.glob("trp_scale/**/*.py")]
    calls = [call for path in texts for call in re.findall(r"create_model\(\W{1,3}local-dir:[^)]*\)", path.read_text())]
    assert len(calls) >= 4 and not [call for call in calls if "pretrained=True" not in call]


def test_timm_s_model_is_for_224_pixels_if_nothing_else_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "run", MAE)
    export(tmp_path / "run", tmp_path / "timm", to="timm")
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert peer.pos_embed.shape == (1, 1 + (224 // PATCH) ** 2, 24)
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 224, 224]


def refused(tmp_path: Path, settings: Config, **arguments: Any) -> str:
    write_run(tmp_path / "run", settings)
    with pytest.raises(RefusedError) as caught:
        export(tmp_path / "run", tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    return str(caught.value)


@pytest.mark.parametrize("to", ["hf", "timm"])
def test_relative_positions_are_refused(tmp_path: Path, to: str) -> None:
    assert "vision.positions is relative" in refused(tmp_path, config(tokens="visible", positions="relative"), to=to)


@pytest.mark.parametrize("decoder", ["transformer", "linear"])
def test_vitmae_is_refused_what_it_cannot_compute(tmp_path: Path, decoder: Any) -> None:
    message = refused(tmp_path, config(decoder=decoder), to="hf")
    assert "vision.tokens is all" in message and "--to timm" in message


def test_timm_is_refused_other_norms_and_sizes(tmp_path: Path) -> None:
    settings = config(tokens="visible")
    assert "--image_size is 30, allowed: multiples of the run's vision.patch_size 4" in refused(
        tmp_path, settings, to="timm", image_size=30
    )
    settings.model.layer_norm_eps = 1e-12
    assert "layer_norm_eps is 1e-12, timm's models have 1e-06" in refused(tmp_path, settings, to="timm")


def test_a_text_run_is_none_of_timm_s(tmp_path: Path) -> None:
    settings = PosBertConfig()
    assert "upstream is pos_bert; allowed for it: hf" in refused(tmp_path, settings, to="timm")


def test_weights_that_are_not_of_this_model_are_refused(tmp_path: Path) -> None:
    weights = {name: parameter.detach() for name, parameter in small_model(MAE).named_parameters()}
    del weights["norm.bias"]
    weights["adapter.weight"] = torch.ones(3)
    weights["mask_token"] = torch.ones(17)
    write_run(tmp_path / "run", MAE, weights)
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "run", tmp_path / "out", to="timm")
    for words in ("adapter.weight (3,)", "norm.bias missing (expected (24,))", "mask_token (17,) (expected (16,))"):
        assert words in str(caught.value)
    assert not (tmp_path / "out").exists()
