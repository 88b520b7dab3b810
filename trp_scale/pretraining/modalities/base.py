"""Definition of a modality: everything that a run, a data set or a picture needs, in one class.

A modality's file says how its maps are stored (`format`), what enters a batch, how a patch becomes a token, what is
predicted and by which loss, what that costs, and how it is shown. The rest of the package asks for it by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trp_scale.config.images import CropConfig
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, Crops
from trp_scale.data.images.dataset import DecodedRows
from trp_scale.data.images.formats import Map, png_size, read_png
from trp_scale.data.images.maps import MapFormat, StoredMaps
from trp_scale.models.patches import patchify, unpatchify

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Size = tuple[int, int]
"""(H, W) of an image."""

Interpret = Callable[[Any, Sequence[Size]], tuple[list[Tensor], Tensor]]
"""(a model's output of a batch, sizes of its images) -> map of each image, int32 [H, W], and its clipped pixels, int32
[B]."""


@dataclass(frozen=True, kw_only=True)
class MapFiles:
    """How the maps of a modality come into a data set.

    Attributes:
        name: of the modality.
        format: how they are stored.
        description: what dataset.json says of them.
        content: of files that describe them; another one makes another data set.
    """

    name: str
    format: MapFormat
    description: dict[str, Any]
    content: bytes = b""

    def size(self, content: bytes | bytearray) -> Size | None:
        """(H, W) in the header of a file; None: not of a form that can be read."""
        return png_size(content) if self.format.readable(content) else None

    def decode(self, content: bytes | bytearray) -> Map:
        """The numbers of a file that has a size. Raises whatever a broken file leads to."""
        return read_png(content)

    def numbers(self, numbers: Map) -> Map:
        """Convert a file's numbers to stored numbers; returns the same array if nothing changes.

        Raises:
            DataError: numbers that cannot be stored.
        """
        return numbers

    def refuse(self, content: bytes | bytearray, path: str) -> None:
        """Raises DataError if files like the one at `path` need a setting that was not given; names it."""

    def check(self, numbers: Map) -> None:
        """Raises DataError if a map has a number that its data set cannot have."""
        self.format.check(numbers, self.format.stored(Path("dataset.json"), self.name, self.description))


class SceneMap(NamedTuple):
    """The map of a rendered scene, and what dataset.json says of such maps."""

    numbers: Map
    description: dict[str, Any]


class PseudoLabels(ABC):
    """How models of transformers label images with a modality.

    Attributes:
        purpose: of such a model, for messages.
        auto_classes: how the names of the Auto classes end that load its models, and where transformers lists these.
        png_level: of zlib, for its maps.
    """

    purpose: ClassVar[str]
    auto_classes: ClassVar[dict[str, str]]
    png_level: ClassVar[int] = 6

    @abstractmethod
    def read_model(self, where: str, config: Any) -> Any:
        """Return the description of labels in a model's configuration; small, it is sent to every process.

        Args:
            where: how the model was given, for messages.
            config: of transformers.

        Raises:
            DataError: such labels cannot be stored.
        """

    def check_processor(self, where: str, processor: Any) -> None:  # noqa: B027 - most need nothing
        """Raises DataError if the model's image processor cannot do what is needed of it."""

    @abstractmethod
    def describe(self, where: str, facts: Any, settings: Any) -> tuple[dict[str, object], dict[str, object]]:
        """Settings that the labels' values depend on, and what dataset.json says of them.

        Args:
            where: how the model was given, for messages.
            facts: of its configuration (`read_model`).
            settings: of its labels, `LabelSettings` of the modality.

        Raises:
            DataError: settings that the model cannot have.
        """

    @abstractmethod
    def interpret(self, processor: Any, facts: Any, settings: Any) -> Interpret:
        """Return the function from the model's output to maps, on its device and without waiting for it."""


class Modality(ABC):
    """One modality. What is stored belongs to the class; an instance is the modality in one run.

    A patch has N_p = (P / stride)^2 numbers in each of C channels, an element is one place of them, P the patch size.
    Where nothing is known a batch holds `blank`: not a number, or a number that stands for it. `patches` are then not a
    number either, or, of whole numbers, `blank`.

    Args:
        settings: its own, the section of the run that has its name.
        patch_size: P, side of a patch in pixels of the image.

    Attributes:
        name: of the modality, as --modalities.inputs has it.
        format: how its maps are stored; None: it is the image itself.
        regression: whether its losses are distances, not cross-entropies.
        blank: number in a batch where nothing is known, in the batch's type.
        file_suffixes: how files of its maps end, in a folder of them.
        labels: how models label images with it, by the settings that its `LabelSettings` has; None: none does.
    """

    name: ClassVar[str]
    format: ClassVar[MapFormat | None]
    regression: ClassVar[bool] = True
    blank: ClassVar[Any] = np.float32(np.nan)
    file_suffixes: ClassVar[tuple[str, ...]] = (".png",)
    labels: ClassVar[PseudoLabels | None] = None

    def __init__(self, settings: Any, patch_size: int) -> None:
        self.settings, self.patch_size = settings, patch_size

    # What is stored

    @classmethod
    def classes(cls, stored: StoredMaps) -> int:
        """Return the number of classes in the maps, which model shapes depend on; 0 without classes."""
        return len(cls.class_names(stored))

    @classmethod
    def class_names(cls, stored: StoredMaps) -> tuple[str, ...]:
        """Names of these classes, in the order of their numbers; none: they have no names, or there are no classes."""
        return ()

    @classmethod
    def from_files(cls, settings: Any) -> MapFiles:
        """Describe how its maps come from files.

        Args:
            settings: its `FileSettings`; None where it has none.

        Raises:
            DataError: a setting that describes them is missing or wrong.
        """
        assert cls.format is not None
        return MapFiles(name=cls.name, format=cls.format, description={"exact": False})

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap | None:
        """Return its map of a rendered scene; `None` if scenes have none."""
        return None

    # What a batch holds

    @property
    def stride(self) -> int:
        """The batch holds one of so many pixels along each side."""
        return 1

    @property
    def channels(self) -> int:
        """C."""
        return 3 if self.format is None else self.format.channels

    @property
    def side(self) -> int:
        """N_p^(1/2), numbers along the side of a patch."""
        return self.patch_size // self.stride

    def fields(
        self, rows: DecodedRows, crops: Crops, cropper: Cropper, stored: Sequence[StoredMaps]
    ) -> dict[str, Tensor]:
        """What a batch holds of it: under its name the maps, [R, s, s], or [R, C, s, s] of several channels; under
        NAME_counts [R, N] int32, elements of each patch that are known.

        Args:
            rows: the decoded samples.
            crops: the crop of each row.
            cropper: cuts them out.
            stored: of each row, the maps of its data set.
        """
        size = cropper.size // self.stride
        channels = () if self.channels == 1 else (self.channels,)
        values: npt.NDArray[Any] = np.full((len(rows.samples), *channels, size, size), self.blank)
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                numbers = cropper.pick(sample.maps[self.name], crops, row, size)
                standardised = self.standardise(numbers, stored[row], mirrored=bool(crops.flips[row, 0]))
                values[row] = standardised if self.channels == 1 else standardised.transpose(2, 0, 1)
        known = values != self.blank
        if values.dtype.kind == "f":
            known = np.logical_and(known, ~np.isnan(values))
        if self.channels > 1:
            known = np.logical_and.reduce(known, axis=1)  # [R, s, s]
        return {
            self.name: torch.from_numpy(values),
            f"{self.name}_counts": torch.from_numpy(count_patches(known, self.side)),
        }

    def empty_fields(self, rows: int, crops: CropConfig) -> dict[str, Tensor]:
        """Return the fields of a batch for rows without content."""
        cropper, sizes = Cropper(crops), np.ones((rows, 2), dtype=np.int64)
        drawn = cropper.draw(np.zeros(rows, dtype=np.uint64), sizes)
        return self.fields(DecodedRows(samples=[None] * rows, reasons={}), drawn, cropper, self.stored_unknown(rows))

    def stored_unknown(self, rows: int) -> Sequence[Any]:
        """Return the arguments of `fields` for absent rows; most need none."""
        return []

    @abstractmethod
    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[Any]:
        """The crop of a map as the batch has it: [s, s] or [s, s, C], in the type of `blank`.

        Args:
            numbers: of the crop, as stored.
            stored: of its data set.
            mirrored: the crop is mirrored, its numbers already lie there: what they say of a direction is not yet.
        """

    # What the model computes

    def tokeniser(self, width: int, classes: int) -> nn.Module:
        """[R, K, P] patches -> [R, K, width] tokens: a linear projection unless something else is said."""
        return nn.Linear(self.channels * self.side**2, width)

    def values(self, task: str, classes: int) -> int:
        """Numbers that are predicted of a patch."""
        return self.channels * self.side**2

    # What is learned

    def patches(self, batch: Batch) -> Tensor:
        """[R, N, P] each patch of the batch, not a number (or no class) where nothing is known; places row by row, the
        channels of each place side by side."""
        maps = batch[self.name]
        return patchify(maps if maps.ndim == 4 else maps.unsqueeze(1), self.side)

    def seen(self, patches: Tensor, batch: Batch) -> Tensor:
        """[R, N, P] what enters the tokeniser: 0, the mean of what is known, where nothing is."""
        return patches.nan_to_num(nan=0.0) if patches.is_floating_point() else patches

    def elements(self, batch: Batch) -> Tensor:
        """[R, N] float64, elements of each patch, or [R, 1] if all have as many; from what the loader counted alone."""
        return batch[f"{self.name}_counts"].double()

    @abstractmethod
    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        """[R, N] the sum of a task's losses over the elements of each patch, of a prediction in fp32 at least.

        Args:
            guess: [R, N, `values`].
            patches: [R, N, P] from `patches`.
        """

    # How it is shown

    def reconstruction(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """[R, N, P] a prediction in the units of `patches`."""
        return prediction

    def plainest(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """The prediction [R, N, `values`] that knows the data's mean alone, to compare losses with."""
        return torch.zeros_like(prediction)

    def maps(self, patches: Tensor) -> Tensor:
        """Patches as maps for `show`: [R, s, s], or [R, C, s, s] of several channels."""
        maps = unpatchify(patches, self.side)
        return maps[:, 0] if self.channels == 1 else maps

    @classmethod
    def is_unknown(cls, maps: Tensor) -> bool:
        """Whether nothing is known in any of `maps`."""
        unknown = maps.isnan() if maps.is_floating_point() else maps == int(cls.blank)
        return bool(unknown.all())

    @classmethod
    def legend(cls, maps: Sequence[Tensor], names: Sequence[str]) -> list[tuple[str, Any]]:
        """(words, colour) of what the colours of these maps stand for, where `show` gives each number its own.

        Args:
            maps: as they are shown, of any shapes.
            names: of its classes, by number; there may be none.
        """
        return []

    @classmethod
    def meaning(cls, stored: Any) -> str:
        """Return the meaning of colours in stored maps that do not state it."""
        return ""

    @staticmethod
    def colours(numbers: Map) -> npt.NDArray[np.uint8]:
        """A stored map as [H, W, 3]: from black, its smallest number, to white; of three channels their upper bits."""
        if numbers.ndim == 3:
            return numbers if numbers.dtype == np.uint8 else (numbers >> 8).astype(np.uint8)
        shares = numbers.astype(np.float32)
        low, high = float(shares.min()), float(shares.max())
        grey = ((shares - low) * (255 / max(high - low, 1))).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)

    @staticmethod
    def show(axes: Axes, image: Tensor, whole: Tensor) -> None:
        """Draw one of `maps`: colours from the smallest to the largest number of the whole image's."""
        known = whole[~whole.isnan()]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        if image.ndim == 3:
            coloured = ((image - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(nan=0.5)  # unknown: grey
            axes.imshow(coloured.permute(1, 2, 0).numpy())
        else:
            axes.imshow(image.numpy(), cmap="viridis", vmin=low, vmax=high)


def count_patches(valid: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.int32]:
    """Count the valid pixels of each patch, [R, N] for maps [R, N^(1/2) side, N^(1/2) side]."""
    rows, size, _ = valid.shape
    across = size // side
    # Lines first, in 16 bits: five times as fast as both at once.
    lines = valid.view(np.uint8).reshape(rows, across, side, size).sum(axis=2, dtype=np.uint16)
    counts: npt.NDArray[np.int32] = lines.reshape(rows, across * across, side).sum(axis=2, dtype=np.int32)
    return counts
