"""An exported checkpoint is transformers' model, number for number; its README.md has the front matter of the Hub, the
figures of the run, and code that loads the model."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoTokenizer, BertForPreTraining, PreTrainedTokenizerFast

from tests.runs import flags, image_flags, pretrain_here
from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from trp_scale.checkpoint import export as export_module
from trp_scale.checkpoint.export import CARD_FILE, export, find_checkpoint, loading_call
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints
from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.errors import CheckpointError
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions, bert_config
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.metrics import read_history

VOCABULARY = 90
MODEL = TextModelConfig(layers=2, hidden_size=32, heads=4, intermediate_size=48, max_positions=16, dropout=0.0)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(VOCABULARY - 5))]


def write_run(run_dir: Path, weights: dict[str, torch.Tensor], **extra: Any) -> Path:
    """A run directory with these weights in two pieces each, and a tokenizer."""
    backend = Tokenizer(WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    split = {name: [(0, 7, 0), (7, tensor.numel(), 0)] for name, tensor in weights.items() if tensor.numel() > 7}
    split |= {name: [(0, tensor.numel(), 0)] for name, tensor in weights.items() if tensor.numel() <= 7}
    engine = FakeEngine(0, split, {"weight": weights}, steps=0)
    config = asdict(PosBertConfig(model=MODEL))
    return save_step(run_dir, 4, engine=engine, config=config, extra={"vocab_size": VOCABULARY} | extra)


def our_weights() -> dict[str, torch.Tensor]:
    """As a run stores them: 128 rows of vocabulary, of which 90 count, the rest poisoned."""
    weights = {name: tensor.detach() for name, tensor in our_model().named_parameters()}
    generator = torch.Generator().manual_seed(3)
    weights = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    weights["bert.embeddings.word_embeddings.weight"][VOCABULARY:] = torch.nan
    weights["cls.predictions.bias"][VOCABULARY:] = torch.nan
    return weights


def our_model() -> BertForMaskedPositions:
    return BertForMaskedPositions(MODEL, vocab_size=VOCABULARY, seed=1)


def test_transformers_loads_it_and_computes_the_same(tmp_path: Path) -> None:
    weights = our_weights()
    checkpoint = write_run(tmp_path / "run", weights)
    assert export(tmp_path / "run", tmp_path / "hf") == checkpoint
    model, report = BertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    # The reference takes its tensors directly, by name, and never sees a file.
    reference = BertForPreTraining(bert_config(MODEL, VOCABULARY))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(weights[name][: parameter.shape[0]])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (3, 12), generator=generator)
    labels = {"labels": tokens.roll(1), "next_sentence_label": torch.tensor([0, 1, 1])}
    with torch.no_grad():
        found, expected = model.eval()(input_ids=tokens, **labels), reference.eval()(input_ids=tokens, **labels)
    assert found.prediction_logits.shape == (3, 12, VOCABULARY)
    for name in ("loss", "prediction_logits", "seq_relationship_logits"):
        assert torch.equal(found[name], expected[name]), name
    assert model.config.architectures == ["BertForPreTraining"]
    assert model.dtype == torch.float32


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path / "run", our_weights())
    export(checkpoint, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(tokenizer) == VOCABULARY
    assert tokenizer("word3 [MASK]", add_special_tokens=False)["input_ids"] == [8, 4]


def test_a_run_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", our_weights())
    (tmp_path / "run" / "tokenizer").rename(tmp_path / "gone")
    with pytest.raises(RefusedError, match=f"{tmp_path}/run/tokenizer"):
        export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_others_can_read_an_export(tmp_path: Path) -> None:
    write_run(tmp_path / "run", our_weights())
    before = os.umask(0o022)
    try:
        export(tmp_path / "run", tmp_path / "exported")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "exported").iterdir()}
    assert modes == dict.fromkeys(modes, 0o644) and "model.safetensors" in modes


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run", our_weights())
    (tmp_path / "hf").mkdir()
    export(tmp_path / "run", tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(RefusedError, match="--output"):
        export(tmp_path / "run", tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_the_directory_that_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", our_weights())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(tmp_path / "run", Path())
    assert (tmp_path / "here" / "config.json").is_file()


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=str(tmp_path)):
        export(tmp_path, tmp_path / "hf")
    write_run(tmp_path / "run", our_weights(), vocab_size=None)
    with pytest.raises(CheckpointError, match="vocab_size"):
        export(tmp_path / "run", tmp_path / "hf")


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run with --checkpoint.keep 1 does, three times."""
    original, newer = export_module.read_document, [2, 3, 4]
    save_step(tmp_path, 1)

    def read(path: Path) -> Any:
        if newer:
            save_step(tmp_path, newer.pop(0), keep=1)
        return original(path)

    monkeypatch.setattr(export_module, "read_document", read)

    def use() -> tuple[Path, int]:
        checkpoint = export_module.find_checkpoint(tmp_path)
        return checkpoint, export_module.read_document(checkpoint).step

    assert export_module.while_training(use)() == (checkpoint_path(tmp_path, 4), 4)


