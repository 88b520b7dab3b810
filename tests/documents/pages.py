"""The pages of docs/ and their code blocks, with what a page says of a block that is not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.commands import ROOT, Command, bash_commands, commands_of

DOCS = ROOT / "docs"
WALKTHROUGHS = (
    "quickstart.md",
    "own_text.md",
    "own_sources.md",
    "own_images.md",
    "own_modalities.md",
    "coming_from.md",
)
"""Pages whose blocks are run in order, in a folder of their own."""
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run: (.+?) -->\n\Z", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block.

    Attributes:
        page: its path under docs/.
        line: of its first fence.
        language: what stands behind the fence; empty if nothing does.
        why_not: from the comment above it, why it is not run; empty if there is none.
    """

    page: str
    line: int
    language: str
    text: str
    why_not: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[Command]:
        """Of a bash block."""
        return commands_of(self.text)


def pages() -> list[str]:
    """All pages, relative to docs/; not the reports that `trp-scale study` wrote."""
    names = [path.relative_to(DOCS) for path in DOCS.rglob("*.md")]
    return sorted(str(name) for name in names if name.parts[0] != "studies")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    text = read(page) if text is None else text
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        reason = REASON.search(before)
        yield Block(
            page=page,
            line=before.count("\n") + 1,
            language=found[1],
            text=found[3],
            why_not=" ".join(reason[1].split()) if reason else "",
        )


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
"""Of README.md and of the pages that go on from it, as a reader would type them."""
