"""The values in docs/defaults.md are the defaults of the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from trp_scale.config.registry import make_settings
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

PAGE = Path(__file__).parents[2] / "docs" / "defaults.md"
ROWS = re.findall(
    r"^\| `([a-z_0-9]+)\.([a-z_0-9]+)`(?: of `(\w+)`)?[^|]*\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.M
)


def test_the_page_is_short_and_each_row_of_it_is_read() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) > 40


def test_each_default_is_that_of_the_code() -> None:
    for section, name, kind, value in ROWS:
        settings: Any = make_settings(section, kind) if kind else getattr(PosBertConfig(), section)
        default = getattr(settings, name)
        stated = float(value) if isinstance(default, float) else yaml.safe_load(value)
        assert stated == default and isinstance(stated, type(default)), f"{section}.{name}"
