"""Text files, JSON lines, a Hugging Face dataset or --embedded -> a data set of shards for pre-training."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    # This folder holds inspect.py, which must not stand in for the standard library's module of that name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import logging

    import tyro

    from trp_scale.data.index import DataError
    from trp_scale.preparation.text.shard import ShardTextConfig, shard_text
    from trp_scale.preparation.text.taggers import TaggerError

    config = tyro.cli(ShardTextConfig, use_underscores=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        shard_text(config)
    except (DataError, TaggerError) as error:
        print(f"shard_text: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
