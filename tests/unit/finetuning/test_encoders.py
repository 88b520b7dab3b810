"""`--from`: the encoders of our runs, transformers and timm, taken as they compute; other things are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from tests.unit.checkpoint.test_export_images import write_run
from tests.unit.checkpoint.test_export_mm_mae import write_run as write_multimodal_run
from tests.unit.models import small_modalities
from tests.unit.models.encoder_peers import finetune_config
from tests.unit.models.small_images import GRID, PATCH, config, images, randomise_weights
from tests.unit.models.vitmae_peer import vitmae
from trp_scale.checkpoint.export import export
from trp_scale.config import RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.engines.optimizer import decay_groups
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ImageClassifier
from trp_scale.finetuning.encoders import load_weights, open_encoder
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, patchify
from trp_scale.models.positions import PositionOrder, sine_cosine
from trp_scale.models.vit import ImageEncoder

BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}
MODERN_BERT = {**BERT, "model_type": "modernbert", "num_hidden_layers": 4}


def load_source(path: Path, grid: int = GRID, **downstream: Any) -> tuple[ImageEncoder, ClassificationTaskConfig]:
    """The encoder at `path` in a run on images of this grid, whose recipe has other sizes."""
    settings = finetune_config(**downstream)
    settings.model.layers, settings.model.hidden_size, settings.model.layer_norm_eps = 3, 48, 1e-3
    settings.vision.patch_size = 2
    source = open_encoder(str(path))
    source.adopt(settings)
    settings.crops.size = grid * settings.vision.patch_size
    encoder = ImageEncoder(settings).eval()
    load_weights(encoder, source.image_weights(settings), str(path))
    return encoder, settings


def features(encoder: ImageEncoder, pixels: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return encoder(images().float() if pixels is None else pixels)[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "mode", "values"),
    [
        ("absolute", "contextual", False),
        ("relative", "contextual", False),
        ("relative", "bias", False),
        ("relative", "contextual", True),
    ],
)
@pytest.mark.parametrize("tokens", ["visible", "all"])
def test_encoder_of_an_image_run(tmp_path: Path, tokens: Any, positions: Any, mode: Any, values: bool) -> None:
    model = write_run(tmp_path, config(tokens=tokens, positions=positions, mode=mode, values=values))
    encoder, settings = load_source(tmp_path)
    assert (settings.vision.positions, settings.downstream.pretraining_grid) == (positions, GRID)
    assert (settings.vision.relative_mode, settings.vision.relative_values) == (mode, values)
    every = torch.arange(GRID**2).expand(3, -1)
    with torch.no_grad():
        assert_close(features(encoder), model.features(patchify(images().float(), PATCH), every))


def test_a_run_with_a_coordinate_adversary_keeps_the_adversarys_index(tmp_path: Path) -> None:
    settings = config(positions="relative", kind="relative_coordinate")
    settings.adversary.index = "relaxed"
    model = write_run(tmp_path, settings)
    encoder, found = load_source(tmp_path)
    assert (settings.vision.index, found.vision.index) == ("rounded", "relaxed")
    with torch.no_grad():
        every = torch.arange(GRID**2).expand(3, -1)
        assert_close(features(encoder), model.features(patchify(images().float(), PATCH), every))


@pytest.mark.parametrize("order", ["column_row", "row_column"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("exported", [False, True])
def test_encoder_of_a_multimodal_run_and_its_export(
    tmp_path: Path, exported: bool, norm: bool, order: PositionOrder
) -> None:
    """Itself, and as timm has it: positions stay fixed, in their order, and a missing last norm is a fresh one."""
    given = small_modalities.config(
        inputs=("semseg", "rgb"), outputs=("depth",), encoder_norm=norm, position_order=order
    )
    model = write_multimodal_run(tmp_path / "run", given)
    if exported:
        export(tmp_path / "run", tmp_path / "timm", to="timm", image_size=given.crops.size)
    encoder, settings = load_source(tmp_path / ("timm" if exported else "run"), model.grid)
    assert (settings.vision.position_order, settings.downstream.learned_positions) == (order, False)
    side = settings.crops.size
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    tokens = (model.grid**2 + torch.arange(model.grid**2)).expand(2, -1)
    with torch.no_grad():
        patches = patchify(pixels, settings.vision.patch_size)
        expected = model.features({"rgb": patches}, tokens)
        if not norm:
            expected = torch.nn.functional.layer_norm(expected, expected.shape[-1:], eps=1e-6)
        assert_close(features(encoder, pixels), expected)


@pytest.mark.parametrize("learned", [False, True])
def test_a_run_and_its_exports(tmp_path: Path, learned: bool) -> None:
    """Fixed positions stay fixed, learned ones become weights."""
    settings = config(tokens="visible")
    settings.vision.learned_positions = learned
    model = write_run(tmp_path / "run", settings)
    export(tmp_path / "run", tmp_path / "hf", to="hf")
    export(tmp_path / "run", tmp_path / "timm", to="timm", image_size=GRID * PATCH)
    with torch.no_grad():
        expected = model.features(patchify(images().float(), PATCH), torch.arange(GRID**2).expand(3, -1))
    for name in ("run", "hf", "timm"):
        encoder, found = load_source(tmp_path / name)
        assert found.downstream.learned_positions is learned and found.vision.positions == "absolute"
        assert_close(features(encoder), expected)
    assert not learned or model.pos_embed.abs().max() > 0.1


def write_classifier(run_dir: Path, settings: ClassificationTaskConfig) -> ImageClassifier:
    """A fine-tuned run's directory."""
    model = ImageClassifier(settings).eval()
    randomise_weights(model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    split = {name: [(0, tensor.numel(), 0)] for name, tensor in weights.items()}
    save_step(run_dir, 4, engine=FakeEngine(0, split, {"weight": weights}, steps=0), config=to_dict(settings), extra={})
    return model


@pytest.mark.parametrize(
    ("positions", "learned"), [({}, False), ({"learned_positions": True}, True), ({"positions": "learned"}, True)]
)
@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_encoder_of_a_fine_tuned_run(tmp_path: Path, pooling: str, positions: dict[str, Any], learned: bool) -> None:
    model = write_classifier(tmp_path, finetune_config(pooling=pooling, **positions))
    encoder, settings = load_source(tmp_path)
    assert settings.downstream.learned_positions is learned
    found, pixels = features(encoder), images().float()
    with torch.no_grad():
        if pooling == "class":
            assert_close(found, model.encoder(pixels)[0])
        else:  # the norm of the mean is the only one that there is
            assert model.fc_norm is not None
            assert_close(found, model.fc_norm(model.encoder(pixels)[0]))


def test_interpolated_positions_keep_the_pretraining_grid(tmp_path: Path) -> None:
    settings = finetune_config(GRID, positions="interpolated", pretraining_grid=3)
    model = write_classifier(tmp_path, settings)
    encoder, found = load_source(tmp_path, positions="interpolated")
    assert found.downstream.pretraining_grid == 3
    assert encoder.fixed_positions is not None and model.encoder.fixed_positions is not None
    assert encoder.fixed_positions.equal(model.encoder.fixed_positions)


@pytest.mark.parametrize("grid", [GRID, GRID + 2])
def test_learned_positions_begin_at_the_stretched_grid_and_get_a_gradient(tmp_path: Path, grid: int) -> None:
    write_run(tmp_path, config(tokens="visible"))
    fixed, _ = load_source(tmp_path, grid, positions="interpolated")
    encoder, _ = load_source(tmp_path, grid, positions="learned")
    before = torch.cat([torch.zeros(1, 24), sine_cosine(GRID, 24).float()])[None]
    torch.testing.assert_close(encoder.pos_embed.detach(), resample_abs_pos_embed(before, [grid, grid])[0])
    pixels = torch.randn(2, 3, grid * PATCH, grid * PATCH, generator=torch.Generator().manual_seed(1))
    assert features(encoder, pixels).equal(features(fixed, pixels))
    encoder(pixels)[0].square().sum().backward()
    assert encoder.pos_embed.grad is not None and encoder.pos_embed.grad[1:].abs().min(dim=1).values.max() > 0
    groups = decay_groups(encoder.named_parameters(), 0.05)
    (decay,) = {group["weight_decay"] for group in groups for each in group["params"] if each is encoder.pos_embed}
    assert decay == 0.0, "MAE's code spares positions"


def test_vitmae_saved_by_transformers(tmp_path: Path) -> None:
    settings = config(tokens="visible")
    peer = vitmae(settings)
    with torch.no_grad():
        peer.vit.embeddings.position_embeddings[0, 0] = torch.randn(peer.config.hidden_size)  # the class token's own
    peer.save_pretrained(tmp_path)
    encoder, found = load_source(tmp_path)
    assert (found.model.layers, found.downstream.pretraining_grid) == (2, GRID)
    peer.vit.config.mask_ratio = 0.0
    with torch.no_grad():
        expected = peer.vit(images().float(), noise=torch.arange(GRID**2).float().expand(3, -1)).last_hidden_state
    assert_close(features(encoder), expected)


def save_timm_model(directory: Path, own_statistics: bool = True, **changes: Any) -> timm.models.VisionTransformer:
    """A small model of timm's own maker, saved as timm saves for the hub; with the mean and deviation of its pixels, or
    ours."""
    sizes = {"img_size": GRID * PATCH, "patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 2}
    peer = timm.create_model("vit_base_patch16_224", pretrained=False, num_classes=7, **{**sizes, **changes}).eval()
    randomise_weights(peer)
    save_for_hf(peer, directory, safe_serialization=True)
    if not own_statistics:
        described = json.loads((directory / "config.json").read_text())
        described["pretrained_cfg"] |= {"mean": CHANNEL_MEAN, "std": CHANNEL_DEVIATION}
        (directory / "config.json").write_text(json.dumps(described))
    return peer


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_vit_saved_by_timm(tmp_path: Path, pool: str) -> None:
    """Its own mean and deviation, 0.5, are in the patch embedding afterwards."""
    peer = save_timm_model(tmp_path, global_pool=pool)
    statistics = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert statistics["mean"] == [0.5, 0.5, 0.5]
    encoder, settings = load_source(tmp_path)
    assert settings.downstream.learned_positions
    pixels = torch.rand(3, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(2))
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (CHANNEL_MEAN, CHANNEL_DEVIATION))
    with torch.no_grad():
        expected = peer.fc_norm(peer.forward_features((pixels - 0.5) / 0.5))
    assert_close(features(encoder, (pixels - mean) / deviation), expected)


def test_learned_positions_are_stretched_to_the_images(tmp_path: Path) -> None:
    save_timm_model(tmp_path, own_statistics=False)
    grid = GRID + 2
    encoder, _ = load_source(tmp_path, grid)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=grid * PATCH).eval()
    assert larger.pos_embed.shape[1] == 1 + grid**2
    with torch.no_grad():
        assert_close(features(encoder, images(grid=grid).float()), larger.forward_features(images(grid=grid).float()))


