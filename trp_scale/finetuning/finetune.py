"""`trp-scale finetune`: fine-tune a pre-trained encoder on downstream tasks over seeds, and evaluate it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.run_directory import adopt_unrecorded, check_settings
from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.flags import phase
from trp_scale.config.loader import check_engine, to_dict
from trp_scale.config.registry import engine_rules
from trp_scale.data.images.leakage import image_datasets, refuse_shared_images
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import check_shared_directory, on_rank_zero
from trp_scale.errors import ExitStatus
from trp_scale.finetuning.arguments import FinetuneArguments
from trp_scale.finetuning.measurement import predict
from trp_scale.finetuning.task import DownstreamTask, build_task, seed_result
from trp_scale.pretraining.base import Upstream
from trp_scale.reporting.comparison import Measurement
from trp_scale.reporting.results import (
    RESULT_FILE,
    RESULTS_FILE,
    Results,
    SeedResult,
    join,
    read_results,
    read_seed,
    write_results,
)
from trp_scale.training import rundir
from trp_scale.training.metrics import FINISHED
from trp_scale.training.pretrain import Ended, Rollback, Run, train_run
from trp_scale.training.rundir import Guard, guard_run


def finetune(arguments: FinetuneArguments) -> Measurement:
    """Run `trp-scale finetune`; return the result, the same on every rank.

    A repeated command resumes: it skips finished runs.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = arguments.config
    config.refuse_overwritten()
    with Environment(timeout_minutes=config.reliability.collective_minutes) as environment:
        engine_name = arguments.choose_engine(environment.info.world)
        check_engine(arguments.config, engine_name, gpu=environment.device.type == "cuda")
        engine_rules(engine_name).join_groups(config, environment)
        world = environment.world
        run_dir = rundir.create_run_directory(arguments.run_dir, arguments.recipe_name(), world)
        check_shared_directory(run_dir, world)
        rundir.refuse_runs(run_dir, rundir.CONFIG_FILE, "a run of trp-scale pretrain", world)
        baseline = None if arguments.baseline is None else read_results(arguments.baseline)
        tasks = arguments.config.tasks(arguments.task)
        if arguments.only is not None:
            task_number, number = divmod(arguments.only, arguments.seeds)
            seed_arguments = select_seed(arguments, tasks[task_number], number, run_dir)
            seed_dir = rundir.create_run_directory(seed_arguments.run_dir, "", world)  # others guard the other runs
            with guard_run(seed_dir, config, environment, stop_directory=run_dir) as guard:
                ended, result = run_seed(seed_arguments, environment, engine_name, guard)
                return measurement(arguments, ended, [[] if result is None else [result]], written=False)
        measured: list[list[SeedResult]] = []
        with guard_run(run_dir, config, environment) as guard:
            for task in tasks:
                measured.append([])
                for number in range(arguments.seeds):
                    seed_arguments = select_seed(arguments, task, number, run_dir)
                    ended, result = run_seed(seed_arguments, environment, engine_name, guard, measured[-1])
                    if result is None:
                        return measurement(arguments, ended._replace(run_dir=run_dir), measured, written=False)
                    measured[-1].append(result)
        outcome = measurement(arguments, Ended(run_dir, FINISHED, ExitStatus.DONE), measured, baseline=baseline)
        results = on_rank_zero(world, f"writing {run_dir}", lambda: add_results(run_dir, outcome.results))
    return replace(outcome, results=results)


def measurement(
    arguments: FinetuneArguments, ended: Ended, measured: Sequence[list[SeedResult]], **fields: Any
) -> Measurement:
    """Return the result of the seeds that are finished, by task."""
    tasks = [join(seeds) for seeds in measured if seeds]
    results = Results(recipe=arguments.recipe, encoder=arguments.from_, tasks=tasks)
    return Measurement(path=ended.run_dir, results=results, reason=ended.reason, status=ended.status, **fields)


def add_results(run_dir: Path, results: Results) -> Results:
    """Write results.json, and keep its rows for other tasks with the same recipe and encoder. Return its content."""
    if (run_dir / RESULTS_FILE).is_file():
        before, names = read_results(run_dir), {task.task for task in results.tasks}
        if (before.recipe, before.encoder) == (results.recipe, results.encoder):
            kept = [task for task in before.tasks if task.task not in names]
            results = replace(results, tasks=[*kept, *results.tasks])
    write_results(run_dir / RESULTS_FILE, results)
    return results


