"""The README is short, and every command of it and of the tour exists. (tests/distributed runs them.)"""

from __future__ import annotations

import re

import pytest

from tests.commands import ROOT, Command, check, parse_line
from tests.readme import COMMANDS, OF_THE_README, README


def test_the_two_commands_are_there() -> None:
    first, activate, second = OF_THE_README[:3]
    assert (first.words, activate.words) == (("make", "pretrain"), ("source", ".venv/bin/activate"))
    assert second == Command(words=("trp-scale", "report"))


def test_it_is_read_in_a_minute() -> None:
    """150 lines, the first result within the first screen of them, and each paper by its link."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.index("make pretrain") < len("".join(text.splitlines(keepends=True)[:40]))
    assert all(f"https://arxiv.org/abs/{number}" in text for number in ("2306.12070", "2303.07598", "2402.18128"))


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", README.read_text(encoding="utf-8"))
    names = {name for name, _ in links if not name.startswith("https://")}
    assert len(names) > 15
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing, missing


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
