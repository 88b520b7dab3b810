"""Text encoders of transformers as initial weights: what the encoder computes, and what the log names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
)

from tests.runs import SMALL, flags, pretrain_here
from tests.unit.pretraining.mae.test_image_weights import randomise, settings_of, write_torch_file
from trp_scale.checkpoint.initial_weights import read_given_weights
from trp_scale.config import RefusedError
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions
from trp_scale.pretraining.pos_bert.weights import MODELS, load_transformers

BERT = BertConfig(
    vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, layer_norm_eps=1e-6
)
MODERN = ModernBertConfig(
    vocab_size=90,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    global_attn_every_n_layers=2,
    local_attention=6,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
)


@pytest.mark.parametrize(
    ("make", "recipe", "fresh"),
    [
        (lambda: BertModel(BERT), "pos_bert_tiny", ("cls.predictions", "cls.seq_relationship")),
        (lambda: BertForMaskedLM(BERT), "pos_bert_tiny", ("bert.pooler", "cls.seq_relationship")),
        (lambda: BertForSequenceClassification(BERT), "pos_bert_tiny", ("cls.predictions", "cls.seq_relationship")),
        (lambda: ModernBertModel(MODERN), "pos_modern_tiny", ("head.dense", "head.norm", "decoder")),
        (lambda: ModernBertForMaskedLM(MODERN), "pos_modern_tiny", ()),
    ],
    ids=["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "ModernBertModel", "ModernBertForMaskedLM"],
)
def test_text_encoders_compute_what_transformers_do(
    make: Callable[[], Any], recipe: str, fresh: tuple[str, ...], tmp_path: Path
) -> None:
    peer = randomise(make())
    peer.save_pretrained(tmp_path)
    settings: Any = settings_of(tmp_path, recipe)
    assert (settings.model.layers, settings.model.heads, settings.model.intermediate_size) == (
        peer.config.num_hidden_layers,
        4,
        48,
    )
    model: Any = MODELS[settings.model.kind](settings.model, vocab_size=90, seed=0).eval()
    given = read_given_weights(str(tmp_path))
    lines = load_transformers(model, given.tensors, given.fields)
    assert {name for line in lines if "start" in line for name in line.partition(": ")[2].split(", ")} == {*fresh}
    tokens = torch.randint(90, (2, 20), generator=torch.Generator().manual_seed(6))
    read: dict[str, Tensor] = {}
    hooked = model.model.final_norm if isinstance(model, ModernBertForMaskedPositions) else model.layers[-1]
    hooked.register_forward_hook(lambda module, inputs, output: read.update(found=output))
    with torch.no_grad():
        model(
            tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool), torch.arange(20).expand(2, -1)
        )
        base = getattr(peer, peer.base_model_prefix, peer)
        expected = base(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    torch.testing.assert_close(read["found"][:, 1:], expected, rtol=0, atol=1e-5)


def test_names_of_the_first_published_bert(tmp_path: Path) -> None:
    peer = BertForMaskedLM(BERT)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in peer.state_dict().items()
    }
    peer.config.save_pretrained(tmp_path)
    write_torch_file(tmp_path / "pytorch_model.bin", state)
    settings: Any = settings_of(tmp_path, "pos_bert_tiny")
    model: Any = MODELS["bert"](settings.model, vocab_size=90, seed=0)
    load_transformers(model, read_given_weights(str(tmp_path)).tensors)
    assert model.bert.embeddings.LayerNorm.weight.equal(peer.bert.embeddings.LayerNorm.weight)


def test_text_models_of_the_other_kind_are_refused_by_it(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path / "bert")
    ModernBertModel(MODERN).save_pretrained(tmp_path / "modern")
    for name, recipe in (("bert", "pos_modern_tiny"), ("modern", "pos_bert_tiny")):
        with pytest.raises(RefusedError, match=r"--model.kind"):
            settings_of(tmp_path / name, recipe)


def test_text_of_other_sizes(text_dataset: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((text_dataset / "dataset.json").read_text())
    pieces = next(value for name, value in flat_items(vocabulary) if name == "vocab_size")
    BertModel(BertConfig(**{**BERT.to_dict(), "vocab_size": pieces})).save_pretrained(tmp_path / "bert")
    words = flags(text_dataset, tmp_path / "run", model__weights=tmp_path / "bert", training__steps=1)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    sizes = tuple(f"--{name}" for name in SMALL if name.startswith("model."))
    assert pretrain_here([word for pair in pairs if not pair[0].startswith(sizes) for word in pair]) == 0


def flat_items(document: Any) -> list[tuple[str, Any]]:
    """Return the pairs of all objects in a JSON document."""
    if not isinstance(document, dict):
        return []
    return [*document.items(), *(pair for value in document.values() for pair in flat_items(value))]
