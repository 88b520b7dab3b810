"""`trp-scale evaluate`: measure a fine-tuned or pre-trained run on its own or other data.

Losses of a pre-trained run are computed like its validation: same batches, masks and sums."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.export import while_training
from trp_scale.checkpoint.initial_weights import is_run
from trp_scale.config import AVERAGE, PretrainConfig, RefusedError
from trp_scale.config.finetuning import FinetuneConfig, GroupDownstreamConfig, ImageTaskConfig
from trp_scale.data.images.leakage import image_datasets, shared_images
from trp_scale.data.mixture import MemberPath, parse_members, parse_paths
from trp_scale.data.plan import HeldOutPlan
from trp_scale.data.sources import Chosen, Rows, within_cpus
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, check_shared_directory, on_rank_zero
from trp_scale.errors import DataError, finding
from trp_scale.evaluation.arguments import EvaluateArguments, parse_robustness_sets
from trp_scale.finetuning.measurement import (
    Collector,
    ReadRun,
    all_blocks,
    find_runs,
    open_run,
    predict,
    predicting_engine,
    read_once,
    refuse_unreadable_rows,
)
from trp_scale.finetuning.task import (
    DownstreamTask,
    build_task,
    has_training_data,
    seed_result,
    select_training_blocks,
    task_class,
)
from trp_scale.methods.balancing.settings import UniformSettings
from trp_scale.pretraining.base import Upstream, build_upstream, find_upstream
from trp_scale.reporting.comparison import Measurement
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
from trp_scale.training.loop import validate

logger = logging.getLogger(__name__)


def refuse_flags(arguments: EvaluateArguments, flags: Sequence[str], kinds: str) -> None:
    """Refuse flags, without dashes, that apply to other `kinds` of runs. Raises RefusedError that names the flag."""
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
    config = reread_config(run, arguments, environment)
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
            metric="loss",  # as in metrics.jsonl
            split=arguments.split or ("test" if arguments.data else "dev"),
            lower_is_better=True,
            seed=config.training.seed,
            metrics={"loss": task["loss"]},
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


def reread_config(run: ReadRun, arguments: EvaluateArguments, environment: Environment) -> Any:
    """Return the run's settings with the measured data, and a global batch size that fits any number of ranks."""
    config = copy.deepcopy(find_upstream(run.config).inference_config(run.config))
    config.data.path, config.model.weights = arguments.data or config.data.path, ""
    if arguments.data:  # all rows are measured
        config.data.validation_fraction, config.validation.every = 0.0, 0
        if len(parse_members(arguments.data)) == 1:
            config.objective.tasks = type(config.objective)().tasks  # no sources
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
    return [~mask for mask in select_training_blocks(rows.blocks, paths, fraction)]


