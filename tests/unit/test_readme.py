"""The README is short, and every command of it exists. (tests/distributed runs them.)"""

from __future__ import annotations

import re

import pytest

from tests.commands import Command, check
from tests.documents.pages import OF_THE_README, README


def test_the_two_commands_are_there() -> None:
    _, first, activate, second = OF_THE_README[:4]
    assert (first.words, activate.words) == (("make", "pretrain"), ("source", ".venv/bin/activate"))
    assert second == Command(words=("trp-scale", "report"))


def prose(text: str) -> str:
    """The text outside code, tables, comments and addresses."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|^\|.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_it_is_read_in_a_minute() -> None:
    """120 lines and 650 words, the first result within the first screen of them, and each paper by its link."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(prose(text).split()) <= 650
    assert text.index("make pretrain") < len("".join(text.splitlines(keepends=True)[:40]))
    assert all(f"https://arxiv.org/abs/{number}" in text for number in ("2306.12070", "2303.07598", "2402.18128"))


@pytest.mark.parametrize("command", OF_THE_README, ids=str)
def test_commands_exist(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command.words, monkeypatch)
