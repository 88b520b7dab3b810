"""Depth, metric or relative, standardised over each crop.

A batch has stored depth in 16 bits, half the bytes of the model's input, and each crop's statistics. The device
standardises it.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.config.schema import Fields, Range
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, Crops
from trp_scale.data.images.dataset import DecodedRows
from trp_scale.data.images.formats import GREY, Map, png_format, png_size, read_png
from trp_scale.data.images.maps import MapFormat, StoredMaps, own_directory
from trp_scale.data.tar_reader import is_npy, npy_header, read_npy
from trp_scale.errors import DataError
from trp_scale.models.patches import patchify
from trp_scale.pretraining.modalities.base import Interpret, MapFiles, Modality, PseudoLabels, SceneMap, Size

log = logging.getLogger(__name__)

NOT_MEASURED = 0
"""Value of unmeasured pixels in stored maps."""

STATISTICS = "depth_statistics"
"""Field of a batch with the statistics of each row's crop (`crop_statistics`)."""

RELATIVE_SCALE = 1.0 / 65535
"""Scale of relative maps: 16 bits cover the range of a map."""

LARGEST = 65535
"""Largest stored number, in 16 bits."""

VARIANCE_FLOOR = 1e-6
"""Added to the variance, in metres^2 (or range^2), so that rounding in a flat crop is not amplified."""

Direction = Literal["farther", "nearer"]
"""Meaning of a larger number in a map."""

SHADES: dict[Direction, str] = {"farther": "black (near) to white (far)", "nearer": "black (far) to white (near)"}
"""Shades of depth on a contact sheet, by the meaning of a larger number."""


@dataclass(frozen=True, kw_only=True)
class StoredDepth(StoredMaps):
    """Depth maps of a data set.

    Attributes:
        scale: metres per unit; `None` if relative.
        larger_is: meaning of a larger number. Batches do not depend on it, so it is not in repr, which enters the
            digest in checkpoints.
    """

    scale: float | None
    larger_is: Direction = field(repr=False)


class DepthFormat(MapFormat):
    """16 bits. dataset.json has "scale": metres per unit, or null for relative maps; "unit": description of the unit;
    "larger_is": "farther" (or absent), or "nearer" for inverse depth."""

    def stored(self, name: str, description: Fields) -> StoredDepth:
        return StoredDepth(
            name=name,
            suffix=self.suffix,
            directory=own_directory(description),
            scale=description.take("scale", Annotated[float, Range(above=0)] | None, None),
            larger_is=description.take("larger_is", Direction, "farther"),
        )

    def agree(self, members: Sequence[tuple[str, StoredDepth]]) -> None:
        """Refuse mixtures of depth and inverse depth."""
        first, wanted = members[0][0], members[0][1].larger_is
        for name, maps in members[1:]:
            if maps.larger_is != wanted:
                raise DataError(
                    f"data.path: members of a mixture must have depth of the same direction: larger is {wanted} in "
                    f"{first}, {maps.larger_is} in {name}. Label one of them again with a depth model of the other's "
                    f"direction (trp-scale pseudo-label; --depth.larger_is corrects a model's direction), or train on "
                    f"one data set at a time"
                )


METRIC_KINDS = ("depth_pro", "glpn", "zoedepth")
"""Model types with output in metres. The configuration of Depth Anything states this itself."""


