"""Training commands `pretrain` and `finetune`, and commands about runs: `recipes` lists recipes, `plan` predicts memory
and time, `launch-files` copies the scripts of launchers, `runs` lists runs, `doctor` checks machines or a run. Under a
launcher each rank runs the same command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trp_scale.cli.main import run, show, work_and_show
from trp_scale.config.flags import Modules, TakesModules, is_rank_zero_env, phase, read
from trp_scale.config.registry import check_settings, setting
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.config.run_flags import Arguments
    from trp_scale.diagnostics.machine import Finding


@dataclass(kw_only=True)
class RecipesArguments(TakesModules):
    """List the recipes, one per line; or print all settings of one as YAML, each with the recipe that sets it."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """A recipe, or the path of a .yaml file; empty = list all."""
    module: Modules = field(default_factory=list)
    """File or dotted name of a module of yours that registers recipes or their components."""


def recipes(argv: Sequence[str]) -> int:
    """`trp-scale recipes`."""
    from trp_scale.config.loader import list_recipes, resolve_recipe
    from trp_scale.config.recipes import recipe_path

    arguments = read(RecipesArguments, argv, prog="trp-scale recipes")
    lines = resolve_recipe(recipe_path(arguments.name, "trp-scale recipes")) if arguments.name else list_recipes()
    print("\n".join(lines))
    return 0


def plan(argv: Sequence[str]) -> int:
    """`trp-scale plan`."""
    from trp_scale.planning.clusters import parse_plan

    return work_and_show("trp_scale.planning.command:plan", parse_plan(argv))


def pretrain(argv: Sequence[str]) -> int:
    """`trp-scale pretrain`."""
    from trp_scale.config.run_flags import parse
    from trp_scale.data.mixture import require_run_data

    arguments = parse(argv)
    if arguments.print_config and arguments.config.length_flag == "--training.steps":
        return _print_config(arguments)
    require_run_data(arguments)
    if arguments.print_config:
        from trp_scale.pretraining.base import set_length

        set_length(arguments.config)
        return _print_config(arguments)
    if arguments.dry_run:
        from trp_scale.distributed.launchers import discover
        from trp_scale.planning.command import dry_run

        if is_rank_zero_env():
            dry_run(arguments, discover(os.environ).world).show()
        return 0
    phase(f"{arguments.recipe_name()}: importing torch")
    from trp_scale.pretraining.base import find_upstream
    from trp_scale.training.pretrain import pretrain as train

    return _train_with_restarts(arguments, lambda: train(arguments).status, lambda: find_upstream(arguments.config))


def finetune(argv: Sequence[str]) -> int:
    """`trp-scale finetune`."""
    from trp_scale.finetuning.arguments import parse_finetune

    arguments = parse_finetune(argv)
    if arguments.print_config:
        return _print_config(arguments)
    phase(f"{arguments.recipe_name()}: importing torch")
    from trp_scale.finetuning.finetune import finetune as train
    from trp_scale.finetuning.task import task_class

    return _train_with_restarts(arguments, lambda: show(train(arguments)), lambda: task_class(arguments.config))


def _print_config(arguments: Arguments) -> int:
    """Print the settings on rank 0."""
    from trp_scale.config.loader import dump
    from trp_scale.distributed.launchers import discover

    if discover(os.environ).rank == 0:
        print(dump(arguments.config), end="")
    return 0


def _train_with_restarts(arguments: Arguments, train: Callable[[], int], load: Callable[[], object]) -> int:
    """Train, and restart in place after a fault, at most --reliability.restarts times. `load`: imports the upstream or
    the task."""
    restarts, run_dir = arguments.config.reliability.restarts, arguments.run_dir
    if restarts == 0:
        return train()
    if run_dir is None:
        raise RefusedError(
            f"--reliability.restarts {restarts} needs --run_dir DIR: a restart resumes in the same directory"
        )
    from trp_scale.checkpoint.run_directory import checkpoints
    from trp_scale.config.registry import find
    from trp_scale.distributed.launchers import discover
    from trp_scale.distributed.restarts import run_with_restarts

    info = discover(os.environ)

    def imports() -> None:
        load()
        with suppress(ImportError):  # the run reports missing packages
            find("engine", arguments.choose_engine(info.world)).load()

    def attempt(number: int) -> int:
        if number and (arguments.resume == "never" or checkpoints(run_dir)):
            arguments.resume = "auto"
        return run(train)

    return run_with_restarts(attempt, info=info, restarts=restarts, imports=imports)


FILES = Path(__file__).parents[1] / "launch_files"
"""Links to `ds_configs/` and `launch/`; a wheel contains them as files."""


@dataclass(kw_only=True)
class LaunchFilesArguments:
    """Write DeepSpeed's JSON files (ds_configs/), the scripts for launchers (launch/), the SLURM batch script
    (launch/slurm/) and the Kubernetes Job (launch/kubernetes/) into a directory, to use or to change. Existing files
    are kept; they are refused if they differ."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Output directory; created if it does not exist."""


def launch_files(argv: Sequence[str]) -> int:
    """`trp-scale launch-files`. Refuse a directory that cannot be written, or that contains other files of these
    names."""
    directory = read(LaunchFilesArguments, argv, prog="trp-scale launch-files").directory
    folders = (Path(folder) for folder, _, _ in os.walk(FILES, followlinks=True) if Path(folder).name != "__pycache__")
    files = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    targets = {path: directory / path.relative_to(FILES) for path in files}
    changed = [
        target for source, target in targets.items() if target.exists() and target.read_bytes() != source.read_bytes()
    ]
    if changed:
        raise RefusedError(
            f"{', '.join(map(str, changed))}: files with other content exist; allowed: a directory without them"
        )
    try:
        for source, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except OSError as error:
        raise RefusedError(f"{directory} cannot be written: {error.strerror}") from error
    print("\n".join(map(str, targets.values())))
    return 0


