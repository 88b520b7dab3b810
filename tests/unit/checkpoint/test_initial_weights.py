"""A run may start from the weights of transformers' and timm's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import BertForPreTraining, GPT2Config, GPT2LMHeadModel

from tests.unit.checkpoint.test_export_images import MAE, write_run
from tests.unit.models.small_images import GRID, PATCH, config
from tests.unit.models.vitmae_peer import vitmae
from tests.unit.pretraining.mae.test_weights import loaded, timm_vit
from trp_scale.checkpoint.initial_weights import Load, give_weights, load_given_weights
from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.models.initialise import build_with_initialisers, fill_module
from trp_scale.pretraining.mae.image_weights import is_encoder
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.weights import load_weights, stored_positions
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions, bert_config
from trp_scale.pretraining.pos_bert.weights import load_transformers

BERT = TextModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64, max_positions=16)


def equal(ours: nn.Module, theirs: nn.Module) -> dict[str, bool]:
    other = dict(theirs.named_parameters())
    return {name: torch.equal(parameter, other[name]) for name, parameter in ours.named_parameters()}


def made_as_shapes(make: Callable[[], nn.Module], file: Path, load: Load[nn.Module]) -> nn.Module:
    """The model that takes the file's weights, made as shapes and then filled."""

    def model() -> nn.Module:
        made = make()
        load_given_weights(made, str(file), load)
        return made

    shapes = build_with_initialisers(model)
    assert all(parameter.is_meta for parameter in shapes.parameters()), "no rank makes the whole model"
    whole = model()
    assert all(equal(whole, fill_module(shapes, torch.device("cpu"))).values())
    return whole


def test_bert_starts_from_transformers_weights(tmp_path: Path) -> None:
    peer = BertForPreTraining(bert_config(BERT, 90))
    peer.save_pretrained(tmp_path / "bert")
    given, expected = (BertForMaskedPositions(BERT, vocab_size=90, seed=0) for _ in range(2))
    load_transformers(expected, peer.state_dict())
    assert not all(equal(given, expected).values())
    load_given_weights(given, str(tmp_path / "bert"), load_transformers)
    assert all(equal(given, expected).values())
    make = partial(BertForMaskedPositions, BERT, vocab_size=90, seed=0)
    assert all(equal(made_as_shapes(make, tmp_path / "bert", load_transformers), given).values())


def test_an_autoencoder_starts_from_vitmae(tmp_path: Path) -> None:
    settings = config(tokens="visible")
    peer = vitmae(settings)
    save_file(
        {name: tensor.contiguous() for name, tensor in peer.state_dict().items()}, tmp_path / "vitmae.safetensors"
    )
    given = MaskedAutoencoder(settings)
    load_given_weights(given, str(tmp_path / "vitmae.safetensors"), load_weights)
    assert all(equal(given, loaded(peer.state_dict(), settings)).values())
    shapes = made_as_shapes(lambda: MaskedAutoencoder(settings), tmp_path / "vitmae.safetensors", load_weights)
    assert all(equal(shapes, given).values())


def test_an_encoder_starts_from_timm_and_its_decoder_from_the_seed(tmp_path: Path) -> None:
    peer = timm_vit(GRID * PATCH)
    with torch.no_grad():
        peer.pos_embed.copy_(stored_positions(GRID, peer.embed_dim))
    save_file(dict(peer.state_dict()), tmp_path / "model.safetensors")
    given, expected, seeded = (MaskedAutoencoder(config()) for _ in range(3))
    load_weights(expected, peer.state_dict())
    load_given_weights(given, str(tmp_path), load_weights)
    assert all(equal(given, expected).values())
    assert all(equal(made_as_shapes(lambda: MaskedAutoencoder(config()), tmp_path, load_weights), given).values())
    of_the_seed = equal(given, seeded)
    assert not of_the_seed["blocks.0.attn.qkv.weight"]
    assert all(same for name, same in of_the_seed.items() if not is_encoder(name))


@pytest.mark.parametrize(
    "peer",
    [
        lambda: vitmae(config()),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_inner=64)),
    ],
    ids=["of images", "another kind"],
)
def test_tensors_of_another_model_are_named(peer: Callable[[], nn.Module], tmp_path: Path) -> None:
    peer().save_pretrained(tmp_path)  # type: ignore[operator]
    model = BertForMaskedPositions(BERT, vocab_size=90, seed=0)
    with pytest.raises(RefusedError, match=r"--model.weights_names") as refused:
        give_weights(model, replace(BERT, weights=str(tmp_path)), load_transformers)
    assert len(str(refused.value)) < 800 + len(str(tmp_path))
    every = replace(BERT, weights=str(tmp_path), weights_names=True)
    with pytest.raises(RefusedError) as refused:
        give_weights(model, every, load_transformers)
    named = {line.split()[0] for line in str(refused.value).splitlines() if line.startswith("  ")}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = set(file.keys()) - set(BertForMaskedPositions.tied_parameters)
    parts = ("cls.", "bert.pooler.")  # may be absent
    encoder = {name for name, _ in model.named_parameters() if not name.startswith(parts)}
    assert {name for name in named if not name.startswith(parts)} >= encoder ^ theirs - {
        name for name in theirs if name.startswith(parts)
    }


@pytest.mark.parametrize("every", [True, False])
def test_a_checkpoint_of_another_model_is_told_the_same_way(every: bool, tmp_path: Path) -> None:
    deeper = replace(MAE, model=replace(MAE.model, layers=3))
    relative = replace(deeper, vision=replace(deeper.vision, positions="relative"))
    write_run(tmp_path, relative)
    with pytest.raises(RefusedError, match=r"not the weights of this model \(unexpected: blocks.0.rel") as refused:
        asked = replace(deeper.model, weights=str(tmp_path), weights_names=every)
        give_weights(MaskedAutoencoder(deeper), asked, load_weights)
    first, *others = str(refused.value).splitlines()
    tables = {f"  {name}" for name, _ in MaskedAutoencoder(relative).named_parameters() if name.endswith(".table")}
    assert " and 1 more)" in first and len(tables) == 5
    if every:
        assert others[0] == "unexpected, 5:" and set(others[1:]) == tables
    else:
        assert first.endswith("; --model.weights_names names every tensor") and not others


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    model = MaskedAutoencoder(config())
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04")
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    (tmp_path / "bert-base-uncased").mkdir()
    save_file({"blocks.0.norm1.weight": torch.zeros(3)}, tmp_path / "few.safetensors")
    for name, words in (
        ("absent", "expected"),
        ("weights.bin", "weights.bin"),
        ("broken.safetensors", "broken.safetensors"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("few.safetensors", "pos_embed"),
    ):
        with pytest.raises(RefusedError, match=words):
            load_given_weights(model, str(tmp_path / name), load_weights)
