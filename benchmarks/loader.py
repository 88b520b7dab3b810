"""Finished training sequences of the loader per CPU-second, and the share of each stage.

    python benchmarks/loader.py [--length 128] [--data DATASET] [--micro-sizes 32 256]

Finished means: addressed, read, paired, masked, tagged, and a Batch of torch tensors. The rate is rows over the CPU
time of this process (so other work on the machine does not count), median over rounds in which the sizes take turns.
Without --data it makes 131,072 random rows in blocks of 4,096, which stay in the page cache: the figure is the
processor's part, not the disk's. The breakdown comes from profiled rounds beside the measured ones.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate
from trp_scale.data import plan
from trp_scale.data.index import write_json
from trp_scale.data.text import dataset as text_rows
from trp_scale.data.text.dataset import GROUPS, WORD_START
from trp_scale.data.train_source import TrainSource
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert import batch as text_batch
from trp_scale.pretraining.pos_bert import masking
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.sharding.job.parts import new_tar, report_path

STAGES = {
    "address (order, shuffles)": (plan.__file__, "locate"),
    "read rows from the maps": (text_rows.__file__, "read"),
    "draw pairs": (text_batch.__file__, "draw_pairs"),
    "lay out the sequences": (text_batch.__file__, "_lay_out"),
    "mask": (masking.__file__, "mask"),
    "tensors": (text_batch.__file__, "_fields"),
}
"""File and function of each stage; none calls another. What is left is Python between them and torch's DataLoader."""

BLOCKS, BLOCK_ROWS, VOCABULARY = 32, 4096, 30522


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    data: Path | None = None
    """A data set made by trp-scale shard-text; none = random rows."""
    length: int = 128
    """Pieces of a finished sequence, for random rows."""
    micro_sizes: tuple[int, ...] = (32, 256)
    """Rows per micro-batch."""
    rounds: int = 9
    """Rounds per size."""
    rows: int = 8192
    """Rows per round."""


def make_block(length: int, generator: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    """Random rows, nine in ten of them full, in sentences of 8 to 40 pieces and words of 1.3 pieces."""
    width = length - 3
    pieces = np.where(generator.random(BLOCK_ROWS) < 0.9, width, generator.integers(width // 4, width, BLOCK_ROWS))
    inside = np.arange(width) < pieces[:, None]  # [R, P]
    tokens = np.where(inside, generator.integers(1000, VOCABULARY, inside.shape), 0).astype(np.uint16)
    starts = generator.random(inside.shape) < 0.77
    starts[:, 0] = True
    tags = np.where(inside, generator.integers(0, len(GROUPS), inside.shape) | (starts * WORD_START), 0).astype(
        np.uint8
    )
    sentences = generator.integers(8, 41, (BLOCK_ROWS, width // 8)).cumsum(axis=1)
    ends = np.minimum(sentences, pieces[:, None]).astype(np.uint16)
    ends[:, -1] = pieces
    return {"tokens.npy": tokens, "tags.npy": tags, "sentences.npy": ends}


def make_dataset(directory: Path, length: int) -> Path:
    """Write a data set of random rows."""
    (directory / "shards").mkdir(parents=True)
    (directory / "progress").mkdir()
    generator = np.random.default_rng(0)
    tar = directory / "shards" / "text-000000.tar"
    with new_tar(tar, report_path(directory, tar.stem)) as shard:
        for number in range(BLOCKS):
            members = {}
            for suffix, array in make_block(length, generator).items():
                stream = io.BytesIO()
                np.save(stream, array, allow_pickle=False)
                members[suffix] = stream.getvalue()
            shard.writer.add(f"text-{number:06d}", BLOCK_ROWS, members)
    special = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
    document = {
        "format": 1,
        "kind": "text",
        "length": length,
        "row_length": length - 3,
        "vocab_size": VOCABULARY,
        "special_tokens": special,
        "special_token_ids": list(special.values()),
        "token_dtype": "uint16",
        "groups": list(GROUPS),
        "shards": [tar.name],
    }
    write_json(directory / "dataset.json", document)
    return directory


def breakdown(train: TrainSource, stages: Mapping[str, tuple[str, str]], rest: str) -> dict[str, float]:
    """Return the share of a profiled window's time by stage.

    Args:
        stages: file and function of each; none may call another.
        rest: name of the remaining time.
    """
    profile = cProfile.Profile()
    profile.runcall(train.next_window)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    seconds: dict[tuple[str, str], float] = {}
    for (file, _, name), (_, _, _, cumulated, _) in stats.items():
        # A plan's `locate` calls that of its orders, in the same file: the outer call counts for both.
        seconds[file, name] = max(cumulated, seconds.get((file, name), 0.0))
    shares = {stage: seconds.get(function, 0.0) / total for stage, function in stages.items()}
    return {**shares, rest: 1.0 - sum(shares.values())}


def open_train(options: Options, directory: Path, micro_size: int) -> TrainSource:
    """The training rows in this process; one window is one round."""
    config = PosBertConfig()
    config.data.path, config.data.workers, config.data.validation_fraction = str(directory), 0, 0.0
    config.batch.micro_size = micro_size
    config.batch.global_size = -(-options.rows // micro_size) * micro_size
    config.model.max_positions = 1 << 16
    return open_sources(config, rank=0, world=1).train


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        data = options.data or make_dataset(Path(directory) / "random", options.length)
        trains = {micro: open_train(options, data, micro) for micro in options.micro_sizes}
        windows = {str(micro): train.next_window for micro, train in trains.items()}
        measured = alternate(windows, rounds=options.rounds, warmup=1)  # the first round maps the files
        table = Table("", *(f"micro-batch {micro}" for micro in trains), title="Loader, one process")
        rows = {micro: -(-options.rows // micro) * micro for micro in trains}
        rates = {micro: [rows[micro] / seconds for seconds in measured[str(micro)].cpus] for micro in trains}
        medians = (f"{statistics.median(values):,.0f}" for values in rates.values())
        table.add_row("finished sequences per CPU-second", *medians)
        spread = (f"{min(values):,.0f} - {max(values):,.0f}" for values in rates.values())
        table.add_row("slowest and fastest round", *spread, end_section=True)
        shares = [breakdown(train, STAGES, "Python between, DataLoader") for train in trains.values()]
        for stage in shares[0]:
            table.add_row(stage, *(f"{share[stage]:.0%}" for share in shares))
        Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