class DepthLabels(PseudoLabels):
    """Labels from depth estimators; `read_model` returns whether the output is in metres, or `None` if unknown."""

    purpose = "depth estimation"
    auto_classes: ClassVar[dict[str, str]] = {"DepthEstimation": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES"}
    png_level = 3  # level 6 is 4 % smaller and takes three times as long (512 x 384: 196 KB, 47 ms)

    def read_model(self, where: str, config: Any) -> bool | None:
        estimation_type = getattr(config, "depth_estimation_type", None)
        if estimation_type is not None:
            return bool(estimation_type == "metric")
        return True if config.model_type in METRIC_KINDS else None

    def describe(self, where: str, facts: bool | None, settings: Any) -> tuple[dict[str, object], dict[str, object]]:
        scale, larger_is = settings.scale, self._larger_is(where, facts, settings)
        relative = "none: 1 to 65535 is the range of each image's own estimates"
        unit = relative if scale is None else f"{scale:g} metre"
        identity = {"scale": scale, "larger_is": larger_is}
        return identity, {"scale": scale, "unit": unit, "larger_is": larger_is}

    def _larger_is(self, where: str, metric: bool | None, settings: Any) -> Direction:
        """Return the direction of larger outputs."""
        setting: Literal["auto"] | Direction = settings.larger_is
        if settings.scale is None:
            return setting if setting != "auto" else "farther" if metric else "nearer"
        if metric is False:
            raise DataError(
                f"--depth.scale {settings.scale}: by its configuration, {where} estimates relative depth, not metres; "
                f"omit --depth.scale, or choose a metric model"
            )
        if metric is None and setting == "auto":
            log.warning(
                "--depth.scale %g: the configuration of %s does not state that its depth is in metres; it is stored as "
                "metres. If this is right, give --depth.larger_is farther. For relative or inverse depth, such as DPT "
                "from MiDaS, omit --depth.scale and give the meaning of a larger output with --depth.larger_is",
                settings.scale,
                where,
            )
        return "farther"

    def interpret(self, processor: Any, facts: bool | None, settings: Any) -> Interpret:
        return depth_maps(processor, settings.scale)


@dataclass(frozen=True, kw_only=True)
class DepthFiles(MapFiles):
    """Depth maps from files: PNG with 16 bits, or 8 bits if relative; and .npy.

    Attributes:
        scale: metres per stored unit; `None` if relative.
        relative: stretch each map without a unit over its own range.
    """

    scale: float | None
    relative: bool

    def size(self, content: bytes | bytearray) -> Size | None:
        if is_npy(content):
            shape = npy_header(content).shape if _has_header(content) else ()
            return shape if len(shape) == 2 else None
        if png_format(content) == (8, GREY):
            return png_size(content) if self.relative else None
        return super().size(content)

    def decode(self, content: bytes | bytearray) -> Map:
        return read_npy(content) if is_npy(content) else read_png(content)

    def numbers(self, numbers: Map) -> Map:
        if numbers.dtype == np.uint16:
            return numbers
        if numbers.dtype == np.uint8 or (numbers.dtype.kind == "f" and self.relative):
            if not self.relative:
                raise DataError(EIGHT_BITS)
            return stretch(numbers)
        if numbers.dtype.kind == "f":
            if self.scale is None:
                raise DataError(FLOATS)
            return units_of_metres(numbers, self.scale)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) <= LARGEST:
            raise DataError(
                f"{int(numbers.min())} to {int(numbers.max())} found, 0 to {LARGEST} can be stored: in coarser units"
            )
        return numbers.astype(np.uint16)

    def refuse(self, content: bytes | bytearray, path: str) -> None:
        if self.relative:
            return
        dtype = npy_header(content).dtype if _has_header(content) else None
        if dtype == np.uint8 or png_format(content) == (8, GREY):
            raise DataError(f"--modality depth, the map of {path}: {EIGHT_BITS}")
        if self.scale is None and dtype is not None and dtype.kind == "f":
            raise DataError(f"--modality depth, the map of {path}: {FLOATS}")


EIGHT_BITS = (
    "8 bits found: 256 steps are a picture of depth and no metres; give --depth.relative to store each map's own "
    "range as relative depth (and --depth.larger_is nearer if its near parts are bright), or maps of 16 bits or .npy"
)
FLOATS = (
    "floats found, and nothing says what they are; give --depth.scale 0.001 if they are metres (stored as millimetres, "
    "up to 65.5 m; 0.01 up to 655 m), or --depth.relative if they have no unit"
)
"""Messages about maps that need a setting; dataset.json lists them for skipped images."""


def _has_header(content: bytes | bytearray) -> bool:
    """Whether the content is a .npy file of numbers."""
    try:
        return is_npy(content) and bool(npy_header(content))
    except DataError:
        return False


def stretch(numbers: npt.NDArray[Any]) -> Map:
    """Stretch the range of finite numbers except 0 to 1..65535; others become NOT_MEASURED."""
    known = np.isfinite(numbers) & (numbers != 0)
    return (
        relative_units(torch.from_numpy(np.where(known, numbers, np.nan).astype(np.float64))).numpy().astype(np.uint16)
    )