def refuse_to_open(path: Path, *named: str) -> None:
    """Check that the encoder is refused, when it is opened or when it is read, and that the message names these."""
    with pytest.raises(RefusedError) as refused:
        open_encoder(str(path)).read()
    assert all(part in str(refused.value) for part in ("--from", *named)), refused.value


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"class_token": False, "global_pool": "avg"}, "no class token"),
        ({"reg_tokens": 2}, "registers"),
        ({"depth": 0}, "no blocks"),
        ({"pre_norm": True}, "a norm before the blocks"),
        ({"qk_norm": True}, "normalised queries"),
        ({"act_layer": "relu"}, "ReLU"),
    ],
)
def test_unsupported_timm_models_are_refused(tmp_path: Path, changes: Any, difference: str) -> None:
    save_timm_model(tmp_path, **changes)
    refuse_to_open(tmp_path, "vit_base_patch16_224", difference)


@pytest.mark.parametrize(
    "changes",
    [{"init_values": 0.5}, {"no_embed_class": True}, {"qkv_bias": False}, {"global_pool": "map"}],
    ids=str,
)
def test_parts_that_other_tensors_can_hold_are_folded_into_them(tmp_path: Path, changes: Any) -> None:
    peer = save_timm_model(tmp_path, own_statistics=False, **changes)
    encoder, _ = load_source(tmp_path)
    with torch.no_grad():
        assert_close(features(encoder), peer.forward_features(images().float()))


