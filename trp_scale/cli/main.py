"""Command `trp-scale`: a table of subcommands, each imported only when it is called."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NoReturn

import trp_scale
from trp_scale.config.flags import HELP, is_rank_zero_env, read
from trp_scale.config.registry import import_name
from trp_scale.config.schema import clean_text
from trp_scale.console import EscapedStream, Shown
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS, discover, exit_process
from trp_scale.distributed.stop import listen_early
from trp_scale.errors import ExitStatus, RefusedError, exit_status_and_message, nearest

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "make data": {
        "shard-text": ("sharding", "tag, tokenize and shard English text"),
        "shard-images": ("sharding", "shard images, or render small scenes"),
        "pseudo-label": ("sharding", "add maps predicted by depth and segmentation models to images"),
        "index": ("sharding", "write the memory-mapped index of a data set"),
        "merge": ("sharding", "merge the parts of a data set that several machines made"),
        "inspect": ("sharding", "show rows of a shard"),
        "verify": ("sharding", "check every byte of a data set"),
    },
    "train": {
        "recipes": ("training", "list the recipes, or print all settings of one"),
        "plan": ("training", "predict memory, time and the best layout of a run on a cluster"),
        "pretrain": ("training", "pre-train from a recipe, in one process or on many ranks"),
        "finetune": ("training", "fine-tune an encoder on downstream tasks, over seeds"),
        "launch-files": ("training", "write DeepSpeed's files, launch and SLURM scripts"),
    },
    "diagnose": {
        "runs": ("training", "list runs with state, step, worst task and age"),
        "doctor": ("training", "find problems of the machines, or of a run directory"),
    },
    "evaluate": {
        "report": ("evaluation", "print a run's results, and plot them on a page"),
        "reference": ("evaluation", "write a run's losses and weights for the balancer of a second run"),
        "watch": ("evaluation", "serve that page while the run is training"),
        "evaluate": ("evaluation", "measure runs again, also on other data and corrupted images"),
        "probe": ("evaluation", "measure the features of a frozen encoder"),
        "represent": ("evaluation", "visualize the representations of an image encoder on one page"),
        "compare": ("evaluation", "compare the results of several runs, with p values"),
        "export": ("evaluation", "write a run's weights to a directory that other libraries load"),
    },
    "compare methods": {
        "study": ("study", "run all runs of a table of the papers, or of your own, and report"),
    },
}
"""Module of trp_scale.cli and description of each command, in the groups of `trp-scale --help`. The module has a
function of the command's name, which takes its arguments and returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status (errors.py)."""
    words = sys.argv[1:] if argv is None else argv
    with redirect_stdout(EscapedStream(sys.stdout)), redirect_stderr(EscapedStream(sys.stderr)):  # type: ignore[type-var]
        return run(lambda: _main(list(map(clean_text, words))))


def _main(arguments: Sequence[str]) -> int:
    with suppress(FileNotFoundError):  # the directory may have been removed
        clean_text(os.getcwd())  # noqa: PTH109 - paths are stored absolute, by its name
    if not arguments or arguments[0] in HELP:
        print("\n".join(usage()), flush=True)
        return ExitStatus.DONE if arguments else ExitStatus.REFUSED
    if arguments[0] == "--version":
        print(f"trp-scale {trp_scale.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    modules = {name: module for group in COMMANDS.values() for name, (module, _) in group.items()}
    if name not in modules:
        close = nearest(name, modules)
        raise RefusedError(f"{name!r} is not a command of trp-scale{close}; allowed: {', '.join(modules)}")
    module = importlib.import_module(f"trp_scale.cli.{modules[name]}")
    status: int = getattr(module, name.replace("-", "_"))(rest)
    return status


def usage() -> Iterator[str]:
    """Yield the lines of the help: commands and exit statuses."""
    width = max(len(name) for group in COMMANDS.values() for name in group)
    yield "usage: trp-scale COMMAND ...      trp-scale --version"
    for title, group in COMMANDS.items():
        yield f"\n{title}:"
        yield from (f"  {name:<{width}}  {line}" for name, (_, line) in group.items())
    yield "\nexit status:"
    yield from (f"  {status.value:<{width}}  {status.meaning}" for status in ExitStatus)
    yield "\ntrp-scale COMMAND --help explains the main flags of a command, --help-all all of them."


def run(command: Callable[[], int]) -> int:
    """Run a command; print a refusal as one message without a traceback, on rank 0 if there are several."""
    try:
        return command()
    except SystemExit as error:  # a wrong flag; the parser has printed the message on rank 0
        if isinstance(error.__context__, BrokenPipeError):  # rich converts it
            return ExitStatus.DONE
        if error.code:
            _wait_for_rank_0()
        raise
    except BrokenPipeError:  # `trp-scale recipes NAME | head` has closed the pipe
        if _has_reader():
            raise
        return ExitStatus.DONE
    except BaseException as error:
        status, line = exit_status_and_message(error)
        if not line:
            raise
        _wait_for_rank_0()
        print(f"error: {line}", file=sys.stderr, flush=True)
        return status


def show(result: Shown) -> int:
    """Print a result on rank 0; return its exit status, 0 if it has none."""
    if discover(os.environ).rank == 0:
        result.show()
    status: int = getattr(result, "status", ExitStatus.DONE)
    return status


def work_and_show(work: str, arguments: object) -> int:
    """Import a function, "module:name", call it and show its result; return the exit status."""
    return show(import_name(work)(arguments))


def command(name: str, kind: type[Any], work: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command: it reads the arguments `kind` and shows the result of `work`."""
    return lambda argv: work_and_show(work, read(kind, argv, prog=f"trp-scale {name}"))


def _has_reader() -> bool:
    """Return whether standard output still has a reader."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll always reports a pipe without a reader
    return not output.poll(0)


def _wait_for_rank_0() -> None:
    """Wait for rank 0: all ranks read the same command line, and after rank 0 stops with the same error the launcher
    ends this rank."""
    if not is_rank_zero_env():
        time.sleep(FIRST_WORD_SECONDS)


def _open_closed_streams() -> None:
    """Connect closed standard streams (`>&-`) to os.devnull, before files get their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def console(*command: str) -> NoReturn:
    """Run the console command, and the scripts in launch/ and data_tools/, which pass their command."""
    _open_closed_streams()
    if [*command, *sys.argv[1:]][:1] in (["pretrain"], ["finetune"]):
        listen_early()  # before the seconds of imports
    exit_process(main([*command, *sys.argv[1:]]))
