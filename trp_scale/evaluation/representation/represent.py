"""`trp-scale represent`: what an encoder has learned, as figures, pictures and one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import RefusedError
from trp_scale.evaluation.pictures import figure_class
from trp_scale.evaluation.representation.attention import Position, default_positions
from trp_scale.evaluation.representation.embedding import PlaneKind, check_library
from trp_scale.evaluation.representation.encoder import load_encoder
from trp_scale.evaluation.representation.findings import Findings
from trp_scale.evaluation.representation.finetuned import finetuned_pictures
from trp_scale.evaluation.representation.images import choose_images
from trp_scale.evaluation.representation.pretraining import pretraining_pictures
from trp_scale.evaluation.representation.study import Pooling, study_images

LEAST_IMAGES = 5
"""Below, there is nothing to see."""


@dataclass(kw_only=True)
class RepresentArguments:
    """Look at what an encoder has learned: how much more alike images of one class are than images of two, the
    representations in a plane, attention maps; of a run of ours its reconstructions and masks; of fine-tuned runs what
    they decide by. Writes PNG files, representation.json and one page, index.html."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR")]
    """The encoder: a run directory of trp-scale pretrain or finetune, an export, a directory of transformers (ViTMAE)
    or of timm (ViT, such as DINO's)."""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Images that data_tools/shard_images.py wrote; with classes for all that needs them."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; made if it is not there."""
    run: Annotated[list[Path], tyro.conf.arg(metavar="DIR")] = field(default_factory=list)
    """Fine-tuned runs of one task, each the run directory of a seed: Grad-CAM of classifiers, side by side."""
    images: int = 1024
    """Images at most that figures, plane and averaged attention are made of; 0 = all of them."""
    size: int = 0
    """Side of the images in pixels; 0 = that of pre-training."""
    shown: int = 6
    """Images in the pictures that show images."""
    pooling: Pooling = "mean"
    """The representation of an image: the mean of its patch tokens, or the class token, after the last norm."""
    plane: PlaneKind = "pca"
    """How representations are laid out in a plane: principal components, or t-SNE."""
    block: int = 0
    """Block whose attention is shown, from 0; negative ones count from the last."""
    positions: Annotated[list[str], tyro.conf.arg(metavar="ROW,COLUMN")] = field(default_factory=list)
    """Patches whose attention is shown, such as 3,3 3,10; empty = three by three over the image."""


def represent(argv: Sequence[str]) -> int:
    """Run `trp-scale represent`; returns the exit status.

    Raises:
        RefusedError: no such encoder or data, a library that is not installed, or flags that do not fit them.
    """
    arguments = tyro.cli(RepresentArguments, prog="trp-scale represent", args=argv, use_underscores=True)
    _check(arguments)
    output, shown = arguments.output, arguments.shown
    encoder, size = load_encoder(arguments.from_, arguments.size)
    block = read_block(arguments.block, len(encoder.blocks))
    positions = read_positions(arguments.positions, encoder.grid)
    choice = choose_images(arguments.data, arguments.images)
    if len(choice.positions) < LEAST_IMAGES:
        raise RefusedError(f"--data {arguments.data}: {len(choice.positions)} images; allowed: {LEAST_IMAGES} or more")
    study = study_images(encoder, choice, size=size, block=block, pooling=arguments.pooling, shown=shown)
    output.mkdir(parents=True, exist_ok=True)
    findings = Findings(encoder=arguments.from_, choice=choice, study=study, output=output)
    findings.add_similarity()
    findings.add_plane(arguments.plane)
    findings.add_attention(positions)
    findings.add_pictures("Pre-training", lambda: pretraining_pictures(arguments.from_, choice, output, shown))
    findings.add_pictures("Fine-tuned", lambda: finetuned_pictures(arguments.run, choice, study.shown, output))
    findings.write()
    return 0


def _check(arguments: RepresentArguments) -> None:
    """Refuse, before anything is read, what will not work."""
    figure_class()
    check_library()
    for name, value, least in (("images", arguments.images, 0), ("shown", arguments.shown, 1)):
        if value < least:
            raise RefusedError(f"--{name} is {value}, allowed: {least} or more")


def read_block(number: int, blocks: int) -> int:
    """--block as a number from 0.

    Raises:
        RefusedError: there is no such block.
    """
    if not -blocks <= number < blocks:
        raise RefusedError(f"--block is {number}, allowed: {-blocks} to {blocks - 1}; the encoder has {blocks} blocks")
    return number % blocks


def read_positions(words: Sequence[str], grid: int) -> list[Position]:
    """--positions as (row, column), three by three places for none.

    Raises:
        RefusedError: not two numbers, or outside the grid.
    """
    found = []
    for word in words:
        row, _, column = word.partition(",")
        if not (row.isdigit() and column.isdigit() and max(int(row), int(column)) < grid):
            raise RefusedError(
                f"--positions {word}: allowed: ROW,COLUMN, each from 0 to {grid - 1}: the encoder sees {grid} x {grid} "
                "patches"
            )
        found.append((int(row), int(column)))
    return found or default_positions(grid)
