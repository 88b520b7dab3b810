"""`trp-scale evaluate`: measure what was fine-tuned or pre-trained, on its own data or on other, without training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trp_scale.config import AVERAGE, RefusedError
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.data.images.leakage import image_datasets, shared_images
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, check_shared_directory, on_rank_zero
from trp_scale.evaluation.arguments import EvaluateArguments, RobustnessSet, parse_robustness_sets
from trp_scale.evaluation.pretrained_losses import measure_losses, read_pretrained, refuse_flags
from trp_scale.finetuning.measurement import Collector, ReadRun, find_runs, predict, predicting_engine, read_origin
from trp_scale.finetuning.task import DownstreamTask, build_task, seed_result, task_class, trained_on_is_there
from trp_scale.reporting.comparison import print_results
from trp_scale.reporting.results import (
    RESULT_FILE,
    RESULTS_FILE,
    Results,
    SeedResult,
    TaskResult,
    join,
    read_results,
    read_seed,
    write_results,
)

EVALUATIONS = "evaluations"
"""File in the run's directory with what was measured later."""


def evaluate(arguments: EvaluateArguments) -> int:
    """Run `trp-scale evaluate`; returns the exit status, 0."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    sets = parse_robustness_sets(arguments.robustness)
    baseline = None if arguments.baseline is None else read_results(arguments.baseline)
    with Environment() as environment:
        world = environment.world
        pretrained = read_pretrained(arguments.run, arguments.weights)
        if pretrained is not None:
            refuse_flags(
                arguments, ("robustness", "images", "classes", "predictions", "partial"), "runs of trp-scale finetune"
            )
        run_dir = arguments.run if pretrained is None else pretrained.directory
        output = arguments.output or run_dir / EVALUATIONS / _name(arguments, sets)
        with create_directories(output, arguments.predictions, world=world):
            if pretrained is None:
                results = _evaluate_finetuned(arguments, sets, environment)
            elif arguments.background:
                source = f"{pretrained.checkpoint}{AVERAGE if arguments.weights == 'average' else ''}"
                results = on_rank_zero(world, "measuring the masks", lambda: _masks(source, arguments))
            else:
                results = measure_losses(pretrained, arguments, environment)
        if not results.tasks:  # of rows without labels there are predictions alone
            return 0
        on_rank_zero(world, f"writing {output}", lambda: write_results(output / RESULTS_FILE, results))
        if world.rank == 0:
            print_results(results, baseline)
            print(output / RESULTS_FILE)
    return 0


@contextmanager
def create_directories(*paths: Path | None, world: Group) -> Iterator[None]:
    """Context with directories that all ranks see. After an error those that it made are gone, where they are empty."""
    directories = [path for path in paths if path is not None]
    created = {path for directory in directories for path in (directory, *directory.parents) if not path.exists()}
    try:
        for directory in directories:
            check_shared_directory(directory, world)
        yield
    except BaseException:
        for path in sorted(created, reverse=True) if world.rank == 0 else ():  # what lies in another comes first
            with suppress(OSError):
                path.rmdir()
        raise


def _masks(source: str, arguments: EvaluateArguments) -> Results:
    """Measure the overlap of a run's masks with objects."""
    from trp_scale.evaluation.figures.masks_on_objects import measure_masks
    from trp_scale.evaluation.figures.trained_images import load_trained_images

    background = arguments.background.split(",")
    return measure_masks(load_trained_images(source), arguments.data, background, arguments.rows)


def _evaluate_finetuned(arguments: EvaluateArguments, sets: list[RobustnessSet], environment: Environment) -> Results:
    """Measure all tasks and seeds of a directory of `trp-scale finetune`."""
    refuse_flags(arguments, ("background", "rows"), "runs of pre-training")
    runs = find_runs(arguments.run, arguments.weights)
    if sets and len(runs) > 1:
        raise RefusedError(
            f"--run {arguments.run} holds {len(runs)} tasks ({', '.join(runs)}), --robustness measures one; "
            f"allowed: one of its seeds, such as {next(iter(runs.values()))[0].directory}"
        )
    several = any(len(seeds) > 1 for seeds in runs.values())  # then each has predictions in a directory of its own

    def measure(run: ReadRun) -> list[SeedResult]:
        if sets:
            from trp_scale.evaluation.robustness import RobustClassifier

            classifier = RobustClassifier(
                run, environment, classes_of=arguments.classes, micro_size=arguments.micro_size
            )
            return [classifier.measure(images, partial=arguments.partial) for images in sets]
        directory = arguments.predictions
        if directory is not None and several:
            directory /= f"seed_{run.config.training.seed}"
        result = measure_run(run, arguments, environment, directory)
        return [] if result is None else [result]

    tasks: list[TaskResult] = []
    for seeds in runs.values():
        tasks += [join(list(results)) for results in zip(*map(measure, seeds), strict=True)]
    recipe, encoder = read_origin(arguments.run, runs)
    return Results(recipe=recipe, encoder=encoder, tasks=tasks)


