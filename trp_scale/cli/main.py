"""The command `trp-scale`: a table of its commands, each imported only when it is chosen."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import NoReturn

import trp_scale
from trp_scale.config.flags import HELP, is_rank_zero_env
from trp_scale.config.schema import clean_text
from trp_scale.console import EscapedStream
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS, exit_process
from trp_scale.distributed.stop import listen_early
from trp_scale.errors import ExitStatus, RefusedError, exit_status_and_message, nearest

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "make data": {
        "shard-text": ("sharding", "tag, tokenize and shard English text"),
        "shard-images": ("sharding", "shard images, or render small scenes"),
        "pseudo-label": ("sharding", "give images the maps that depth and segmentation models see"),
        "index": ("sharding", "write the one index of a data set that runs map into memory"),
        "merge": ("sharding", "join a data set that several machines made in parts"),
        "inspect": ("sharding", "show rows of a shard"),
        "verify": ("sharding", "check every byte of a data set"),
    },
    "train": {
        "recipes": ("training", "list the recipes, or print all settings of one"),
        "plan": ("training", "predict memory, time and the best layout of a run on a cluster"),
        "pretrain": ("training", "pre-train from a recipe, in one process or on many ranks"),
        "finetune": ("training", "fine-tune an encoder on downstream tasks, over seeds"),
        "launch-files": ("training", "write out DeepSpeed's files, launch and SLURM scripts"),
    },
    "look at the machines": {
        "doctor": ("training", "find what of the machines, or in a run's directory, stops or slows a run"),
    },
    "look at what was trained": {
        "report": ("evaluation", "print what a run has reached, and draw it on a page"),
        "watch": ("evaluation", "serve that page while the run goes on"),
        "evaluate": ("evaluation", "measure runs again, also on other data and on unusual images"),
        "probe": ("evaluation", "measure how far a frozen encoder tells classes apart"),
        "represent": ("evaluation", "draw and measure what an image encoder has learned, on one page"),
        "compare": ("evaluation", "put what several runs reached side by side, with p values"),
        "export": ("evaluation", "write a run's weights as a directory that other libraries load"),
    },
    "compare methods": {
        "study": ("study", "run a table of the papers, or your own, as one file: all runs, and a report"),
    },
}
"""Module of trp_scale.cli and description of each command, in the groups of `trp-scale --help`. The module has a
function of the command's name, which takes the arguments behind it and returns the status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (errors.py)."""
    words = sys.argv[1:] if argv is None else argv
    with redirect_stdout(EscapedStream(sys.stdout)), redirect_stderr(EscapedStream(sys.stderr)):  # type: ignore[type-var]
        return run(lambda: _main(list(map(clean_text, words))))


def _main(arguments: Sequence[str]) -> int:
    with suppress(FileNotFoundError):  # it may be gone
        clean_text(os.getcwd())  # noqa: PTH109 - paths are stored absolute, by its name
    if not arguments or arguments[0] in HELP:
        return _usage(ExitStatus.DONE if arguments else ExitStatus.REFUSED)
    if arguments[0] == "--version":
        print(f"trp-scale {trp_scale.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    modules = {name: module for group in COMMANDS.values() for name, (module, _) in group.items()}
    if name not in modules:
        close = nearest(name, modules)
        raise RefusedError(f"{name!r} is no command of trp-scale{close}; allowed: {', '.join(modules)}")
    module = importlib.import_module(f"trp_scale.cli.{modules[name]}")
    status: int = getattr(module, name.replace("-", "_"))(rest)
    return status


def _usage(status: ExitStatus) -> int:
    print("\n".join(usage()), flush=True)
    return status


def usage() -> Iterator[str]:
    """The commands, a line each."""
    width = max(len(name) for group in COMMANDS.values() for name in group)
    yield "usage: trp-scale COMMAND ...      trp-scale --version"
    for title, group in COMMANDS.items():
        yield f"\n{title}:"
        yield from (f"  {name:<{width}}  {line}" for name, (_, line) in group.items())
    yield "\nexit status:"
    yield from (f"  {status.value:<{width}}  {status.meaning}" for status in ExitStatus)
    yield "\ntrp-scale COMMAND --help explains what a command needs, --help-all all of its flags."


def run(command: Callable[[], int]) -> int:
    """Run a command and show a refusal as one message without a traceback; of several ranks, rank 0 speaks."""
    try:
        return command()
    except SystemExit as error:  # a wrong flag, which the parser has told on rank 0
        if isinstance(error.__context__, BrokenPipeError):  # as below, by rich
            return ExitStatus.DONE
        if error.code:
            _let_rank_0_speak_first()
        raise
    except BrokenPipeError:  # `trp-scale recipes NAME | head`: nobody reads the rest
        if _is_read():
            raise
        return ExitStatus.DONE
    except BaseException as error:
        status, line = exit_status_and_message(error)
        if not line:
            raise
        _let_rank_0_speak_first()
        print(f"error: {line}", file=sys.stderr, flush=True)
        return status


def _is_read() -> bool:
    """Whether somebody still reads what this process prints."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # that a pipe has no reader is always told
    return not output.poll(0)


def _let_rank_0_speak_first() -> None:
    """All ranks read the same command; when rank 0 stops for it too, the launcher ends this one while it waits."""
    if not is_rank_zero_env():
        time.sleep(FIRST_WORD_SECONDS)


def _open_closed_streams() -> None:
    """Lead standard streams that were closed (`>&-`) nowhere, before files take their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def console(*command: str) -> NoReturn:
    """The console command, and the scripts in launch/ and data_tools/, which name their command."""
    _open_closed_streams()
    if [*command, *sys.argv[1:]][:1] in (["pretrain"], ["finetune"]):
        listen_early()  # before the seconds of imports
    exit_process(main([*command, *sys.argv[1:]]))
