"""From the bytes of a stored image to pixels."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from trp_scale.data.images.members import GREY_PNG, MAP_BITS, VOID, Map, png_format, unlisted_class
from trp_scale.data.index import DataError


def decode_image(content: bytearray) -> Tensor:
    """The pixels of a JPEG, [3, H, W] uint8, channels last in memory; a grey one has three equal channels.

    libjpeg makes pixels of most damage within the file: only a checksum finds it (data.verify).

    Raises:
        DataError: not a JPEG, cut short, or in colours that torchvision does not turn into RGB.
    """
    if not content:
        raise DataError("an empty file, a JPEG expected")
    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise DataError(f"not a JPEG that can be decoded ({error})") from error
    return pixels


def decode_map(suffix: str, content: bytearray, size: tuple[int, ...]) -> Map:
    """The numbers of a depth or segmentation map, [H, W] uint16 or uint8, read-only.

    By Pillow: torchvision's PNG decoder ends the process by SIGSEGV on most damaged files. Pillow finds what no longer
    unpacks, not every changed number; `SampleReader` compares a map's checksum before.

    Args:
        suffix: of the member.
        size: (H, W) of its image.

    Raises:
        DataError: not a grey PNG of the modality's bits that can be decoded, or of another size.
    """
    bits, colour_type = png_format(content)
    if (bits, colour_type) != (MAP_BITS[suffix], GREY_PNG):
        raise DataError(
            f".{suffix}: {bits} bits and colour type {colour_type} found, a PNG of {MAP_BITS[suffix]} bits and colour "
            f"type {GREY_PNG} (grey) expected"
        )
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG",))
        if image.size[::-1] == tuple(size):  # as its header says, before anything is unpacked
            return np.asarray(image)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f".{suffix}: not a PNG that can be decoded ({error})") from error
    raise DataError(f".{suffix}: {image.size[::-1]} pixels found, the image has {tuple(size)}")


def check_classes(numbers: Map, classes: int) -> None:
    """Raises DataError if a segmentation map has a number that is neither one of so many classes nor void."""
    wrong = unlisted_class(numbers, classes)
    if wrong is not None:
        raise DataError(f"class {wrong} found, 0 to {classes - 1} or {VOID} (void) expected")
