"""Show rows of a shard: text with its part-of-speech groups in colour, or images with their classes and maps."""

from __future__ import annotations

import sys
from pathlib import Path


def show(shard: Path, rows: int = 5, block: str = "", output: Path | None = None) -> None:
    """Show rows of a shard.

    Args:
        shard: a tar of a data set, with its index beside it; or a data set's directory, for its first shard.
        rows: rows to show.
        block: key of the block (text) or of the image to show them from; empty = from the first on.
        output: images: PNG file for a contact sheet of them.
    """
    from rich.console import Console

    from trp_scale.data.index import read_index
    from trp_scale.preparation.images.display import is_image_shard

    if shard.is_dir():
        shard = min((shard / "shards").glob("*.tar"), default=shard / "shards" / "text-000000.tar")
    show_kind = show_images if is_image_shard(read_index(shard).blocks) else show_text
    show_kind(Console(), shard, rows, block or None, output)


def show_text(console, shard, rows, block, output):  # type: ignore[no-untyped-def]
    """Rows of text."""
    from trp_scale.data.index import DataError
    from trp_scale.preparation.text.stored import legend, row_texts

    if output is not None:
        raise DataError(f"--output {output}: goes with images, {shard} holds text")
    console.print(legend())
    for name, text in row_texts(shard, rows, block):
        console.rule(name, align="left")
        console.print(text)


def show_images(console, shard, rows, block, output):  # type: ignore[no-untyped-def]
    """Images, one a line, and their contact sheet."""
    from trp_scale.preparation.images.display import contact_sheet, stored_images

    images = list(stored_images(shard, rows, block))
    for image in images:
        console.rule(image.key, align="left")
        console.print(image.line(), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        contact_sheet(images).save(output, "PNG")
        console.print(f"{len(images)} images: {output}", markup=False, highlight=False, soft_wrap=True)


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
