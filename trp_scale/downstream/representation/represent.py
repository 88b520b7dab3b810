"""`trp-scale represent`: what an encoder has learned, as figures, pictures and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights
from trp_scale.config import RefusedError
from trp_scale.config.upstream import AVERAGE
from trp_scale.core.batch import Batch
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.arguments import SCRATCH
from trp_scale.downstream.pictures import Picture, draw_images_of, draw_modalities_of, figure_class
from trp_scale.downstream.probe.encoder import FrozenEncoder, encoder_config
from trp_scale.downstream.representation.arguments import RepresentArguments
from trp_scale.downstream.representation.attention import Position, default_positions
from trp_scale.downstream.representation.features import check_library
from trp_scale.downstream.representation.findings import Findings
from trp_scale.downstream.representation.finetuned import finetuned_pictures, open_finetuned
from trp_scale.downstream.representation.images import ImageChoice, choose_images, trained_images
from trp_scale.downstream.representation.study import study_images
from trp_scale.downstream.trained_images import TrainedRun, load_trained_images, load_trained_modalities, to_look_at


def pretraining_pictures(source: str, choice: ImageChoice, output: Path) -> list[Picture]:
    """Draw them, with crops and masks as the run's own; none of what is no pre-training run.

    Raises:
        RefusedError: the data lacks a modality that the run needs.
    """
    path = Path(named_weights(source)[0])
    if not ((path / "checkpoints").is_dir() or (path / DOCUMENT_NAME).is_file()):
        return []
    upstream = read_document(find_checkpoint(path)).config.get("upstream")
    if upstream is None:
        return []
    if upstream == "mm_mae":
        several = load_trained_modalities(source, str(choice.dataset.directory))
        return draw_modalities_of(several, _batch(several, choice), output)
    trained = load_trained_images(source, str(choice.dataset.directory))
    return draw_images_of(trained, _batch(trained, choice), output)


def _batch(trained: TrainedRun, choice: ImageChoice) -> Batch:
    return next(trained_images(to_look_at(trained.config), choice))


LEAST_IMAGES = 5
"""Below, there is nothing to see."""


def represent(arguments: RepresentArguments) -> int:
    """Run `trp-scale represent`; returns the exit status.

    Raises:
        RefusedError: no such encoder or data, a library that is not installed, flags that do not fit them, or an output
            that cannot be written.
    """
    _check(arguments)
    source = arguments.from_ + (AVERAGE if arguments.weights == "average" else "")
    config = encoder_config(source, recipe=arguments.recipe, size=arguments.image_size)
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
            encoder=source, config=config, pooling=arguments.pooling, choice=choice, study=study, output=output
        )
        findings.add_similarity()
        findings.add_plane(arguments.plane)
        findings.add_attention(positions)
        findings.add_pictures("Pre-training", lambda: pretraining_pictures(source, study.shown.choice, output))
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
