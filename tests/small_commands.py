"""Commands of documents made small, and run in this process: less text, smaller models, fewer steps.

A command keeps its words; what makes it small is appended, and of two equal flags the last one counts.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Mapping
from pathlib import Path

from tests.commands import PRETRAIN
from tests.runs import SMALL
from trp_scale.cli import main as cli
from trp_scale.config.loader import flat, load_recipe, to_dict

SMALL_IMAGES = {"samples_per_shard": 16, "rows_per_block": 8, "processes": 1}
SMALL_SCENES = {**SMALL_IMAGES, "count": 48, "size": 48}
SMALL_DECODER = {"vision.decoder_layers": 2, "vision.decoder_hidden_size": 32, "vision.decoder_heads": 2}
SMALL_TEXT = {"length": 64, "vocab_size": 1000, "rows_per_block": 16, "processes": 1, "tagger": "textblob"}
STEPS = 3
LONGER = 2
"""Steps that a command with --resume adds."""


def as_flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def small_training(words: list[str], steps: int) -> list[str]:
    """Flags that shrink a recipe, those of its own settings. What a resume may not change is the same in all
    commands. Weights of another library bring their own sizes."""
    own = {
        "training.steps": steps,
        "training.epochs": 0,
        "training.precision": "fp32",
        "optimizer.schedule": "constant",
    }
    known = flat(to_dict(load_recipe(words[words.index("--recipe") + 1])))
    small = {name: value for name, value in {**SMALL, **SMALL_DECODER, **own}.items() if name in known}
    if "--model.weights" in words:
        small = {name: value for name, value in small.items() if not name.startswith("model.")}
    return as_flags(small)


def small_tuning(words: list[str]) -> list[str]:
    """Flags that shrink fine-tuning; the encoder has its own sizes."""
    small: dict[str, object] = {"downstream.epochs": 0, "training.steps": STEPS, "optimizer.schedule": "constant"}
    small |= {"batch.global_size": 8, "batch.micro_size": 4, "data.workers": 0}
    small |= {"training.precision": "fp32", "logging.every": 1}
    if "--seeds" in words:
        small["seeds"] = 2
    if "--task" in words:
        small |= {"task": "cola,rte", "downstream.max_length": 32}
    return as_flags(small)


def made_small(words: list[str]) -> list[str]:
    """A command of trp-scale, or of a launcher, that makes less and takes less time."""
    if "shard-text" in words:
        return [*words, *as_flags(SMALL_TEXT)]
    if "shard-images" in words:
        return [*words, *as_flags(SMALL_SCENES if "--embedded" in words else SMALL_IMAGES)]
    if "probe" in words:
        return [*words, *as_flags({"workers": 0})]
    if "pseudo-label" in words:
        return [*words, *as_flags({"processes": 1, "batch": 4})]
    if "pretrain" in words or PRETRAIN in words:
        return [*words, *small_training(words, STEPS + LONGER if "--resume" in words else STEPS)]
    if "finetune" in words or "launch/finetune.py" in words:
        return [*words, *small_tuning(words)]
    return words


def run_here(words: list[str]) -> tuple[int, str]:
    """A command in this process; returns its exit status and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            own = words[1:] if words[0] == "trp-scale" else [Path(words[1]).stem, *words[2:]]
            status = cli.main(own)
        except Exception:  # as a process would end; the test that asks for this command shows it
            status = 1
            traceback.print_exc()
    return status, printed.getvalue()