def write_description(directory: Path, weights: dict[str, Tensor] | None = None, **document: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    save_file(weights or {"nothing": torch.zeros(1)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"model_type": "vit"}, "model_type 'vit'"),
        ({"architecture": "resnet18"}, "ResNet"),
        ({"architecture": "vit_of_my_own"}, "vit_of_my_own"),
        ({"architecture": "vit_base_patch16_224"}, "pos_embed"),
        ({name: value for name, value in BERT.items() if name != "hidden_size"}, "'hidden_size'"),
        ({"model_type": "vit_mae"}, "pos_embed"),
        ({**MODERN_BERT, "mlp_bias": True}, "mlp_bias"),
        ({**MODERN_BERT, "hidden_activation": "silu"}, "hidden_activation"),
        ({**MODERN_BERT, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
        ({**MODERN_BERT, "layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        ({**MODERN_BERT, "local_rope_theta": "many"}, "local_rope_theta"),
        ({**MODERN_BERT, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
    ids=str,
)
def test_other_and_incomplete_descriptions_are_refused(tmp_path: Path, document: dict[str, Any], named: str) -> None:
    refuse_to_open(write_description(tmp_path, **document), named)


def modern_values(directory: Path) -> dict[str, Any]:
    return {name: value for (_, name), value in open_encoder(str(directory)).settings.items()}


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_modernbert_in_the_forms_of_transformers_versions(tmp_path: Path, every: int) -> None:
    """Names of its tensors with and without a head; layer types and bases of rotary positions, today's and earlier."""
    description = ModernBertConfig(
        **{name: value for name, value in MODERN_BERT.items() if name != "model_type"},
        global_attn_every_n_layers=every,
        global_rope_theta=5e4,
        local_rope_theta=300.0,
        local_attention=6,
        norm_eps=1e-4,
        vocab_size=16,
        **dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 0),
    )
    ModernBertModel(description).save_pretrained(tmp_path / "bare")
    ModernBertForMaskedLM(description).save_pretrained(tmp_path / "headed")
    bare, headed = (open_encoder(str(tmp_path / name)).read() for name in ("bare", "headed"))
    assert headed.keys() - bare.keys() == {"head.dense.weight", "head.norm.weight"} and bare.keys() <= headed.keys()
    earlier = {"global_attn_every_n_layers": every, "global_rope_theta": 5e4, "local_rope_theta": 300.0}
    write_description(tmp_path / "earlier", **MODERN_BERT, **earlier, local_attention=6, norm_eps=1e-4)
    values = modern_values(tmp_path / "earlier")
    assert modern_values(tmp_path / "bare") == {**values, "global_every": min(every, 4)}
    assert (values["kind"], values["global_rotary_base"], values["local_rotary_base"]) == ("modern", 5e4, 300.0)
    assert (values["local_attention"], values["layer_norm_eps"], values["dropout"]) == (6, 1e-4, 0.0)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    refuse_to_open(tmp_path / "nowhere", "nowhere")
    refuse_to_open(tmp_path, str(tmp_path))
    save_timm_model(tmp_path / "timm")
    for directory in (write_description(tmp_path / "bert", **BERT), tmp_path / "timm"):
        (directory / "model.safetensors").write_bytes(b"cut off")
        refuse_to_open(directory, str(directory / "model.safetensors"))
        for content in ("{", "[1]"):
            (directory / "config.json").write_text(content)
            refuse_to_open(directory, "config.json")


def test_vitmae_without_its_decoder_and_with_positions_of_its_own(tmp_path: Path) -> None:
    peer = vitmae(config(tokens="visible"))
    peer.save_pretrained(tmp_path / "whole")
    whole = features(load_source(tmp_path / "whole")[0])
    peer.vit.save_pretrained(tmp_path / "bare")
    assert features(load_source(tmp_path / "bare")[0]).equal(whole)
    with torch.no_grad():
        peer.vit.embeddings.position_embeddings.add_(0.1)
    peer.save_pretrained(tmp_path / "moved")
    encoder, settings = load_source(tmp_path / "moved")
    assert settings.downstream.learned_positions and not features(encoder).equal(whole)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    save_timm_model(tmp_path)
    weights, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    save_file({**weights, "adapter.weight": torch.zeros(2)}, path)
    refuse_to_open(tmp_path, "adapter")
    save_file({name: tensor for name, tensor in weights.items() if name != "cls_token"}, path)
    refuse_to_open(tmp_path, "positions")
    save_file({name: tensor for name, tensor in weights.items() if name != "blocks.1.norm2.bias"}, path)
    with pytest.raises(RefusedError, match=r"blocks.1.norm2.bias"):
        load_source(tmp_path)


def test_encoders_that_read_no_images_are_refused(tmp_path: Path) -> None:
    write_multimodal_run(tmp_path / "blind", small_modalities.config(inputs=("depth", "semseg")))
    refuse_to_open(tmp_path / "blind", "modalities.inputs", "depth, semseg")
    source = open_encoder(str(write_description(tmp_path / "bert", **BERT)))
    with pytest.raises(RefusedError, match=r"--downstream.kind classification"):
        source.adopt(finetune_config())


def test_timm_is_given_no_argument_that_loads_or_fetches(tmp_path: Path) -> None:
    """timm would unpickle `checkpoint_path`, and fetch an architecture called hf-hub:USER/MODEL."""
    save_file({"pos_embed": torch.zeros(1, 5, 8)}, tmp_path / "model.safetensors")
    for settings, message in (
        ({"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "x.pth"}}, "'checkpoint_path'"),
        ({"architecture": "vit_tiny_patch16_224", "model_args": {"pretrained_cfg": "x"}}, "'pretrained_cfg'"),
        ({"architecture": "hf-hub:user/model"}, "hf-hub:user/model .*Unknown model"),
        ({"architecture": "local-dir:/tmp"}, "local-dir:/tmp .*Unknown model"),
        ({"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 10**9}}, " 1000 "),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(RefusedError, match=message):
            open_encoder(str(tmp_path))
