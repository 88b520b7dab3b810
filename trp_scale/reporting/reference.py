"""`trp-scale reference`: losses and weights of a finished run, for a second run that balances excess losses or samples
sources by the first run's weights (DoReMi, Xie et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trp_scale.config.files import read_yaml
from trp_scale.config.schema import Fields
from trp_scale.data.index import write_json
from trp_scale.data.mixture import format_paths, parse_members
from trp_scale.errors import RefusedError
from trp_scale.storage.files import write_text
from trp_scale.training.metrics import read_history
from trp_scale.training.rundir import CONFIG_FILE

SHARES = 10_000
"""Sum of the weights in the mixture."""


def write_reference(run_dir: Path, output: Path) -> list[str]:
    """Write the mean loss and the mean weight of each task of a run; return lines for the user. If the tasks are
    sources, also write the `data.path` with the weights as shares, with the suffix .txt.

    The losses are those on held-out rows at the last validation, or without one those of the last tenth of the logged
    steps. The weights are means over all logged steps, 0 where a task is absent.

    Raises:
        RefusedError: no metrics, or no step was logged.
    """
    sums: dict[str, float] = {}
    steps = 0

    def add_weights(line: Mapping[str, Any]) -> None:
        nonlocal steps
        steps += "tasks" in line
        for name, entry in line.get("tasks", {}).items():
            sums[name] = sums.get(name, 0.0) + (entry["weight"] or 0.0)

    history = read_history(run_dir, add_weights)
    held_out = (history.validation or {}).get("tasks", {})
    losses = {name: task["loss"] for name, task in held_out.items() if task.get("count")}
    losses = losses or {name: task.end for name, task in history.tasks.items() if task.end is not None}
    if not losses:
        raise RefusedError(f"{run_dir}: no loss of a task was logged; give a run that made steps")
    weights = {name: total / steps for name, total in sums.items() if name not in history.outside_tasks}
    step = history.validation_step if held_out else history.last_step
    where = "held out" if held_out else "training"
    write_json(output, {"run": str(run_dir), "step": step, "rows": where, "losses": losses, "weights": weights})
    shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    lines = [f"{output}: losses at step {step} ({where}): {shown}"]
    members = parse_members(Fields(read_yaml(run_dir / CONFIG_FILE), CONFIG_FILE).document["data"]["path"])
    if {name for name, _, _ in members} == set(weights):
        path = output.with_suffix(".txt")
        directories = {name: directory for name, _, directory in members}
        write_text(path, format_paths(weights, directories, total=SHARES) + "\n")
        lines.append(f"{path}: value of --data.path with the mean weights as shares")
    return lines
