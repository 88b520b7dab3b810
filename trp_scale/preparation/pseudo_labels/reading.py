"""The images of a shard, decoded and brought into the models' form by threads that work ahead of the models."""

from __future__ import annotations

import io
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from PIL import Image
from torch import Tensor

from trp_scale.data.images.reader import SampleReader, SampleTable
from trp_scale.data.images.rows import decode_image
from trp_scale.data.index import DataError
from trp_scale.modalities.base import Size
from trp_scale.preparation.pseudo_labels.labeller import Labeller


@dataclass(kw_only=True)
class Prepared:
    """An image as the models take it.

    Attributes:
        size: (H, W) of the image.
        inputs: float [3, h, w] by modality.
        flaws: by modality without input, why there is none.
    """

    size: Size
    inputs: dict[str, Tensor] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)


class ImagePreparer:
    """Reads, decodes and prepares images of one shard. Many threads may call it at once.

    Args:
        table: of the shard; its first column is the image.
        labellers: whose inputs are prepared, by modality.
    """

    def __init__(self, table: SampleTable, labellers: Mapping[str, Labeller]) -> None:
        self._table = table
        self._labellers = labellers
        self._local = threading.local()  # a reader for each thread: they keep files open

    def __call__(self, image: int) -> Prepared:
        """Prepare the image at a place of the shard.

        Raises:
            DataError: the shard cannot be read at all (a damaged image is no error: it has flaws).
        """
        if not hasattr(self._local, "reader"):
            self._local.reader = SampleReader(self._table, verify=False)
        content = bytearray()
        try:
            (content,) = self._local.reader.members(image)
            if zlib.crc32(content) != int(self._table.checksums[image, 0]):  # a wrong label would be there for good
                raise DataError("checksum differs from the index")
            pixels = decode_image(content)
        except DataError as error:
            if isinstance(error.__cause__, OSError):  # of the storage, not of the image
                raise
            return Prepared(size=_stated_size(content), flaws=dict.fromkeys(self._labellers, str(error)))
        prepared = Prepared(size=(pixels.shape[1], pixels.shape[2]))
        for modality, labeller in self._labellers.items():
            values = labeller.prepare(pixels)
            if isinstance(values, str):
                prepared.flaws[modality] = values
            else:
                prepared.inputs[modality] = values
        return prepared


def _stated_size(content: bytearray) -> Size:
    """(H, W) as the header of a damaged image says, or 1 x 1."""
    try:
        width, height = Image.open(io.BytesIO(content), formats=("JPEG",)).size
    except Exception:  # decoders raise whatever a broken file leads them to; any size will do for an empty label
        return 1, 1
    return height, width


def prepared_ahead(
    pool: ThreadPoolExecutor, preparer: ImagePreparer, images: int, window: int
) -> Iterator[tuple[range, list[Prepared]]]:
    """All images in order, a window at a time, while the pool prepares the next one."""
    waiting = deque(range(start, min(start + window, images)) for start in range(0, images, window))
    begun: deque[tuple[range, list[Future[Prepared]]]] = deque()
    while waiting or begun:
        while waiting and len(begun) < 2:
            places = waiting.popleft()
            begun.append((places, [pool.submit(preparer, place) for place in places]))
        places, futures = begun.popleft()
        yield places, [future.result() for future in futures]


def batches_of_one_shape(inputs: Sequence[Tensor | None], batch: int) -> list[list[int]]:
    """Places of inputs in batches of at most `batch`, each of one shape; by shape in the order of first appearance."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, values in enumerate(inputs):
        if values is not None:
            by_shape.setdefault(tuple(values.shape), []).append(place)
    return [same[start : start + batch] for same in by_shape.values() for start in range(0, len(same), batch)]