@while_training
def evaluate(arguments: EvaluateArguments) -> Measurement:
    """Run `trp-scale evaluate`; return the result, the same on every rank. It has no tasks if the measured rows have no
    labels; then only predictions are written."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    sets = parse_robustness_sets(arguments.robustness)
    baseline = None if arguments.baseline is None else read_results(arguments.baseline)
    with Environment() as environment:
        world = environment.world
        run = open_run(arguments.run, arguments.weights) if is_run(arguments.run) else None
        pretrained = run if run is not None and isinstance(run.config, PretrainConfig) else None
        if pretrained is not None:
            refuse_flags(
                arguments,
                ("robustness", "images", "classes", "predictions", "partial", "groups"),
                "runs of trp-scale finetune",
            )
        run_dir = arguments.run if pretrained is None else pretrained.directory
        output = arguments.output or run_dir / "evaluations" / _name(arguments, sets)
        predictions: list[Path] = []
        with create_directories(output, arguments.predictions, world=world):
            if pretrained is None:
                results = _evaluate_finetuned(arguments, sets, environment, predictions)
            elif arguments.background:
                source = f"{pretrained.checkpoint}{AVERAGE if arguments.weights == 'average' else ''}"
                results = on_rank_zero(world, "measuring the masks", lambda: _masks(source, arguments))
            else:
                results = measure_losses(pretrained, arguments, environment)
        if labelled := bool(results.tasks):
            on_rank_zero(world, f"writing {output}", lambda: write_results(output / RESULTS_FILE, results))
    return Measurement(path=output, results=results, baseline=baseline, predictions=predictions, written=labelled)


@contextmanager
def create_directories(*paths: Path | None, world: Group) -> Iterator[None]:
    """Create directories that all ranks can access. After an error, remove those that were created if they are
    empty."""
    directories = [path for path in paths if path is not None]
    created = {path for directory in directories for path in (directory, *directory.parents) if not path.exists()}
    try:
        for directory in directories:
            check_shared_directory(directory, world)
        yield
    except BaseException:
        for path in sorted(created, reverse=True) if world.rank == 0 else ():  # children first
            with suppress(OSError):
                path.rmdir()
        raise


def _masks(source: str, arguments: EvaluateArguments) -> Results:
    """Measure how a run's masks overlap with objects."""
    from trp_scale.evaluation.figures.masks_on_objects import measure_masks
    from trp_scale.evaluation.figures.trained_images import TrainedImages

    background = arguments.background.split(",")
    return measure_masks(TrainedImages(source), arguments.data, background, arguments.rows)


def _evaluate_finetuned(
    arguments: EvaluateArguments, sets: dict[str, Path], environment: Environment, predictions: list[Path]
) -> Results:
    """Measure all tasks and seeds of a `trp-scale finetune` directory; append the written files to `predictions`."""
    refuse_flags(arguments, ("background", "rows"), "runs of pre-training")
    runs = find_runs(arguments.run, arguments.weights)
    if sets and len(runs) > 1:
        raise RefusedError(
            f"--run {arguments.run} contains {len(runs)} tasks ({', '.join(runs)}), --robustness measures one; "
            f"allowed: one of its seeds, such as {next(iter(runs.values()))[0].directory}"
        )
    several = any(len(seeds) > 1 for seeds in runs.values())  # then each seed has its own directory of predictions

    def measure(run: ReadRun) -> list[SeedResult]:
        if sets:
            from trp_scale.evaluation.robustness import RobustClassifier

            classifier = RobustClassifier(
                run, environment, classes_of=arguments.classes, micro_size=arguments.micro_size
            )
            return [classifier.measure(*images, partial=arguments.partial) for images in sets.items()]
        directory = arguments.predictions
        if directory is not None and several:
            directory /= f"seed_{run.config.training.seed}"
        result, written = measure_run(run, arguments, environment, directory)
        predictions.extend(written)
        return [] if result is None else [result]

    tasks: list[TaskResult] = []
    for seeds in runs.values():
        tasks += [join(list(results)) for results in zip(*map(measure, seeds), strict=True)]
    if (arguments.run / RESULTS_FILE).is_file():
        return replace(read_results(arguments.run), tasks=tasks)
    encoder = next(iter(runs.values()))[0].config.model.weights or "scratch"
    return Results(recipe=str(arguments.run), encoder=encoder, tasks=tasks)


def _name(arguments: EvaluateArguments, sets: dict[str, Path]) -> str:
    if sets:
        parts = ["robustness", *sets]
    else:
        parts = [Path(arguments.data).resolve().name if arguments.data else "own", arguments.split or ""]
        parts += [str(arguments.rows or ""), "masks" if arguments.background else ""]
        parts.append("groups" if arguments.groups else "")
    parts.append(arguments.weights if arguments.weights != "last" else "")
    return "-".join(filter(None, parts))


