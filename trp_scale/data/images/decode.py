"""From the bytes of a stored image to pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

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
