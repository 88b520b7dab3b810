"""`trp-scale represent`: what an encoder has learned, as figures, pictures and one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.encoder_source import SCRATCH
from trp_scale.downstream.pictures import figure_class
from trp_scale.downstream.probe.arguments import Pooling
from trp_scale.downstream.probe.encoder import FrozenEncoder, encoder_config
from trp_scale.downstream.representation.attention import Position, default_positions
from trp_scale.downstream.representation.embedding import PlaneKind, check_library
from trp_scale.downstream.representation.findings import Findings
from trp_scale.downstream.representation.finetuned import finetuned_pictures, open_finetuned
from trp_scale.downstream.representation.images import choose_images
from trp_scale.downstream.representation.pretraining import pretraining_pictures
from trp_scale.downstream.representation.study import study_images

LEAST_IMAGES = 5
"""Below, there is nothing to see."""


@dataclass(kw_only=True)
class RepresentArguments:
    """Look at what an encoder has learned: how much more alike images of one class are than images of two, the
    representations in a plane, attention maps; of a run of ours its reconstructions and masks; of fine-tuned runs what
    they decide by. Writes PNG files, representation.json and one page, index.html."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")]
    """The encoder: a run directory of trp-scale pretrain or finetune, an export, a directory of transformers (ViTMAE)
    or of timm (ViT, such as DINO's); scratch: weights drawn at random, in the sizes of --recipe, for comparison."""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Sharded images to look at. Figures about classes need images with classes."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; made if it is not there."""
    run: Annotated[list[Path], tyro.conf.arg(metavar="DIR")] = field(default_factory=list)
    """Fine-tuned runs of one kind of task, each the run directory of a seed (DIR/TASK/seed_N): Grad-CAM of classifiers,
    predicted maps of segmentation and depth, side by side."""
    images: int = 1024
    """Largest number of images that figures, plane and averaged attention are made of; 0 = all."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """For --from scratch: a recipe of images with the encoder's sizes; a run's config.yaml is one too."""
    image_size: int = 0
    """Side of the images in pixels, a multiple of the patches'; 0 = that of the pre-training."""
    seen: Literal["centre", "whole"] = "centre"
    """Part of an image that the encoder sees. centre: the central square, image_size of image_size / 0.875 pixels.
    whole: the whole image, squashed to a square."""
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
        RefusedError: no such encoder or data, a library that is not installed, flags that do not fit them, or an output
            that cannot be written.
    """
    arguments = tyro.cli(RepresentArguments, prog="trp-scale represent", args=argv, use_underscores=True)
    _check(arguments)
    config = encoder_config(arguments.from_, recipe=arguments.recipe, size=arguments.image_size)
    config.augmentation.measured = arguments.seen
    block = read_block(arguments.block, config.model.layers)
    positions = read_positions(arguments.positions, config.crops.size // config.vision.patch_size)
    choice = choose_images(arguments.data, arguments.images)
    if len(choice.positions) < LEAST_IMAGES:
        raise RefusedError(f"--data {arguments.data}: {len(choice.positions)} images; allowed: {LEAST_IMAGES} or more")
    runs = open_finetuned(arguments.run, choice)
    output = arguments.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"--output {output} cannot be made: {error.strerror}") from error
    with Environment() as environment:
        encoder = FrozenEncoder(config, pooling=arguments.pooling, device=environment.device)
        study = study_images(encoder, config, choice, block=block, shown=arguments.shown)
        findings = Findings(
            encoder=arguments.from_, config=config, pooling=arguments.pooling, choice=choice, study=study, output=output
        )
        findings.add_similarity()
        findings.add_plane(arguments.plane)
        findings.add_attention(positions)
        findings.add_pictures("Pre-training", lambda: pretraining_pictures(arguments.from_, study.shown.choice, output))
        findings.add_pictures("Fine-tuned", lambda: finetuned_pictures(runs, study.shown, output, environment))
        findings.write()
    return 0


def _check(arguments: RepresentArguments) -> None:
    """Refuse, before anything is read, what will not work."""
    figure_class()
    check_library()
    if (arguments.from_ == SCRATCH) is not bool(arguments.recipe):
        raise RefusedError(
            f"--recipe {arguments.recipe or 'is missing'}: --from {SCRATCH} needs one, for the encoder's sizes, and "
            "others have their own"
        )
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
        if not (row.isdecimal() and column.isdecimal() and max(int(row), int(column)) < grid):
            raise RefusedError(
                f"--positions {word}: allowed: ROW,COLUMN, each from 0 to {grid - 1}: the encoder sees {grid} x {grid} "
                "patches"
            )
        found.append((int(row), int(column)))
    return found or default_positions(grid)
