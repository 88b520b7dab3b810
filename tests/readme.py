"""The commands of README.md, as a reader would type them."""

from __future__ import annotations

from tests.commands import ROOT, bash_commands

README = ROOT / "README.md"
COMMANDS = bash_commands(README.read_text(encoding="utf-8"))
