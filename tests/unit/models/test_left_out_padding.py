"""Padding is not computed, with equal results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.models.masked_rows import LENGTH, masked_rows, small_model
from trp_scale.core.batch import Batch
from trp_scale.data.text.dataset import GROUPS
from trp_scale.pretraining.pos_bert.batch import KEPT_LENGTHS, kept_positions
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

ROWS = 11


def keeping(batch: Batch, places: Tensor | None = None) -> Batch:
    """The batch with the places that its builder keeps, or with these."""
    found = torch.from_numpy(kept_positions(batch["attention_mask"].numpy())) if places is None else places
    return replace(batch, fields={**batch.fields, "kept": found})


def task_sums(model: BertForMaskedPositions, batch: Batch) -> Tensor:
    return PosMaskedLanguageModelling(PosBertObjectiveConfig(), GROUPS, hidden_size=16)(model, batch).sums


def losses_and_gradients(model: BertForMaskedPositions, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    sums = task_sums(model, batch)
    # Each task with a weight of its own, so that gradients cannot agree by a sum.
    (sums @ torch.linspace(0.5, 2.0, len(sums), dtype=sums.dtype)).backward()
    return [sums.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("places", ["real", "of the builder", "all"])
def test_losses_and_gradients_are_those_of_padded_rows(places: str) -> None:
    model, batch = small_model().double().train(), masked_rows(ROWS)
    real = batch["attention_mask"].flatten()
    kept = {"real": real.nonzero().flatten(), "of the builder": None, "all": torch.arange(len(real))}[places]
    ours, padded = losses_and_gradients(model, keeping(batch, kept)), losses_and_gradients(model, batch)
    assert len(ours) == len(padded) == 1 + len(list(model.parameters()))
    for one, other in zip(ours, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_only_kept_positions_are_computed() -> None:
    model, batch = small_model(), keeping(masked_rows(ROWS))
    kept, seen = len(batch["kept"]), []
    assert int(batch["attention_mask"].sum()) <= kept < ROWS * LENGTH
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear | torch.nn.LayerNorm) and name.startswith("bert.e"):
            part.register_forward_hook(lambda part, given, found, name=name: seen.append((name, found.shape[:-1])))
    task_sums(model, batch)
    last, read = "encoder.layer.1", (ROWS, 1 + batch["masked_positions"].shape[1])
    for name, shape in seen:
        chosen = last in name and not name.endswith((".key", ".value"))
        assert shape == (read if chosen else (1, kept) if "embeddings" in name else (kept,)), name
    assert len(seen) == 1 + 2 * (4 + 2 + 2)


@pytest.mark.parametrize(("rows", "length"), [(1, 8), (3, 24), (32, 128), (5, 77)])
def test_lists_have_few_lengths(rows: int, length: int) -> None:
    """Lists contain each real position, in order, and the first padding positions up to the next 64th."""
    generator, lengths = np.random.default_rng(0), set()
    for _ in range(200):
        real = np.arange(length) < generator.integers(3, length + 1, (rows, 1))
        kept, flat = kept_positions(real), real.ravel()
        part = -(-rows * length // KEPT_LENGTHS)
        assert (np.diff(kept) > 0).all() and flat[kept].sum() == flat.sum()
        assert flat.sum() <= len(kept) < flat.sum() + part and (len(kept) % part == 0 or len(kept) == rows * length)
        added = kept[~flat[kept]]
        assert (added == np.flatnonzero(~flat)[: len(added)]).all()
        lengths.add(len(kept))
    assert len(lengths) <= KEPT_LENGTHS + 1
