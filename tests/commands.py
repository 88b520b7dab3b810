"""Commands that documents show: read as a shell would read them, and checked against what there is."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser

from trp_scale.cli import main as cli
from trp_scale.config.run_flags import parse

ROOT = Path(__file__).parents[1]
PRETRAIN = "launch/pretrain.py"
SCRIPTS = (PRETRAIN, "launch/finetune.py", "launch/evaluate.py", "launch/probe.py")
"""What stands behind a launcher; each is the command of trp-scale of that name."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line: `variables` set before it, then its words."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables), *self.words])


def parse_line(line: str) -> Command:
    """Words as a shell would split them, comments left out; the leading NAME=value are the variables."""
    words = shlex.split(line, comments=True)
    variables: list[tuple[str, str]] = []
    while words and (found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        variables.append((found[1], found[2]))
        words = words[1:]
    return Command(words=tuple(words), variables=tuple(variables))


def commands_of(block: str) -> list[Command]:
    """The commands of a block; lines that end in a backslash go on in the next."""
    return [command for command in map(parse_line, block.replace("\\\n", " ").splitlines()) if command.words]


def bash_commands(text: str) -> list[Command]:
    """The commands of all ```bash blocks of a text."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [command for block in blocks for command in commands_of(block)]


def script_place(words: Sequence[str]) -> int | None:
    """Where on the line one of SCRIPTS stands."""
    return next((place for place, word in enumerate(words) if word in SCRIPTS), None)


@functools.cache
def help_of(script: str, *words: str) -> str:
    """Return what a command of trp-scale, or a script, prints of its flags, in a window so wide that no flag is broken.

    In this process: a script of SCRIPTS through its command.
    """
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as left:
        patch.setenv("COLUMNS", "400")
        if script == "trp-scale" or script in SCRIPTS:
            cli.main([*([] if script == "trp-scale" else [Path(script).stem]), *words, "--help-all"])
        else:
            patch.setattr(sys, "argv", [script, *words, "--help-all"])
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not left.value.code, f"{script} {' '.join(words)} --help-all"
    return printed.getvalue()


def check_flags(words: Sequence[str], *command: str) -> None:
    recipe = words[words.index("--recipe") :][:2] if "--recipe" in words else ()  # it says which settings there are
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        found = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w.-])", help_of(*command, *recipe))
        assert found, f"{command[-1]} has no {flag}"


def check_launcher(words: Sequence[str]) -> None:
    """What stands before launch/pretrain.py on the line of a launcher."""
    launcher, *flags = words
    if launcher == "torchrun":
        get_args_parser().parse_args([*flags, PRETRAIN])
    elif launcher == "deepspeed":
        runner.parse_args([*flags, PRETRAIN])
        for file in (flags[number + 1] for number, flag in enumerate(flags) if flag == "--hostfile"):
            assert (ROOT / file).is_file(), file
    else:
        assert list(words) in (["python"], ["srun"]), f"unknown launcher {words}"


def check_pretrain(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the parser that the run itself uses: flags, recipe, values, the DeepSpeed file; weights are not there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("trp_scale.config.run_flags.resolve_weights", lambda arguments, chosen: None)
    parse(words)


def check(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That a command exists, with its flags, values, scripts and targets. Raises what the parser does, or an
    AssertionError, where it does not."""
    program, *rest = words
    if program == "make":
        (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(phony.split()), rest
    elif program == "pip":  # of this package
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
        extras = re.findall(r"^([\w-]+) = \[", project, flags=re.MULTILINE)
        (asked,) = re.findall(r"\[(.*?)\]", rest[-1])
        assert rest[:1] == ["install"] and set(asked.split(",")) <= set(extras), rest
    elif program == "git":
        assert rest[0] == "clone" and rest[2:] == ["&&", "cd", "trp_scale"], rest
    elif program == "source":
        assert rest == [".venv/bin/activate"], rest
    elif program == "sbatch":
        script = next(number for number, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[script]).is_file(), rest[script]
        check_pretrain(rest[script + 1 :], monkeypatch)
    elif (place := script_place(words)) is not None:
        script = words[place]
        assert (ROOT / script).is_file()
        check_launcher(words[:place])
        if script == PRETRAIN:
            check_pretrain(words[place + 1 :], monkeypatch)
        else:  # the encoder that --from names is not there to be looked at
            check_flags(words[place + 1 :], script)
    elif list(words[:2]) == ["trp-scale", "study"]:
        check_flags(rest[2:], "trp-scale", "study", rest[1])
    elif list(words[:2]) == ["trp-scale", "pretrain"] and not {"--help", "--help-all"} & set(words):
        check_pretrain(words[2:], monkeypatch)
    elif program == "trp-scale":
        check_flags(rest, "trp-scale", rest[0])
    else:
        assert program == "python", f"a document starts {program!r}, which this test does not know"
        assert (ROOT / rest[0]).is_file(), rest[0]
        check_flags(rest[1:], rest[0])
