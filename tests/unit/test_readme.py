"""Every command of the README exists: script, flags, values, make target. (tests/distributed runs them.)"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from torch.distributed.run import get_args_parser

from tests.readme import COMMANDS, PRETRAIN, README, ROOT, Command, parse_line, script_place
from trp_scale.recipes.arguments import parse


@functools.cache
def help_of(*command: str, asks: str = "--help-all") -> str:
    """What a command prints of its flags, in a wide window so that no flag is broken."""
    environment = {"COLUMNS": "400", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, asks], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{' '.join(command)} {asks}: {result.stderr[-2000:]}"
    return result.stdout


def check_flags(words: Sequence[str], *command: str, asks: str = "--help-all") -> None:
    recipe = words[words.index("--recipe") :][:2] if "--recipe" in words else ()  # it says which settings there are
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        found = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w.-])", help_of(*command, *recipe, asks=asks))
        assert found, f"{command[-1]} has no {flag}"


def check_launcher(words: Sequence[str]) -> None:
    """What stands before launch/pretrain.py on the line of a launcher."""
    launcher, *flags = words
    if launcher == "torchrun":
        get_args_parser().parse_args([*flags, PRETRAIN])
    elif launcher == "deepspeed":
        check_flags(flags, sys.executable, "-m", "deepspeed.launcher.runner", asks="--help")
        for file in (flags[number + 1] for number, flag in enumerate(flags) if flag == "--hostfile"):
            assert (ROOT / file).is_file(), file
    else:
        assert list(words) == ["python"], f"unknown launcher {words}"


def check_pretrain(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the parser that the run itself uses: flags, recipe, values, the DeepSpeed file."""
    monkeypatch.chdir(ROOT)
    parse(words)


def check(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    if program == "make":
        (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(rest) <= set(phony.split()), rest
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
            check_flags(words[place + 1 :], sys.executable, script)
    elif list(words[:2]) == ["trp-scale", "study"]:
        check_flags(rest[2:], sys.executable, "-m", "trp_scale", "study", rest[1])
    elif list(words[:2]) == ["trp-scale", "pretrain"]:
        check_pretrain(words[2:], monkeypatch)
    elif program == "trp-scale":
        check_flags(rest, sys.executable, "-m", "trp_scale", rest[0])
    else:
        assert program == "python", f"the README starts {program!r}, which this test does not know"
        assert (ROOT / rest[0]).is_file(), rest[0]
        check_flags(rest[1:], sys.executable, rest[0])


def test_the_two_commands_are_there() -> None:
    assert COMMANDS[:2] == [Command(words=("make", "pretrain")), Command(words=("make", "test"))]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_exist(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command.words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "make pretraining",
        "trp-scale pretrain --recipe pos_bert_tinny",
        "python launch/pretrain.py --recipe pos_bert_tiny --balancer.alfa 4",
        "python launch/pretrain.py --recipe pos_bert_tiny --balancer.kind maximin",
        "torchrun --ranks 2 launch/pretrain.py --recipe pos_bert_tiny",
        "deepspeed launch/pretrain.py --ds_config ds_configs/zero9.json --recipe pos_bert_tiny",
        "sbatch launch/slurm/train.sbatch --recipe pos_bert_tiny",
        "python data_tools/shard.py --inputs a",
        "python data_tools/shard_text.py --input a",
        "trp-scale shard-text --input a",
        "trp-scale shard --inputs a",
        "trp-scale export --model a",
        "bash launch/everything.sh",
    ],
)
def test_a_wrong_command_is_seen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ValueError, SystemExit, StopIteration)):
        check(parse_line(line).words, monkeypatch)


def test_files_that_the_readme_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:docs|launch|ds_configs|benchmarks|data_tools|\.ci|tests)/[\w./]*)`", text))
    assert names
    missing = [name for name in names | {"constraints.txt"} if not (ROOT / name).exists()]
    assert not missing, missing
