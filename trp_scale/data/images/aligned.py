"""Maps in tars of their own, joined to their images by position.

DATASET/DIRECTORY/image-000000.tar holds the maps of the images in DATASET/shards/image-000000.tar, under the same keys
in the same order.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from trp_scale.data.images.maps import StoredMaps
from trp_scale.data.images.reader import SampleTable, read_samples
from trp_scale.data.index import DataError, read_index


def read_aligned(directory: Path, maps: StoredMaps, images: SampleTable) -> SampleTable:
    """Read the indexes of the tars in a modality's own directory.

    Args:
        directory: of the data set.
        maps: they lie in `directory / maps.directory`.
        images: the data set's images.

    Raises:
        DataError: a tar, a member or a key is missing or another than beside the image.
    """
    advice = f"make the {maps.name} maps again (trp-scale pseudo-label), or copy {maps.directory} again"
    suffixes = (maps.suffix,)
    try:
        table = read_samples(directory / maps.directory, [path.name for path in images.shards], suffixes, suffixes)
    except DataError as error:
        raise DataError(f"{maps.name} maps beside the images: {error}; {advice}") from error
    for images_tar, maps_tar, ours, theirs in zip(
        images.shards, table.shards, images.key_digests, table.key_digests, strict=True
    ):
        if ours != theirs:
            raise DataError(f"{first_difference(images_tar, maps_tar)}; {advice}")
    return table


def first_difference(images: Path, maps: Path) -> str:
    """The first place at which two tars have different keys, by their indexes; "" if there is none."""
    keys = ([block.key for block in read_index(path).blocks] for path in (images, maps))
    for place, (ours, theirs) in enumerate(zip_longest(*keys)):
        if ours != theirs:
            found = "no more maps" if theirs is None else f"a map of {theirs}"
            expected = "no more images" if ours is None else f"image {ours}"
            return f"{maps}: place {place}: {found} found, {images} has {expected} there"
    return ""
