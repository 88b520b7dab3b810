"""Segmentation: the class of every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.config.schema import Fields
from trp_scale.data.images.formats import PALETTE, Map, png_format
from trp_scale.data.images.maps import (
    MapFormat,
    StoredMaps,
    class_names,
    own_directory,
    read_names,
    refuse_other_classes,
)
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import Interpret, MapFiles, Modality, PseudoLabels, SceneMap, Size
from trp_scale.pretraining.modalities.settings import SemsegSettings

VOID = 255
"""Label of pixels without a class."""

COLOURS = 20
"""Colours of the palette in pictures; further classes repeat them."""

MOST_NAMED = 24
"""Most classes in a picture's legend."""

CONTACT_COLOURS = np.stack([np.arange(256) * step % 256 for step in (67, 113, 197)], axis=1).astype(np.uint8)
"""Colour of each number on a contact sheet, [256, 3]; neighbours differ."""


@dataclass(frozen=True, kw_only=True)
class StoredClasses(StoredMaps):
    """Segmentation maps of a data set; `classes` are the names by number, `None` if not stored."""

    classes: tuple[str, ...] | None


class ClassFormat(MapFormat):
    """8 bits, one class per pixel. dataset.json has "classes": their names in the order of their numbers."""

    def readable(self, content: bytes | bytearray) -> bool:
        """Whether the format is known; palette images of any bits are too: their indices are the classes."""
        return self.fits(content) or png_format(content)[1] == PALETTE

    def stored(self, name: str, description: Fields) -> StoredClasses:
        directory, classes = own_directory(description), class_names(description)
        if classes is not None and not 0 < len(classes) <= VOID:
            raise description.refusal(f"{len(classes)} classes found, allowed: 1 to {VOID} ({VOID} is void)")
        return StoredClasses(name=name, suffix=self.suffix, directory=directory, classes=classes)

    def check(self, numbers: Map, stored: StoredClasses) -> None:
        classes = VOID if stored.classes is None else len(stored.classes)
        wrong = unlisted_class(numbers, classes)
        if wrong is not None:
            raise DataError(f"class {wrong} found, 0 to {classes - 1} or {VOID} (void) expected")

    def require(self, path: Path, stored: StoredClasses) -> None:
        if stored.classes is None:
            raise RefusedError(
                f"{stored.name} maps need class names, which {path} lacks; shard the images again with "
                f"--semseg.classes NAMES.txt"
            )

    def agree(self, members: Sequence[tuple[str, StoredClasses]]) -> None:
        refuse_other_classes("classes in segmentation maps", [(name, maps.classes) for name, maps in members])


@dataclass(frozen=True, kw_only=True)
class SegmentationFiles(MapFiles):
    """Segmentation maps from files; `void_label`: their number that is stored as VOID."""

    void_label: int = VOID

    def numbers(self, numbers: Map) -> Map:
        void = numbers == self.void_label
        if self.void_label == VOID or not void.any():
            return numbers
        voided: Map = np.where(void, np.uint8(VOID), numbers)
        return voided


