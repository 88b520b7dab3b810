"""Checkpoints of a run directory: their names and retention, and where a run goes on from.

Which settings may differ from the checkpoint's: engine, launcher and number of ranks are none and may always differ; a
setting may differ if the sequence of global batches, the model and the method stay as they were.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trp_scale.checkpoint.document import DOCUMENT_NAME, check_sound, read_document, wrong_size
from trp_scale.config import WITHOUT_END, Config, RefusedError
from trp_scale.config.checks import engine_rules
from trp_scale.config.json_files import json_lines, parse_json
from trp_scale.config.loader import flat, from_dict, to_dict
from trp_scale.config.registry import names
from trp_scale.distributed.groups import Group, on_rank_zero, run_on_all_ranks
from trp_scale.distributed.liveness import LEASE
from trp_scale.errors import CheckpointError, listed_problems, quote, shorten
from trp_scale.storage.files import atomic_write, sync_directory

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


class ResumePoint(NamedTuple):
    """Checkpoint that a search selected, `None` if there is none, and sentences for the log: a sentence for each newer
    one that was passed over."""

    path: Path | None
    notices: tuple[str, ...] = ()


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


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest of `checkpoints`, -1 without one."""
    return max((step for step, _ in checkpoints(run_dir)), default=-1)


def incompleteness(path: Path) -> str | None:
    """None when checkpoint.json can be read and every file it lists is there with its size; else what is wrong."""
    try:
        document = read_document(path)
        return next((problem for entry in document.files if (problem := wrong_size(path, entry))), None)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError as error:  # the run has just removed it
        return f"{error.filename}: missing"


def newest_complete(run_dir: Path) -> ResumePoint:
    """The newest checkpoint that is complete; newer ones that are not are named in the warnings. A run that goes on may
    remove them meanwhile: then it is looked again."""
    while True:
        warnings: list[str] = []
        listed = checkpoints(run_dir)
        for _, path in reversed(listed):
            problem = incompleteness(path)
            if problem is None:
                return ResumePoint(path, tuple(warnings))
            warnings.append(f"{path} is not complete and is passed over: {problem}")
        if checkpoints(run_dir) == listed:
            return ResumePoint(None, tuple(warnings))


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
    problem_of: Callable[[Path], str | None],
    spared: Collection[Path],
) -> None:
    """Keep `written` and those before it that are to stay; remove the rest of those before it.

    Later steps are not touched: they can only be there when the run was taken back to an earlier step, and then
    set_aside_later has moved them. Nothing is removed for the sake of a checkpoint that is not sound.

    Args:
        problem_of: what is wrong with a checkpoint; None = it is sound.
        spared: still needed; they go the next time.
    """
    if kept.newest == 0 or problem_of(written) is not None:
        return
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
    for _, path in reversed(before):
        if path not in staying:
            hidden = path.with_name(f".{path.name}.old")
            path.rename(hidden)  # half-removed, it must not look like a checkpoint
            shutil.rmtree(hidden)


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
        return on_rank_zero(group, what, lambda: _start_fresh(run_dir))
    path = run_dir if resume == "auto" else Path(resume)
    if resume == "auto":
        on_rank_zero(group, what, lambda: remove_leftovers(run_dir))
    elif on_rank_zero(group, what, lambda: _is_checkpoint(path, run_dir)):
        if problem := damage(path, group):
            raise RefusedError(f"--resume {path}: the checkpoint is not whole: {problem}")
        return ResumePoint(path, (f"resuming from {path}",))
    newest = newest_whole(path, group, every if resume == "auto" else 1)
    if newest.path is not None:
        return ResumePoint(newest.path, (*newest.notices, f"resuming from {newest.path}"))
    if resume == "auto" and not newest.notices:
        return ResumePoint(None, (f"no checkpoint in {run_dir}: starting from step 0",))
    problem = "; ".join((*newest.notices, "none is left")) if newest.notices else "there is no checkpoint in it"
    raise RefusedError(f"--resume {resume}: {problem}. Put back a whole one, or start again in another --run_dir")


