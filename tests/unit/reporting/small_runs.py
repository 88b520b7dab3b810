"""Run directories of each kind as a run would leave them, small and made of numbers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trp_scale.config.loader import dump, load_recipe

HOSTILE = "<script>alert(1)</script>&\"'</b>"


def task(loss: float | None, weight: float = 0.5, count: int = 40) -> dict[str, Any]:
    return {"loss": loss, "weight": weight, "count": 0 if loss is None else count}


def line(step: int, tasks: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    losses = [one["loss"] * one["weight"] for one in tasks.values() if one["loss"] is not None]
    return {
        "step": step,
        "loss": sum(losses),
        "lr": 1e-3 * step,
        "grad_norm": 1.0 + 1.0 / step,
        "tasks": dict(tasks),
        "outside_tasks": [],
        "step_seconds": 0.5 + 0.01 * (step % 3),
        "data_wait_share": 0.01 * (step % 4),
        "data_wait_seconds": 0.005,
        "tokens_per_second": 1000.0 + step,
        "model_flops_utilisation": None,
        "peak_memory_bytes": (1 << 30) + step,
        "applied": True,
        **more,
    }


def text_lines(steps: int = 20) -> Iterator[dict[str, Any]]:
    """Minimax over two tasks in the balance and one beside it; a third comes once. Each fifth step is validated."""
    for step in range(1, steps + 1):
        noun, verb = 5.0 + 2.0 / step + 0.1 * math.sin(step), 4.0 + 3.0 / step
        share = noun / (noun + verb)
        tasks = {
            "noun": task(noun, share),
            "verb": task(verb, 1.0 - share),
            "rare": task(9.0 if step == 3 else None, 0.0, 1),
            "other": task(6.0 - 0.01 * step, 1.0),
        }
        balancer = {"kind": "minimax", "effective_elements": 50.0 + step, "alpha": 1.0}
        more: dict[str, Any] = {"outside_tasks": ["other"], "balancer": balancer}
        if step % 5 == 0:
            held_out = {
                name: {"loss": one["loss"] and one["loss"] + 0.2, "accuracy": 0.1, "count": 9}
                for name, one in tasks.items()
            }
            more["validation"] = {"loss": noun + 0.2, "worst_task": "noun", "tasks": held_out}
        yield line(step, tasks, **more)


def image_lines(steps: int = 20) -> Iterator[dict[str, Any]]:
    """One task and an adversary, and probes now and then."""
    for step in range(1, steps + 1):
        adversary = {
            "kind": "relative_coordinate",
            "norm": 0.02 * step,
            "largest_norm": 0.03 * step,
            "eps": 1.0,
            "share_of_eps": 0.02 * step,
            "sensitivity": 1e-5 * step,
            "effect": 1e-3 * step,
            "saturated": 0.001 * step,
        }
        balancer = {"kind": "uniform", "effective_elements": 40.0}
        more: dict[str, Any] = {"adversary": adversary, "balancer": balancer, "images_per_second": 30.0 + step}
        if step % 6 == 0:
            more["probes"] = {
                "step": step - 1,
                "knn": 0.3 + 0.01 * step,
                "linear": 0.4,
                "rank_me": 5.0 + step,
                "notice": "probed",
            }
        yield line(step, {"reconstruction": task(1.0 + 1.0 / step, 1.0)}, **more)


def mask_lines(steps: int = 20) -> Iterator[dict[str, Any]]:
    """One task, learned masks, and a hook that nobody describes."""
    for step in range(1, steps + 1):
        multilevel = {
            "lessons": step // 2,
            "mean_probability": 0.5 - 0.001 * step,
            "entropy": 0.6 - 0.001 * step,
            "overlap_untrained": 1.0 - 0.01 * step,
            "overlap_last": 0.99 - 0.001 * step,
            "head_loss": 2.0 + 1.0 / step,
            "validation_loss": 2.1 + 1.0 / step,
            "time": {"masks": 0.1 + 0.01 * step, "validation": 0.6 - 0.01 * step},
        }
        own = {"speed": 1.0 * step, "parts": {"left": 1.0 * step, "right": 2.0 * step}, "limit": 3}
        yield line(step, {"reconstruction": task(1.0 + 1.0 / step, 1.0)}, multilevel=multilevel, own_hook=own)


def write(
    run: Path,
    lines: Iterator[dict[str, Any]],
    *,
    recipe: str = "",
    stop: Mapping[str, Any] | None = None,
    incidents: tuple[Mapping[str, Any], ...] = (),
) -> Path:
    """A run directory; with a recipe also its settings, of which the number of steps is changed."""
    run.mkdir(parents=True, exist_ok=True)
    written = [json.dumps(each) for each in lines]
    (run / "metrics.jsonl").write_text("\n".join(written) + "\n", encoding="utf-8")
    if recipe:
        config = load_recipe(recipe)
        config.training.steps = len(written)
        (run / "config.yaml").write_text(dump(config), encoding="utf-8")
        command = ["python", "/bin/trp-scale", "pretrain", "--recipe", recipe, "--training.steps", str(len(written))]
        environment = {"command": command, "directory": "/home/someone"}
        (run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    if stop is not None:
        (run / "stop.json").write_text(json.dumps(stop), encoding="utf-8")
    if incidents:
        (run / "incidents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in incidents), encoding="utf-8")
    return run


FINISHED = {"why": "finished", "status": 0, "step": 20, "advice": "all steps are done"}
FAILED = {"why": f"ValueError: no more {HOSTILE}", "status": 1, "step": 20, "advice": "read the error"}


def curve_traces(figure: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The traces of a figure that hold curves, no bands."""
    return [trace for trace in figure["data"] if trace.get("hoverinfo") != "skip"]
