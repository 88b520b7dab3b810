"""Where a run goes on from, its metrics cut back to there, and which settings may differ from the checkpoint's.

Engine, launcher and number of ranks are not settings: they may always differ. A setting may differ if the sequence of
global batches, the model and the method stay as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.agreement import on_rank_zero, run_on_all_ranks
from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.run_directory import (
    CHECKPOINTS,
    METRICS_FILE,
    PICTURES,
    Found,
    checkpoints,
    remove_leftovers,
    set_aside_later,
)
from trp_scale.checkpoint.tensor_file import check_sound
from trp_scale.config import WITHOUT_END, Config, RefusedError
from trp_scale.config.json_files import json_lines, parse_json
from trp_scale.config.loader import flat, from_dict, to_dict
from trp_scale.distributed.groups import Group
from trp_scale.distributed.lease import LEASE
from trp_scale.errors import CheckpointError, listed_problems, quote, shorten
from trp_scale.storage.files import atomic_write


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Checkpoint that `--resume` selected.

    Attributes:
        checkpoint: directory to load, None for a fresh start.
        notices: sentences for the log: what was taken and what was passed over.
    """

    checkpoint: Path | None
    notices: tuple[str, ...]


def select(run_dir: Path, resume: str, group: Group, every: int = 1) -> ResumePoint:
    """Decide what to start from; all ranks together. Every byte of what is taken has been compared with its checksum,
    each file by one rank, so that a run goes on from the newest checkpoint that can be read at all.

    What a killed process left half-written in run_dir is removed first; another run's directory is only read.

    Args:
        resume: "auto" = the newest whole checkpoint of run_dir, or a fresh start where there is none at all;
            "never" = a fresh start in an empty directory; else the path of a checkpoint or of a run directory.
        every: "auto" takes only checkpoints of steps that are multiples of it.
    Raises:
        RefusedError: on every rank: "never" and the directory is not empty; a checkpoint given by its path that is not
            whole; no whole one among those of a directory.
    """
    what = f"looking into {run_dir}"
    if resume == "never":
        return on_rank_zero(group, what, lambda: _fresh(run_dir))
    if resume == "auto":
        on_rank_zero(group, what, lambda: remove_leftovers(run_dir))
        newest = newest_whole(run_dir, group, every)
        if newest.path is None and not newest.warnings:
            return ResumePoint(checkpoint=None, notices=(f"no checkpoint in {run_dir}: starting from step 0",))
        if newest.path is None:
            raise RefusedError(
                f"--resume auto: {'; '.join(newest.warnings)}; none is left. Put back a whole one, or start again in "
                "another --run_dir"
            )
        return ResumePoint(checkpoint=newest.path, notices=(*newest.warnings, f"resuming from {newest.path}"))
    path = Path(resume)
    if on_rank_zero(group, what, lambda: _is_checkpoint(path, run_dir)):
        if problem := damage(path, group):
            raise RefusedError(f"--resume {path}: the checkpoint is not whole: {problem}")
        return ResumePoint(checkpoint=path, notices=(f"resuming from {path}",))
    newest = newest_whole(path, group)
    if newest.path is None:
        why = "; ".join(newest.warnings) or "there is no checkpoint in it"
        raise RefusedError(f"--resume {path}: nothing to resume from: {why}")
    return ResumePoint(checkpoint=newest.path, notices=(*newest.warnings, f"resuming from {newest.path}"))


def newest_whole(run_dir: Path, group: Group, every: int = 1) -> Found:
    """The newest checkpoint of which every byte is as it was written; all ranks together. The warnings name newer ones
    that are not, and how many steps are lost with them."""
    passed: list[tuple[int, Path, str]] = []
    newest: Path | None = None
    newest_step = 0
    for step, path in reversed(on_rank_zero(group, f"looking into {run_dir}", lambda: checkpoints(run_dir, every))):
        problem = damage(path, group)
        if problem is None:
            newest, newest_step = path, step
            break
        passed.append((step, path, problem))
    warnings = [
        f"{path} is not whole and is passed over: {problem}" + (_lost(step - newest_step) if newest else "")
        for step, path, problem in passed
    ]
    return Found(path=newest, warnings=tuple(warnings))


def _lost(steps: int) -> str:
    return f"; {steps} {'steps are' if steps > 1 else 'step is'} lost, which this start makes again"


def damage(path: Path, group: Group) -> str | None:
    """Compare all files of a checkpoint with their checksums, each by one rank; all ranks together.

    Returns:
        what is missing or damaged, the same on every rank; None when all is whole.
    """
    try:
        document = on_rank_zero(group, f"reading {path}", lambda: read_document(path))
        run_on_all_ranks(group, f"checking {path}", lambda: check_sound(path, document.files[group.rank :: group.size]))
    except CheckpointError as error:
        return str(error)
    return None


def _fresh(run_dir: Path) -> ResumePoint:
    content = sorted(
        entry.name
        for entry in (run_dir.iterdir() if run_dir.is_dir() else ())
        if not entry.name.startswith(".")
        and entry.name != LEASE  # this start's
        and not (entry.is_dir() and not any(entry.iterdir()))
    )
    if content:
        shown = ", ".join(content[:8]) + (f" and {len(content) - 8} more" if len(content) > 8 else "")
        raise RefusedError(
            f"--resume never, but {run_dir} is not empty (it holds {shown}); give another --run_dir, empty this one, "
            "or say --resume auto to go on with that run"
        )
    return ResumePoint(checkpoint=None, notices=(f"starting from step 0 in {run_dir}",))


