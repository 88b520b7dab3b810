"""Commands that train: `pretrain`, `finetune`; `plan`, which predicts what that takes; `launch-files`, which copies
the scripts of launchers. Under a launcher each rank runs the same command line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trp_scale.cli.main import run
from trp_scale.config.flags import phase, read
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.config.run_flags import Arguments


def plan(argv: Sequence[str]) -> int:
    """`trp-scale plan`."""
    from trp_scale.planning.arguments import parse_plan

    arguments = parse_plan(argv)
    from trp_scale.planning.command import print_plan

    return print_plan(arguments)


def pretrain(argv: Sequence[str]) -> int:
    """`trp-scale pretrain`."""
    from trp_scale.config.loader import data_command
    from trp_scale.config.run_flags import parse
    from trp_scale.data.mixture import require_data, require_made

    arguments = parse(argv)
    if arguments.print_config:
        return _print_config(arguments)
    require_made(arguments.config.data.path, data_command(arguments.recipe, arguments.config.data.path))
    require_data(arguments.config.datasets())
    if arguments.dry_run:
        from trp_scale.planning.command import print_dry_run

        return print_dry_run(arguments)
    phase(f"{arguments.recipe_name()}: importing torch")
    from trp_scale.pretraining.base import find_upstream
    from trp_scale.training.pretrain import pretrain as train

    return _in_its_place(arguments, lambda: train(arguments).status, lambda: find_upstream(arguments.config))


def finetune(argv: Sequence[str]) -> int:
    """`trp-scale finetune`."""
    from trp_scale.finetuning.arguments import parse_finetune

    arguments = parse_finetune(argv)
    if arguments.print_config:
        return _print_config(arguments)
    phase(f"{arguments.recipe_name()}: importing torch")
    from trp_scale.finetuning.finetune import finetune as train
    from trp_scale.finetuning.task import task_class

    return _in_its_place(arguments, lambda: train(arguments), lambda: task_class(arguments.config))


def _print_config(arguments: Arguments) -> int:
    """Print the settings on rank 0."""
    from trp_scale.config.loader import dump
    from trp_scale.distributed.launchers import discover

    if discover(os.environ).rank == 0:
        print(dump(arguments.config), end="")
    return 0


def _in_its_place(arguments: Arguments, train: Callable[[], int], load: Callable[[], object]) -> int:
    """Train, and again after a fault, as often as --reliability.restarts says.

    Args:
        load: imports the upstream or the task.
    """
    restarts, run_dir = arguments.config.reliability.restarts, arguments.run_dir
    if restarts == 0:
        return train()
    if run_dir is None:
        raise RefusedError(
            f"--reliability.restarts {restarts} needs --run_dir DIR: a run goes on in the directory that it began in"
        )
    from trp_scale.checkpoint.run_directory import checkpoints
    from trp_scale.config.registry import find
    from trp_scale.distributed.launchers import discover
    from trp_scale.distributed.restarts import run_with_restarts

    info = discover(os.environ)

    def imports() -> None:
        load()
        with suppress(ImportError):  # the run says what is not installed
            find("engine", arguments.choose_engine(info.world)).load()

    def attempt(number: int) -> int:
        if number and (arguments.resume == "never" or checkpoints(run_dir)):
            arguments.resume = "auto"
        return run(train)

    return run_with_restarts(attempt, info=info, restarts=restarts, imports=imports)


FILES = Path(__file__).parents[1] / "launch_files"
"""Links to `ds_configs/` and `launch/`, which a wheel stores as files."""


@dataclass(kw_only=True)
class LaunchFilesArguments:
    """Write DeepSpeed's JSON files (ds_configs/), the scripts for launchers (launch/), the SLURM batch script
    (launch/slurm/) and the Kubernetes Job (launch/kubernetes/) into a directory, to be started from there or changed. A
    file that is there already stays, and is refused if it differs."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory to write them into; made if it is not there."""


def launch_files(argv: Sequence[str]) -> int:
    """`trp-scale launch-files`.

    Raises:
        RefusedError: the directory cannot be written, or holds other files of these names.
    """
    directory = read(LaunchFilesArguments, argv, prog="trp-scale launch-files").directory
    folders = (Path(folder) for folder, _, _ in os.walk(FILES, followlinks=True) if Path(folder).name != "__pycache__")
    files = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    targets = {path: directory / path.relative_to(FILES) for path in files}
    changed = [
        target for source, target in targets.items() if target.exists() and target.read_bytes() != source.read_bytes()
    ]
    if changed:
        raise RefusedError(
            f"{', '.join(map(str, changed))}: there already, with other content; allowed: a directory without them"
        )
    try:
        for source, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except OSError as error:
        raise RefusedError(f"{directory} cannot be written: {error.strerror}") from error
    print("\n".join(map(str, targets.values())))
    return 0
