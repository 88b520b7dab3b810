"""`trp-scale finetune`: fine-tune a pre-trained encoder on downstream tasks, over seeds, and measure it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from trp_scale.checkpoint.agreement import check_shared_directory, on_rank_zero
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.resume_rules import check_settings
from trp_scale.checkpoint.run_directory import newest_complete
from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.stop import StopRequests
from trp_scale.downstream.encoder_source import SCRATCH, open_encoder
from trp_scale.downstream.glue.folders import require_folders
from trp_scale.downstream.result_tables import print_results
from trp_scale.downstream.results import (
    RESULT_FILE,
    RESULTS_FILE,
    Results,
    SeedResult,
    join,
    read_results,
    read_seed,
    write_json,
)
from trp_scale.downstream.task import DownstreamTask, measure
from trp_scale.downstream.tasks import build_task
from trp_scale.recipes.arguments import Arguments, parse_run
from trp_scale.recipes.checks import check_engine
from trp_scale.recipes.finetune_checks import check_finetune
from trp_scale.recipes.loader import to_dict
from trp_scale.training import rundir
from trp_scale.training.pretrain import EXIT_FINISHED, Run

GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""What --task all runs, in the order of TRP's Table 1; wnli is left out, as there."""


@dataclass(kw_only=True)
class FinetuneArguments(Arguments):
    """Fine-tune a pre-trained encoder on a downstream task, over seeds, and measure it: results.json and a table."""

    config: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)
    """The settings: the recipe's, changed by the flags."""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """The encoder: a run directory of trp-scale pretrain, an export, a directory of transformers (BERT, ViTMAE) or of
    timm (ViT); scratch: no pre-training, in the sizes of the recipe. Of a run its newest checkpoint is taken: where
    the run goes on, name the checkpoint itself to repeat the command."""
    seeds: int = 1
    """Runs of each task, with training.seed, training.seed + 1, ..."""
    task: str = ""
    """GLUE: a task, several with commas between, or all; empty = the recipe's --downstream.task."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of another finetune: the table gives differences to it."""


