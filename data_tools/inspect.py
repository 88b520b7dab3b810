"""Show rows of a shard as text, the part-of-speech groups in colour."""

from __future__ import annotations

import sys
from pathlib import Path


def show(shard: Path, rows: int = 5, block: str = "") -> None:
    """Show rows of a shard.

    Args:
        shard: a tar of a data set, with its index beside it; or a data set's directory, for its first shard.
        rows: rows to show.
        block: key of the block to show them from; empty = from the first on.
    """
    from rich.console import Console

    from trp_scale.data.text.display import legend, row_texts

    if shard.is_dir():
        shard = min((shard / "shards").glob("*.tar"), default=shard / "shards" / "text-000000.tar")
    console = Console()
    console.print(legend())
    for name, text in row_texts(shard, rows, block or None):
        console.rule(name, align="left")
        console.print(text)


def main() -> int:
    # This file's own name must not stand in for the standard library's module.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import tyro

    from trp_scale.data.index import DataError

    try:
        tyro.cli(show, use_underscores=True, config=(tyro.conf.PositionalRequiredArgs,))
    except DataError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
