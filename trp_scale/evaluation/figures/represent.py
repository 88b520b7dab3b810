"""`trp-scale represent`: figures, pictures and notes on an encoder, printed, as JSON, and as a self-contained page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from trp_scale.checkpoint.export import while_training
from trp_scale.checkpoint.format import named_weights
from trp_scale.checkpoint.initial_weights import is_run
from trp_scale.config import AVERAGE, PretrainConfig, RefusedError
from trp_scale.config.registry import check_settings, find, import_name
from trp_scale.config.registry import names as registered_names
from trp_scale.console import Table
from trp_scale.data.mixture import MemberPath
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.arguments import RepresentArguments
from trp_scale.evaluation.encoders import FrozenEncoder, encoder_config
from trp_scale.evaluation.figures.features import (
    EncodedImages,
    ImageChoice,
    PlaneKind,
    Position,
    ShownImages,
    choose_images,
    class_similarity,
    default_positions,
    draw_attention,
    draw_average_attention,
    draw_plane,
    encode_images,
    mean_distance,
    planned_batches,
    project_to_plane,
)
from trp_scale.evaluation.figures.pictures import Picture, draw_trained, figure_class
from trp_scale.evaluation.figures.trained_images import load_trained
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.measurement import ReadRun, open_run, read_run, require_scikit_learn
from trp_scale.pretraining.base import find_upstream
from trp_scale.reporting.comparison import names
from trp_scale.reporting.document import Page, PageSection, Pictures, Sentences, page_text

DOCUMENT, PAGE = "representation.json", "index.html"

DrawRuns: TypeAlias = Callable[[Mapping[str, ReadRun], ShownImages, Path, Environment], list[Picture]]
"""Function that draws fine-tuned runs of one task, by name, on images into a directory. A task names it as
`pictures` (finetuning/task.py). Raises DataError or RefusedError if the images lack what the task needs."""


@dataclass(kw_only=True)
class Findings:
    """Figures, pictures and notes on an encoder.

    Attributes:
        encoder: value of --from.
        config: of the encoder and its input images.
        output: directory for pictures.
        figures: (name, value), for readers.
        numbers: the same, for programs.
        pictures: (heading, picture).
        notes: missing parts, with reasons.
    """

    encoder: str
    config: ClassificationTaskConfig
    pooling: str
    choice: ImageChoice
    encoded: EncodedImages
    output: Path
    figures: list[tuple[str, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    pictures: list[tuple[str, Picture]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_similarity(self) -> None:
        """Add the similarity ratio of MLO-MAE's Table 13."""
        if not self.choice.classes:
            self.notes.append(f"{self.choice.dataset.directory}: no class similarity, since the images have no classes")
            return
        similarity = class_similarity(self.encoded.features, self.encoded.labels)
        self.numbers["class_similarity"] = asdict(similarity)
        quotient = (
            "undefined, since the second is not positive" if similarity.ratio is None else f"{similarity.ratio:.4f}"
        )
        self.figures += [
            ("cosine similarity within classes", f"{similarity.intra:.4f}"),
            ("cosine similarity between classes", f"{similarity.inter:.4f}"),
            ("ratio (MLO-MAE, Table 13)", quotient),
        ]

    def add_plane(self, kind: PlaneKind) -> None:
        """Add the representations in a plane."""
        points, sentence = project_to_plane(self.encoded.features, kind)
        path = self.output / f"{kind}.png"
        draw_plane(points, self.encoded.labels, self.choice.classes, sentence, path)
        caption = f"{len(points)} images, {self._representation()}; {sentence}"
        self.pictures.append(("Representations in a plane", Picture(path, caption)))

    def add_attention(self, positions: Sequence[Position]) -> None:
        """Add attention maps of shown images, and their mean over all images (AdPE, Figures A.1 and A.2)."""
        encoded, count = self.encoded, len(self.encoded.labels)
        distance, uniform = mean_distance(encoded.attention), mean_distance(torch.ones_like(encoded.attention))
        self.numbers["attention"] = {
            "block": encoded.block,
            "mean_distance_patches": distance,
            "uniform_distance_patches": uniform,
        }
        self.figures.append(
            (f"mean distance of attention, block {encoded.block}", f"{distance:.4f} patches (uniform: {uniform:.4f})")
        )
        path = self.output / "attention.png"
        draw_attention(encoded.shown.images, encoded.shown_attention, positions, path)
        what = f"block {encoded.block}, mean over heads; framed: the query patch (row, column)"
        self.pictures.append(("Attention", Picture(path, f"{what}; scaled by image")))
        path = self.output / "attention_average.png"
        draw_average_attention(encoded.attention, positions, path)
        self.pictures.append((f"Attention averaged over {count} images", Picture(path, what)))

    def add_pictures(self, heading: str, draw: Callable[[], Sequence[Picture]]) -> None:
        """Add pictures that need more than the encoder, or a note that says what is missing."""
        try:
            pictures = draw()
        except RefusedError as error:
            self.notes.append(f"{heading}: no pictures: {error}")
            return
        self.pictures += [(f"{heading}: {picture.path.stem.replace('_', ' ')}", picture) for picture in pictures]

    def write(self) -> None:
        """Write representation.json and index.html, and print the figures."""
        dataset, size, count = self.choice.dataset, self.config.crops.size, len(self.encoded.labels)
        part = "the whole image" if self.config.augmentation.measured == "whole" else "its central square"
        about = [
            ("encoder", self.encoder),
            ("images", f"{count} of {dataset.directory} ({dataset.split}), {size} x {size} pixels ({part})"),
            ("representation", self._representation()),
        ]
        figures = [*about, *self.figures]
        document = {
            "encoder": self.encoder,
            "data": str(dataset.directory),
            "split": dataset.split,
            "images": count,
            "classes": len(np.unique(self.encoded.labels)) if self.choice.classes else None,
            "image_size": size,
            "seen": self.config.augmentation.measured,
            "pooling": self.pooling,
            **self.numbers,
            "pictures": [drawing.path.name for _, drawing in self.pictures],
            "notes": self.notes,
        }
        (self.output / DOCUMENT).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        (self.output / PAGE).write_text(page_text(self._page(figures)), encoding="utf-8")
        for name, value in figures:
            print(f"{name}: {value}")
        for _, picture in self.pictures:
            print(picture)
        for note in self.notes:
            print(f"note: {note}")
        print(self.output / PAGE)

    def _page(self, figures: Sequence[tuple[str, str]]) -> Page:
        sections = [PageSection(name="figures", title="Figures", blocks=[Table(head=["", ""], rows=figures, words=2)])]
        for number, (heading, picture) in enumerate(self.pictures):
            content = [(picture.caption, picture.path.read_bytes())]
            sections.append(PageSection(name=f"picture-{number}", title=heading, blocks=[Pictures(pictures=content)]))
        if self.notes:
            sections.append(PageSection(name="notes", title="Notes", blocks=[Sentences(sentences=self.notes)]))
        return Page(kind="Representation", title=f"What {self.encoder} has learned", sections=sections)

    def _representation(self) -> str:
        return "class token" if self.pooling == "class" else "mean of the patch tokens"


