"""docs/troubleshooting.md explains messages that the package says; docs/defaults.md has the settings' defaults."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.commands import ROOT
from tests.documents.pages import read
from trp_scale.config.registry import make_settings
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

ROWS = re.findall(r"^\| `([a-z_0-9]+)\.([a-z_0-9]+)`(?: of `(\w+)`)?[^|]*\| `([^`]+)` \|", read("defaults.md"), re.M)


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


def test_the_page_is_short_and_each_row_of_it_is_read() -> None:
    lines = read("defaults.md").splitlines()
    assert len(lines) <= 120
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) > 40


def test_each_default_is_that_of_the_code() -> None:
    for section, name, kind, value in ROWS:
        settings: Any = make_settings(section, kind) if kind else getattr(PosBertConfig(), section)
        default = getattr(settings, name)
        stated = float(value) if isinstance(default, float) else yaml.safe_load(value)
        assert stated == default and isinstance(stated, type(default)), f"{section}.{name}"