@dataclass(kw_only=True)
class RunsArguments:
    """List the runs below a directory, newest first: state, steps, the worst task with its loss, and the time since the
    last write. Damaged directories and those without a run are counted."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Directory that contains runs, also in subdirectories."""


def runs(argv: Sequence[str]) -> int:
    """`trp-scale runs`."""
    arguments = read(RunsArguments, argv, prog="trp-scale runs")
    from trp_scale.diagnostics.run_directory import list_runs

    return show(list_runs(arguments.directory))


@dataclass(kw_only=True)
class DoctorArguments:
    """Check the machines before a run: GPUs and driver, versions, limits, shared memory, ports and network, speed of
    each rank, all-reduce and storage. Under torchrun, deepspeed or srun it checks all hosts of the job. With RUN_DIR it
    checks a run instead: intact checkpoints, resume point, why it ended, whether it is alive, incidents, disk space.
    Exits with status 1 if something is wrong, otherwise 0."""

    run_dir: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = None
    """Directory of a running or ended run; nothing in it is changed."""
    quick: bool = False
    """With RUN_DIR: verify files of checkpoints by their sizes only, not by checksums."""
    storage: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Shared directory in which each rank writes a file, reads another's and removes its own. Default: storage is not
    measured."""
    hostfile: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Hostfile of deepspeed's launcher: check its lines, and whether ssh reaches each host without a password."""
    two_ranks: bool = False
    """Start two ranks on this host, which share its GPU (NCCL 2.30 or newer) or compute on CPUs."""
    mebibytes: Annotated[int, tyro.conf.arg(metavar="MIB")] = setting(64, at_least=1)
    """Size of these files, and of the all-reduce."""
    timeout_minutes: float = setting(2.0, above=0)
    """Time to wait for ranks that have not started."""
    json: bool = False
    """Print one JSON object instead of lines."""


def doctor(argv: Sequence[str]) -> int:
    """`trp-scale doctor`."""
    arguments = read(DoctorArguments, argv, prog="trp-scale doctor")
    check_settings(arguments)
    if arguments.two_ranks and arguments.run_dir is None:
        from trp_scale.distributed.environment import SHARED_GPUS, discover

        if discover(os.environ).launcher == "single":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
            command, variables = [*torchrun, "trp_scale", "doctor", *argv], {**os.environ, SHARED_GPUS: "1"}
            ranks = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            print(ranks.stdout or ranks.stderr, end="", flush=True)
            return int(ranks.returncode != 0)
    findings = _examine_run(arguments.run_dir, arguments) if arguments.run_dir else _examine_machines(arguments)
    return int(any(finding.state == "wrong" for finding in findings))


def _examine_machines(arguments: DoctorArguments) -> list[Finding]:
    if arguments.quick:
        raise RefusedError("--quick is for a run; give its directory: trp-scale doctor RUN_DIR --quick")
    from trp_scale.diagnostics.machine import examine, examine_hostfile
    from trp_scale.distributed.environment import Environment

    with Environment(timeout_minutes=arguments.timeout_minutes) as environment:
        findings = examine(environment, arguments.storage, mebibytes=arguments.mebibytes)
        if (info := environment.info).rank == 0:
            findings += examine_hostfile(arguments.hostfile) if arguments.hostfile else ()
            job = {"ranks": info.world, "launcher": info.launcher, "device": environment.device.type}
            _print(job, findings, as_json=arguments.json)
        environment.world.barrier()  # no rank exits, which would end the job, before rank 0 has printed
    return findings


def _examine_run(run_dir: Path, arguments: DoctorArguments) -> list[Finding]:
    for name in ("storage", "hostfile", "two_ranks"):
        if getattr(arguments, name):
            raise RefusedError(f"--{name} is for machines, and {run_dir} for a run; give only one of them")
    from trp_scale.diagnostics.run_directory import examine_run

    findings = examine_run(run_dir, quick=arguments.quick)
    _print({"run_dir": str(run_dir)}, findings, as_json=arguments.json)
    return findings


def _print(subject: Mapping[str, object], findings: Sequence[Finding], *, as_json: bool) -> None:
    document = {**subject, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps(document, indent=1) if as_json else "\n".join(_format_lines(findings)), flush=True)


def _format_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield lines for each finding, and the count of each state."""
    width = min(120, shutil.get_terminal_size().columns)
    names = max(len(finding.check) for finding in findings)
    indent = " " * (8 + names + 2)
    hosts = {host for finding in findings for host in finding.where}
    for finding in findings:
        where = ", ".join(finding.where) if finding.where and {*finding.where} != hosts else ""
        first = f"{finding.state:<7} {finding.check:<{names}}  "
        text = finding.result + (f" ({where})" if where else "")
        yield textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent)
        if finding.change:
            yield textwrap.fill(finding.change, width, initial_indent=f"{indent}to do: ", subsequent_indent=indent)
    counts = [(state, sum(finding.state == state for finding in findings)) for state in ("ok", "warning", "wrong")]
    yield ", ".join(f"{count} {state}" for state, count in counts)
