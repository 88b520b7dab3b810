"""What was found of an encoder: figures, pictures and notes, printed, as JSON, and as a page without other files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trp_scale.config import RefusedError
from trp_scale.downstream.classification.settings import ClassificationTaskConfig
from trp_scale.downstream.pictures import Picture
from trp_scale.downstream.representation.attention import Position, mean_distance
from trp_scale.downstream.representation.features import PlaneKind, class_similarity, plane
from trp_scale.downstream.representation.figures import draw_attention, draw_average_attention, draw_plane
from trp_scale.downstream.representation.images import ImageChoice
from trp_scale.downstream.representation.study import Study

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td { padding: 0.2em 1.5em 0.2em 0; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid #ddd; }
img { max-width: 100%; } p.caption { color: #555; margin-top: 0.3em; }"""


def write_page(
    path: Path,
    title: str,
    figures: Sequence[tuple[str, str]],
    pictures: Sequence[tuple[str, Picture]],
    notes: Sequence[str],
) -> None:
    """Write index.html.

    Args:
        figures: (what it is, its value) of each line of the table.
        pictures: (heading, picture); the file is put into the page.
        notes: sentences at the end.
    """
    rows = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in figures)
    shown = "\n".join(_section(heading, picture) for heading, picture in pictures)
    listed = "\n".join(f"<p>{escape(note)}</p>" for note in notes)
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<table>\n{rows}\n</table>\n"
        f"{shown}\n{listed}\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _section(heading: str, picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return (
        f'<h2>{escape(heading)}</h2>\n<img alt="{escape(heading)}" src="data:image/png;base64,{data}">\n'
        f'<p class="caption">{escape(picture.caption)}</p>'
    )


DOCUMENT, PAGE = "representation.json", "index.html"


@dataclass(kw_only=True)
class Findings:
    """Collects them.

    Attributes:
        encoder: as --from named it.
        config: of the encoder, and of what is seen of an image.
        output: where pictures go.
        figures: (what it is, its value), as a reader sees them.
        numbers: the same for a program.
        pictures: (heading, picture).
        notes: what could not be done, and why.
    """

    encoder: str
    config: ClassificationTaskConfig
    pooling: str
    choice: ImageChoice
    study: Study
    output: Path
    figures: list[tuple[str, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    pictures: list[tuple[str, Picture]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_similarity(self) -> None:
        """The ratio of MLO-MAE's Table 13."""
        if not self.choice.classes:
            self.notes.append(
                f"{self.choice.dataset.directory}: the images have no classes: no similarity within and between them"
            )
            return
        found = class_similarity(self.study.features, self.study.labels)
        self.numbers["class_similarity"] = asdict(found)
        quotient = "undefined: the latter is not positive" if found.ratio is None else f"{found.ratio:.4f}"
        self.figures += [
            ("cosine similarity of images of one class", f"{found.intra:.4f}"),
            ("of images of two classes", f"{found.inter:.4f}"),
            ("ratio (MLO-MAE, Table 13)", quotient),
        ]

    def add_plane(self, kind: PlaneKind) -> None:
        """Representations in a plane."""
        places, sentence = plane(self.study.features, kind)
        path = self.output / f"{kind}.png"
        draw_plane(places, self.study.labels, self.choice.classes, sentence, path)
        caption = f"{len(places)} images, {self._representation()}; {sentence}"
        self.pictures.append(("Representations in a plane", Picture(path, caption)))

    def add_attention(self, positions: Sequence[Position]) -> None:
        """Attention maps of images to show, and the mean over all (AdPE, Figures A.1 and A.2)."""
        study, count = self.study, len(self.study.labels)
        distance, uniform = mean_distance(study.attention), mean_distance(torch.ones_like(study.attention))
        self.numbers["attention"] = {
            "block": study.block,
            "mean_distance_patches": distance,
            "uniform_distance_patches": uniform,
        }
        self.figures.append(
            (f"mean distance of attention, block {study.block}", f"{distance:.4f} patches (uniform: {uniform:.4f})")
        )
        path = self.output / "attention.png"
        draw_attention(study.shown.images, study.shown_attention, positions, path)
        what = f"block {study.block}, mean over heads; framed: the patch that looks (row, column)"
        self.pictures.append(("Attention", Picture(path, f"{what}; each image has its own scale")))
        path = self.output / "attention_average.png"
        draw_average_attention(study.attention, positions, path)
        self.pictures.append((f"Attention averaged over {count} images", Picture(path, what)))

    def add_pictures(self, heading: str, draw: Callable[[], Sequence[Picture]]) -> None:
        """Pictures that need more than the encoder; where that is missing, a note says what."""
        try:
            found = draw()
        except RefusedError as error:
            self.notes.append(f"{heading}: no pictures: {error}")
            return
        self.pictures += [(f"{heading}: {one.path.stem.replace('_', ' ')}", one) for one in found]

    def write(self) -> None:
        """representation.json, index.html, and the figures on the terminal."""
        dataset, size, count = self.choice.dataset, self.config.crops.size, len(self.study.labels)
        about = [
            ("encoder", self.encoder),
            ("images", f"{count} of {dataset.directory} ({dataset.split}), {self._seen()}"),
            ("representation", self._representation()),
        ]
        figures = [*about, *self.figures]
        document = {
            "encoder": self.encoder,
            "data": str(dataset.directory),
            "split": dataset.split,
            "images": count,
            "classes": len(np.unique(self.study.labels)) if self.choice.classes else None,
            "image_size": size,
            "seen": self.config.augmentation.measured,
            "pooling": self.pooling,
            **self.numbers,
            "pictures": [one.path.name for _, one in self.pictures],
            "notes": self.notes,
        }
        (self.output / DOCUMENT).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        write_page(self.output / PAGE, f"What {self.encoder} has learned", figures, self.pictures, self.notes)
        for name, value in figures:
            print(f"{name}: {value}")
        for _, picture in self.pictures:
            print(picture)
        for note in self.notes:
            print(f"note: {note}")
        print(self.output / PAGE)

    def _seen(self) -> str:
        size, part = self.config.crops.size, self.config.augmentation.measured
        return f"{size} x {size} pixels ({'the whole image' if part == 'whole' else 'its central square'})"

    def _representation(self) -> str:
        return "class token" if self.pooling == "class" else "mean of the patch tokens"
