"""The commands of README.md, and of the tour in docs/commands.md that goes on from it, as a reader would type them."""

from __future__ import annotations

from tests.commands import ROOT, bash_commands

README = ROOT / "README.md"
TOUR = ROOT / "docs/commands.md"
OF_THE_README = bash_commands(README.read_text(encoding="utf-8"))
COMMANDS = list(dict.fromkeys([*OF_THE_README, *bash_commands(TOUR.read_text(encoding="utf-8"))]))
