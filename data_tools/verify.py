"""Check every index, size, checksum and array of a data set; the first bad byte range is named, exit status 1."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    # This folder holds inspect.py, which must not stand in for the standard library's module of that name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import tyro

    from trp_scale.data.index import DataError
    from trp_scale.preparation.verify import verify_dataset

    def verify(dataset: Path) -> int:
        """Check a data set.

        Args:
            dataset: directory with dataset.json.
        """
        try:
            found = verify_dataset(dataset)
        except DataError as error:
            print(f"verify: {error}", file=sys.stderr)
            return 1
        print(
            f"{dataset}: {found.shards} shards, {found.blocks} blocks, {found.rows} rows, {found.bytes} bytes are whole"
        )
        return 0

    return tyro.cli(verify, use_underscores=True, config=(tyro.conf.PositionalRequiredArgs,))


if __name__ == "__main__":
    sys.exit(main())