def pretraining_pictures(source: str, choice: ImageChoice, output: Path) -> list[Picture]:
    """Draw the pictures of a pre-training run, with its crops and masks; none for other encoders. Raises
    RefusedError if the data lacks a modality."""
    path = Path(named_weights(source)[0])
    if not is_run(path) or not isinstance(open_run(path).config, PretrainConfig):
        return []
    trained = load_trained(source, str(choice.dataset.directory))
    upstream = find_upstream(trained.config)
    member = MemberPath(name="", weight=Fraction(1), path=choice.dataset.directory)
    rows = upstream.open_rows(upstream.inference_config(trained.config), [member])
    return draw_trained(trained, next(planned_batches(rows.builder, choice)), output)


def open_finetuned(runs: Sequence[Path], choice: ImageChoice) -> dict[str, ReadRun]:
    """Open runs of one kind, by name. Raises RefusedError for unfinished runs, kinds without pictures, different
    kinds, or a classifier with other classes than the images."""
    if not runs:
        return {}
    folders = [run.resolve().parent.parent.name for run in runs]  # DIR/TASK/seed_N
    named = dict(zip(folders if len(set(folders)) == len(folders) else names(runs), map(read_run, runs), strict=True))
    kinds = [run.config.downstream.kind for run in named.values()]
    for run, kind in zip(named.values(), kinds, strict=True):
        if not _drawing_function(kind):
            allowed = ", ".join(task for task in registered_names("task") if _drawing_function(task))
            raise RefusedError(f"--run {run.directory}: fine-tuned on {kind}; allowed: {allowed}")
        if kind != kinds[0]:
            raise RefusedError(
                f"--run {run.directory}: fine-tuned on {kind}, the first on {kinds[0]}; allowed: one kind"
            )
        count, other_names = run.config.downstream.classes, choice.dataset.meta.classes not in (None, run.classes)
        is_other = (run.classes is not None and other_names) or len(choice.classes) > count
        if isinstance(run.config, ClassificationTaskConfig) and choice.classes and is_other:
            raise RefusedError(
                f"--run {run.directory}: {count} classes, {choice.dataset.directory} has {len(choice.classes)}, "
                "or other names; allowed: a run with the same classes"
            )
    return named


