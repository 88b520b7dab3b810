"""The last sections of a run's page: settings that are not the recipe's, and what to do next, as commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Literal

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.config import Config
from trp_scale.errors import shorten
from trp_scale.reporting.document import Block, Cell, Commands, Section, Sentences, Table
from trp_scale.reporting.record import RunRecord
from trp_scale.training.rundir import continue_command


def settings_section(run: RunRecord) -> Section:
    """Settings that are not the recipe's."""
    changed = run.changed
    rows = [
        [
            Cell(text=name, code=True),
            *(Cell(text="-" if value is None else shorten(_value(value), 300), code=True) for value in values),
        ]
        for name, *values in changed.settings
    ]
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(head=["setting", "recipe", "this run"], rows=rows, words=3))
    if changed.problem:
        blocks.append(Sentences(sentences=[f"Not compared with a recipe: {changed.problem}"]))
    look_for = (
        f"What is not as in {changed.recipe}. What a run chooses where a recipe leaves it open, as batch.micro_size, "
        "stands here too; config.yaml has all settings."
    )
    return Section(name="settings", title="Settings that differ from the recipe", look_for=look_for, blocks=blocks)


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def next_section(run: RunRecord) -> Section:
    """Commands with this run's path."""
    commands = list(next_commands(run))
    look_for = "Each is ready to be pasted; words in capitals are yours to fill in."
    return Section(name="next", title="What to do next", look_for=look_for, blocks=[Commands(commands=commands)])


def next_commands(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(what for, command)."""
    path, modules = shlex.quote(str(run.run_dir.resolve())), _modules(run)
    if run.state.word == "running":
        yield "Follow it while it goes on:", f"trp-scale watch {path}{modules}"
    if run.state.goes_on and run.command:
        where = run.start.directory or "where it was started"
        command = continue_command(run.command, run.run_dir.resolve())
        yield f"Go on from its newest checkpoint, in {where} and under the same launcher:", command
    yield "Examine the run: which checkpoints are whole, where it would go on:", f"trp-scale doctor {path}"
    if run.fine_tuning:
        return
    yield "Measure every task's loss on held-out rows:", f"trp-scale evaluate --run {path}{modules}"
    if run.config is not None:
        judged = of_text if run.config.reads == "text" else of_images
        yield from ((what, f"{command}{modules}") for what, command in judged(path))
        to = exported_to(run.config)
        what = "the model, as transformers reads it" if to == "hf" else "the encoder, for timm or torch alone"
        yield f"Take away {what}:", f"trp-scale export --run {path} --to {to} --output EXPORTED{modules}"
    other = f"trp-scale compare {path} OTHER_RUN --html compared.html{modules}"
    yield "Put it beside another run, results and curves:", other


def exported_to(config: Config) -> Literal["hf", "timm"]:
    """Return the library that a model can be exported to unchanged: transformers has BERT, and the MAE whose encoder
    sees visible patches alone."""
    vision = getattr(config, "vision", None)
    is_mae = getattr(vision, "tokens", "") == "visible" and getattr(vision, "positions", "") == "absolute"
    return "hf" if vision is None or (is_mae and getattr(vision, "decoder", "") == "transformer") else "timm"


def of_text(path: str) -> Iterator[tuple[str, str]]:
    """Commands that judge an encoder of text."""
    finetune = f"trp-scale finetune --recipe glue --from {path} --data.path GLUE --task all --seeds 3 --run_dir NEW_RUN"
    yield "Fine-tune its encoder on GLUE, over seeds:", finetune
    yield "Measure its frozen encoder:", f"trp-scale probe --from {path} --data GLUE --task sst2"


def of_images(path: str) -> Iterator[tuple[str, str]]:
    """Commands that judge an encoder of images."""
    drawn = f"trp-scale report --run {path} --pictures {path}/{PICTURES}"
    yield "Draw what it reconstructs, its positions and masks, and have them on this page:", drawn
    yield "Measure its frozen encoder:", f"trp-scale probe --from {path} --data SHARDS --method knn"
    tuned = f"trp-scale finetune --recipe classification_tiny --from {path} --data.path SHARDS --seeds 3"
    yield "Fine-tune its encoder to classify images, over seeds:", f"{tuned} --run_dir NEW_RUN"


def _modules(run: RunRecord) -> str:
    """--module of a run with methods from outside."""
    named = run.settings.get("modules")
    return "".join(f" --module {shlex.quote(str(name))}" for name in named) if isinstance(named, list) else ""
