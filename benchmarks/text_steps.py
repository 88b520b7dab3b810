"""Random sequences with masked words, and a BERT over them, for the benchmarks."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.steps import Workload
from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.data.text.dataset import GROUPS
from trp_scale.pretraining.pos_bert.batch import kept_places
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

VOCABULARY, LENGTH, MASKED = 30522, 128, 19


def small_bert(dropout: float = 0.1) -> TextModelConfig:
    """4 layers x 256."""
    return TextModelConfig(
        layers=4, hidden_size=256, heads=4, intermediate_size=1024, max_positions=LENGTH, dropout=dropout
    )


def random_batch(rows: int, length: int = LENGTH, masked: int = MASKED) -> Batch:
    """Full-length rows of `length` tokens with `masked` masked positions each, uneven groups."""
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([4.0, 6.0, 1.5, 1.0, 0.5, 0.5, 1.0, 0.3, 0.1, 2.0])
    positions = torch.stack([torch.randperm(length, generator=generator)[:masked].sort().values for _ in range(rows)])
    fields = {
        "tokens": torch.randint(0, VOCABULARY, (rows, length), generator=generator),
        "token_types": (torch.arange(length) >= length // 2).long().expand(rows, -1).contiguous(),
        "masked_positions": positions,
        "labels": torch.randint(0, VOCABULARY, (rows, masked), generator=generator),
        "label_groups": torch.multinomial(share.expand(rows, -1), masked, replacement=True, generator=generator),
        "label_weights": torch.ones(rows, masked),
        "next_sentence": torch.randint(0, 2, (rows,), generator=generator),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


SHORTEST = 0.5
"""Of rows that end early, over the length: the mean of lengths that are spread evenly from here is three quarters, as
few as data/embedded has at 128 places (77.9 %)."""


def ending_early(batch: Batch) -> Batch:
    """The same rows, each with its end somewhere in its second half: masked words behind it no longer count."""
    rows, length = batch["tokens"].shape
    generator = torch.Generator().manual_seed(1)
    ends = torch.randint(int(SHORTEST * length), length + 1, (rows, 1), generator=generator)
    attended = torch.arange(length) < ends
    fields = {
        **batch.fields,
        "attention_mask": attended,
        "kept": torch.from_numpy(kept_places(attended.numpy())),
        "label_weights": batch["label_weights"] * attended.gather(1, batch["masked_positions"]),
    }
    return replace(batch, fields=fields)


def without_list(batch: Batch) -> Batch:
    return replace(batch, fields={name: value for name, value in batch.fields.items() if name != "kept"})


def text_workload(config: PosBertConfig, length: int = LENGTH, masked: int = MASKED) -> Workload:
    """A BERT of these settings over a global batch of random sequences."""
    return Workload(
        config=config,
        module=BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=config.training.seed),
        objective=PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size),
        rows=random_batch(config.batch.global_size, length, masked),
    )
