"""Image folders, tars, torchvision and Hugging Face datasets, or --embedded (synthetic) -> a data set of shards."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    # This folder holds inspect.py, which must not stand in for the standard library's module of that name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import logging

    import tyro

    from trp_scale.data.index import DataError
    from trp_scale.preparation.images.shard import ShardImagesConfig, shard_images

    config = tyro.cli(ShardImagesConfig, use_underscores=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        shard_images(config)
    except DataError as error:
        print(f"shard_images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
