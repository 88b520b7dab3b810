"""The commands of README.md, and of the pages that go on from it, as a reader would type them."""

from __future__ import annotations

from tests.commands import ROOT, bash_commands
from tests.documents.pages import blocks

README = ROOT / "README.md"
TOUR = (
    "methods/trp.md",
    "methods/adpe.md",
    "methods/mlo_mae.md",
    "methods/all_at_once.md",
    "engines.md",
    "commands.md",
)
"""Pages whose commands are run after those of the README, in this order and in one directory."""
OF_THE_README = bash_commands(README.read_text(encoding="utf-8"))
OF_THE_TOUR = [
    command
    for page in TOUR
    for block in blocks(page)
    if block.language == "bash" and not block.why_not
    for command in block.commands
]
COMMANDS = list(dict.fromkeys([*OF_THE_README, *OF_THE_TOUR]))
