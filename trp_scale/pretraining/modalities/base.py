"""Base class of a modality, which defines its storage format, fields of a batch, tokeniser, loss and pictures.

The rest of the package gets modalities by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trp_scale.config.images import CropConfig
from trp_scale.config.schema import Fields
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, Crops
from trp_scale.data.images.dataset import DecodedRows
from trp_scale.data.images.formats import Map, png_size, read_png
from trp_scale.data.images.maps import MapFormat, StoredMaps
from trp_scale.errors import DataError
from trp_scale.models.patches import patchify, unpatchify

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Size = tuple[int, int]
"""(H, W) of an image."""

Interpret = Callable[[Any, Sequence[Size]], tuple[list[Tensor], Tensor]]
"""(a model's output for a batch, sizes of its images) -> map of each image, int32 [H, W], and number of clipped pixels
of each, int32 [B]."""


@dataclass(frozen=True, kw_only=True)
class MapFiles:
    """Conversion of a modality's map files into a data set.

    Attributes:
        description: description in dataset.json.
        content: content of files that describe the maps; it is part of the data set's identity.
    """

    name: str
    format: MapFormat
    description: dict[str, Any]
    content: bytes = b""

    def size(self, content: bytes | bytearray) -> Size | None:
        """Return (H, W) from the header of a file; `None` for an unknown format."""
        return png_size(content) if self.format.readable(content) else None

    def decode(self, content: bytes | bytearray) -> Map:
        """Return the numbers of a file that has a size. A damaged file raises any exception."""
        return read_png(content)

    def numbers(self, numbers: Map) -> Map:
        """Convert a file's numbers to stored numbers; return the same array if they are equal.

        Raises DataError for numbers that cannot be stored.
        """
        return numbers

    def refuse(self, content: bytes | bytearray, path: str) -> None:
        """Raise DataError with the setting that is missing for files like the one at `path`."""

    def check(self, numbers: Map) -> None:
        """Raise DataError if a map has a number that its format does not allow."""
        description = Fields(self.description, f"dataset.json: modalities: {self.name}", DataError)
        self.format.check(numbers, self.format.stored(self.name, description))


class SceneMap(NamedTuple):
    """Map of a rendered scene, and the description of such maps in dataset.json."""

    numbers: Map
    description: dict[str, Any]


class PseudoLabels(ABC):
    """Labels of a modality from transformers models.

    Attributes:
        purpose: purpose of such a model, for messages.
        auto_classes: {suffix of the Auto class that loads a model: transformers' mapping with its models}.
        png_level: zlib level of the maps.
    """

    purpose: ClassVar[str]
    auto_classes: ClassVar[dict[str, str]]
    png_level: ClassVar[int] = 6

    @abstractmethod
    def read_model(self, where: str, config: Any) -> Any:
        """Return facts about the labels from a model's configuration, small enough to send to every process.

        Args:
            where: flag and value of the model, for messages.
            config: configuration of transformers.

        Raises:
            DataError: such labels cannot be stored.
        """

    def check_processor(self, where: str, processor: Any) -> None:  # noqa: B027 - most need nothing
        """Raise DataError if the model's image processor lacks a method."""

    @abstractmethod
    def describe(self, where: str, facts: Any, settings: Any) -> tuple[dict[str, object], dict[str, object]]:
        """Return the settings that the labels' values depend on, and their description in dataset.json.

        Args:
            where: flag and value of the model, for messages.
            facts: facts from its configuration (`read_model`).
            settings: `LabelSettings` of the modality.

        Raises:
            DataError: settings that contradict the model.
        """

    @abstractmethod
    def interpret(self, processor: Any, facts: Any, settings: Any) -> Interpret:
        """Return the function from the model's output to maps; it runs on the device without synchronising."""


class Modality(ABC):
    """A modality. The class defines its data sets; an instance is the modality in one run.

    A patch has N_p = (P / stride)^2 values in each of C channels, where P is the patch size. An element is one of the
    N_p positions. Unknown pixels are `blank` in a batch, and in `patches` NaN, or `blank` for integers.

    Args:
        settings: section of the run with the modality's name.
        patch_size: P, side of a patch in pixels of the image.

    Attributes:
        name: name in --modalities.inputs.
        format: storage format of its maps; `None` for the image itself.
        regression: whether its losses are distances, not cross-entropies.
        blank: value of unknown pixels in a batch, in the batch's type.
        file_suffixes: suffixes of map files in a folder.
        labels: labels from models, with the settings of its `LabelSettings`; `None` if unsupported.
    """

    name: ClassVar[str]
    format: ClassVar[MapFormat | None]
    regression: ClassVar[bool] = True
    blank: ClassVar[Any] = np.float32(np.nan)
    file_suffixes: ClassVar[tuple[str, ...]] = (".png",)
    labels: ClassVar[PseudoLabels | None] = None

    def __init__(self, settings: Any, patch_size: int) -> None:
        self.settings, self.patch_size = settings, patch_size

    # Data sets

    @classmethod
    def classes(cls, stored: StoredMaps) -> int:
        """Return the number of classes in the maps, which sets model shapes; 0 without classes."""
        return len(cls.class_names(stored))

    @classmethod
    def class_names(cls, stored: StoredMaps) -> tuple[str, ...]:
        """Return the class names in the order of their numbers; empty without names or classes."""
        return ()

    @classmethod
    def from_files(cls, settings: Any) -> MapFiles:
        """Return the conversion of map files.

        `settings` are the modality's settings for files. Raises DataError if one is missing or wrong.
        """
        assert cls.format is not None
        return MapFiles(name=cls.name, format=cls.format, description={"exact": False})

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap | None:
        """Return the map of a rendered scene; `None` if scenes lack this modality."""
        return None

    # Fields of a batch

    @property
    def stride(self) -> int:
        """Step between the pixels that a batch holds, along each side."""
        return 1

    @property
    def channels(self) -> int:
        """C."""
        return 3 if self.format is None else self.format.channels

    @property
    def side(self) -> int:
        """sqrt(N_p), values along the side of a patch."""
        return self.patch_size // self.stride

    def fields(
        self, rows: DecodedRows, crops: Crops, cropper: Cropper, stored: Sequence[StoredMaps]
    ) -> dict[str, Tensor]:
        """Return the fields of a batch: NAME: maps, [R, s, s] or [R, C, s, s] for several channels; NAME_counts: known
        elements of each patch, [R, N] int32.

        `stored` are the maps of the data set of each row.
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
        return self.fields(DecodedRows(samples=[None] * rows, reasons={}), drawn, cropper, self.stored_of_absent(rows))

    def stored_of_absent(self, rows: int) -> Sequence[Any]:
        """Return the argument `stored` of `fields` for absent rows."""
        return []

    @abstractmethod
    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[Any]:
        """Convert the crop of a map to the batch's format: [s, s] or [s, s, C], in the type of `blank`.

        Args:
            numbers: stored numbers of the crop.
            stored: maps of its data set.
            mirrored: whether the crop is mirrored; values that encode a direction must still be mirrored.
        """

    # Model

    def tokeniser(self, width: int, classes: int) -> nn.Module:
        """Return the module from patches [R, K, P] to tokens [R, K, width]; the default is a linear projection."""
        return nn.Linear(self.channels * self.side**2, width)

    def values(self, task: str, classes: int) -> int:
        """Return the number of predicted values per patch."""
        return self.channels * self.side**2

    # Objective

    def patches(self, batch: Batch) -> Tensor:
        """Return the patches of a batch, [R, N, P]: pixels row by row, channels last, NaN or `blank` if unknown."""
        maps = batch[self.name]
        return patchify(maps if maps.ndim == 4 else maps.unsqueeze(1), self.side)

    def seen(self, patches: Tensor, batch: Batch) -> Tensor:
        """Return the tokeniser's input, [R, N, P]: unknown values are 0, the mean of known ones."""
        return patches.nan_to_num(nan=0.0) if patches.is_floating_point() else patches

    def elements(self, batch: Batch) -> Tensor:
        """Return the loader's counts of known elements per patch, [R, N] float64, or [R, 1] if patches are equal."""
        return batch[f"{self.name}_counts"].double()

    @abstractmethod
    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        """Return the loss of each patch, summed over its elements, [R, N].

        `guess` is the prediction [R, N, `values`] in fp32 or fp64, `patches` are [R, N, P].
        """

    # Pictures

    def reconstruction(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Convert a prediction to the units of `patches`, [R, N, P]."""
        return prediction

    def plainest(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Return the constant prediction of the data's mean, [R, N, `values`], as a baseline for losses."""
        return torch.zeros_like(prediction)

    def maps(self, patches: Tensor) -> Tensor:
        """Return patches as maps for `show`: [R, s, s], or [R, C, s, s] for several channels."""
        maps = unpatchify(patches, self.side)
        return maps[:, 0] if self.channels == 1 else maps

    @classmethod
    def is_unknown(cls, maps: Tensor) -> bool:
        """Whether all pixels of all maps are unknown."""
        unknown = maps.isnan() if maps.is_floating_point() else maps == int(cls.blank)
        return bool(unknown.all())

    @classmethod
    def legend(cls, maps: Sequence[Tensor], names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the legend (text, colour) of maps if `show` has a colour for each number; `names` may be empty."""
        return []

    @classmethod
    def meaning(cls, stored: Any) -> str:
        """Return the meaning of the colours of stored maps."""
        return ""

    @staticmethod
    def colours(numbers: Map) -> npt.NDArray[np.uint8]:
        """Convert a stored map to colours [H, W, 3]: black (smallest number) to white, or the upper 8 bits of RGB."""
        if numbers.ndim == 3:
            return numbers if numbers.dtype == np.uint8 else (numbers >> 8).astype(np.uint8)
        shares = numbers.astype(np.float32)
        low, high = float(shares.min()), float(shares.max())
        grey = ((shares - low) * (255 / max(high - low, 1))).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)

    @staticmethod
    def show(axes: Axes, image: Tensor, whole: Tensor) -> None:
        """Draw one of `maps`, with colours from the smallest to the largest value of the `whole` image."""
        known = whole[~whole.isnan()]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        if image.ndim == 3:
            coloured = ((image - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(nan=0.5)  # unknown: grey
            axes.imshow(coloured.permute(1, 2, 0).numpy())
        else:
            axes.imshow(image.numpy(), cmap="viridis", vmin=low, vmax=high)


def count_patches(valid: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.int32]:
    """Count the valid pixels of each patch, [R, N] for maps [R, sqrt(N) side, sqrt(N) side]."""
    rows, size, _ = valid.shape
    across = size // side
    # Summing lines first, in 16 bits, is five times as fast.
    lines = valid.view(np.uint8).reshape(rows, across, side, size).sum(axis=2, dtype=np.uint16)
    counts: npt.NDArray[np.int32] = lines.reshape(rows, across * across, side).sum(axis=2, dtype=np.int32)
    return counts
