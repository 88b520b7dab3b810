"""Write the binary index of a data set, of its own tars and of those with maps beside them, from the JSON indexes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trp_scale.config.schema import Fields
from trp_scale.data.images.maps import OWN_TAR, second_directories
from trp_scale.data.samples import write_binary_index
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError


def write_dataset_index(directory: Path, document: Mapping[str, Any]) -> list[Path]:
    """Write the binary indexes of a data set; returns where.

    Args:
        directory: of the data set.
        document: the content of its dataset.json, which need not be there yet.

    Raises:
        DataError: a tar or a JSON index is missing, damaged or does not fit.
    """
    fields = Fields(document, str(directory / "dataset.json"), DataError)
    kind, shards = fields.take("kind", Literal["text", "image"]), fields.file_names("shards")
    if kind == "text":
        return [write_binary_index(directory / OWN_TAR, shards, SUFFIXES, None)]
    rows_per_block = fields.whole("rows_per_block", least=1)
    written = [write_binary_index(directory / OWN_TAR, shards, tuple(fields.texts("suffixes")), rows_per_block)]
    for name, maps in second_directories(directory / "dataset.json", document).items():
        written.append(write_binary_index(directory / name, shards, (maps.suffix,), rows_per_block))
    return written