def newest_whole(run_dir: Path, group: Group, every: int = 1) -> ResumePoint:
    """The newest checkpoint of which every byte is as it was written; all ranks together. The notices name newer ones
    that are not, and how many steps are lost with them."""
    passed: list[tuple[int, Path, str]] = []
    for step, path in reversed(on_rank_zero(group, f"looking into {run_dir}", lambda: checkpoints(run_dir, every))):
        if (problem := damage(path, group)) is None:
            return ResumePoint(path, tuple(_passed_over(*newer, newest=step) for newer in passed))
        passed.append((step, path, problem))
    return ResumePoint(None, tuple(_passed_over(*newer) for newer in passed))


def _passed_over(step: int, path: Path, problem: str, newest: int | None = None) -> str:
    text = f"{path} is not whole and is passed over: {problem}"
    if newest is not None:
        lost = step - newest
        text += f"; {lost} {'steps are' if lost > 1 else 'step is'} lost, which this start makes again"
    return text


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


def _start_fresh(run_dir: Path) -> ResumePoint:
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
    return ResumePoint(None, (f"starting from step 0 in {run_dir}",))


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
    return notices + cut_metrics(run_dir / METRICS_FILE, step)


def cut_metrics(path: Path, step: int) -> list[str]:
    """Cut metrics.jsonl back to a checkpoint: keep the records with `step` <= step, in order and byte for byte.

    A record's `step` is the number of steps done after it. A record that is not whole (the process was killed while it
    wrote) is dropped. The file is replaced at once; where it does not exist nothing is done.

    Returns:
        sentences for the log on what was cut off.
    """
    if not path.exists():
        return []
    later = damaged = 0
    with atomic_write(path) as output:
        for _, line in json_lines(path):
            number = _record_step(line)
            if number is None:
                damaged += 1
            elif number > step:
                later += 1
            else:
                output.write(line)
    cut = {f"after step {step} were cut off": later, "that were not whole were dropped": damaged}
    return [f"{METRICS_FILE}: records {what}: {count}" for what, count in cut.items() if count]


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
"""Settings that may change, beside those of an engine; `section.*` is every field of the section. data.path may where
the data are the same."""


def adopt_unrecorded(config: Config, stored: Mapping[str, Any]) -> None:
    """Set, in place, what earlier versions computed where the settings that they stored do not say it.

    Args:
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
    engines = [f"{section}.*" for name in names("engine") if (section := engine_rules(name).section)]
    changeable = (*MAY_CHANGE, *engines)
    same_data = stored_digest is not None and stored_digest == present_digest
    allowed: list[str] = []
    refused: list[str] = []
    for field in sorted(before.keys() | now.keys()):
        then, today = before.get(field, "absent"), now.get(field, "absent")
        if then == today:
            continue
        difference = f"{field}: checkpoint {_quote_value(then)}, now {_quote_value(today)}"
        may_change = field in changeable or f"{field.partition('.')[0]}.*" in changeable
        if may_change or (field == "data.path" and same_data):
            if field == "training.steps" and (schedule := now.get("optimizer.schedule")) not in WITHOUT_END:
                difference += f" (the {schedule} schedule of the learning rate now ends there)"
            allowed.append(difference)
        else:
            refused.append(difference)
    if stored_digest != present_digest:
        refused.append(
            f"content of the data set: checkpoint {_quote_value(stored_digest)}, now {_quote_value(present_digest)}"
        )
    if refused:
        raise RefusedError(
            f"the checkpoint was made with other settings:\n{listed_problems(refused)}\n"
            f"On resume these may change: engine, number of ranks, {', '.join(changeable)}, and data.path to the same "
            "data elsewhere. Set the listed ones back, or start a new run with another --run_dir."
        )
    return allowed


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.field": value}, values as they come back from JSON."""
    return flat(json.loads(json.dumps(nested)))


def _quote_value(value: Any) -> str:
    return "unknown" if value is None else shorten(value if isinstance(value, str) else quote(value))