def units_of_metres(metres: npt.NDArray[Any], scale: float) -> Map:
    """Convert metres to units of `scale`, at least 1; NOT_MEASURED where they are 0 or not finite.

    Raises DataError if a depth is below 0 or exceeds 16 bits.
    """
    known = np.isfinite(metres) & (metres != 0)
    units = np.where(known, np.rint(metres.astype(np.float64) / scale), 0.0)
    if known.any():
        low, high = float(metres[known].min()), float(units.max())
        if low < 0:
            raise DataError(f"a depth of {low:g} m found, depths from 0 on are allowed")
        if high > LARGEST:
            raise DataError(
                f"a depth of {high * scale:g} m found, 16 bits hold {LARGEST * scale:g} m at --depth.scale {scale:g}; "
                "give a larger one"
            )
    return np.where(known, units.clip(1), NOT_MEASURED).astype(np.uint16)


class Depth(Modality):
    """Depth. Its task is the absolute error of standardised depth at measured pixels. An element is a pixel.

    Fields of a batch: depth [R, S, S] uint16, in stored units, and depth_statistics [R, 3] float32 (`crop_statistics`).
    """

    name = "depth"
    format = DepthFormat("depth.png", bits=16, empty=NOT_MEASURED)
    labels = DepthLabels()
    blank = np.uint16(NOT_MEASURED)
    file_suffixes = (".png", ".npy")

    @classmethod
    def from_files(cls, settings: Any) -> MapFiles:
        unit = "relative" if settings.scale is None else f"{settings.scale} metres"
        nearer = {"larger_is": "nearer"} if settings.larger_is == "nearer" else {}
        description = {"scale": settings.scale, "unit": unit, "exact": False, **nearer}
        return DepthFiles(
            name=cls.name,
            format=cls.format,
            description=description,
            scale=settings.scale,
            relative=settings.relative,
        )

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap:
        per_metre = scene.units_per_metre
        unit = f"1/{per_metre} metre along the camera's axis"
        return SceneMap(scene.depth, {"scale": 1 / per_metre, "unit": unit})

    def fields(
        self, rows: DecodedRows, crops: Crops, cropper: Cropper, stored: Sequence[StoredMaps]
    ) -> dict[str, Tensor]:
        tensors = super().fields(rows, crops, cropper, stored)
        of_crops = [
            crop_statistics(crop, maps.scale)
            for crop, maps in zip(tensors[self.name].numpy(), cast(Sequence[StoredDepth], stored), strict=True)
        ]
        return {**tensors, STATISTICS: torch.tensor(of_crops, dtype=torch.float32)}

    def stored_of_absent(self, rows: int) -> Sequence[StoredDepth]:
        blank = StoredDepth(name=self.name, suffix="", directory="", scale=None, larger_is="farther")
        return [blank] * rows

    def standardise(self, numbers: Map, stored: StoredDepth, *, mirrored: bool) -> npt.NDArray[np.uint16]:
        """Return stored numbers; the device standardises them."""
        return numbers

    def patches(self, batch: Batch) -> Tensor:
        return patchify(standardise(batch[self.name], batch[STATISTICS]).unsqueeze(1), self.side)

    @classmethod
    def meaning(cls, stored: StoredDepth) -> str:
        return SHADES[stored.larger_is]

    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        distances = (guess - patches.nan_to_num(nan=0.0)).abs()
        return torch.where(patches.isnan(), 0.0, distances).sum(-1)


