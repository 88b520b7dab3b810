"""Whole runs of `trp-scale pretrain`, in this process, on shared ranks, or as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Refused = Callable[..., str]
"""Fixture of a command that is refused, see tests/conftest.py."""

SIZES = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "batch.global_size": 8,
    "training.steps": 8,
    "optimizer.warmup_steps": 2,
    "data.workers": 0,
    "logging.every": 1,
}
SMALL = {**SIZES, "model.max_positions": 64, "batch.micro_size": 2, "data.validation_fraction": 0.1}
SMALL_IMAGES = {
    **SIZES,
    "vision.decoder_layers": 1,
    "vision.decoder_hidden_size": 32,
    "vision.decoder_heads": 2,
    "crops.size": 32,
    "batch.micro_size": 4,
    "validation.every": 0,
}


def hear_ctrl_c() -> None:
    """For preexec_fn: a process hears SIGINT, also where the tests run in the background of a shell that ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def to_flags(values: Mapping[str, Any], **changes: Any) -> list[str]:
    """The flags --section.field of `values`; `changes` replace or add some, with "__" for the dot."""
    changed = {**values, **{name.replace("__", "."): value for name, value in changes.items()}}
    return [word for name, value in changed.items() for word in (f"--{name}", str(value))]


def recipe_flags(recipe: str, values: Mapping[str, Any], **changes: Any) -> list[str]:
    """Command line of a recipe; `changes` such as model__dropout=0.0."""
    return ["--recipe", recipe, *to_flags(values, **changes)]


def image_flags(recipe: str, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Command line of a small run on images, 4 x 4 patches of 8 px."""
    return recipe_flags(recipe, {**SMALL_IMAGES, "data.path": dataset, "run_dir": run_dir}, **changes)


def flags(dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Command line of a small run on text."""
    return recipe_flags("pos_bert_tiny", {**SMALL, "data.path": dataset, "run_dir": run_dir}, **changes)


def sections(dataset: Path, values: Mapping[str, Any] = SMALL, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the same small run for `trp.pretrain`; `changes` by section."""
    found: dict[str, Any] = {"data": {"path": dataset}}
    for name, value in values.items():
        section, _, field = name.partition(".")
        found.setdefault(section, {})[field] = value
    for section, own in changes.items():
        found[section] = {**found.get(section, {}), **own}
    return found


def pretrain_here(arguments: list[str]) -> int:
    """Run in this process; on shared ranks the process group is already there."""
    from trp_scale.config.run_flags import parse
    from trp_scale.training.pretrain import pretrain

    return pretrain(parse(arguments)).status


def environment() -> dict[str, str]:
    """Environment of a process of its own: one thread, no rank of an outer run, the package from this checkout."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, "TRP_SCALE_PROGRESS": "plain"}


def start(
    arguments: list[str], launcher: list[str] | None = None, *, script: str = "pretrain.py"
) -> subprocess.Popen[str]:
    """Start a script of launch/ as a process of its own, under `launcher` or plain Python."""
    command = [*(launcher or [sys.executable]), str(ROOT / "launch" / script), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_command(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of trp-scale in this checkout, without the environment of the tests."""
    return subprocess.run(
        [sys.executable, "-m", "trp_scale", command, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )


def wait_until(is_true: Callable[[], object], what: str, seconds: float = 300.0, pause: float = 0.1) -> None:
    """Wait for what other processes or threads do."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(pause)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def essence(line: dict[str, Any]) -> dict[str, Any]:
    """Return what a line says of the training itself, without times."""
    names = ("step", "loss", "lr", "grad_norm", "tasks", "balancer", "adversary")
    return {name: line[name] for name in names if name in line}