def parse_finetune(argv: Sequence[str], *, quiet: bool = False) -> FinetuneArguments:
    """Read the command line, take the encoder's sizes, and check all settings.

    Raises:
        RefusedError, SystemExit: as recipes.arguments.parse, or no such encoder.
    """
    arguments = parse_run(
        argv, FinetuneArguments, FinetuneConfig, prog="trp-scale finetune", description=__doc__ or "", quiet=quiet
    )
    config = arguments.config
    if not arguments.from_:
        raise RefusedError(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    if arguments.from_ != SCRATCH:
        open_encoder(arguments.from_).adopt(config)
    if arguments.seeds < 1:
        raise RefusedError(f"--seeds is {arguments.seeds}, allowed: 1 or more")
    if arguments.resume not in ("auto", "never"):
        raise RefusedError(
            f"--resume {arguments.resume}: allowed: auto or never; repeat --run_dir to go on with its runs"
        )
    tasks_of(arguments)
    check_finetune(config)
    if config.downstream.kind == "glue":  # all tasks, before the first is trained for hours
        require_folders(Path(config.data.path), tasks_of(arguments))
    return arguments


def finetune(arguments: FinetuneArguments) -> int:
    """Run `trp-scale finetune`; returns the exit status, as `pretrain`.

    What is finished already is not run again: a command that was stopped or killed goes on when it is repeated.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with Environment() as environment:
        engine_name = arguments.engine_for(environment.info.world)
        check_engine(arguments.config, engine_name, gpu=environment.device.type == "cuda")
        if engine_name != "plain":
            environment.ensure_process_group()
        world = environment.world
        run_dir = rundir.create_run_directory(arguments, world)
        check_shared_directory(run_dir, world)
        baseline = None if arguments.baseline is None else read_results(arguments.baseline)
        found = []
        with StopRequests(run_dir, rank=environment.info.rank, max_hours=arguments.config.training.max_hours) as stop:
            for task in tasks_of(arguments):
                of_task: list[SeedResult] = []
                for number in range(arguments.seeds):
                    one = of_seed(arguments, task, number, run_dir)
                    status, result = run_seed(one, environment, engine_name, stop.requested, of_task)
                    if result is None:
                        return status
                    of_task.append(result)
                found.append(join(of_task))
        results = Results(recipe=arguments.recipe, encoder=arguments.from_, tasks=found)
        on_rank_zero(world, f"writing {run_dir}", lambda: write_json(run_dir / RESULTS_FILE, results))
        if world.rank == 0:
            print_results(results, baseline)
            print(run_dir / RESULTS_FILE)
    return EXIT_FINISHED


def tasks_of(arguments: FinetuneArguments) -> list[str]:
    """Names of the tasks to run."""
    downstream = arguments.config.downstream
    if downstream.kind != "glue":
        if arguments.task:
            raise RefusedError(f"--task {arguments.task} is for GLUE; --downstream.kind is {downstream.kind}")
        return [downstream.task or downstream.kind]
    named = arguments.task or downstream.task
    if named == "all":
        return list(GLUE_TASKS)
    tasks = [name.strip() for name in named.split(",") if name.strip()]
    wrong = [name for name in tasks if name not in (*GLUE_TASKS, "wnli")]
    if wrong or not tasks:
        raise RefusedError(f"--task {named!r}: allowed: all, or of {', '.join(GLUE_TASKS)}, wnli, with commas between")
    if len(set(tasks)) < len(tasks):
        raise RefusedError(f"--task {named!r}: a task is given twice; allowed: each once")
    return tasks


def of_seed(arguments: FinetuneArguments, task: str, number: int, run_dir: Path) -> FinetuneArguments:
    """The arguments of one run of one task."""
    config = copy.deepcopy(arguments.config)
    config.downstream.task = task
    config.training.seed += number
    directory = run_dir / task / f"seed_{config.training.seed}"
    return replace(arguments, config=config, run_dir=directory)


def read_done(run_dir: Path, asked: dict[str, Any]) -> SeedResult | None:
    """The result of a run that was asked for in these settings; None where there is none, or it is of fewer steps: such
    a run goes on.

    Raises:
        RefusedError: the result is of other settings, another encoder's say, or the run has gone on for more steps.
    """
    steps, checkpoint = asked["training"]["steps"], newest_complete(run_dir).path
    if checkpoint is not None and asked["downstream"]["epochs"] == 0:  # else the steps follow from the data
        trained = read_document(checkpoint).step
        if trained > steps:
            raise RefusedError(
                f"{run_dir} has been trained for {trained} steps, --training.steps is {steps}; allowed: {trained} or "
                "more, or another --run_dir"
            )
    done = read_seed(run_dir / RESULT_FILE)
    if done is None or done.settings.get("training", {}).get("steps") != steps:
        return None
    check_settings(done.settings, asked)
    return done


def check_same_data(run_dir: Path, digest: str, earlier: Sequence[SeedResult]) -> None:
    """Refuse to put a seed beside others that have learned from other data, or were measured on other.

    Args:
        digest: of the seed's data; empty = not known.

    Raises:
        RefusedError: naming the seeds.
    """
    others = [str(one.seed) for one in earlier if "" not in (one.data, digest) and one.data != digest]
    if others:
        raise RefusedError(
            f"{run_dir}: the data are not those of seed {', '.join(others)}, which is finished; put them back, or give "
            "another --run_dir"
        )


def run_seed(
    arguments: FinetuneArguments,
    environment: Environment,
    engine_name: str,
    stop_requested: Any,
    earlier: Sequence[SeedResult] = (),
) -> tuple[int, SeedResult | None]:
    """Train and measure one run, or read what it has found already; the result is None when it was stopped.

    Args:
        earlier: of other seeds, whose data it must have.
    """
    world, run_dir = environment.world, arguments.run_dir
    assert run_dir is not None
    asked = to_dict(arguments.config)
    if arguments.resume != "never":
        done = on_rank_zero(world, f"reading {run_dir}", lambda: read_done(run_dir, asked))
        if done is not None:
            check_same_data(run_dir, done.data, earlier)
            return EXIT_FINISHED, done
    rundir.create_run_directory(arguments, world)
    found: list[SeedResult] = []
    tasks: list[DownstreamTask] = []

    def build(config: Config, where: Environment) -> DownstreamTask:
        assert isinstance(config, FinetuneConfig)
        tasks.append(build_task(config, where))
        check_same_data(run_dir, tasks[0].sources.digest(), earlier)
        return tasks[0]

    run = Run(arguments, environment, run_dir, engine_name, stop_requested, build)

    def measured() -> None:
        task = tasks[0]
        metrics = measure(run.engine, task, run.sources.validation.windows())
        detail = metrics.pop("detail", {})
        found.append(
            SeedResult(
                task=task.name,
                metric=task.metric,
                split=task.split,
                lower_is_better=task.lower_is_better,
                seed=arguments.config.training.seed,
                metrics=metrics,
                detail=detail,
                settings=asked,
                data=run.sources.digest(),
            )
        )
        on_rank_zero(world, f"writing {run_dir}", lambda: write_json(run_dir / RESULT_FILE, found[0]))

    status = run.train(measured)
    return status, found[0] if found else None
