"""ModernBERT against transformers' ModernBertForMaskedLM with the same weights; its list of kept positions; its
initial values; and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, ModernBertForMaskedLM, ModernBertModel
from transformers.models.modernbert import modeling_modernbert

import trp_scale as trp
from tests.runs import flags, pretrain_here
from trp_scale.checkpoint.export import export, find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions, Rotation
from trp_scale.pretraining.pos_bert.settings import PosBertModelConfig
from trp_scale.pretraining.pos_bert.weights import load_transformers, to_transformers

VOCABULARY = 90
ROWS, LENGTH, MASKED = 3, 24, 4
SPECIAL = {"pad": 0, "cls": 2, "sep": 3}


def sizes(layers: int = 4, **changes: Any) -> PosBertModelConfig:
    """Layers 0 and 3 are global; a window of 8 is shorter than the rows."""
    values: dict[str, Any] = {"hidden_size": 16, "heads": 2, "intermediate_size": 20, "local_attention": 8}
    return PosBertModelConfig(
        kind="modern", layers=layers, max_positions=64, layer_norm_eps=1e-5, dropout=0.0, **(values | changes)
    )


def pair(dtype: torch.dtype, layers: int = 4, **changes: Any) -> tuple[ModernBertForMaskedPositions, Any]:
    """Our model and transformers' with the same weights, which are large enough that all matter."""
    settings = sizes(layers, **changes)
    ours = ModernBertForMaskedPositions(settings, vocab_size=VOCABULARY, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    theirs = ModernBertForMaskedPositions.transformers_model(settings, VOCABULARY, SPECIAL)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    theirs.load_state_dict(to_transformers(weights, VOCABULARY, ModernBertForMaskedPositions))
    return ours.to(dtype), theirs.to(dtype)


def rows(length: int = LENGTH, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ends = torch.randint(length // 2, length + 1, (ROWS, 1), generator=generator) if padded else length
    mask = (torch.arange(length) < ends).expand(ROWS, length)
    masked = [torch.randperm(int(end), generator=generator)[:MASKED] for end in mask.sum(1)]
    return {
        "tokens": torch.randint(4, VOCABULARY, (ROWS, length), generator=generator),
        "mask": mask,
        "masked": torch.stack(masked),
        "labels": torch.randint(4, VOCABULARY, (ROWS, MASKED), generator=generator),
    }


@contextmanager
def wide_rotation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers rotates in fp32, whatever the type of the model."""

    def rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor, unsqueeze_dim: int = 1) -> Any:
        half = modeling_modernbert.rotate_half
        cosines, sines = cosines.unsqueeze(unsqueeze_dim), sines.unsqueeze(unsqueeze_dim)
        return queries * cosines + half(queries) * sines, keys * cosines + half(keys) * sines

    with monkeypatch.context() as patch:
        patch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotate)
        yield


def our_loss(model: ModernBertForMaskedPositions, batch: dict[str, Tensor], *, listed: bool = False) -> Tensor:
    mask = None if bool(batch["mask"].all()) else batch["mask"]
    kept = batch["mask"].flatten().nonzero().flatten() if listed else None
    output = model(batch["tokens"], torch.zeros_like(batch["tokens"]), mask, batch["masked"], kept=kept)
    return F.cross_entropy(output.prediction_logits.flatten(0, 1), batch["labels"].flatten())


def their_loss(model: ModernBertForMaskedLM, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"], attention_mask=batch["mask"].long()).logits  # [R, L, V]
    chosen = logits.gather(1, batch["masked"][..., None].expand(-1, -1, VOCABULARY))
    return F.cross_entropy(chosen.flatten(0, 1), batch["labels"].flatten())


SHAPES = {
    "short": {"length": 5, "padded": False},
    "full": {"padded": False},
    "padded": {},
}


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [4, 2])  # the last layer is global, or local
def test_losses_and_gradients_equal_transformers(
    monkeypatch: pytest.MonkeyPatch, layers: int, shape: str, dtype: torch.dtype, close: float
) -> None:
    ours, theirs = pair(dtype, layers)
    batch = rows(**SHAPES[shape])  # type: ignore[arg-type]
    with wide_rotation(monkeypatch):
        expected = their_loss(theirs, batch)
        expected.backward()
    loss = our_loss(ours, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=close)
    state = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient, other = parameter.grad, state[name]
        if name in ours.padded_parameters:
            gradient = gradient[:VOCABULARY]
        assert float((gradient - other).norm()) <= 10 * close * float(other.norm()), name


@pytest.mark.parametrize("layers", [4, 2])
def test_a_list_of_kept_positions_changes_nothing(layers: int) -> None:
    ours, _ = pair(torch.float64, layers)
    batch = rows()
    whole = our_loss(ours, batch)
    whole.backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    listed = our_loss(ours, batch, listed=True)
    listed.backward()  # type: ignore[no-untyped-call]
    assert float(listed.detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


def test_the_product_of_rotated_queries_and_keys_depends_on_their_distance() -> None:
    queries, keys = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def product(first: int, second: int) -> float:
        rotations = [Rotation.from_positions(torch.tensor([[position]]), 8, 100.0) for position in (first, second)]
        return float((rotations[0].apply(queries) * rotations[1].apply(keys)).sum())

    assert product(3, 7) == pytest.approx(product(13, 17), rel=1e-5)
    assert abs(product(3, 7) - product(3, 8)) > 1e-4


def test_initial_values_are_those_of_transformers_by_kind() -> None:
    """Means of transformers' random values: deviations by tensor, no value beyond two deviations."""
    settings = sizes(hidden_size=128, intermediate_size=256)
    ours = ModernBertForMaskedPositions(settings, vocab_size=2048, seed=3)
    theirs = ModernBertForMaskedPositions.transformers_model(settings, 2048, SPECIAL)
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = others[name]
        if parameter.ndim < 2:
            assert torch.equal(parameter[: len(other)], other), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(float(other.detach().std()), rel=0.03), name
            assert float(parameter.detach().abs().max()) <= 2.0 * settings.initializer_range + 1e-6


def test_weights_come_back_bit_for_bit() -> None:
    ours, theirs = pair(torch.float32)
    other = ModernBertForMaskedPositions(sizes(), vocab_size=VOCABULARY, seed=9)
    load_transformers(other, theirs.state_dict())
    for name, parameter in ours.named_parameters():
        end = VOCABULARY if name in ours.padded_parameters else None
        assert torch.equal(parameter[:end], dict(other.named_parameters())[name][:end]), name


def test_probability_of_padding_is_zero() -> None:
    ours, _ = pair(torch.float32)
    batch = rows()
    logits = ours(batch["tokens"], batch["tokens"], batch["mask"], batch["masked"]).prediction_logits
    assert logits.shape[-1] == 128
    assert bool((logits[..., VOCABULARY:] == -math.inf).all())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({}, "--objective.next_sentence is outside"),
        ({"objective.next_sentence": "off", "model.dropout": 0.1}, "--model.dropout is 0.1"),
        ({"objective.next_sentence": "off", "model.hidden_size": 33, "model.heads": 3}, "--model.hidden_size is 33"),
    ],
)
def test_settings_of_bert_are_refused(tmp_path: Path, changes: dict[str, Any], flag: str) -> None:
    values = {"model.kind": "modern", "model.dropout": 0.0, **changes}
    with pytest.raises(RefusedError) as refused:
        parse(flags(tmp_path, tmp_path / "run", **values))
    assert flag in str(refused.value)


MODERN = {
    "model__kind": "modern",
    "model__dropout": 0.0,
    "model__layer_norm_eps": 1e-5,
    "model__local_attention": 8,
    "objective__next_sentence": "off",
    "training__steps": 1,
}


@pytest.fixture(scope="module")
def exported(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, whose window is shorter than the rows, and its export hf."""
    directory = tmp_path_factory.mktemp("modern")
    pretrain_here(flags(text_dataset, directory / "run", **MODERN))
    export(directory / "run", directory / "hf")
    return directory


def test_a_run_is_exported_and_started_from_bit_for_bit(exported: Path, text_dataset: Path, tmp_path: Path) -> None:
    theirs = ModernBertForMaskedLM.from_pretrained(exported / "hf")
    pieces = AutoTokenizer.from_pretrained(exported / "hf")
    assert theirs.config.pad_token_id == pieces.pad_token_id
    weights = read_full_state(find_checkpoint(exported / "run"))
    state = to_transformers(weights, len(pieces), ModernBertForMaskedPositions)
    assert all(torch.equal(value, state[name]) for name, value in theirs.state_dict().items())
    still = {**MODERN, "optimizer__lr": 1e-30, "optimizer__weight_decay": 0.0}
    pretrain_here(flags(text_dataset, tmp_path / "again", **still, model__weights=exported / "hf"))
    for name, value in read_full_state(find_checkpoint(tmp_path / "again")).items():
        end = len(pieces) if name in ModernBertForMaskedPositions.padded_parameters else None  # padding comes back as 0
        torch.testing.assert_close(value[:end], weights[name][:end], rtol=0, atol=1e-29)


def test_weights_of_another_tokenizer_are_refused(exported: Path, text_dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "run", tmp_path / "run")
    vocabulary = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    pieces = json.loads(vocabulary.read_text())["model"]["vocab"]
    first, second = list(pieces)[-2:]
    text = vocabulary.read_text().replace(f'"{first}"', '"swapped"').replace(f'"{second}"', f'"{first}"')
    vocabulary.write_text(text.replace('"swapped"', f'"{second}"'))
    with pytest.raises(RefusedError) as refused:
        pretrain_here(flags(text_dataset, tmp_path / "again", **MODERN, model__weights=tmp_path / "run"))
    assert f"--model.weights {tmp_path / 'run'}" in str(refused.value)


@pytest.mark.parametrize("source", ["run", "hf"])
def test_a_loaded_encoder_equals_transformers(exported: Path, source: str) -> None:
    """Of a run and of its export."""
    encoder, theirs = trp.load(exported / source), ModernBertModel.from_pretrained(exported / "hf").eval()
    texts = [" ".join(["some words of a long sentence"] * 5), "a short one"]
    pieces = encoder.tokenizer(texts, padding=True, return_tensors="pt")
    assert len(pieces["input_ids"][0]) > 8 and not encoder.training
    with torch.no_grad():
        expected = theirs(pieces["input_ids"], attention_mask=pieces["attention_mask"]).last_hidden_state
        torch.testing.assert_close(encoder(**pieces), expected, rtol=0, atol=1e-6)
    assert float(expected.std()) > 0.1
