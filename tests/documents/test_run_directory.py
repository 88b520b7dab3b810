"""docs/run_directory.md: every file that a run leaves, and every name in metrics.jsonl, is in its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.documents.pages import blocks, read
from tests.runs import flags, image_flags, lines, pretrain_here, recipe_flags
from trp_scale.cli import main as cli
from trp_scale.config.registry import names as registered_names
from trp_scale.evaluation.probe.online import OnlineProbes
from trp_scale.methods.adversary.positions import PixelAdversary, PositionAdversary
from trp_scale.methods.gradient_noise_scale import GradientNoiseScale
from trp_scale.methods.learned_masks.hook import LearnedMasks

PAGE = "run_directory.md"
TEXT = {"validation__every": 2, "training__steps": 2, "optimizer__warmup_steps": 1}
IMAGES = {"training__steps": 2, "optimizer__warmup_steps": 1}
MASKS = {"multilevel__hidden_size": 8, "multilevel__unroll": 1, "crops__size": 32}
BY_TASK = {"tasks", "scaled", "shares", "task_weights", "gradient_norms", "targets", "training_rates", "log_variances"}
BY_TASK |= {"ratios", "logits"}
"""Objects whose keys are names of tasks."""
BY_PART = {"time"}


def names(line: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of a line's values: NAME for a task, PART for a part of the time."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            inner = f"{prefix}{key}."
            if key in BY_TASK:
                for each in value.values():
                    if isinstance(each, Mapping):
                        yield from names(each, f"{inner}NAME.")
                    else:
                        yield f"{inner}NAME"
            elif key in BY_PART:
                yield f"{inner}PART"
            else:
                yield from names(value, inner)
        else:
            yield f"{prefix}{key}"


def first_cells(page: str) -> set[str]:
    """What stands in backquotes in the first cells of the page's tables."""
    cells = re.findall(r"^\| ([^|]+) \|", read(page), flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def text_runs(dataset: Path, directory: Path) -> Iterator[Path]:
    """PoS-BERT with each balancer, the first with all hooks."""
    for kind in registered_names("balancer"):
        own = {"balancer__interval_steps": 1} if kind == "dwa" else {}
        if kind in ("minimax", "gradnorm"):
            own |= {"balancer__scale": "initial"}
        hooks = ["--hooks", "weight_average", "gradient_noise_scale"] if kind == "minimax" else []
        run_dir = directory / kind
        assert pretrain_here([*flags(dataset, run_dir, balancer__kind=kind, **TEXT, **own), *hooks]) == 0
        yield run_dir


def image_runs(dataset: Path, directory: Path) -> Iterator[Path]:
    """MAE+ with adversaries, learned masks of each kind, MM-MAE."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "relative": ("adpe_tiny", {"hooks": "probes"}),
        "pixels": ("adpe_tiny", {"adversary__kind": "pixels", "adversary__eps": 0.01, "hooks": "pictures"}),
        "modalities": ("mm_mae_tiny", {"modalities__visible_tokens": 10}),
    }
    for kind in registered_names("multilevel"):
        learned = kind not in ("none", "color", "self_guided")
        exact = {"multilevel__exact_every": 2} if learned and kind != "reconstruction" else {}
        weights = {"multilevel__weights": "normalised"} if kind == "reconstruction" else {}
        changes = {**MASKS, **exact, **weights} if learned else {"crops__size": 32}
        kinds[f"masks_{kind}"] = ("mlo_mae_tiny", {"multilevel__kind": kind, **changes})
    for name, (recipe, changes) in kinds.items():
        run_dir = directory / name
        assert pretrain_here(image_flags(recipe, dataset, run_dir, **IMAGES, **changes)) == 0, name
        yield run_dir


def tuned_run(dataset: Path, encoder: Path, directory: Path) -> Path:
    """A run of fine-tuning, of which there is a directory for each task and seed."""
    small = {"downstream.epochs": 0, "training.steps": 2, "batch.global_size": 8, "batch.micro_size": 4}
    small |= {"data.workers": 0, "logging.every": 1, "data.path": dataset, "crops.size": 32, "run_dir": directory}
    assert cli.main(["finetune", "--from", str(encoder), *recipe_flags("classification_tiny", small)]) == 0
    return directory


@pytest.fixture(scope="module")
def runs(text_dataset: Path, image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Directories of pre-training, and one of fine-tuning."""
    directory = tmp_path_factory.mktemp("runs")
    found = [*text_runs(text_dataset, directory), *image_runs(image_dataset, directory)]
    return found, tuned_run(image_dataset, directory / "masks_none", directory / "tuned")


def test_every_name_of_a_metric_is_in_a_table(runs: tuple[list[Path], Path]) -> None:
    known, (pre_training, tuned) = first_cells(PAGE), runs
    missing: dict[str, str] = {}
    for run_dir in (*pre_training, *(path.parent for path in tuned.rglob("metrics.jsonl"))):
        for line in lines(run_dir):
            missing |= {name: run_dir.name for name in names(line) if name not in known}
    assert missing == {}


def in_a_table(path: Path, known: set[str]) -> bool:
    """Whether a file's name, or a directory above it, stands in a table; numbers as N."""
    parts = [re.sub(r"\d{4,}", lambda found: "N" * len(found[0]), part) for part in path.parts]
    return any("/".join(parts[:end]) + rest in known for end in range(1, len(parts) + 1) for rest in ("", "/"))


def test_every_file_of_a_run_is_in_a_table(runs: tuple[list[Path], Path]) -> None:
    known, (pre_training, tuned) = first_cells(PAGE), runs
    missing = set()
    for run_dir in (*pre_training, *tuned.rglob("seed_*"), tuned):
        files = [path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file()]
        outside = [path for path in files if run_dir != tuned or len(path.parts) == 1]
        missing |= {str(path) for path in outside if not in_a_table(path, known)}
        checkpoint = [path for path in files if path.parts[0] == "checkpoints" and run_dir != tuned]
        missing |= {str(path) for path in checkpoint if not in_a_table(Path(path.name), known)}
    assert missing == set()


def test_the_page_reads_metrics_as_it_says(
    runs: tuple[list[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = (block.text for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(runs[0][0])
    monkeypatch.chdir(tmp_path)
    exec(compile(script, PAGE, "exec"), {})
    assert capsys.readouterr().out.startswith("1 ")


def test_what_the_display_shows_of_hooks_are_metrics() -> None:
    tables = read(PAGE)
    for hook in (PositionAdversary, PixelAdversary, LearnedMasks, GradientNoiseScale, OnlineProbes):
        assert hook.shown
        for name in hook.shown:
            assert f"`{hook.name}.{name}`" in tables, f"{hook.name}.{name}"
