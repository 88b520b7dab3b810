"""Every command of benchmarks/ that a document shows is accepted: the script is there, and has its flags."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tyro

from trp_scale.config.run_flags import parse
from trp_scale.evaluation.probe.arguments import parse_probe

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"`python benchmarks/(\w+)\.py([^`]*)`")
PASSED_ON: dict[str, Callable[[Sequence[str]], object]] = {
    "linear_probe_speed": parse_probe,
    "mlo_truncation": lambda words: parse(["--recipe", "mlo_mae_tiny", *words]),
}
"""Scripts whose other flags are those of a command of the package, and what reads these."""


def shown() -> list[tuple[str, str]]:
    """Script and flags of each command, once."""
    paths = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    commands = [found for path in paths for found in COMMAND.findall(path.read_text(encoding="utf-8"))]
    return list(dict.fromkeys((script, " ".join(flags.split())) for script, flags in commands))


def read(script: str, flags: str) -> None:
    """As the script itself reads them; SystemExit for a flag that it does not know."""
    options = importlib.import_module(f"benchmarks.{script}").Options
    _, others = tyro.cli(options, args=shlex.split(flags), return_unknown_args=True)
    if script in PASSED_ON:
        PASSED_ON[script](others)
    elif others:
        raise SystemExit(f"unknown: {others}")


@pytest.mark.parametrize(("script", "flags"), shown(), ids=str)
def test_a_command_that_a_document_shows_is_accepted(script: str, flags: str) -> None:
    read(script, flags)


@pytest.mark.parametrize(
    ("script", "flags"), [("step_time", "--row 3"), ("mlo_truncation", "--data d --model.layer 2")]
)
def test_a_flag_that_is_not_there_is_refused(script: str, flags: str) -> None:
    with pytest.raises(SystemExit):
        read(script, flags)
