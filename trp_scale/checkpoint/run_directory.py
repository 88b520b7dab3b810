"""Checkpoints of a run directory: names, retention, and the resume point.

Engine, launcher and number of ranks may always differ from the checkpoint's. A setting may differ if the sequence of
global batches, the model and the method stay the same.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trp_scale.checkpoint.document import DOCUMENT_NAME, check_sound, read_document, wrong_size
from trp_scale.config import WITHOUT_END, Config, RefusedError
from trp_scale.config.files import json_lines, parse_json, read_optional_object
from trp_scale.config.loader import flat, from_dict, to_dict
from trp_scale.config.registry import engine_rules, names
from trp_scale.config.schema import Fields, PartOf, record
from trp_scale.distributed.groups import Group, on_rank_zero, run_on_all_ranks
from trp_scale.distributed.liveness import LEASE
from trp_scale.errors import CheckpointError, listed_problems, quote, shorten
from trp_scale.storage.files import atomic_write, sync_directory

METRICS_FILE, SUMMARY_FILE, ENVIRONMENT_FILE = "metrics.jsonl", "summary.json", "environment.json"

SET_ASIDE = "set_aside_"
"""Prefix of the new names of checkpoints and pictures of later steps, after a run has resumed from an earlier step."""

PICTURES = "pictures"
"""Folder of a run directory with PNG files for its page, Weights & Biases and TensorBoard."""

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
"""Directory with the tokenizer that a run on text copies."""
_FINAL = re.compile(r"^step_(\d{8,})$")
_LEFTOVER = re.compile(r"^\.(step_\d{8,})\.(tmp|old|replaced)$")


class ResumePoint(NamedTuple):
    """Selected checkpoint, `None` if none exists, and log messages: one for each newer checkpoint that was skipped."""

    path: Path | None
    notices: tuple[str, ...] = ()


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return RUN/checkpoints/step_00000123."""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def temporary_path(run_dir: Path, step: int) -> Path:
    """Return the path of an unfinished checkpoint: RUN/checkpoints/.step_00000123.tmp."""
    return run_dir / CHECKPOINTS / f".step_{step:08d}.tmp"


def checkpoints(run_dir: Path, every: int = 1) -> list[tuple[int, Path]]:
    """Return (step, directory) of the checkpoints under their final names, complete or not, oldest first. `every`: only
    multiples of this step; other steps are from stops or best metrics."""
    return [(step, path) for step, path in _of_steps(run_dir / CHECKPOINTS) if step % every == 0]


