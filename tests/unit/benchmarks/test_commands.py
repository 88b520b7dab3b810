"""Every command of benchmarks/ that a document shows is accepted: the script is there, and has its flags."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"`python benchmarks/(\w+)\.py([^`]*)`")


def shown() -> list[tuple[str, str]]:
    """Script and flags of each command, once; docs/experiments.md names scripts of their day."""
    paths = (ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/experiments.md"}))
    commands = [found for path in paths for found in COMMAND.findall(path.read_text(encoding="utf-8"))]
    return list(dict.fromkeys((script, " ".join(flags.split())) for script, flags in commands))


def read(script: str, flags: str) -> None:
    """As the script itself reads them; SystemExit for a flag that it does not know."""
    options = importlib.import_module(f"benchmarks.{script}").Options
    _, others = tyro.cli(options, args=shlex.split(flags), return_unknown_args=True)
    if others:
        raise SystemExit(f"unknown: {others}")


@pytest.mark.parametrize(("script", "flags"), shown(), ids=str)
def test_a_command_that_a_document_shows_is_accepted(script: str, flags: str) -> None:
    read(script, flags)
