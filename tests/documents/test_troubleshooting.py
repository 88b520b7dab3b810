"""The messages that docs/troubleshooting.md explains are ones that the package says."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.commands import ROOT
from tests.documents.pages import read


@cache
def said() -> str:
    """The texts of all sources, with strings that go on in the next line joined."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "trp_scale").rglob("*.py"))]
    return re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts)))


def messages() -> list[str]:
    """What stands in backquotes in the first column."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", read("troubleshooting.md"), flags=re.MULTILINE)
    return [piece for row in rows for piece in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_that_the_package_says(message: str) -> None:
    assert message in said()