def _of_steps(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = ((match, path) for path in directory.iterdir() if (match := _FINAL.match(path.name)) and path.is_dir())
    return sorted((int(match[1]), path) for match, path in named)


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest of `checkpoints`, -1 if none exists."""
    return max((step for step, _ in checkpoints(run_dir)), default=-1)


def incompleteness(path: Path) -> str | None:
    """Return `None` if checkpoint.json can be read and every listed file exists with its size; otherwise the
    problem."""
    try:
        document = read_document(path)
        return next((problem for entry in document.files if (problem := wrong_size(path, entry))), None)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError as error:  # a live run has just removed it
        return f"{error.filename}: missing"


def newest_complete(run_dir: Path) -> ResumePoint:
    """Return the newest complete checkpoint; notices name newer incomplete ones. Search again if a live run removes
    checkpoints meanwhile."""
    while True:
        warnings: list[str] = []
        listed = checkpoints(run_dir)
        for _, path in reversed(listed):
            problem = incompleteness(path)
            if problem is None:
                return ResumePoint(path, tuple(warnings))
            warnings.append(f"{path} is incomplete and skipped: {problem}")
        if checkpoints(run_dir) == listed:
            return ResumePoint(None, tuple(warnings))


def remove_leftovers(run_dir: Path) -> None:
    """Remove half-written and half-removed directories of a killed process; at start-up and before each save, on one
    rank.

    A checkpoint that was being replaced gets its name back if the new one was not published.
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
    """Rename a finished directory to its final name, replacing an older one."""
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
        newest: number of newest intact checkpoints, including the last; 0 = all.
        every: keep each multiple of this step; 0 = none.
        before: keep the newest intact checkpoint before this step, at which a fault began; 0 = none.
        best: keep the checkpoint of this step; 0 = none.
        regular: keep the newest intact checkpoint whose step is a multiple of this, for rollbacks; 0 = none.
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
    """Keep `written` and the earlier checkpoints selected by `kept`; remove the other earlier ones.

    Later checkpoints are not touched; `set_aside_later` has renamed them if the run has resumed from an earlier step.
    Nothing is removed if `written` is damaged.

    Args:
        problem_of: returns the problem of a checkpoint, `None` if it is intact.
        spared: still in use; they are removed the next time.
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
            path.rename(hidden)  # a half-removed directory must not look like a checkpoint
            shutil.rmtree(hidden)


def set_aside_later(directory: Path, step: int) -> list[Path]:
    """Rename entries of steps later than the resume step `step` to set_aside_step_..., so that `auto` does not select
    such checkpoints and no page shows such pictures.

    Args:
        directory: RUN/checkpoints, or another with folders of the same names.

    Returns:
        the new paths.
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
    """Copy the data set's tokenizer on rank 0, so that the run directory can be exported and moved without the data."""
    target = run_dir / TOKENIZER
    if world.rank != 0 or target.exists():
        return
    temporary = run_dir / f".{TOKENIZER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    temporary.rename(target)


def name_seed_runs(directory: Path) -> str:
    """Return a hint that lists the runs in a directory of `trp-scale finetune`; empty if there are none."""
    paths = sorted(str(path.parent) for path in directory.glob("*/seed_*/config.yaml"))
    return f"; fine-tuned runs are in it, give one: {', '.join(paths[:10])}" if paths else ""


def select(run_dir: Path, resume: str, group: Group, every: int = 1) -> ResumePoint:
    """Select the resume point. Collective. Every byte of the selected checkpoint is verified, each file on one rank, so
    that the run resumes from the newest readable checkpoint.

    Half-written files of a killed process in run_dir are removed first; other run directories are only read.

    Args:
        resume: "auto" = newest intact checkpoint of run_dir, or a fresh start if there is none; "never" = fresh start
            in an empty directory; otherwise the path of a checkpoint or run directory.
        every: "auto" selects only multiples of this step.

    Raises:
        RefusedError: on every rank: "never" in a directory that is not empty; a damaged checkpoint at an explicit path;
            only damaged checkpoints in a directory.
    """
    what = f"looking into {run_dir}"
    if resume == "never":
        return on_rank_zero(group, what, lambda: _start_fresh(run_dir))
    path = run_dir if resume == "auto" else Path(resume)
    if resume == "auto":
        on_rank_zero(group, what, lambda: remove_leftovers(run_dir))
    elif on_rank_zero(group, what, lambda: _is_checkpoint(path, run_dir)):
        if problem := damage(path, group):
            raise RefusedError(f"--resume {path}: the checkpoint is damaged: {problem}")
        return ResumePoint(path, (f"resuming from {path}",))
    newest = newest_whole(path, group, every if resume == "auto" else 1)
    if newest.path is not None:
        return ResumePoint(newest.path, (*newest.notices, f"resuming from {newest.path}"))
    if resume == "auto" and not newest.notices:
        return ResumePoint(None, (f"no checkpoint in {run_dir}: starting from step 0",))
    problem = "; ".join((*newest.notices, "none is left")) if newest.notices else "it contains no checkpoint"
    raise RefusedError(f"--resume {resume}: {problem}. Restore an intact one, or start in another --run_dir")


def newest_whole(run_dir: Path, group: Group, every: int = 1) -> ResumePoint:
    """Return the newest checkpoint with all bytes intact; notices name newer damaged ones and the number of lost steps.
    Collective."""
    passed: list[tuple[int, Path, str]] = []
    for step, path in reversed(on_rank_zero(group, f"looking into {run_dir}", lambda: checkpoints(run_dir, every))):
        if (problem := damage(path, group)) is None:
            return ResumePoint(path, tuple(_passed_over(*newer, newest=step) for newer in passed))
        passed.append((step, path, problem))
    return ResumePoint(None, tuple(_passed_over(*newer) for newer in passed))


def _passed_over(step: int, path: Path, problem: str, newest: int | None = None) -> str:
    text = f"{path} is damaged and skipped: {problem}"
    if newest is not None:
        lost = step - newest
        text += f"; {lost} {'steps are' if lost > 1 else 'step is'} lost and repeated"
    return text


def damage(path: Path, group: Group) -> str | None:
    """Verify the checksums of a checkpoint's files, each on one rank. Collective.

    Returns:
        the missing or damaged files, the same on every rank; `None` if all are intact.
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
        and entry.name != LEASE  # of this start
        and not (entry.is_dir() and not any(entry.iterdir()))
    )
    if content:
        shown = ", ".join(content[:8]) + (f" and {len(content) - 8} more" if len(content) > 8 else "")
        raise RefusedError(
            f"--resume never, but {run_dir} is not empty (it contains {shown}); give another --run_dir, empty this "
            "one, or use --resume auto to continue that run"
        )
    return ResumePoint(None, (f"starting from step 0 in {run_dir}",))


def _is_checkpoint(path: Path, run_dir: Path) -> bool:
    """Return whether --resume names a checkpoint; otherwise it is a run directory."""
    if not path.is_dir():
        raise RefusedError(f"--resume {path}: no such directory; give auto, never, a checkpoint or a run directory")
    if (run_dir / METRICS_FILE).exists() and not path.resolve().is_relative_to(run_dir.resolve()):
        raise RefusedError(
            f"--resume {path} is of another run than --run_dir {run_dir}, which has its own {METRICS_FILE}; "
            "give an empty --run_dir, or use --resume auto to continue its run"
        )
    return (path / DOCUMENT_NAME).exists()


def take_back(run_dir: Path, step: int) -> list[str]:
    """Reset a run directory to the resume step `step` (0 = a fresh start); on one rank.

    Later checkpoints and pictures are set aside, so that `--resume auto` never selects them. metrics.jsonl is cut.

    Returns:
        log messages.
    """
    aside = set_aside_later(run_dir / CHECKPOINTS, step)
    notices = [f"a checkpoint of a later step was renamed to {path}" for path in aside]
    set_aside_later(run_dir / PICTURES, step)
    return notices + cut_metrics(run_dir / METRICS_FILE, step)


def cut_metrics(path: Path, step: int) -> list[str]:
    """Cut metrics.jsonl at a checkpoint: keep the records with `step` <= step, in order and byte for byte.

    The `step` of a record is the number of completed steps. Torn records of a killed process are dropped. The file is
    replaced atomically; without a file nothing happens.

    Returns:
        log messages on what was removed.
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
    cut = {f"after step {step} removed": later, "torn and dropped": damaged}
    return [f"{METRICS_FILE}: records {what}: {count}" for what, count in cut.items() if count]


def _record_step(line: bytes) -> int | None:
    """Return the record's step; `None` if the line is not a complete record."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = parse_json(line, METRICS_FILE)["step"]
    except (RefusedError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


@dataclass(frozen=True, kw_only=True)
class Start(PartOf):
    """Fields of environment.json. Attributes: command: of the last start; directory: working directory."""

    command: Sequence[str] = ()
    directory: str = ""


def read_start(run_dir: Path) -> Start:
    """Read environment.json; a damaged file is left to `trp-scale doctor`."""
    path = run_dir / ENVIRONMENT_FILE
    try:
        return record(Start, read_optional_object(path), str(path), RefusedError)
    except RefusedError:
        return Start()


def find_recipe(start: Start) -> str:
    """Return --recipe of the last start; a relative path is resolved from its working directory."""
    words = start.command
    recipes = [after for word, after in pairwise([*words, ""]) if word == "--recipe"]
    recipes += [word.partition("=")[2] for word in words if word.startswith("--recipe=")]
    name = recipes[-1] if recipes else ""
    if name.endswith((".yaml", ".yml")) and not Path(name).is_absolute():
        return str(Path(start.directory) / name)
    return name


MAY_CHANGE = (
    "modules",
    "model.weights_names",
    "batch.micro_size",
    "training.steps",
    "training.epochs",
    "training.max_hours",
    "training.max_skipped_steps",
    "training.compile",
    "training.capture",
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
"""Settings that may change on resume, in addition to engine settings; `section.*` is every field of the section.
data.path may change if the data are the same."""


def adopt_unrecorded(config: Config, stored: Mapping[str, Any]) -> None:
    """Set, in place, the behaviour of earlier versions for settings that their files do not contain. `stored`: nested
    settings of a checkpoint or result."""
    sections = Fields(stored, "stored settings", CheckpointError)  # a damaged document may have a number as a section
    if "decay_end" not in sections.section("optimizer"):
        config.optimizer.decay_end = "last_step"
    balancer: Any = getattr(config, "balancer", None)
    if hasattr(balancer, "group_sizes") and "group_sizes" not in sections.section("balancer"):
        balancer.group_sizes = "batch"


def check_settings(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    stored_digest: str | None = None,
    present_digest: str | None = None,
) -> list[str]:
    """Compare the settings of a checkpoint with those of the resuming run.

    Settings missing in the checkpoint are newer than it; they had their default then (or the value of
    `adopt_unrecorded`).

    Args:
        stored: nested settings of the checkpoint.
        present: nested settings of this run, as from config.loader.to_dict.
        stored_digest, present_digest: digests of the data set's content then and now; `None` = unknown.

    Returns:
        a message for each allowed difference.

    Raises:
        RefusedError: lists all other differences.
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
                difference += f" (the {schedule} learning-rate schedule now ends there)"
            allowed.append(difference)
        else:
            refused.append(difference)
    if stored_digest != present_digest:
        refused.append(
            f"content of the data set: checkpoint {_quote_value(stored_digest)}, now {_quote_value(present_digest)}"
        )
    if refused:
        raise RefusedError(
            f"the checkpoint has other settings:\n{listed_problems(refused)}\n"
            f"On resume these may change: engine, number of ranks, {', '.join(changeable)}, and data.path to the same "
            "data elsewhere. Restore the listed settings, or start a new run with another --run_dir."
        )
    return allowed


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"section.field": value}, with values as JSON returns them."""
    return flat(json.loads(json.dumps(nested)))


def _quote_value(value: Any) -> str:
    return "unknown" if value is None else shorten(value if isinstance(value, str) else quote(value))