def crop_statistics(depth: Map, scale: float | None) -> tuple[float, float, float]:
    """Return the statistics that standardise the depth of a crop: (depth - mean) / sqrt(var + 1e-6) over the measured
    pixels without the lowest and highest tenth (TRP 4.2; Bachmann et al.).

    Of K measured pixels, the K // 10 lowest and K // 10 highest are left out. Mean and variance come from sums of
    integers, which are exact.

    Args:
        depth: [S, S] uint16, 0 if not measured.
        scale: metres per unit; `None` if relative.

    Returns:
        integer and fractional part of the mean in stored units, and unit / deviation; zeros without measured pixels.
    """
    counts = np.bincount(depth.ravel())  # pixels of each value; np.partition takes 1.5 times as long
    counts[NOT_MEASURED : NOT_MEASURED + 1] = 0
    measured = int(counts.sum())
    if measured == 0:
        return 0.0, 0.0, 0.0
    left_out = measured // 10
    up_to = np.clip(
        counts.cumsum(), left_out, measured - left_out
    )  # kept pixels and the lowest tenth, up to each value
    kept = np.diff(up_to, prepend=left_out)
    values = np.arange(len(kept))
    weighted = kept * values
    count, total, squares = measured - 2 * left_out, int(weighted.sum()), int(weighted @ values)
    unit = RELATIVE_SCALE if scale is None else scale
    variance = (count * squares - total * total) / (count * count) * unit**2
    middle, rest = divmod(total, count)
    return float(middle), rest / count, unit / math.sqrt(variance + VARIANCE_FLOOR)


def standardise(depth: Tensor, statistics: Tensor) -> Tensor:
    """Standardise depth: [R, S, S] uint16 in stored units, `crop_statistics` [R, 3] -> [R, S, S] float32, NaN if not
    measured."""
    middle, rest, factor = statistics[:, :, None, None].unbind(1)  # [R, 1, 1] each
    units = depth.float()
    values = (units - middle).sub_(rest).mul_(factor)  # the difference of 16-bit integers is exact
    return values.masked_fill_(units == NOT_MEASURED, torch.nan)


def depth_maps(processor: Any, scale: float | None) -> Interpret:
    """Return the function from a depth estimator's output to maps. `scale` is metres per stored unit; `None` stretches
    each image's finite output to 1..65535."""

    def interpret(output: Any, sizes: Sequence[Size]) -> tuple[list[Tensor], Tensor]:
        depths = _estimates(processor, output, sizes)
        if scale is None:
            maps = [relative_units(depth) for depth in depths]
            return maps, torch.zeros(len(maps), dtype=torch.int32, device=maps[0].device)
        pairs = [metric_units(depth, scale) for depth in depths]
        return [units for units, _ in pairs], torch.stack([clipped for _, clipped in pairs])

    return interpret


def _estimates(processor: Any, output: Any, sizes: Sequence[Size]) -> list[Tensor]:
    """Return the depth of each image at its size, float [H, W]."""
    post_process = getattr(processor, "post_process_depth_estimation", None)
    if post_process is None:
        return [
            F.interpolate(depth[None, None], size=size, mode="bicubic", align_corners=False)[0, 0]
            for depth, size in zip(output.predicted_depth, sizes, strict=True)
        ]
    arguments: dict[str, Any] = {"target_sizes": list(sizes)}
    if "source_sizes" in inspect.signature(post_process).parameters:  # ZoeDepth removes its padding
        arguments["source_sizes"] = list(sizes)
    estimates = post_process(output, **arguments)
    # Some processors squeeze all dimensions of size 1, also those of an image one pixel wide.
    return [estimate["predicted_depth"].reshape(size) for estimate, size in zip(estimates, sizes, strict=True)]


def relative_units(depth: Tensor) -> Tensor:
    """Stretch the range of finite values of float [H, W] to 1..65535, int32; others become NOT_MEASURED. If all are
    equal, they become 1."""
    finite = depth.isfinite()
    low = torch.where(finite, depth, torch.inf).amin()
    high = torch.where(finite, depth, -torch.inf).amax()
    share = (depth - low) / (high - low).clamp(min=torch.finfo(depth.dtype).tiny)
    units = 1 + (share * (LARGEST - 1)).round()
    return torch.where(finite, units, NOT_MEASURED).to(torch.int32)


def metric_units(depth: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Convert metres, float [H, W], to units of `scale` metres, clipped to 1..65535, int32; also return the number of
    clipped pixels, int32. Values that are not finite become NOT_MEASURED."""
    finite = depth.isfinite()
    units = (depth / scale).round()
    clipped = finite & ((units < 1) | (units > LARGEST))
    return torch.where(finite, units.clamp(1, LARGEST), NOT_MEASURED).to(torch.int32), clipped.sum(dtype=torch.int32)