class SegmentationLabels(PseudoLabels):
    """Labels from models for semantic or panoptic segmentation; `read_model` returns the class names."""

    purpose = "semantic segmentation"
    auto_classes: ClassVar[dict[str, str]] = {
        "UniversalSegmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
        "SemanticSegmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    }

    def read_model(self, where: str, config: Any) -> tuple[str, ...]:
        names = {int(number): str(label) for number, label in config.id2label.items()}
        if sorted(names) != list(range(len(names))):
            raise DataError(f"{where}: id2label in config.json must name the classes 0 to {len(names) - 1}, each once")
        if not 0 < len(names) <= VOID:
            raise DataError(
                f"{where}: {len(names)} classes, allowed: up to {VOID} in 8 bits ({VOID} is void); choose a model with "
                f"fewer classes"
            )
        return tuple(names[number] for number in range(len(names)))

    def check_processor(self, where: str, processor: Any) -> None:
        if not hasattr(processor, "post_process_semantic_segmentation"):
            raise DataError(
                f"{where}: its image processor {type(processor).__name__} has no post_process_semantic_segmentation; "
                f"choose a model with this method"
            )

    def describe(
        self, where: str, facts: tuple[str, ...], settings: Any
    ) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {"classes": list(facts)}

    def interpret(self, processor: Any, facts: tuple[str, ...], settings: Any) -> Interpret:
        return class_maps(processor, len(facts))


class Semseg(Modality):
    """Segmentation at 1/stride of the image's resolution. Its task is the cross-entropy of labels that are not void. An
    element is a label.

    Field of a batch: semseg [R, S / stride, S / stride] uint8.
    """

    settings: SemsegSettings
    name = "semseg"
    format = ClassFormat("semseg.png", bits=8, empty=VOID)
    labels = SegmentationLabels()
    regression = False
    blank = np.uint8(VOID)

    @classmethod
    def class_names(cls, stored: StoredMaps) -> tuple[str, ...]:
        assert isinstance(stored, StoredClasses)
        return stored.classes or ()

    @classmethod
    def from_files(cls, settings: Any) -> SegmentationFiles:
        if settings.classes is None:
            raise DataError(
                "the input has segmentation maps without class names; give --semseg.classes FILE, a text file with one "
                "class name per line, from number 0 on"
            )
        names, content = read_names("--semseg.classes", str(settings.classes))
        if len(names) > VOID:
            raise DataError(f"--semseg.classes {settings.classes}: {len(names)} names, allowed: up to {VOID}")
        return SegmentationFiles(
            name=cls.name,
            format=cls.format,
            description={"classes": names, "exact": False},
            content=content,
            void_label=settings.void_label,
        )

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap:
        return SceneMap(scene.segmentation, {"classes": list(scene.classes)})

    @property
    def stride(self) -> int:
        return self.settings.stride

    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[np.uint8]:
        return numbers

    def tokeniser(self, width: int, classes: int) -> nn.Module:
        return SegmentationTokeniser(classes, self.side**2, self.settings.class_embedding, width)

    def values(self, task: str, classes: int) -> int:
        """Return the number of logits per patch, one per label and class, label first."""
        return self.side**2 * classes

    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        labels = patches.long()  # [R, N, L]
        logits = guess.view(labels.numel(), -1)  # [R N L, C]
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=VOID, reduction="none")
        return losses.view(labels.shape).sum(-1)

    def reconstruction(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Return the most likely class of each label."""
        return prediction.view(*patches.shape, -1).argmax(-1).to(patches.dtype)

    def plainest(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Return the log frequencies of the classes in the patches."""
        labels = patches.long()
        classes = prediction.shape[-1] // labels.shape[-1]
        logits = F.one_hot(labels[labels != VOID], classes).float().mean(0).clamp(min=1e-6).log()  # [C]
        return logits.repeat(labels.shape[-1]).expand_as(prediction).contiguous()

    @staticmethod
    def colours(numbers: Map) -> npt.NDArray[np.uint8]:
        return CONTACT_COLOURS[numbers]

    @classmethod
    def legend(cls, maps: Sequence[Tensor], names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the present classes in the order of their numbers; at most the MOST_NAMED most frequent ones."""
        from matplotlib import colormaps

        counts = torch.bincount(torch.cat([labels.flatten().long() for labels in maps]), minlength=VOID + 1)[:VOID]
        present = int((counts > 0).sum())
        numbers = sorted(counts.argsort(descending=True, stable=True)[: min(present, MOST_NAMED)].tolist())
        palette = colormaps["tab20"]
        entries: list[tuple[str, Any]] = [
            (names[number] if number < len(names) else f"class {number}", palette(number % COLOURS))
            for number in numbers
        ]
        return entries if present <= MOST_NAMED else [*entries, (f"and {present - MOST_NAMED} more", "none")]

    @staticmethod
    def show(axes: Any, image: Tensor, whole: Tensor) -> None:
        colours = torch.where(image == VOID, torch.nan, (image % COLOURS).float())
        axes.imshow(colours.numpy(), cmap="tab20", vmin=0, vmax=COLOURS - 1)


class SegmentationTokeniser(nn.Module):
    """Tokeniser of a patch of labels: class embeddings, concatenated, through one matrix.

    Args:
        classes: C; VOID has one more embedding.
        labels: L, labels per patch.
        embedding: E, width of a class embedding.
        width: D, width of a token.
    """

    def __init__(self, classes: int, labels: int, embedding: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        # One-dimensional, so that weight decay, which skips vectors, skips it.
        self.class_embedding = nn.Parameter(torch.empty((classes + 1) * embedding))
        self.projection = nn.Linear(labels * embedding, width)

    def forward(self, labels: Tensor) -> Tensor:
        """[R, K, L] uint8 or int64 -> [R, K, D]."""
        numbers = torch.where(labels == VOID, self.classes, labels.long())
        vectors = F.embedding(numbers, self.class_embedding.view(self.classes + 1, -1))  # [R, K, L, E]
        return self.projection(vectors.flatten(2))  # type: ignore[no-any-return]


def unlisted_class(numbers: Map, classes: int) -> int | None:
    """Return a number of a map that is neither a class nor void; `None` if all are valid."""
    wrong = (numbers >= classes) & (numbers != VOID)
    return int(numbers[np.unravel_index(wrong.argmax(), wrong.shape)]) if wrong.any() else None


def class_maps(processor: Any, classes: int) -> Interpret:
    """Return the function from a segmentation model's output to maps; values that are not classes (such as -1) become
    VOID."""

    def interpret(output: Any, sizes: Sequence[Size]) -> tuple[list[Tensor], Tensor]:
        found = processor.post_process_semantic_segmentation(output, target_sizes=list(sizes))
        maps = [
            torch.where((numbers >= 0) & (numbers < classes), numbers, VOID).to(torch.int32).reshape(size)
            for numbers, size in zip(found, sizes, strict=True)
        ]
        return maps, torch.zeros(len(maps), dtype=torch.int32, device=maps[0].device)

    return interpret
