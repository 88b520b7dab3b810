"""Exported image runs are the other library's models: transformers' ViTMAE and timm's ViT, loaded from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ViTImageProcessor, ViTMAEForPreTraining

from tests.grids import always
from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from tests.unit.models.small_images import GRID, PATCH, config, crops, small_model
from tests.unit.models.vitmae_peer import images_and_noise
from trp_scale.checkpoint.export import export, loading_call
from trp_scale.cli.main import main
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.errors import CheckpointError
from trp_scale.finetuning.encoders import open_encoder
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, patchify
from trp_scale.pretraining.mae.image_weights import is_encoder, is_table, published_name
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import load_weights
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

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
    processor = ViTImageProcessor.from_pretrained(tmp_path / "hf")
    assert (processor.size["height"], processor.resample) == (settings.crops.size, Image.Resampling.BICUBIC)
    white = processor(Image.new("RGB", (9, 5), "white"), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(white[0, :, 0, 0], (1 - torch.tensor(CHANNEL_MEAN)) / torch.tensor(CHANNEL_DEVIATION))
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


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (config(tokens="visible", positions="relative"), {"to": "hf"}, r"vision.positions is relative.*--to timm"),
        (config(decoder="linear"), {"to": "hf"}, r"vision.tokens is all.*--to timm"),
        (config(positions="relative", mode="bias"), {"to": "timm"}, r"vision.relative_mode is bias.*contextual"),
        (config(positions="relative", values=True), {"to": "timm"}, r"vision.relative_values True.*False"),
        (MAE, {"to": "timm", "image_size": 30}, r"--image_size is 30.* 4"),
        (
            replace(MAE, model=replace(MAE.model, layer_norm_eps=1e-12)),
            {"to": "timm"},
            r"layer_norm_eps is 1e-12.*1e-06",
        ),
        (PosBertConfig(), {"to": "timm"}, "pos_bert.*: hf"),
    ],
)
def test_what_a_library_cannot_compute_is_refused(
    tmp_path: Path, settings: Config, arguments: dict[str, Any], message: str
) -> None:
    write_run(tmp_path / "run", settings)
    with pytest.raises(RefusedError, match=message):
        export(tmp_path / "run", tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


WITHOUT_US = """
import sys

class Ours:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "trp_scale":
            raise ImportError("trp_scale is not there")

sys.meta_path.insert(0, Ours())
import torch, timm
from safetensors.torch import load_file, save_file

model = {call}.eval()
with torch.no_grad():
    found = model.forward_features(load_file("images.safetensors")["images"])
    half = model.bfloat16()(torch.zeros(1, 3, {size}, {size}, dtype=torch.bfloat16))
assert half.isfinite().all() and not [name for name in sys.modules if name.startswith("trp_scale")]
assert tuple(timm.data.resolve_model_data_config(model)["mean"]) == (0.485, 0.456, 0.406)
save_file({{"found": found}}, "found.safetensors")
"""


@pytest.mark.parametrize(
    ("adversary", "grid", "index"),
    always([("none", GRID, "rounded"), ("relative_coordinate", 10, "relaxed")], ("relative_coordinate", 10, "relaxed")),
)
def test_relative_positions_bring_a_module_that_computes_the_same_without_ours(
    tmp_path: Path, adversary: str, grid: int, index: str
) -> None:
    """On a larger grid too, where offsets go beyond the table. trp_scale cannot be imported there."""
    settings = config(positions="relative", kind=adversary)
    settings.crops.size = grid * PATCH
    model = write_run(tmp_path / "run", settings).eval()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    export(tmp_path / "run", tmp_path / "out", to="timm", image_size=grid * PATCH)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["relative_index"] == index and not timm.is_model(described["architecture"])
    images = torch.randn(2, 3, grid * PATCH, grid * PATCH, generator=torch.Generator().manual_seed(0))
    save_file({"images": images}, tmp_path / "images.safetensors")
    program = WITHOUT_US.format(call=loading_call(tmp_path / "out"), size=grid * PATCH)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model.features(patchify(images, PATCH), torch.arange(grid**2).expand(2, -1))
        for table in (parameter for name, parameter in model.named_parameters() if is_table(name)):
            table.zero_()
        without = model.features(patchify(images, PATCH), torch.arange(grid**2).expand(2, -1))
    found = load_file(tmp_path / "found.safetensors")["found"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - without).abs().max() > 0.01, "the tables matter"
    source = open_encoder(str(tmp_path / "out"))
    assert source.settings["vision", "positions"] == "relative" and source.settings["vision", "index"] == index
    read = source.read()
    for name, tensor in weights.items():
        assert not is_encoder(name) or torch.allclose(read[name], tensor, atol=1e-6), name
    other = MaskedAutoencoder(settings)
    load_weights(other, load_file(tmp_path / "out" / "model.safetensors"))
    assert all(
        torch.equal(tensor, weights[name])
        for name, tensor in other.named_parameters()
        if is_table(name) and is_encoder(name)
    )


def test_the_module_takes_a_head_and_refuses_what_the_weights_do_not_fit(tmp_path: Path) -> None:
    write_run(tmp_path / "run", config(positions="relative"))
    export(tmp_path / "run", tmp_path / "out", to="timm", image_size=GRID * PATCH)
    model = torch.hub.load(str(tmp_path / "out"), "encoder", source="local", num_classes=5, drop_path_rate=0.1)
    assert model.train()(torch.zeros(2, 3, GRID * PATCH, GRID * PATCH)).shape == (2, 5)
    for wrong in ({"img_size": 2 * GRID * PATCH}, {"depth": 9}):
        with pytest.raises(RuntimeError):
            torch.hub.load(str(tmp_path / "out"), "encoder", source="local", **wrong)


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
