"""Layout of a run directory: complete checkpoints, retention, tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.tensor_file import wrong_size
from trp_scale.distributed.groups import Group
from trp_scale.errors import CheckpointError
from trp_scale.storage.files import sync_directory

METRICS_FILE = "metrics.jsonl"

SET_ASIDE = "set_aside_"
"""Before the names of what a run that went on from an earlier step had left of later ones: checkpoints, pictures."""

PICTURES = "pictures"
"""Folder of a run directory whose PNG files are shown on its page, and go to Weights & Biases and TensorBoard."""

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
"""Directory into which a run on text copies its tokenizer."""
_FINAL = re.compile(r"^step_(\d{8,})$")
_LEFTOVER = re.compile(r"^\.(step_\d{8,})\.(tmp|old|replaced)$")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search: the checkpoint taken, if any, and a sentence for each newer one that was passed over."""

    path: Path | None
    warnings: tuple[str, ...] = ()


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """RUN/checkpoints/step_00000123"""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def temporary_path(run_dir: Path, step: int) -> Path:
    """Return the path of an unfinished checkpoint: RUN/checkpoints/.step_00000123.tmp"""
    return run_dir / CHECKPOINTS / f".step_{step:08d}.tmp"


def checkpoints(run_dir: Path, every: int = 1) -> list[tuple[int, Path]]:
    """(step, directory) of the checkpoints under their final names, complete or not, oldest first.

    Args:
        every: only steps that are multiples of it: a stop or a best figure may have written others.
    """
    return [(step, path) for step, path in _of_steps(run_dir / CHECKPOINTS) if step % every == 0]


def _of_steps(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = ((match, path) for path in directory.iterdir() if (match := _FINAL.match(path.name)) and path.is_dir())
    return sorted((int(match[1]), path) for match, path in named)


def incompleteness(path: Path) -> str | None:
    """None when checkpoint.json can be read and every file it lists is there with its size; else what is wrong."""
    try:
        document = read_document(path)
        return next((problem for entry in document.files if (problem := wrong_size(path, entry))), None)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError as error:  # the run has just removed it
        return f"{error.filename}: missing"


def newest_complete(run_dir: Path) -> Found:
    """The newest checkpoint that is complete; newer ones that are not are named in the warnings. A run that goes on may
    remove them meanwhile: then it is looked again."""
    while True:
        warnings: list[str] = []
        listed = checkpoints(run_dir)
        for _, path in reversed(listed):
            problem = incompleteness(path)
            if problem is None:
                return Found(path=path, warnings=tuple(warnings))
            warnings.append(f"{path} is not complete and is passed over: {problem}")
        if checkpoints(run_dir) == listed:
            return Found(path=None, warnings=tuple(warnings))


def remove_leftovers(run_dir: Path) -> None:
    """Remove what a killed process left half-written or half-removed; at start-up and before each save, on one rank.

    A checkpoint that was about to be replaced by a new one of the same step gets its name back if the new one has not.
    """
    directory = run_dir / CHECKPOINTS
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        leftover = _LEFTOVER.match(path.name)
        if leftover and leftover[2] == "replaced" and not path.with_name(leftover[1]).exists():
            path.rename(path.with_name(leftover[1]))
        elif leftover:
            shutil.rmtree(path)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, taking the place of an older one of that name."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    sync_directory(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Retention of checkpoints.

    Attributes:
        newest: so many of the newest sound ones, the last written included; 0 = all.
        every: each one whose step is a multiple of it; 0 = none.
        before: the newest sound one of an earlier step than this, where it is not 0: a fault began there.
        best: that of this step; 0: none for this reason.
        regular: the newest sound one whose step is a multiple of it, which a rollback needs; 0: none for this reason.
    """

    newest: int
    every: int = 0
    before: int = 0
    best: int = 0
    regular: int = 0


def retain(
    run_dir: Path,
    written: Path,
    kept: Kept,
    problem_of: Callable[[Path], str | None] = incompleteness,
    spared: Collection[Path] = (),
) -> list[Path]:
    """Keep `written` and those before it that are to stay; remove the rest of those before it.

    Later steps are not touched: they can only be there when the run was taken back to an earlier step, and then
    set_aside_later has moved them. Nothing is removed for the sake of a checkpoint that is not sound.

    Args:
        problem_of: what is wrong with a checkpoint; None = it is sound.
        spared: still needed; they go the next time.
    """
    if kept.newest == 0 or problem_of(written) is not None:
        return []
    step = next(step for step, path in checkpoints(run_dir) if path.name == written.name)
    before = [(earlier, path) for earlier, path in reversed(checkpoints(run_dir)) if earlier < step]
    staying = {path for earlier, path in before if kept.every and earlier % kept.every == 0} | set(spared)
    staying |= {path for earlier, path in before if earlier == kept.best}
    wanted, pinned = kept.newest - 1, False
    has_regular = not kept.regular or step % kept.regular == 0
    for earlier, path in before:
        needed = not pinned and 0 < earlier < kept.before
        is_regular = not has_regular and earlier % kept.regular == 0
        if (wanted > 0 or needed or is_regular) and problem_of(path) is None:
            staying.add(path)
            wanted -= 1
            pinned = pinned or needed
            has_regular = has_regular or is_regular
    removed = [path for _, path in reversed(before) if path not in staying]
    for path in removed:
        hidden = path.with_name(f".{path.name}.old")
        path.rename(hidden)  # half-removed, it must not look like a checkpoint
        shutil.rmtree(hidden)
    return removed


def set_aside_later(directory: Path, step: int) -> list[Path]:
    """Rename what a directory has of steps later than `step`, from which a run goes on, to set_aside_step_...: `auto`
    must not take such checkpoints, and no page shows such pictures.

    Args:
        directory: RUN/checkpoints, or another whose folders are named like its own.

    Returns:
        the new names.
    """
    moved: list[Path] = []
    for later, path in _of_steps(directory):
        if later > step:
            target = path.with_name(f"{SET_ASIDE}{path.name}")
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"{SET_ASIDE}{path.name}_{number}")
            path.rename(target)
            moved.append(target)
    return moved


def copy_tokenizer(run_dir: Path, source: Path, world: Group) -> None:
    """Copy the data set's tokenizer on rank 0, so that the run directory can be exported and moved on its own."""
    target = run_dir / TOKENIZER
    if world.rank != 0 or target.exists():
        return
    temporary = run_dir / f".{TOKENIZER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    temporary.rename(target)


def name_seed_runs(directory: Path) -> str:
    """Return the words that name the runs in a directory of `trp-scale finetune`; empty if there are none."""
    paths = sorted(str(path.parent) for path in directory.glob("*/seed_*/config.yaml"))
    return f"; fine-tuned runs are in it, give one: {', '.join(paths[:10])}" if paths else ""
