"""What the hypergradient leaves out when it goes through the last of the unrolled steps alone (`derivative: last`).

    python benchmarks/mlo_truncation.py --data data/scenes [further flags of trp-scale pretrain]

Trains the recipe mlo_mae_tiny for some steps in mode look_ahead with `derivative: full`, and prints for 1, 2 and 5
unrolled steps how far the masking network's gradient from the last step alone is from that of all of them: the relative
error and the cosine, medians over the outer steps.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trp_scale.config.run_flags import parse
from trp_scale.distributed.environment import Environment
from trp_scale.methods.learned_masks.hook import LearnedMasks
from trp_scale.methods.learned_masks.masks import Hypergradient, Masker, patch_weights
from trp_scale.training.pretrain import Run, unguarded


@dataclass(kw_only=True)
class Options:
    data: str
    """Sharded images with classes."""
    steps: int = 60
    """Of the encoder."""
    unroll: list[int] = field(default_factory=lambda: [1, 2, 5])
    """Unrolled steps to measure."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments, flags = tyro.cli(Options, args=argv, description=__doc__, use_underscores=True, return_unknown_args=True)
    table = Table(title="the last unrolled step's hypergradient against that of all of them")
    for column in ("unroll", "outer steps", "relative error", "cosine"):
        table.add_column(column, justify="right")
    for unroll in arguments.unroll:
        found = truncation(arguments.data, unroll, arguments.steps, flags)
        errors, cosines = (statistics.median(each) for each in zip(*found, strict=True))
        table.add_row(str(unroll), str(len(found)), f"{errors:.3f}", f"{cosines:.3f}")
    Console(width=100).print(table)


def truncation(data: str, unroll: int, steps: int, flags: Sequence[str]) -> list[tuple[float, float]]:
    """(relative error, cosine) of every outer step of a short run."""
    found: list[tuple[float, float]] = []
    settings: dict[str, Any] = {
        "multilevel.mode": "look_ahead",
        "multilevel.derivative": "full",
        "multilevel.unroll": unroll,
        "training.steps": steps,
        "optimizer.warmup_steps": 0,
        "validation.every": 0,
        "data.workers": 0,
        "logging.progress": "false",
    }
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as directory, Environment() as environment:
        command = ["--recipe", "mlo_mae_tiny", "--data.path", data, "--run_dir", directory, *given, *flags]
        run = Run(parse(command), environment, Path(directory), "plain", unguarded(Path(directory)))
        (hook,) = (each for each in run.hooks.all if isinstance(each, LearnedMasks))
        outer_step = hook.masker.outer_step

        def compared(hypergradient: Hypergradient, scale: float) -> bool:
            last, every = (gradient(hook.masker, part) for part in (hypergradient[:1], hypergradient))
            error = float((last - every).norm() / every.norm())
            found.append((error, float(last @ every / (last.norm() * every.norm()))))
            return outer_step(hypergradient, scale)

        hook.masker.outer_step = compared  # type: ignore[method-assign]
        run.train()
    return found


def gradient(masker: Masker, hypergradient: Hypergradient) -> Tensor:
    """The masking network's gradient of a hypergradient by the masks, flat."""
    losses = []
    for window, parts in hypergradient:
        for selection, part in zip(window.selections, parts, strict=True):
            weights = patch_weights(masker.network(selection.embeddings), selection, masker.relaxation)
            losses.append((weights.masked * part.weights).sum() * window.factor)
    parameters = list(masker.network.module.parameters())
    found = torch.autograd.grad(torch.stack(losses).sum(), parameters)
    return torch.cat([each.reshape(-1) for each in found]).double()


if __name__ == "__main__":
    main()
