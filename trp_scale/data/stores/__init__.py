"""Where the tars of a folder are stored: in the folder, under a URL that it mirrors, or each at a path of its own."""

from __future__ import annotations

from pathlib import Path

from trp_scale.data.stores.external import find_external_tars
from trp_scale.data.stores.mirror import find_mirror
from trp_scale.data.stores.tars import TarStore


def find_store(directory: Path) -> TarStore:
    """Return the store that opens the tars of a folder.

    Raises:
        DataError: the file that describes it is damaged.
    """
    return find_external_tars(directory) or find_mirror(directory) or TarStore(directory)