def _drawing_function(kind: str) -> str:
    """Return the name of the function that draws runs of a task; empty if none exists."""
    location: str = find("task", kind).load().pictures
    return location


@while_training
def represent(arguments: RepresentArguments) -> int:
    """Run `trp-scale represent`; return the exit status. Raises RefusedError for an invalid encoder, data, flag or
    output."""
    figure_class()  # libraries and flags are checked before anything is read
    require_scikit_learn()
    if (arguments.from_ == SCRATCH) is not bool(arguments.recipe):
        raise RefusedError(
            f"--recipe {arguments.recipe or 'is missing'}: --from {SCRATCH} needs one, for the encoder's sizes, and "
            "others have their own"
        )
    check_settings(arguments)
    source = arguments.from_ + (AVERAGE if arguments.weights == "average" else "")
    config = encoder_config(
        source, recipe=arguments.recipe, size=arguments.image_size, positions=arguments.encoder_positions
    )
    config.augmentation.measured = arguments.seen
    block = read_block(arguments.block, config.model.layers)
    positions = read_positions(arguments.positions, config.crops.size // config.vision.patch_size)
    choice = choose_images(arguments.data, arguments.images)
    if len(choice.positions) < 5:  # for useful figures
        raise RefusedError(f"--data {arguments.data}: {len(choice.positions)} images; allowed: 5 or more")
    runs = open_finetuned(arguments.run, choice)
    output = arguments.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"--output {output} cannot be created: {error.strerror}") from error
    with Environment() as environment:
        encoder = FrozenEncoder(config, pooling=arguments.pooling, device=environment.device)
        encoded = encode_images(encoder, config, choice, block=block, shown=arguments.shown)
        findings = Findings(
            encoder=source, config=config, pooling=arguments.pooling, choice=choice, encoded=encoded, output=output
        )
        findings.add_similarity()
        findings.add_plane(arguments.plane)
        findings.add_attention(positions)
        findings.add_pictures("Pre-training", lambda: pretraining_pictures(source, encoded.shown.choice, output))
        if runs:
            kind = next(iter(runs.values())).config.downstream.kind
            draw: DrawRuns = import_name(_drawing_function(kind))
            findings.add_pictures("Fine-tuned", lambda: draw(runs, encoded.shown, output, environment))
        findings.write()
    return 0


def read_block(number: int, blocks: int) -> int:
    """Convert --block to a number from 0. Raises RefusedError if the block does not exist."""
    if not -blocks <= number < blocks:
        raise RefusedError(f"--block is {number}, allowed: {-blocks} to {blocks - 1}; the encoder has {blocks} blocks")
    return number % blocks


def read_positions(words: Sequence[str], grid: int) -> list[Position]:
    """Parse --positions as (row, column); three by three if empty. Raises RefusedError outside the grid."""
    positions = []
    for word in words:
        row, _, column = word.partition(",")
        if not (row.isdecimal() and column.isdecimal() and max(int(row), int(column)) < grid):
            raise RefusedError(
                f"--positions {word}: allowed: ROW,COLUMN, each from 0 to {grid - 1}: the encoder sees {grid} x {grid} "
                "patches"
            )
        positions.append((int(row), int(column)))
    return positions or default_positions(grid)