def measure_run(
    run: ReadRun, arguments: EvaluateArguments, environment: Environment, directory: Path | None = None
) -> tuple[SeedResult | None, list[Path]]:
    """Measure one seed of one task; `None` if the rows have no labels. Also return the files with predictions, on rank
    0. Collective; all ranks return the same result, which does not depend on their number. Raises DataError or
    RefusedError for data that the task cannot read.

    Args:
        directory: for predictions; `None`: do not save them.
    """
    config = measured_config(run, arguments, environment.data.size)
    task = build_task(config, environment, figures=directory is None)
    try:
        _check_data(run, arguments, config, task, environment)
        _check_classes(run, config, task)
        task.restore_extra(run.document.extra)
        engine = predicting_engine(task.model(), run, environment)
        collected = None if task.unlabelled else task.metrics()
        saved = None if directory is None else task.predictions(directory, engine.data_group)
        collectors: list[Collector] = [collector for collector in (collected, saved) if collector is not None]
        predict(engine, task.predict, task.sources.validation.windows(), collectors)
        written = [] if saved is None else saved.finish()
    finally:
        task.sources.close()
    if collected is None:
        return None, written
    return seed_result(task, run.config.training.seed, collected.finish(engine.data_group)), written


def measured_config(run: ReadRun, arguments: EvaluateArguments, world: int) -> FinetuneConfig:
    """Return the run's settings with the measured data, and a global batch size that fits any number of ranks."""
    config: FinetuneConfig = copy.deepcopy(run.config)
    config.batch.micro_size = arguments.micro_size or config.batch.micro_rows
    config.batch.global_size = config.batch.micro_rows * world
    task_class(config).measure_on(config, run.checkpoint, arguments.data, arguments.images)
    config.downstream.split = arguments.split or config.downstream.split
    if isinstance(config.downstream, GroupDownstreamConfig):
        config.downstream.groups = arguments.groups or config.downstream.groups
        config.downstream.least_group = arguments.least_group or config.downstream.least_group
        # Nothing is trained: only measured rows need a group.
        config.downstream.group_sampling, config.balancer = "rows", UniformSettings()
    elif arguments.groups:
        raise RefusedError(
            f"--groups {arguments.groups}: the run's task is {config.downstream.kind}; allowed: classification and GLUE"
        )
    return config


def _check_data(
    run: ReadRun, arguments: EvaluateArguments, config: FinetuneConfig, task: DownstreamTask[Any], where: Environment
) -> None:
    """Without --data, refuse data that has changed since the run. With --data, report images that the run was
    trained on. Collective."""
    if not arguments.data:
        done = on_rank_zero(where.world, f"reading {run.directory}", lambda: read_seed(run.directory / RESULT_FILE))
        as_measured = config.downstream.split == run.config.downstream.split
        as_measured = as_measured and not (arguments.images or arguments.groups)
        if as_measured and done is not None and done.data and done.data != task.sources.digest():
            raise RefusedError(
                f"--run {run.directory}: the data at {' and '.join(config.datasets().values())} has changed since the "
                "run; restore it, or name the data to measure with --data"
            )
    elif isinstance(run.config, ImageTaskConfig) and has_training_data(run.config):
        train = run.config.data.path

        def count_shared() -> int:
            learned_from = image_datasets(train)
            return sum(len(shared_images(learned_from, dataset)) for dataset in image_datasets(arguments.data))

        count = on_rank_zero(where.world, "comparing what is learned and measured", count_shared)
        if count and where.world.rank == 0:
            logger.warning("%s images of %s are training images of %s", count, arguments.data, run.directory)


def _check_classes(run: ReadRun, config: FinetuneConfig, task: DownstreamTask[Any]) -> None:
    """Refuse data with other classes than the model. Nothing else compares them if the training data is missing."""
    classes = task.checkpoint_extra().get("classes")
    if run.classes is not None and classes is not None and tuple(classes) != run.classes:
        raise RefusedError(
            f"--data: classes {_list_names(tuple(classes))} found, the model's are {_list_names(run.classes)}; "
            "shard data with the "
            "same classes in the same order; measure subsets of ImageNet's classes with --robustness"
        )
    if config.downstream.classes != run.config.downstream.classes:
        raise RefusedError(
            f"--data: {config.downstream.classes} classes found, the model has {run.config.downstream.classes}; give "
            "data with the same classes"
        )


def _list_names(names: tuple[str, ...]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