def select_seed(arguments: FinetuneArguments, task: str, number: int, run_dir: Path) -> FinetuneArguments:
    """Return the arguments for the run of one task and seed."""
    config = copy.deepcopy(arguments.config)
    config.downstream.task = task
    config.training.seed += number
    if config.checkpoint.mirror:
        config.checkpoint.mirror += f"/{task}/seed_{config.training.seed}"
    directory = run_dir / task / f"seed_{config.training.seed}"
    return replace(arguments, config=config, run_dir=directory)


def read_finished(run_dir: Path, config: Config) -> SeedResult | None:
    """Return the result of a finished run with these settings.

    `None` if no result exists, or if it has another number of steps; such a run is resumed.

    Raises:
        RefusedError: the result has other settings, for example another encoder.
    """
    done = read_seed(run_dir / RESULT_FILE)
    if done is None or done.settings.get("training", {}).get("steps") != config.training.steps:
        return None
    asked = copy.deepcopy(config)
    adopt_unrecorded(asked, done.settings)
    check_settings(done.settings, to_dict(asked))
    return done


def check_same_data(run_dir: Path, digest: str, earlier: Sequence[SeedResult]) -> None:
    """Refuse to join seeds that were trained or measured on different data; an empty digest is unknown."""
    others = [str(result.seed) for result in earlier if "" not in (result.data, digest) and result.data != digest]
    if others:
        raise RefusedError(
            f"{run_dir}: the data differ from those of finished seed {', '.join(others)}; restore that data, or use "
            "another --run_dir"
        )


def run_seed(
    arguments: FinetuneArguments,
    environment: Environment,
    engine_name: str,
    guard: Guard,
    earlier: Sequence[SeedResult] = (),
) -> tuple[Ended, SeedResult | None]:
    """Train and measure one run, or read its result if it is finished; the result is `None` if the run was stopped.

    Args:
        earlier: results of other seeds; they must be of the same data.
    """
    world, run_dir = environment.world, arguments.run_dir
    assert run_dir is not None
    asked = to_dict(arguments.config)
    if arguments.resume != "never":
        done = on_rank_zero(world, f"reading {run_dir}", lambda: read_finished(run_dir, arguments.config))
        if done is not None:
            check_same_data(run_dir, done.data, earlier)
            return Ended(run_dir, FINISHED, ExitStatus.DONE), done
    rundir.create_run_directory(arguments.run_dir, arguments.recipe_name(), world)
    results: list[SeedResult] = []
    tasks: list[DownstreamTask[Any]] = []

    def build(config: Config, where: Environment) -> Upstream:
        assert isinstance(config, FinetuneConfig)
        tasks.append(build_task(config, where))
        image_test = isinstance(config, ImageTaskConfig) and config.downstream.test_path
        if image_test and len(tasks) == 1 and not earlier:  # no collective: the first build may only derive sizes
            for test in image_datasets(image_test):
                refuse_shared_images(image_datasets(config.data.path), test)
        check_same_data(run_dir, tasks[-1].sources.digest(), earlier)
        return tasks[-1]

    def make(rollback: Rollback | None) -> Run:
        phase(f"{arguments.config.downstream.task}, seed {arguments.config.training.seed}: opening")
        run = Run(arguments, environment, run_dir, engine_name, guard, build, rollback)
        phase("making the first step")
        return run

    def measure_run(run: Run) -> None:
        task = tasks[-1]  # earlier ones were built to derive sizes
        with run.hooks.validation():
            collected = task.metrics()
            predict(run.engine, task.predict, run.sources.validation.windows(), [collected])
            metrics = collected.finish(run.engine.data_group)
        asked["optimizer"]["decay_end"] = run.config.optimizer.decay_end  # a run that an earlier version started
        seed = arguments.config.training.seed
        results.append(seed_result(task, seed, metrics, settings=asked, data=run.sources.digest()))
        on_rank_zero(world, f"writing {run_dir}", lambda: write_results(run_dir / RESULT_FILE, results[0]))

    try:
        run, status = train_run(make, measure_run)
    except RefusedError:
        with suppress(OSError):  # not empty, or removed by another rank
            run_dir.rmdir()
            run_dir.parent.rmdir()
        raise
    return Ended(run_dir, FINISHED if results else run.ended, status), results[0] if results else None
