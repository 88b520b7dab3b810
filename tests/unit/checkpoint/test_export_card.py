"""README.md of an export: front matter of the Hub, the run's figures, and code that loads the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from tests.runs import flags, image_flags, pretrain_here
from trp_scale.checkpoint.export import CARD_FILE, export, find_checkpoint, loading_call
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.training.metrics import read_history

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
