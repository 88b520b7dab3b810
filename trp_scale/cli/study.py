"""`trp-scale study`: list, show, plan, run and report studies."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config.flags import HELP, HELP_ALL, asks_for_help, read
from trp_scale.config.registry import check_settings, setting
from trp_scale.errors import RefusedError, nearest

Inputs = Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="NAME=PATH")]
File = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE")]


def study(argv: Sequence[str]) -> int:
    """`trp-scale study ACTION ...`."""
    if not argv:
        raise RefusedError(f"study: the action is missing; allowed: {', '.join(ACTIONS)}")
    if argv[0] in (*HELP, HELP_ALL):
        print(f"usage: trp-scale study {{{','.join(ACTIONS)}}} ...")
        for name, action in ACTIONS.items():
            print(f"  {name:<7} {(action.__doc__ or '').strip().splitlines()[0]}")
        raise SystemExit(0)
    if argv[0] not in ACTIONS:
        raise RefusedError(f"study {argv[0]!r}{nearest(argv[0], ACTIONS)}; allowed: {', '.join(ACTIONS)}")
    return ACTIONS[argv[0]](argv[1:])


def list_studies(argv: Sequence[str]) -> int:
    """List the studies, one per line."""
    if asks_for_help(argv):
        print(f"usage: trp-scale study list\n\n{list_studies.__doc__}")
        return 0
    if argv:
        raise RefusedError(f"study list has no arguments, found: {' '.join(argv)}; leave them out")
    from trp_scale.studies.study import known_studies, load_study

    names = known_studies()
    width = max(map(len, names), default=0)
    for name in names:
        study = load_study(name)
        print(f"{name:<{width}}  {study.source.paper}, {study.source.place}: {study.title} ({', '.join(study.scales)})")
    return 0


@dataclass(kw_only=True)
class ShowArguments:
    """Show the comparison, the metrics and the inputs of a study."""

    file: File
    """A study of the package, or the path of a .yaml file."""


def show(argv: Sequence[str]) -> int:
    """Print the comparison, the judges and the inputs of a study."""
    arguments = read(ShowArguments, argv, prog="trp-scale study show")
    from trp_scale.studies.study import load_study, needed_inputs

    study = load_study(arguments.file)
    source = study.source
    print(f"{study.title} ({source.paper}, arXiv:{source.arxiv}, {source.place})\n{study.question}")
    print(f"outcome: {study.outcome.row} of {', '.join(study.outcome.judges)}, against {study.baseline}")
    for name, variant in study.variants.items():
        settings = " ".join(f"--{flag} {value}" for flag, value in variant.settings.items())
        print(f"  {name}: {variant.title}{f'  {settings}' if settings else ''}")
    for name, scale in study.scales.items():
        judges = "; ".join(f"{kind} ({judge.command}, {judge.seeds} seeds)" for kind, judge in scale.judges.items())
        print(f"scale {name}: recipe {scale.recipe}, {scale.seeds} seeds, budgets {', '.join(scale.budgets)}; {judges}")
        if scale.outcome is not None:
            print(f"  outcome here: {scale.outcome.row} of {', '.join(scale.outcome.judges)}")
        if (tuning := scale.tuning) is not None:
            print(f"  each variant uses its best {tuning.setting} of {tuning.tried}, by {tuning.judge}")
        for needed in needed_inputs(study, scale):
            print(f"  --input {needed}=PATH  {study.inputs[needed]}")
    return 0


@dataclass(kw_only=True)
class StudyPlanArguments:
    """Predict the hours and the costs of a study."""

    file: File
    """A study of the package, or the path of a .yaml file."""
    scale: str = "cpu"
    """cpu, gpu or paper."""
    price: float = 0.0
    """Price of an hour of one GPU (one core for a scale without GPUs), in any currency; 0 = print no costs."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of a started study: predict its remaining hours, evaluation included, from the durations of finished
    runs."""


def plan(argv: Sequence[str]) -> int:
    """Predict the hours of a study, and their price."""
    arguments = read(StudyPlanArguments, argv, prog="trp-scale study plan")
    from trp_scale.studies.execute import Claim, claim, read_claim
    from trp_scale.studies.graph import Graph
    from trp_scale.studies.plan import hours_left, planned_hours
    from trp_scale.studies.study import load_study

    study = load_study(arguments.file)
    scale = study.scale(arguments.scale)
    print("\n".join(planned_hours(study, scale, price=arguments.price)))
    if arguments.run_dir is not None:
        inputs = read_claim(arguments.run_dir).inputs
        claim(arguments.run_dir, Claim(study=_state(arguments.file), scale=arguments.scale, inputs=inputs))
        print("\n".join(hours_left(Graph(study, scale, arguments.run_dir.resolve(), inputs))))
    return 0


@dataclass(kw_only=True)
class RunArguments:
    """Run a study. Finished runs are skipped, so the same command resumes after a stop or kill. A failed run does not
    stop the others."""

    file: File
    """A study of the package, or the path of a .yaml file."""
    scale: str = "cpu"
    """cpu, gpu or paper."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory of all runs of the study."""
    input: Inputs = field(default_factory=list)
    """Path of an input of the study, once per input (`trp-scale study show`)."""
    jobs: int = setting(0, at_least=0)
    """Number of parallel commands, which share the cores; 0 = one per core for a scale without GPUs, otherwise one."""
    executor: Literal["local", "slurm-array"] = "local"
    """local: processes on this machine. slurm-array: job arrays, several in sequence if runs depend on others."""
    sbatch: str = ""
    """slurm-array: additional flags of sbatch, such as "--partition=gpu --gres=gpu:8 --time=24:00:00"."""
    only: int | None = None
    """Run only the command with this number, from 0; for jobs of an array."""