def _is_checkpoint(path: Path, run_dir: Path) -> bool:
    """Whether what --resume names is a checkpoint, not a run directory."""
    if not path.is_dir():
        raise RefusedError(f"--resume {path}: no such directory; give auto, never, a checkpoint or a run directory")
    if (run_dir / METRICS_FILE).exists() and not path.resolve().is_relative_to(run_dir.resolve()):
        raise RefusedError(
            f"--resume {path} is of another run than --run_dir {run_dir}, which has {METRICS_FILE} of its own; "
            "give an empty --run_dir, or say --resume auto to go on with the run that is there"
        )
    return (path / DOCUMENT_NAME).exists()


def take_back(run_dir: Path, step: int) -> list[str]:
    """Bring a run directory to `step`, from which the run goes on (0 = a fresh start); on one rank.

    Later checkpoints are set aside, so that `--resume auto` never returns to what this start left behind, and later
    pictures; metrics.jsonl is cut back.

    Returns:
        sentences for the log.
    """
    aside = set_aside_later(run_dir / CHECKPOINTS, step)
    notices = [f"a checkpoint of a later step was set aside as {path}" for path in aside]
    set_aside_later(run_dir / PICTURES, step)
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
    with atomic_write(path) as output:
        for _, line in json_lines(path):
            number = _record_step(line)
            if number is None:
                damaged += 1
            elif number > step:
                later += 1
            else:
                kept += 1
                output.write(line)
    return CutMetrics(kept=kept, later=later, damaged=damaged)


def _record_step(line: bytes) -> int | None:
    """The record's step; None where the line is no whole record (a last line without its end is not)."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = parse_json(line, METRICS_FILE)["step"]
    except (RefusedError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


MAY_CHANGE = (
    "modules",
    "model.weights_names",
    "batch.micro_size",
    "training.steps",
    "training.max_hours",
    "training.max_skipped_steps",
    "training.compile",
    "training.activation_checkpointing",
    "training.deterministic",
    "fsdp.*",
    "megatron.*",
    "data.workers",
    "data.prefetch",
    "data.verify",
    "data.max_corrupt_blocks",
    "adversary.check_every",
    "validation.*",
    "checkpoint.*",
    "reliability.*",
    "logging.*",
    "probes.*",
)
"""Settings that may change; `section.*` is every field of the section. data.path may where the data are the same."""


def may_change(field: str) -> bool:
    """Whether `section.field` may differ on resume, whatever the data."""
    return field in MAY_CHANGE or f"{field.partition('.')[0]}.*" in MAY_CHANGE


def adopt_unrecorded(config: Config, stored: Mapping[str, Any]) -> None:
    """Set, in place, what earlier versions computed where the settings that they stored do not say it.

    Args:
        config: of the run that continues.
        stored: nested settings in its checkpoint or result.
    """
    if "decay_end" not in stored.get("optimizer", {}):
        config.optimizer.decay_end = "last_step"
    balancer: Any = getattr(config, "balancer", None)
    if hasattr(balancer, "group_sizes") and "group_sizes" not in stored.get("balancer", {}):
        balancer.group_sizes = "batch"


def check_settings(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    stored_digest: str | None = None,
    present_digest: str | None = None,
) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that wants to go on from it.

    A setting that the checkpoint does not know is newer than it, and had its default then (or the value of
    `adopt_unrecorded`).

    Args:
        stored: nested settings in the checkpoint.
        present: nested settings of this run, as recipes.loader.to_dict gives them.
        stored_digest, present_digest: digest of the data set's content then and now; None = not known.
    Returns:
        a sentence for each difference that is allowed.
    Raises:
        RefusedError: listing every difference that is not.
    """
    now = _flat(present)
    default = from_dict({"upstream": present["upstream"]} if "upstream" in present else {"downstream": {}})
    adopt_unrecorded(default, stored)
    before = {**{name: value for name, value in _flat(to_dict(default)).items() if name in now}, **_flat(stored)}
    same_data = stored_digest is not None and stored_digest == present_digest
    allowed: list[str] = []
    refused: list[str] = []
    for field in sorted(before.keys() | now.keys()):
        then, today = before.get(field, "absent"), now.get(field, "absent")
        if then == today:
            continue
        difference = f"{field}: checkpoint {_quote_value(then)}, now {_quote_value(today)}"
        if may_change(field) or (field == "data.path" and same_data):
            allowed.append(difference + _consequence(field, now))
        else:
            refused.append(difference)
    if stored_digest != present_digest:
        refused.append(
            f"content of the data set: checkpoint {_quote_value(stored_digest)}, now {_quote_value(present_digest)}"
        )
    if refused:
        listed = listed_problems(refused)
        raise RefusedError(
            f"the checkpoint was made with other settings:\n{listed}\n"
            f"On resume these may change: engine, number of ranks, {', '.join(MAY_CHANGE)}, and data.path to the same "
            "data elsewhere. Set the listed ones back, or start a new run with another --run_dir."
        )
    return allowed


def _consequence(field: str, now: Mapping[str, Any]) -> str:
    schedule = now.get("optimizer.schedule")
    if field == "training.steps" and schedule not in WITHOUT_END:
        return f" (the {schedule} schedule of the learning rate now ends there)"
    return ""


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.field": value}, values as they come back from JSON."""
    return flat(json.loads(json.dumps(nested)))


def _quote_value(value: Any) -> str:
    return "unknown" if value is None else shorten(value if isinstance(value, str) else quote(value))
