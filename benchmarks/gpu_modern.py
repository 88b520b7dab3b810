"""Section `modern` of benchmarks/gpu.py: ModernBERT's steps on packed rows, on padded rows, and transformers' steps.

All sides have the same number of rows. Padded rows have one document each, packed rows several. Documents of mixed
length have log-normal lengths (median 256, at most a row) and random tokens. "books" are two data sets of the same text
in --data, which this section does not make. Run in --data:

    trp-scale shard-text --inputs train.jsonl --length 128 --output books
    trp-scale shard-text --inputs train.jsonl --length 128 --output books_packed --pack --tokenizer books/tokenizer

Rates are of tokens that count: of documents, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import ModernBertForMaskedLM

from benchmarks.gpu_setting import Figures, Item, Setting, use_of_peak
from benchmarks.rounds import alternate, pair_ratio
from benchmarks.step_time import bert_inputs, peer_step
from benchmarks.steps import Workload, whole_step
from benchmarks.workloads import VOCABULARY, random_batch, text_config
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import Addresses
from trp_scale.data.text.dataset import GROUPS
from trp_scale.pretraining.base import DataFacts, find_upstream
from trp_scale.pretraining.pos_bert.batch import kept_positions, open_rows
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling
from trp_scale.sharding.text.rows import SegmentPacker

POSITIONS = 65_536
"""Positions of a step on a GPU."""
MEDIAN, SPREAD = 256, 1.0
"""Median length of a document, and standard deviation of its logarithm."""
ROUNDS = 9
"""Measured steps of each side."""
MODERN_INPUTS = ("input_ids", "attention_mask", "labels")
SPECIAL = {"pad": 0, "cls": 2, "sep": 3}


def modern_config(setting: Setting, rows: int, length: int) -> PosBertConfig:
    """Return the settings of pos_modern_base, small: pos_modern_tiny, without end."""
    recipe = load_recipe("pos_modern_tiny" if setting.small else "pos_modern_base")
    assert isinstance(recipe, PosBertConfig)
    model = replace(recipe.model, max_positions=length)
    config = text_config(model, rows=rows, precision="bf16" if setting.on_gpu else "fp32")
    config.objective, config.masking = recipe.objective, recipe.masking
    return config


def document_lengths(rows: int, length: int) -> list[int]:
    """Return lengths of documents with [CLS] and [SEP] that more than fill the rows."""
    generator = np.random.default_rng(0)
    drawn = np.exp(generator.normal(np.log(min(MEDIAN, length / 4)), SPREAD, size=rows * max(16, length // 16)))
    return [int(pieces) for pieces in np.clip(drawn, 4, length)]


def mixed_rows(rows: int, length: int, config: PosBertConfig) -> dict[str, Batch]:
    """Return packed and padded rows of documents of mixed length."""
    lengths, random = document_lengths(rows, length), random_batch(rows, length, round(config.masking.ratio * length))
    segments = max(8, length // 16)
    packer = SegmentPacker(length, segments)
    for pieces in lengths:
        packer.add_sentence(pieces - 2)
        packer.end_document()
    ends = torch.zeros(rows, segments, dtype=torch.int64)
    for row, stored in enumerate(packer.ends[:rows]):
        ends[row, : len(stored)], ends[row, len(stored) :] = torch.tensor(stored), stored[-1]
    mask = torch.arange(length) < torch.tensor(lengths[:rows])[:, None]
    kept = torch.from_numpy(kept_positions(mask.numpy()))
    return {
        "packed": replace(random, fields={**random.fields, "segment_ends": ends}),
        "padded": replace(random, fields={**random.fields, "attention_mask": mask, "kept": kept}),
    }


def stored_rows(setting: Setting, rows: int, config: PosBertConfig) -> dict[str, Batch]:
    """Return the first packed and padded rows of the books."""
    batches, line = {}, np.arange(rows)
    for name, directory in (("packed", "books_packed"), ("padded", "books")):
        opened = open_rows(config, parse_paths(str(setting.data / directory)))
        nothing = np.zeros(rows, dtype=np.int64)
        addresses = Addresses(
            member=nothing, block=nothing, row=line, epoch=nothing, keys=line, present=np.ones(rows, dtype=np.bool_)
        )
        batches[name] = opened.builder.build(addresses, 0)
    return batches


def counted_tokens(batch: Batch) -> int:
    """Return the number of tokens that are not padding."""
    if "segment_ends" in batch.fields:
        return int(batch["segment_ends"][:, -1].sum())
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch.fields else batch["tokens"].numel()


def measure(setting: Setting, rows: int, length: int, read: Callable[[PosBertConfig], dict[str, Batch]]) -> Figures:
    """Return the rates of our steps on packed and padded rows, and of transformers' model on the padded ones."""
    config = modern_config(setting, rows, length)
    batches = read(config)
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    steps: dict[str, Callable[[], object]] = {}
    for name, batch in batches.items():
        model = ModernBertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0)
        work = Workload(config=config, module=model, objective=objective, rows=batch)
        steps[name] = whole_step(work, setting.device)
    peer = ModernBertForMaskedPositions.transformers_model(config.model, VOCABULARY, SPECIAL)
    assert isinstance(peer, ModernBertForMaskedLM)
    inputs = {name: value for name, value in bert_inputs(batches["padded"]).items() if name in MODERN_INPUTS}
    steps["transformers"] = peer_step(peer.train(), inputs, config, setting.device)
    measured = alternate(steps, rounds=ROUNDS)
    tokens = {name: counted_tokens(batch) for name, batch in batches.items()}
    tokens["transformers"] = tokens["padded"]
    figures: Figures = {f"{name}_tokens_per_s": tokens[name] / side.wall for name, side in measured.items()}
    for name, batch in batches.items():
        figures[f"{name}_padding"] = 1 - tokens[name] / batch["tokens"].numel()
    for name in ("padded", "transformers"):
        ratio = pair_ratio(measured[name].walls, measured["packed"].walls)
        share = tokens["packed"] / tokens[name]
        figures[f"packed_over_{name}"] = [share * value for value in (ratio.median, ratio.lower, ratio.upper)]
    outline = find_upstream(config).outline(config, DataFacts(length=length))
    flops = replace(outline, rows=lambda count: batches["packed"]).step_flops(1)
    return figures | use_of_peak(setting, measured["packed"].wall, packed_share_of_peak=flops)


def modern(setting: Setting) -> Iterator[Item]:
    """Packed rows of mixed length, and of the books."""
    for length in (64, 256) if setting.small else (1024, 8192):
        rows = 4 if setting.small else POSITIONS // length
        yield Item(
            name=f"documents of mixed length, {length:,} tokens",
            measure=partial(measure, setting, rows, length, partial(mixed_rows, rows, length)),
            seconds=60,
            timed=True,
        )
    missing = [name for name in ("books", "books_packed") if not (setting.data / name / "dataset.json").is_file()]
    rows = 32 if setting.small else POSITIONS // 128
    yield Item(
        name="books, 128 tokens",
        measure=partial(measure, setting, rows, 128, partial(stored_rows, setting, rows)),
        seconds=30,
        lacking=f"{setting.data} has no data set {missing[0]}; the commands are in gpu_modern.py" if missing else "",
        timed=True,
    )