def test_what_is_wrong_otherwise_is_said_at_once(tmp_path: Path) -> None:
    path, tried = save_step(tmp_path, 1), []

    def use() -> None:
        tried.append(export_module.find_checkpoint(tmp_path))
        raise RefusedError("not this one")

    with pytest.raises(RefusedError, match="not this one"):
        export_module.while_training(use)()
    assert tried == [path]


KINDS = [("pos_bert_tiny", "hf"), ("mae_tiny", "hf"), ("mae_tiny", "timm"), ("mae_plus_rpe_vit_b", "timm")]


@pytest.fixture(scope="module")
def runs(text_dataset: Path, image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small run of each recipe, with a checkpoint before its end."""
    runs = {}
    for recipe in dict.fromkeys(recipe for recipe, _ in KINDS):
        run_dir = tmp_path_factory.mktemp("runs") / recipe
        if recipe == "pos_bert_tiny":
            words = flags(text_dataset, run_dir, checkpoint__every=4)
        else:
            words = image_flags(recipe, image_dataset, run_dir, checkpoint__every=4, training__precision="fp32")
        assert pretrain_here(words) == 0
        runs[recipe] = run_dir
    return runs


def front_matter(card: str) -> dict[str, Any]:
    try:
        from huggingface_hub import ModelCard
    except ImportError:
        document: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
        return document
    parsed: dict[str, Any] = ModelCard(card).data.to_dict()
    return parsed


@pytest.mark.parametrize(("recipe", "to"), KINDS)
def test_the_front_matter_is_the_hubs_and_the_code_loads_the_model(
    runs: dict[str, Path], recipe: str, to: str, tmp_path: Path
) -> None:
    pytest.importorskip("timm" if to == "timm" else "transformers")
    output = tmp_path / "exported"
    export(runs[recipe], output, to=to, image_size=32)
    card = (output / CARD_FILE).read_text(encoding="utf-8")
    front = front_matter(card)
    library = "pytorch" if "rpe" in recipe else {"hf": "transformers", "timm": "timm"}[to]
    assert front["library_name"] == library
    assert "trp_scale" in front["tags"] and len(front["datasets"]) == 1 and "license" not in front
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert loading_call(output) in code
    names: dict[str, Any] = {}
    exec(code, names)
    assert isinstance(names["model"], nn.Module)


def test_the_figures_are_those_of_the_run(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["pos_bert_tiny"]
    start = {"command": ["trp-scale", "pretrain", "--recipe", "pos_bert_tiny"], "directory": "/"}
    (run / "environment.json").write_text(json.dumps(start), encoding="utf-8")
    export(run, tmp_path / "exported")
    card = (tmp_path / "exported" / CARD_FILE).read_text(encoding="utf-8").replace("\\", "").replace("`", "")
    history = read_history(run)
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.MULTILINE))
    assert (
        rows["recipe"] == "pos_bert_tiny"
        and rows["steps"] == "8 of 8"
        and rows["weights"] == "last"
        and len(rows["digest of the data"]) == 32
    )
    assert rows[f"{history.worst_task} (worst)"] == f"{history.tasks[history.worst_task or ''].end:.3f}"
    assert {name.removesuffix(" (worst)") for name in rows} >= history.tasks.keys()


def test_an_earlier_checkpoint_has_no_losses_of_the_end(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["pos_bert_tiny"]
    first = checkpoints(run)[0][1]
    assert first != find_checkpoint(run)
    export(first, tmp_path / "exported")
    card = (tmp_path / "exported" / CARD_FILE).read_text(encoding="utf-8")
    assert "4 of 8" in card and "(worst)" not in card