def _name(arguments: EvaluateArguments, sets: list[RobustnessSet]) -> str:
    if sets:
        parts = ["robustness", *(robustness_set.name for robustness_set in sets)]
    else:
        parts = [Path(arguments.data).resolve().name if arguments.data else "own", arguments.split or ""]
        parts += [str(arguments.rows or ""), "masks" if arguments.background else ""]
    parts.append(arguments.weights if arguments.weights != "last" else "")
    return "-".join(filter(None, parts))


def measure_run(
    run: ReadRun, arguments: EvaluateArguments, environment: Environment, directory: Path | None = None
) -> SeedResult | None:
    """One seed of one task. Collective; the same on all ranks, and on any number of them.

    Args:
        directory: where its predictions are saved; None: they are not.

    Returns:
        None where the measured rows have no labels.

    Raises:
        DataError, RefusedError: data that the task does not read, or of other classes.
    """
    config = measured_config(run, arguments, environment.data.size)
    task = build_task(config, environment, figures=directory is None)
    try:
        _check_data(run, arguments, config, task, environment)
        _check_classes(run, config, task)
        task.recall(run.document.extra)
        engine = predicting_engine(task.model(), run, environment)
        collected = None if task.unlabelled else task.metrics()
        saved = None if directory is None else task.predictions(directory, engine.data_group)
        collectors: list[Collector] = [collector for collector in (collected, saved) if collector is not None]
        predict(engine, task.predict, task.sources.validation.windows(), collectors)
        written = [] if saved is None else saved.finish()
    finally:
        task.sources.close()
    if written and environment.world.rank == 0:
        print("\n".join(map(str, written)))
    if collected is None:
        return None
    return seed_result(task, run.config.training.seed, collected.finish(engine.data_group))


def measured_config(run: ReadRun, arguments: EvaluateArguments, world: int) -> FinetuneConfig:
    """The run's settings with the data that is to be measured, and a global batch that any number of ranks divides."""
    config: FinetuneConfig = copy.deepcopy(run.config)
    config.batch.micro_size = arguments.micro_size or config.batch.micro_rows
    config.batch.global_size = config.batch.micro_rows * world
    task_class(config).measure_on(config, run.checkpoint, arguments.data, arguments.images)
    config.downstream.split = arguments.split or config.downstream.split
    return config


def _check_data(
    run: ReadRun, arguments: EvaluateArguments, config: FinetuneConfig, task: DownstreamTask[Any], where: Environment
) -> None:
    """Without --data, refuse data that is no longer what the run has had. With it, say how many of its images the run
    has learned from. Collective."""
    if not arguments.data:
        done = on_rank_zero(where.world, f"reading {run.directory}", lambda: read_seed(run.directory / RESULT_FILE))
        as_measured = config.downstream.split == run.config.downstream.split and not arguments.images
        if as_measured and done is not None and done.data and done.data != task.sources.digest():
            raise RefusedError(
                f"--run {run.directory}: the data at {' and '.join(config.datasets().values())} is not what the run "
                "has learned from and was measured on; put that back, or name what is to be measured by --data"
            )
    elif isinstance(run.config, ImageTaskConfig) and trained_on_is_there(run.config):
        train = run.config.data.path

        def count_shared() -> int:
            learned_from = image_datasets(train)
            return sum(len(shared_images(learned_from, dataset)) for dataset in image_datasets(arguments.data))

        count = on_rank_zero(where.world, "comparing what is learned and measured", count_shared)
        if count and where.world.rank == 0:
            print(f"note: {count} images of {arguments.data} are among those that {run.directory} learned from")


def _check_classes(run: ReadRun, config: FinetuneConfig, task: DownstreamTask[Any]) -> None:
    """Refuse data whose classes are not the model's: where the training data is gone, nothing else compares them."""
    classes = task.checkpoint_extra().get("classes")
    if run.classes is not None and classes is not None and tuple(classes) != run.classes:
        raise RefusedError(
            f"--data: classes {_list_names(tuple(classes))} found, the model's are {_list_names(run.classes)}; "
            "shard data of the "
            "same classes, in the same order; sets of some of ImageNet's classes are measured with --robustness"
        )
    if config.downstream.classes != run.config.downstream.classes:
        raise RefusedError(
            f"--data: {config.downstream.classes} classes found, the model has {run.config.downstream.classes}; give "
            "data of the same classes"
        )


def _list_names(names: tuple[str, ...]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
