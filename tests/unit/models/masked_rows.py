"""A tiny BERT and random rows whose masked positions are spread unevenly over the part-of-speech groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.unit.models.small_images import randomise_weights
from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.data.text.dataset import GROUPS
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions

VOCABULARY = 90
LENGTH = 12
MASKED = 5


def small_sizes(dropout: float = 0.0, layers: int = 2) -> TextModelConfig:
    """Two layers of 16."""
    return TextModelConfig(
        layers=layers, hidden_size=16, heads=2, intermediate_size=32, max_positions=LENGTH + 4, dropout=dropout
    )


def small_model(seed: int = 0, dropout: float = 0.0) -> BertForMaskedPositions:
    """Every weight is drawn anew and large enough that biases, norms and logits all matter; not in training mode."""
    model = BertForMaskedPositions(small_sizes(dropout), vocab_size=VOCABULARY, seed=seed)
    randomise_weights(model, seed=100 + seed)
    return model.eval()


def masked_rows(rows: int, *, seed: int = 0, without: tuple[int, ...] = ()) -> Batch:
    """Rows of different lengths with 1 to MASKED masked positions each.

    Args:
        rows: R.
        seed: of all draws.
        without: groups that are not there.
    """
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([5.0, 8.0, 2.0, 1.5, 0.7, 0.7, 1.0, 0.4, 0.3, 2.0])
    assert len(share) == len(GROUPS)
    share[list(without)] = 0.0
    lengths = torch.randint(MASKED + 2, LENGTH + 1, (rows, 1), generator=generator)
    masked = torch.randint(1, MASKED + 1, (rows, 1), generator=generator)
    used = torch.arange(MASKED) < masked  # [R, M]
    drawn = torch.stack([torch.randperm(int(length), generator=generator)[:MASKED] for length in lengths])
    groups = torch.multinomial(share, rows * MASKED, replacement=True, generator=generator).reshape(rows, MASKED)
    fields = {
        "tokens": torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator),
        "token_types": (torch.arange(LENGTH) > lengths // 2).long(),
        "attention_mask": torch.arange(LENGTH) < lengths,
        # Slots that are not used hold position 0, label 0 and group 0, as from the loader.
        "masked_positions": torch.where(used, drawn, 0),
        "labels": torch.where(used, torch.randint(0, VOCABULARY, (rows, MASKED), generator=generator), 0),
        "label_groups": torch.where(used, groups, 0),
        "label_weights": used.float(),
        "next_sentence": torch.randint(0, 2, (rows,), generator=generator),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start to stop of a batch."""
    fields = {name: value[start:stop] for name, value in batch.fields.items()}
    return Batch(fields=fields, keys=batch.keys[start:stop], start=start)


def changed(batch: Batch, **fields: Tensor) -> Batch:
    """The batch with some of its fields replaced."""
    assert not set(fields) - set(batch.fields)
    return replace(batch, fields={**batch.fields, **fields})


def without(batch: Batch, name: str) -> Batch:
    """The batch without one of its fields."""
    assert name in batch.fields
    return replace(batch, fields={field: value for field, value in batch.fields.items() if field != name})


def slots(batch: Batch) -> list[tuple[int, int]]:
    """(row, slot) of every masked position that is used."""
    return [(int(r), int(m)) for r, m in batch["label_weights"].nonzero()]
