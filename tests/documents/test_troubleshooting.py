"""The messages that docs/troubleshooting.md explains are ones that the package says."""

from __future__ import annotations

import re

from tests.commands import ROOT
from tests.documents.pages import read


def said() -> str:
    """The texts of all sources, with strings that go on in the next line joined."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "trp_scale").rglob("*.py"))]
    return re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts)))


def messages() -> list[str]:
    """What stands in backquotes in the first column."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", read("troubleshooting.md"), flags=re.MULTILINE)
    return [piece for row in rows for piece in re.findall(r"`([^`]+)`", row)]


def test_each_message_is_one_that_the_package_says() -> None:
    texts = said()
    assert len(messages()) > 40 and [message for message in messages() if message not in texts] == []
