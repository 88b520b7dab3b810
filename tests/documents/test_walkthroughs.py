"""The walk-throughs of docs/, run block by block in folders of their own, with less data, smaller models, fewer steps.

A block that is not run says why in a comment above it, `<!-- not run: needs SLURM -->`. Commands run in this process.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.commands import Command
from tests.documents.pages import WALKTHROUGHS, Block, blocks, pages, read
from tests.grids import always
from tests.small_commands import made_small, run_here, write_inputs
from trp_scale.sharding.text import shard
from trp_scale.sharding.text.corpus import embedded_documents

PLAIN = {"TRP_SCALE_PROGRESS": "plain", "COLUMNS": "400"}
IN_EVERY_RUN = ("own_text.md", "own_images.md", "own_modalities.md", "coming_from.md")
"""The others are like them."""
LANGUAGES = ("bash", "python")
"""Of blocks that are run or say why not; others are shown: what is printed, trees of files, recipes."""


def run_python(text: str) -> tuple[int, str]:
    """A script, in this process; its exit status and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exec(compile(text, "block", "exec"), {"__name__": "__main__"})
        except Exception:
            traceback.print_exc()
            return 1, printed.getvalue()
    return 0, printed.getvalue()


def run_command(command: Command) -> tuple[int, str]:
    assert command.words[0] == "trp-scale", f"{command}: only commands of trp-scale are run; mark the block"
    return run_here(made_small(list(command.words)))


def run(block: Block) -> Iterator[tuple[str, int, str]]:
    """What each command of a block, or the whole script, ended with: (it, status, output)."""
    if block.language == "python":
        yield ("the script", *run_python(block.text))
        return
    for command in block.commands:
        yield (str(command), *run_command(command))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", params=always(WALKTHROUGHS, *IN_EVERY_RUN))
def walked(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What went wrong on a page, each with its place. Each page is walked in a folder of its own."""
    directory = tmp_path_factory.mktemp("walk")
    for path in inputs.iterdir():
        (directory / path.name).symlink_to(path)
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        starts = ((name, text[:4000]) for name, text in embedded_documents())
        patch.setattr(shard, "embedded_documents", lambda: islice(starts, 60))
        patch.chdir(directory)
        for block in blocks(request.param):
            if block.language in LANGUAGES and not block.why_not:
                results = list(run(block))
                wrong += [f"{block}: {what}\n{said[-3000:]}" for what, status, said in results if status]
    return wrong


def test_every_block_of_a_walkthrough_ends_well(walked: list[str]) -> None:
    assert not walked, "\n\n".join(walked)


@pytest.mark.parametrize("page", pages())
def test_a_reason_is_a_sentence_above_a_block(page: str) -> None:
    reasons = [block.why_not for block in blocks(page) if block.why_not]
    assert read(page).count("<!-- not run:") == len(reasons), "a comment that stands above no block"
    assert all(len(reason) > 12 for reason in reasons)
