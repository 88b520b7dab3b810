"""Losses of a pre-trained run on its held-out rows or on other data, computed like its validation: same batches,
masks and sums."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trp_scale.config import PretrainConfig, RefusedError, Weights
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import HeldOutPlan
from trp_scale.data.sources import Chosen, Rows, within_cpus
from trp_scale.data.split import held_out
from trp_scale.distributed.environment import Environment
from trp_scale.errors import DataError, finding
from trp_scale.evaluation.arguments import EvaluateArguments
from trp_scale.finetuning.encoders import is_run
from trp_scale.finetuning.measurement import (
    ReadRun,
    all_blocks,
    open_run,
    predicting_engine,
    read_once,
    refuse_unreadable_rows,
)
from trp_scale.pretraining.base import Upstream, build_upstream, find_upstream
from trp_scale.reporting.results import Results, SeedResult, join
from trp_scale.training.loop import validate

logger = logging.getLogger(__name__)

LOSS = "loss"
"""Name of the figure, as in metrics.jsonl."""


def read_pretrained(source: Path, weights: Weights = "last") -> ReadRun | None:
    """Open a run of `trp-scale pretrain`; `None` if the directory is something else."""
    run = open_run(source, weights) if is_run(source) else None
    return run if run is not None and isinstance(run.config, PretrainConfig) else None


def refuse_flags(arguments: EvaluateArguments, flags: Sequence[str], kinds: str) -> None:
    """Refuse flags that do not apply to the run. Raises RefusedError that names the flag.

    Args:
        flags: without dashes.
        kinds: runs that they apply to.
    """
    for flag in flags:
        if getattr(arguments, flag):
            raise RefusedError(f"--{flag} is for {kinds}, which --run {arguments.run} is not; leave it out")


def measure_losses(run: ReadRun, arguments: EvaluateArguments, environment: Environment) -> Results:
    """Measure the mean loss of each task that occurs. Collective; all ranks return the same result, which does not
    depend on their number. Tasks that the balancer does not weight are not judged.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: other kind of data or vocabulary, no held-out rows, or unreadable rows.
    """
    config = measured_config(run, arguments, environment)
    paths = parse_paths(config.data.path)
    upstream = _build(run, config, arguments, environment)
    rows = upstream.sources.opened
    environment.world.require_equal(rows.digest(), f"the data set {config.data.path}")
    upstream.require_readable(rows, config.data.path, run.checkpoint.parent.parent, run.document.extra)
    chosen = _every_block(run, rows) if arguments.data else _held_out(run, config, rows, paths)
    plan = HeldOutPlan(members=rows.members(paths, chosen), most=arguments.rows or None)
    engine = predicting_engine(upstream.model(), run, environment)
    pin = environment.device.type == "cuda"
    batches = read_once(rows, plan, within_cpus(config, environment.cpus), environment.data, pin_memory=pin)
    corrupt: dict[str, str] = {}
    try:
        losses = validate(engine, upstream.objective, batches, corrupt)
    finally:
        upstream.sources.close()
    refuse_unreadable_rows(corrupt, engine.data_group)
    assert losses is not None, "validation was interrupted"
    balanced = {upstream.objective.tasks[number] for number in upstream.objective.balanced}
    which = "all" if arguments.data else f"held out {run.config.data.validation_fraction:g}"
    results = [
        SeedResult(
            task=name,
            metric=LOSS,
            split=arguments.split or ("test" if arguments.data else "dev"),
            lower_is_better=True,
            seed=config.training.seed,
            metrics={LOSS: task["loss"]},
            detail={"elements": task["count"], "rows": plan.rows},
            rows=f"{plan.rows} rows of {rows.digest()[:12]} ({which})",
            judged=name in balanced,
        )
        for name, task in losses["tasks"].items()
        if task["count"]
    ]
    average = ", average of the weights" if run.weights == "average" else ""
    return Results(
        recipe=run.config.upstream,
        encoder=f"{run.directory}, step {run.document.step}{average}",
        tasks=[join([task]) for task in results],
    )


def _build(run: ReadRun, config: PretrainConfig, arguments: EvaluateArguments, environment: Environment) -> Upstream:
    """Build the upstream; say which data can be measured if that fails."""
    try:
        return build_upstream(config, environment)
    except DataError as error:
        if arguments.data:
            raise
        raise RefusedError(
            f"the run's data, data.path {config.data.path} from {Path.cwd()}, cannot be read: {error}; start the "
            "command in the run's working directory, or give other data with --data DIR"
        ) from error
    except RefusedError as error:
        raise RefusedError(
            f"--run {run.directory} cannot be measured on {config.data.path}: {finding(error)}; give data of the same "
            "kind as its training data with --data DIR"
        ) from error


def measured_config(run: ReadRun, arguments: EvaluateArguments, environment: Environment) -> Any:
    """Return the run's settings with the measured data, and a global batch size that fits any number of ranks."""
    config = copy.deepcopy(find_upstream(run.config).inference_config(run.config))
    config.data.path, config.model.weights = arguments.data or config.data.path, ""
    if arguments.data:  # all rows are measured
        config.data.validation_fraction, config.validation.every = 0.0, 0
    config.batch.micro_size = arguments.micro_size or config.batch.micro_rows
    config.batch.global_size = config.batch.micro_rows * environment.data.size
    return config


def _every_block(run: ReadRun, rows: Rows) -> list[Chosen]:
    """Select all rows of each data set, as masks [n]."""
    if rows.digest() == run.document.extra.get("data_digest"):
        logger.warning(
            "--data is the run's training data: training rows are measured too; leave --data out to measure only "
            "held-out rows"
        )
    return all_blocks(rows.blocks)


def _held_out(run: ReadRun, config: PretrainConfig, rows: Rows, paths: Sequence[MemberPath]) -> list[Chosen]:
    """Select the run's held-out rows of each data set, as masks [n]."""
    fraction = config.data.validation_fraction
    if fraction == 0.0:
        raise RefusedError(
            f"--run {run.directory}: the run has no held-out rows (data.validation_fraction 0); give other data with "
            "--data DIR"
        )
    if run.document.extra.get("data_digest") not in (None, rows.digest()):
        raise RefusedError(
            f"the data at data.path {config.data.path} from {Path.cwd()} has changed since the run, so its held-out "
            "rows are unknown; restore it, or give --data DIR to measure on all of other data"
        )
    return [
        held_out(blocks.identities, fraction, where=str(path.path))
        for blocks, path in zip(rows.blocks, paths, strict=True)
    ]
