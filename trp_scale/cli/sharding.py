"""Make and show data: `shard-text`, `shard-images`, `pseudo-label`, `merge`, `index`, `inspect` and `verify`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from trp_scale.config.flags import TakesModules, read
from trp_scale.errors import RefusedError


def shard_text(argv: Sequence[str]) -> int:
    """`trp-scale shard-text`."""
    from trp_scale.sharding.text.shard import ShardTextConfig
    from trp_scale.sharding.text.shard import shard_text as shard

    first = ("inputs", "output", "embedded", "length", "pack", "tokenizer", "vocab_size", "rows_per_block", "processes")
    settings = read(ShardTextConfig, argv, prog="trp-scale shard-text", first=(*first, "executor"))
    return _run_or_submit("shard-text", argv, settings, settings.output, shard)


def shard_images(argv: Sequence[str]) -> int:
    """`trp-scale shard-images`."""
    from trp_scale.sharding.images.settings import ShardImagesConfig

    first = ("inputs", "output", "embedded", "modality", "split", "short_side", "quality", "processes", "executor")
    settings = read(ShardImagesConfig, argv, prog="trp-scale shard-images", first=first)
    from trp_scale.sharding.images.shard import shard_images as shard

    return _run_or_submit("shard-images", argv, settings, settings.output, shard)


def pseudo_label(argv: Sequence[str]) -> int:
    """`trp-scale pseudo-label`."""
    from trp_scale.sharding.pseudo_labels.directory import PseudoLabelConfig

    first = ("data", "device", "batch", "executor", "shard_index", "num_shards")
    settings = read(PseudoLabelConfig, argv, prog="trp-scale pseudo-label", first=first)
    from trp_scale.sharding.pseudo_labels.label import pseudo_label as label

    return _run_or_submit("pseudo-label", argv, settings, settings.data, label)


def _run_or_submit(
    command: str, argv: Sequence[str], settings: Any, directory: Path, work: Callable[[Any], object]
) -> int:
    """Check the settings, then run the work here or submit the command to SLURM."""
    _log_progress()
    settings.check()
    if settings.executor == "slurm-array":
        from trp_scale.sharding.clusters import submit_array

        submit_array(command, argv, settings, directory)
    elif settings.sbatch:
        raise RefusedError(f"--sbatch {settings.sbatch!r} needs --executor slurm-array")
    else:
        work(settings)
    return 0


def index(argv: Sequence[str]) -> int:
    """`trp-scale index`."""
    from trp_scale.sharding.images.settings import IndexConfig

    first = ("tars", "output", "label", "image", "split", "processes", "executor")
    settings = read(IndexConfig, argv, prog="trp-scale index", first=first)
    from trp_scale.data.index import read_json
    from trp_scale.sharding.images.index_tars import index_settings, index_tars, is_indexed
    from trp_scale.sharding.parts import write_dataset_index

    dataset = Path(settings.tars)
    if settings.output is None and is_indexed(dataset):
        settings.refuse_changes(f"{dataset} keeps the settings it was made with; to change them give the tars")
        settings = replace(settings, output=dataset, **index_settings(dataset))
    elif settings.output is None and (dataset / "dataset.json").exists():
        settings.refuse_changes(f"{dataset} is a data set that was sharded here")
        for path in write_dataset_index(dataset, read_json(dataset / "dataset.json")):
            print(f"{path}: {path.stat().st_size} bytes")
        return 0
    elif settings.output is None and not dataset.is_dir():
        raise RefusedError(f"{dataset}: not a folder of tars; give --output DIR for the data set")
    return _run_or_submit("index", argv, settings, settings.directory, index_tars)


@dataclass(kw_only=True)
class MergeArguments(TakesModules):
    """Merge the parts of a data set that were made with --shard_index and --num_shards: check that all exist, and write
    dataset.json. The result is byte for byte the data set of a single run."""

    dataset: tyro.conf.Positional[Path]
    """Directory of the data set: --output of the parts, or --data of labels."""
    max_skipped: float | None = None
    """Maximum share of skipped documents or images; default: the setting of the parts."""


def merge(argv: Sequence[str]) -> int:
    """`trp-scale merge`."""
    arguments = read(MergeArguments, argv, prog="trp-scale merge")
    from trp_scale.sharding.verify import merge as join

    _log_progress()
    join(arguments.dataset, arguments.max_skipped)
    return 0


@dataclass(kw_only=True)
class InspectArguments(TakesModules):
    """Show rows of a shard: text with part-of-speech groups in colour, or images with their classes and maps."""

    shard: tyro.conf.Positional[Path]
    """Tar of a data set, with its index in the same folder; or a data set's directory, for its first shard."""
    rows: int = 5
    """Rows to show."""
    block: str = ""
    """Key of the first block (text) or image to show; empty = the first."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Images: PNG file for their contact sheet."""


def inspect(argv: Sequence[str]) -> int:
    """`trp-scale inspect`."""
    arguments = read(InspectArguments, argv, prog="trp-scale inspect")
    from trp_scale.data.index import index_path, read_index
    from trp_scale.errors import DataError
    from trp_scale.sharding.display import is_image_shard
    from trp_scale.sharding.parts import first_shard, refuse_unfinished

    shard = arguments.shard.absolute()
    if not index_path(shard).is_file():
        shard = first_shard(shard)
    block, blocks = arguments.block or None, read_index(shard).blocks
    of_images = is_image_shard(blocks)
    if of_images or not blocks:
        refuse_unfinished(shard.parent.parent)
    if not blocks:
        raise DataError(f"{shard}: empty shard")
    if of_images:
        _show_images(shard, arguments.rows, block, arguments.output)
    elif arguments.output is not None:
        raise RefusedError(f"--output {arguments.output} is for images, {shard} contains text; leave it out")
    else:
        _show_text(shard, arguments.rows, block)
    return 0


def _show_text(shard: Path, rows: int, block: str | None) -> None:
    from rich.console import Console

    from trp_scale.sharding.display import legend, row_texts

    console = Console()
    console.print(legend())
    for name, text in row_texts(shard, rows, block):
        console.rule(name, align="left")
        console.print(text)


def _show_images(shard: Path, rows: int, block: str | None, output: Path | None) -> None:
    """Print a line for each image, and write their contact sheet."""
    from rich.console import Console

    from trp_scale.sharding.display import contact_sheet, stored_images

    console = Console()
    images = list(stored_images(shard, rows, block))
    for image in images:
        console.rule(image.key, align="left")
        console.print(image.describe(), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        contact_sheet(images).save(output, "PNG")
        console.print(f"{len(images)} images: {output}", markup=False, highlight=False, soft_wrap=True)


@dataclass(kw_only=True)
class VerifyArguments(TakesModules):
    """Check every index, size, checksum and array of a data set. Names the first damaged byte range and exits with
    status 1; status 2 if there is no data set."""

    dataset: tyro.conf.Positional[Path]
    """Directory with dataset.json."""


def verify(argv: Sequence[str]) -> int:
    """`trp-scale verify`."""
    dataset = read(VerifyArguments, argv, prog="trp-scale verify").dataset
    from trp_scale.data.raw_files import require_dataset
    from trp_scale.errors import DataError
    from trp_scale.sharding.verify import verify_dataset

    require_dataset(dataset)
    try:
        verified = verify_dataset(dataset)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{dataset}: {verified.shards} shards, {verified.blocks} blocks, {verified.rows} rows, {verified.bytes} bytes "
        "are intact"
    )
    return 0


def _log_progress() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
