"""A loaded model with its image processor: images in, maps out, one batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trp_scale.data.images.formats import Map
from trp_scale.data.images.maps import MapFormat, map_formats
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import Interpret, Size
from trp_scale.sharding.pseudo_labels.models import FoundModel

Precision = Literal["bf16", "fp32"]

PROBE: Size = (48, 64)
"""(H, W) of the grey image that every model is tried with; not square, so that exchanged sides are seen."""


class InFlight:
    """Maps of a batch on their way to the host."""

    def __init__(self, maps: Tensor, clipped: Tensor, sizes: Sequence[Size], copied: torch.cuda.Event | None) -> None:
        self._maps = maps
        self._clipped = clipped
        self._sizes = sizes
        self._copied = copied

    def wait(self, dtype: type[np.generic]) -> list[tuple[Map, int]]:
        """Map [H, W] of each image and its clipped pixels."""
        if self._copied is not None:
            self._copied.synchronize()
        lengths = [height * width for height, width in self._sizes]
        pieces = np.split(self._maps.numpy().astype(dtype), np.cumsum(lengths)[:-1])
        maps = [piece.reshape(size) for piece, size in zip(pieces, self._sizes, strict=True)]
        return list(zip(maps, self._clipped.tolist(), strict=True))


class Labeller:
    """Labels images with one model.

    Args:
        source: where the model is from.
        model: loaded, on `device`.
        processor: its image processor.
        interpret: makes maps of its output.
        precision: bf16: by autocast, so that normalisation and softmax stay in fp32.

    Raises:
        DataError: the model cannot label an image.
    """

    def __init__(
        self,
        source: FoundModel,
        model: Any,
        processor: Any,
        interpret: Interpret,
        *,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.modality = source.modality
        self.format: MapFormat = map_formats()[source.modality]
        self.dtype: type[np.generic] = np.uint16 if 16 in self.format.bits else np.uint8
        self._flag = source.flag
        self._model = model
        self._processor = processor
        self._interpret = interpret
        self._device = device
        self._precision = precision
        self._probe()

    def _probe(self) -> None:
        """Label a grey image: a model that cannot says so before any work is done."""
        grey = torch.full((3, *PROBE), 128, dtype=torch.uint8)
        try:
            prepared = self._call_processor(grey)
            mask = prepared.get("pixel_mask")
            if mask is not None and not bool(mask.all()):
                raise DataError(f"{self._flag}: its image processor pads images, so its labels would not lie on them")
            ((numbers, _),) = self.start([prepared["pixel_values"][0]], [PROBE]).wait(self.dtype)
            assert numbers.shape == PROBE
        except DataError:
            raise
        except Exception as error:  # whatever a model does that needs other inputs than an image
            raise DataError(
                f"{self._flag}: {type(self._model).__name__} cannot label an image by itself "
                f"({type(error).__name__}: {str(error)[:300]}); choose another model"
            ) from error

    def _call_processor(self, image: Tensor) -> Any:
        return self._processor(images=[image], return_tensors="pt", input_data_format="channels_first")

    def prepare(self, image: Tensor) -> Tensor | str:
        """The model's input of one image, float [3, h, w], or why the processor has none for it (some cannot scale an
        image a few pixels wide). Each image alone: a processor that gets several pads them to
        the largest, and its labels of the smaller ones are then stretched. Many threads may call this at once.

        Args:
            image: uint8 [3, H, W].
        """
        try:
            values: Tensor = self._call_processor(image)["pixel_values"][0]
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return f"the image processor cannot handle it: {error}"
        return values

    @torch.inference_mode()
    def start(self, inputs: Sequence[Tensor], sizes: Sequence[Size]) -> InFlight:
        """Label a batch, without waiting for the device.

        Args:
            inputs: of one shape, from `prepare`.
            sizes: of their images.

        Raises:
            DataError: the device has not enough memory.
        """
        on_gpu = self._device.type == "cuda"
        try:
            batch = torch.stack(  # [B, 3, h, w]
                list(inputs), out=torch.empty(len(inputs), *inputs[0].shape, dtype=inputs[0].dtype, pin_memory=on_gpu)
            ).to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
                output = self._model(pixel_values=batch)
            for name, value in output.items():  # scaled to images' sizes in fp32
                if isinstance(value, Tensor) and value.is_floating_point():
                    output[name] = value.float()
            maps, clipped = self._interpret(output, sizes)
            numbers = torch.cat([map_.flatten() for map_ in maps])  # [all pixels of the batch]
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{self._flag}: {self._device} has not enough memory for {len(inputs)} images at once; give a smaller "
                f"--batch. Finished shards stay"
            ) from error
        if not on_gpu:
            return InFlight(numbers, clipped, sizes, None)
        # One copy for all maps of the batch, and the host goes on meanwhile.
        numbers, clipped = (map_.to("cpu", non_blocking=True) for map_ in (numbers, clipped))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        return InFlight(numbers, clipped, sizes, copied)