def run(argv: Sequence[str]) -> int:
    """Run a study, or resume it."""
    arguments = read(RunArguments, argv, prog="trp-scale study run")
    import os

    from trp_scale.studies.execute import Claim, Executor, claim, has_finished, submit
    from trp_scale.studies.graph import Graph
    from trp_scale.studies.study import load_study, parse_inputs

    study = load_study(arguments.file)
    scale = study.scale(arguments.scale)
    check_settings(arguments)
    graph = Graph(study, scale, arguments.run_dir.resolve(), parse_inputs(study, scale, arguments.input))
    if arguments.only is not None and not 0 <= arguments.only < len(graph.nodes):
        raise RefusedError(f"--only is {arguments.only}, allowed: 0 ... {len(graph.nodes) - 1}")
    claim(graph.directory, Claim(study=_state(arguments.file), scale=arguments.scale, inputs=graph.inputs))
    if arguments.executor == "slurm-array" and arguments.only is None:
        words = [sys.executable, "-m", "trp_scale", "study", "run", *argv, "--executor", "local"]
        jobs = submit(graph, words, arguments.sbatch)
        print(f"{graph.directory}: array jobs {', '.join(jobs) or 'none: everything has finished'}")
        print(f"then run: trp-scale study report {shlex.quote(str(graph.directory))}")
        return 0
    cores = len(os.sched_getaffinity(0))
    executor = Executor(graph, jobs=arguments.jobs or (1 if scale.gpus else cores), tell=_print_line)
    only = None if arguments.only is None else list(graph.nodes)[arguments.only]
    ended = executor.run(only)
    failed = [name for name, state in ended.items() if not has_finished(state)]
    _print_line(f"{len(ended) - len(failed)} of {len(ended)} finished in {graph.directory}")
    if failed:
        _print_line(
            f"not finished: {', '.join(failed[:5])}{f' and {len(failed) - 5} more' * (len(failed) > 5)}; the same "
            "command retries them"
        )
    return 1 if failed else 0


def _print_line(line: str) -> None:
    print(line, flush=True)


def _state(file: str) -> str:
    """Return the study for study.json: its name, or its absolute path."""
    return str(Path(file).resolve()) if file.endswith((".yaml", ".yml")) else file


@dataclass(kw_only=True)
class StudyReportArguments:
    """Write the present results of a study: README.md, report.tex, report.html, figures.json and a picture."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The --run_dir of a study."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Output directory; default DIR/report, or DIR/report_against_BASELINE."""
    baseline: str = ""
    """Compare with this variant at equal steps, instead of the study's baseline."""


def report(argv: Sequence[str]) -> int:
    """Write the present results of a study as Markdown, LaTeX and HTML."""
    arguments = read(StudyReportArguments, argv, prog="trp-scale study report")
    from trp_scale.studies.execute import read_claim
    from trp_scale.studies.graph import Graph
    from trp_scale.studies.report import write_report
    from trp_scale.studies.study import load_study

    study_claim = read_claim(arguments.directory)
    study = load_study(study_claim.study)
    named = study.baseline
    if arguments.baseline:
        study = study.with_baseline(arguments.baseline, study_claim.scale)
    graph = Graph(study, study.scale(study_claim.scale), arguments.directory.resolve(), study_claim.inputs)
    against = f"_against_{arguments.baseline}" if arguments.baseline else ""
    output = arguments.output or arguments.directory / f"report{against}"
    inputs = "".join(f" --input {name}=PATH" for name in graph.inputs)
    command = f"trp-scale study run {study_claim.study} --scale {study_claim.scale} --run_dir DIR{inputs}"
    if study.baseline != named:
        command += f"; differences: trp-scale study report DIR --baseline {study.baseline} (the study's: {named})"
    print(write_report(graph, output, command), end="")
    print(output / "README.md", file=sys.stderr)
    return 0


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": list_studies,
    "show": show,
    "plan": plan,
    "run": run,
    "report": report,
}
