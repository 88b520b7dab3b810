"""The commands of README.md, as a reader would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
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


def script_place(words: Sequence[str]) -> int | None:
    """Where on the line one of SCRIPTS stands."""
    return next((place for place, word in enumerate(words) if word in SCRIPTS), None)


def bash_commands(text: str) -> list[Command]:
    """The commands of all ```bash blocks; lines that end in a backslash go on in the next."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for command in map(parse_line, lines) if command.words]


COMMANDS = bash_commands(README.read_text(encoding="utf-8"))
