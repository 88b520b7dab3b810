"""Large-scale jitter (Ghiasi et al. 2021): the image at a random size, cut or padded to a square, perhaps mirrored.

Every draw is a hash of the row's state, so a jitter depends on (seed, row key, epoch) and on the image's size alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.config import CropsConfig
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.images.crops import uniform
from trp_scale.data.images.png import Map

_JITTER = np.uint64(name_hash("jitter"))


@dataclass(frozen=True, kw_only=True)
class Jitters:
    """What becomes of each image of a batch.

    Attributes:
        boxes: [R, 4] top, left, height, width of the part that is shown, in pixels of the image.
        shown: [R, 2] height and width of that part in the crop, from its upper left corner.
        flips: [R] which crops are mirrored, padding and all.
    """

    boxes: Integers
    shown: Integers
    flips: npt.NDArray[np.bool_]


class Jitter:
    """Draws jitters and carries them out.

    Args:
        crops: size, flip and interpolation.
        scales: smallest and largest size of an image, in units of crops.size.
        longer: whether that is the size of its longer side; otherwise of the shorter one.
    """

    def __init__(self, crops: CropsConfig, scales: tuple[float, float], *, longer: bool) -> None:
        self.size, self._flip = crops.size, crops.flip
        self._low, self._high = scales
        self._longer = longer
        self._mode = InterpolationMode[crops.interpolation.upper()]

    def draw(self, states: Words, sizes: Integers) -> Jitters:
        """The jitter of each row.

        Args:
            states: [R] a word per row (`plan.row_states`).
            sizes: [R, 2] height and width of its image.
        """
        words = mix(mix(states ^ _JITTER)[:, None] ^ np.arange(4, dtype=np.uint64))  # [R, 4]
        scale = self._low + (self._high - self._low) * uniform(words[:, 0])
        side = sizes.max(axis=1) if self._longer else sizes.min(axis=1)
        ratio = (scale * self.size / side)[:, None]  # [R, 1]
        scaled = np.maximum(1, np.rint(sizes * ratio)).astype(np.int64)  # [R, 2]
        shown = np.minimum(scaled, self.size)
        # The shown part in the image's own pixels: image and map are cut by the same box, so they stay aligned.
        extent = np.clip(np.rint(shown * sizes / scaled).astype(np.int64), 1, sizes)
        corner = below(words[:, 1:3], sizes - extent + 1)
        return Jitters(
            boxes=np.concatenate([corner, extent], axis=1), shown=shown, flips=uniform(words[:, 3]) < self._flip
        )

    def cut(self, image: Tensor, jitters: Jitters, row: int, out: Tensor) -> None:
        """Put the jittered image of one row into `out`, [3, S, S] uint8, which holds the padding's colour.

        Args:
            image: [3, H, W] uint8.
            jitters: of the batch.
            row: number of the row in it.
            out: is written.
        """
        top, left, height, width = jitters.boxes[row].tolist()
        tall, wide = jitters.shown[row].tolist()
        part = image[:, top : top + height, left : left + width]
        part = functional.resize(part, [tall, wide], interpolation=self._mode, antialias=True)
        if jitters.flips[row]:
            out[:, :tall, self.size - wide :] = functional.horizontal_flip(part)
        else:
            out[:, :tall, :wide] = part

    def pick(self, map_: Map, jitters: Jitters, row: int, out: Map) -> None:
        """As `cut`, for a map [H, W]: each pixel takes the number that lies at its centre; `out` [S, S]."""
        top, left, height, width = jitters.boxes[row].tolist()
        tall, wide = jitters.shown[row].tolist()
        picked = pick_centres(map_[top : top + height, left : left + width], tall, wide)
        if jitters.flips[row]:
            out[:tall, self.size - wide :] = picked[:, ::-1]
        else:
            out[:tall, :wide] = picked


def pick_centres(map_: Map, tall: int, wide: int) -> Map:
    """[H, W] or [H, W, C] -> [tall, wide] or [tall, wide, C], numbers picked, never mixed: each new pixel takes that at
    its centre."""
    height, width = map_.shape[:2]
    lines = (2 * np.arange(tall) + 1) * height // (2 * tall)
    columns = (2 * np.arange(wide) + 1) * width // (2 * wide)
    picked: Map = map_.take(lines, axis=0).take(columns, axis=1)
    return picked
