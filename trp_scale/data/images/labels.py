"""The class of every stored image, from the index alone: nothing is read from the tars."""

from __future__ import annotations

import zlib

import numpy as np

from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset

UNKNOWN = -1

MOST_CLASSES = 1 << 16


def stored_labels(dataset: ImageDataset) -> Integers:
    """Class of each image in stored order, [n]; UNKNOWN where it cannot be told.

    A .cls member is a class number in ASCII, and its checksum is in the index: that of "7" says 7. Numbers below
    MOST_CLASSES all have different checksums; a member with other bytes (a line end, say) has that of none of them.
    """
    table = dataset.samples
    if "cls" not in table.suffixes:
        return np.full(table.rows, UNKNOWN, dtype=np.int64)
    number_of = {zlib.crc32(str(number).encode()): number for number in range(MOST_CLASSES)}
    checksums, place = np.unique(table.checksums[:, table.suffixes.index("cls")], return_inverse=True)
    numbers = np.array([number_of.get(checksum, UNKNOWN) for checksum in checksums.tolist()], dtype=np.int64)
    labels: Integers = numbers[place]  # [n]
    return labels
