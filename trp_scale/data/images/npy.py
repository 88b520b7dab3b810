"""Arrays in .npy files (numpy's own format), as maps that others made come in. Nothing is unpickled, and what a header
claims is compared with the file's length before memory is taken for it."""

from __future__ import annotations

import io
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trp_scale.errors import DataError, error_text

SIGNATURE = b"\x93NUMPY"


class NpyHeader(NamedTuple):
    """Header of an .npy file. Attributes: shape, dtype; fortran: columns first; start: of the numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def is_npy(content: bytes | bytearray) -> bool:
    """Whether a file begins as a .npy does."""
    return content[: len(SIGNATURE)] == SIGNATURE


def npy_header(content: bytes | bytearray) -> NpyHeader:
    """The header of a .npy file.

    Raises:
        DataError: not one of numbers, or of another length than it says.
    """
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
    except Exception as error:  # whatever a broken header leads to
        raise DataError(f"a .npy file whose header cannot be read ({error_text(error)})") from error
    start = stream.tell()
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(f"a .npy file of {dtype}: whole numbers or floats expected")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(content) - start:
        raise DataError(f"a .npy file of {len(content) - start} bytes of numbers, but its header says {shape} {dtype}")
    return NpyHeader(shape, dtype, fortran, start)


def read_npy(content: bytes | bytearray) -> npt.NDArray[Any]:
    """The numbers of a .npy file, read-only, in this machine's byte order.

    Raises:
        DataError: as `npy_header`.
    """
    shape, dtype, fortran, start = npy_header(content)
    numbers = np.frombuffer(bytes(content), dtype=dtype, offset=start).reshape(shape, order="F" if fortran else "C")
    return numbers.astype(dtype.newbyteorder("="), copy=False)
