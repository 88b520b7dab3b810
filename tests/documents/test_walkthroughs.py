"""The walk-throughs of docs/, run block by block in folders of their own, with less data, smaller models, fewer steps.

A block that is not run says why in a comment above it, `<!-- not run: needs SLURM -->`. Commands run in this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import ROOT, Command
from tests.documents.pages import WALKTHROUGHS, Block, blocks, pages, read
from tests.grids import always
from tests.small_commands import made_small, run_here
from tests.unit.finetuning.glue.small_data import write_glue
from tests.unit.sharding.pseudo_labels.tiny_models import dpt_depth, mask2former
from trp_scale.sharding.text import shard
from trp_scale.sharding.text.corpus import embedded_documents

PLAIN = {"TRP_SCALE_PROGRESS": "plain", "COLUMNS": "400"}
IN_EVERY_RUN = ("own_text.md", "own_images.md", "own_modalities.md", "coming_from.md")
"""The others are like them."""
LANGUAGES = ("bash", "python")
"""Of blocks that are run or say why not; others are shown: what is printed, trees of files, recipes."""


def write_texts(directory: Path, first: int) -> None:
    """Twenty short English texts."""
    directory.mkdir(parents=True)
    for number, (_, text) in enumerate(islice(embedded_documents(), first, first + 20)):
        (directory / f"{first + number}.txt").write_text(text[:3000], encoding="utf-8")


def write_image(path: Path, seed: int) -> None:
    """A picture of coloured patches, as PNG or JPEG by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    patches = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(patches).resize((96, 80), Image.Resampling.BICUBIC).save(path)


def write_images(directory: Path) -> None:
    """Two classes, 32 images to learn from and 16 to test on."""
    for number in range(48):
        split = "train" if number < 32 else "test"
        write_image(directory / split / f"class{number % 2}" / f"{number}.jpg", number)


def write_rooms(directory: Path) -> None:
    """Images with depth in millimetres and three classes of pixels, and the names of these beside them."""
    for number in range(48):
        name, random = f"{number:04d}", np.random.default_rng(number)
        write_image(directory / "rgb" / f"{name}.jpg", number)
        coarse = random.integers(1, 4, (8, 12), dtype=np.uint8)
        for folder, values in (("depth", coarse.astype(np.uint16) * 900), ("semseg", coarse - 1)):
            path = directory / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.repeat(10, 0)[:80].repeat(8, 1)).save(path)
    (directory.parent / "classes.txt").write_text("floor\nwall\nchair\n", encoding="utf-8")


def write_inputs(directory: Path) -> None:
    """What the pages say that a reader has: text, images, maps, GLUE, models in directories named as on the hub."""
    write_texts(directory / "my_texts", 0)
    write_texts(directory / "other_texts", 20)
    for number, source in enumerate(("books", "news", "notes")):
        write_texts(directory / "my_sources" / source, 20 * number)
    write_images(directory / "my_images")
    write_rooms(directory / "rooms")
    write_glue(directory / "glue")
    dpt_depth(directory / "Intel" / "dpt-large")
    mask2former(directory / "facebook" / "mask2former-swin-small-coco-panoptic")
    torch.save({"model": {"global_tokens": torch.zeros(1, 1, 8)}}, directory / "multimae.pth")


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
    """What a reader has."""
    directory = tmp_path_factory.mktemp("inputs")
    write_inputs(directory)
    for name in ("launch", "ds_configs"):
        (directory / name).symlink_to(ROOT / name)
    return directory


@pytest.fixture(scope="module", params=always(WALKTHROUGHS, *IN_EVERY_RUN))
def walked(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What went wrong on a page, each with its place. Each page is walked in a folder of its own."""
    directory, before = tmp_path_factory.mktemp("walk"), Path.cwd()
    for path in inputs.iterdir():
        (directory / path.name).symlink_to(path)
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        starts = ((name, text[:4000]) for name, text in embedded_documents())
        patch.setattr(shard, "embedded_documents", lambda: islice(starts, 60))
        os.chdir(directory)
        try:
            for block in blocks(request.param):
                if block.language in LANGUAGES and not block.why_not:
                    results = list(run(block))
                    wrong += [f"{block}: {what}\n{said[-3000:]}" for what, status, said in results if status]
        finally:
            os.chdir(before)
    return wrong


def test_every_block_of_a_walkthrough_ends_well(walked: list[str]) -> None:
    assert not walked, "\n\n".join(walked)


@pytest.mark.parametrize("page", pages())
def test_a_reason_is_a_sentence_above_a_block(page: str) -> None:
    reasons = [block.why_not for block in blocks(page) if block.why_not]
    assert read(page).count("<!-- not run:") == len(reasons), "a comment that stands above no block"
    assert all(len(reason) > 12 for reason in reasons)
