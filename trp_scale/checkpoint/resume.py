"""Where a run goes on from, and its metrics cut back to there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.durable import sync_directory
from trp_scale.checkpoint.run_directory import (
    incompleteness,
    newest_complete,
    remove_leftovers,
    set_aside_later,
)
from trp_scale.config import RefusedError
from trp_scale.observe.metrics import METRICS_FILE


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What `--resume` led to.

    Attributes:
        checkpoint: directory to load, None for a fresh start.
        notices: sentences for the log: what was taken and what was passed over.
    """

    checkpoint: Path | None
    notices: tuple[str, ...]


def select(run_dir: Path, resume: str) -> Selection:
    """Decide what to start from; on one rank, whose answer the others take (agreement.on_rank_zero).

    What a killed process left half-written in run_dir is removed first; another run's directory is only read.

    Args:
        resume: "auto" = the newest complete checkpoint of run_dir, or a fresh start where there is none;
            "never" = a fresh start in an empty directory; else the path of a checkpoint or of a run directory.
    Raises:
        RefusedError: "never" and the directory is not empty; a path without a complete checkpoint.
    """
    if resume == "never":
        return _fresh(run_dir)
    if resume == "auto":
        remove_leftovers(run_dir)
        found = newest_complete(run_dir)
        if found.path is not None:
            return Selection(checkpoint=found.path, notices=(*found.warnings, f"resuming from {found.path}"))
        return Selection(
            checkpoint=None, notices=(*found.warnings, f"no complete checkpoint in {run_dir}: starting from step 0")
        )
    return _given(Path(resume), run_dir)


def _fresh(run_dir: Path) -> Selection:
    content = sorted(
        entry.name
        for entry in (run_dir.iterdir() if run_dir.is_dir() else ())
        if not entry.name.startswith(".") and not (entry.is_dir() and not any(entry.iterdir()))
    )
    if content:
        shown = ", ".join(content[:8]) + (f" and {len(content) - 8} more" if len(content) > 8 else "")
        raise RefusedError(
            f"--resume never, but {run_dir} is not empty (it holds {shown}); give another --run_dir, empty this one, "
            "or say --resume auto to go on with that run"
        )
    return Selection(checkpoint=None, notices=(f"starting from step 0 in {run_dir}",))


def _given(path: Path, run_dir: Path) -> Selection:
    if not path.is_dir():
        raise RefusedError(f"--resume {path}: no such directory; give auto, never, a checkpoint or a run directory")
    if (run_dir / METRICS_FILE).exists() and not path.resolve().is_relative_to(run_dir.resolve()):
        raise RefusedError(
            f"--resume {path} is of another run than --run_dir {run_dir}, which has {METRICS_FILE} of its own; "
            "give an empty --run_dir, or say --resume auto to go on with the run that is there"
        )
    if (path / DOCUMENT_NAME).exists():
        if problem := incompleteness(path):
            raise RefusedError(f"--resume {path}: the checkpoint is not complete: {problem}")
        return Selection(checkpoint=path, notices=(f"resuming from {path}",))
    found = newest_complete(path)
    if found.path is None:
        why = "; ".join(found.warnings) or "there is no checkpoint in it"
        raise RefusedError(f"--resume {path}: nothing to resume from: {why}")
    return Selection(checkpoint=found.path, notices=(*found.warnings, f"resuming from {found.path}"))


def take_back(run_dir: Path, step: int) -> list[str]:
    """Bring a run directory to `step`, from which the run goes on (0 = a fresh start); on one rank.

    Later checkpoints are set aside, so that `--resume auto` never returns to what this start left behind, and
    metrics.jsonl is cut back.

    Returns:
        sentences for the log.
    """
    notices = [f"a checkpoint of a later step was set aside as {path}" for path in set_aside_later(run_dir, step)]
    cut = cut_metrics(run_dir / METRICS_FILE, step)
    if cut.later:
        notices.append(f"{METRICS_FILE}: records after step {step} were cut off: {cut.later}")
    if cut.damaged:
        notices.append(f"{METRICS_FILE}: records that were not whole were dropped: {cut.damaged}")
    return notices


@dataclass(frozen=True, kw_only=True)
class CutMetrics:
    """Lines of metrics.jsonl that stayed, that belonged to later steps, and that were not whole records."""

    kept: int
    later: int
    damaged: int


def cut_metrics(path: Path, step: int) -> CutMetrics:
    """Cut metrics.jsonl back to a checkpoint: keep the records with `step` <= step, in order and byte for byte.

    A record's `step` is the number of steps done after it. A record that is not whole (the process was killed while it
    wrote) is dropped and counted. The file is replaced at once; where it does not exist nothing is done.
    """
    if not path.exists():
        return CutMetrics(kept=0, later=0, damaged=0)
    kept = later = damaged = 0
    temporary = path.with_name(f".{path.name}.tmp")
    with path.open("rb") as lines, temporary.open("wb") as output:
        for line in lines:
            number = _step_of(line)
            if number is None:
                damaged += 1
            elif number > step:
                later += 1
            else:
                kept += 1
                output.write(line)
        output.flush()
        os.fsync(output.fileno())
    temporary.replace(path)
    sync_directory(path.parent)
    return CutMetrics(kept=kept, later=later, damaged=damaged)


def _step_of(line: bytes) -> int | None:
    """The record's step; None where the line is no whole record (a last line without its end is not)."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
