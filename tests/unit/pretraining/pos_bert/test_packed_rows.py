"""Packed rows: each segment gets the losses and gradients that it gets alone, in this model and in transformers'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runs import flags, pretrain_here
from tests.unit.pretraining.pos_bert.test_modern import VOCABULARY, our_loss, pair, wide_rotation
from tests.unit.pretraining.pos_bert.test_modern import rows as padded_rows
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import Addresses
from trp_scale.data.text.tokenizer import open_tokenizer
from trp_scale.models import attention
from trp_scale.models.attention import PackedSegments
from trp_scale.pretraining.pos_bert import modern
from trp_scale.pretraining.pos_bert.batch import open_rows
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions

ENDS = torch.tensor([[5, 24, 24, 24], [3, 17, 20, 22]])
"""Of two rows of 24; the first has two segments, one longer than the window, the second four and padding."""
LENGTH = 24


def segments() -> list[tuple[int, int, int]]:
    """Row, start and end of each segment."""
    return [
        (row, start, end)
        for row, ends in enumerate(ENDS.tolist())
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > start
    ]


def batch() -> dict[str, Tensor]:
    """Two masked positions of each segment, in slots that the rows share."""
    generator = torch.Generator().manual_seed(4)
    masked = torch.zeros(2, 8, dtype=torch.int64)
    used = torch.zeros(2, 8)
    for row in range(2):
        places = [start + offset for which, start, end in segments() if which == row for offset in (1, end - start - 1)]
        masked[row, : len(places)] = torch.tensor(places)
        used[row, : len(places)] = 1.0
    return {
        "tokens": torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator),
        "masked": masked,
        "used": used,
        "labels": torch.randint(4, VOCABULARY, (2, 8), generator=generator),
    }


def packed_losses(model: ModernBertForMaskedPositions, rows: dict[str, Tensor]) -> Tensor:
    """Losses of the used slots, row by row."""
    output = model(rows["tokens"], rows["tokens"], None, rows["masked"], segment_ends=ENDS)
    losses = F.cross_entropy(output.prediction_logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
    return losses[rows["used"].flatten() > 0]


def alone(rows: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, masked positions and labels of each segment."""
    parts = []
    for row, start, end in segments():
        inside = (rows["masked"][row] >= start) & (rows["masked"][row] < end) & (rows["used"][row] > 0)
        masked = rows["masked"][row][inside] - start
        parts.append((rows["tokens"][row, start:end][None], masked[None], rows["labels"][row][inside]))
    return parts


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
@pytest.mark.parametrize("layers", [4, 2])
def test_losses_and_gradients_equal_those_of_transformers_on_each_segment(
    monkeypatch: pytest.MonkeyPatch, layers: int, dtype: torch.dtype, close: float
) -> None:
    ours, theirs = pair(dtype, layers)
    rows = batch()
    losses = packed_losses(ours, rows)
    losses.sum().backward()
    expected = []
    with wide_rotation(monkeypatch):
        for tokens, masked, labels in alone(rows):
            logits = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, masked[0]]
            expected.append(F.cross_entropy(logits, labels, reduction="none"))
        torch.cat(expected).sum().backward()
    torch.testing.assert_close(losses, torch.cat(expected), rtol=close, atol=0)
    others = gradients(theirs)
    for name, gradient in gradients(ours).items():
        end = VOCABULARY if name in ours.padded_parameters else None
        assert float((gradient[:end] - others[name]).norm()) <= 10 * close * float(others[name].norm()), name


@pytest.mark.parametrize("layers", [4, 2])
def test_losses_equal_those_of_the_segments_one_by_one(layers: int) -> None:
    ours, _ = pair(torch.float32, layers)
    rows = batch()
    expected = []
    for tokens, masked, labels in alone(rows):
        logits = ours(tokens, tokens, None, masked).prediction_logits[0]
        expected.append(F.cross_entropy(logits, labels, reduction="none"))
    torch.testing.assert_close(packed_losses(ours, rows), torch.cat(expected), rtol=1e-6, atol=1e-6)


def segment_by_segment(
    queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, other: Tensor, *lengths: int, window_size: Any
) -> Tensor:
    """The kernel's definition, as a loop: [R * L, H, D / H]."""
    assert bounds is other and bounds.dtype == torch.int32
    parts = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        distances = (torch.arange(end - start)[:, None] - torch.arange(end - start)).abs()
        near = distances <= window_size[0] if window_size[0] >= 0 else torch.ones_like(distances, dtype=torch.bool)
        inputs = (part[start:end].transpose(0, 1) for part in (queries, keys, values))
        if end > start:
            parts.append(F.scaled_dot_product_attention(*inputs, attn_mask=near).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("layers", [4, 2])
def test_the_kernel_of_a_gpu_gets_bounds_and_window_of_the_segments(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    ours, _ = pair(torch.float64, layers)
    rows = batch()
    expected = packed_losses(ours, rows)
    monkeypatch.setattr(modern, "has_segment_kernel", lambda hidden: True)
    monkeypatch.setattr(attention, "varlen_attn", segment_by_segment)
    torch.testing.assert_close(packed_losses(ours, rows), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_the_kernel_takes_rows_that_are_not_packed(monkeypatch: pytest.MonkeyPatch, padded: bool, listed: bool) -> None:
    ours, _ = pair(torch.float64)
    batch = padded_rows(padded=padded)
    expected = our_loss(ours, batch)
    monkeypatch.setattr(modern, "has_segment_kernel", lambda hidden: True)
    monkeypatch.setattr(attention, "varlen_attn", segment_by_segment)
    assert float(our_loss(ours, batch, listed=listed and padded).detach()) == pytest.approx(
        float(expected.detach()), rel=1e-12
    )


@pytest.mark.parametrize("packed", [True, False])
def test_flops_have_the_pairs_of_windows_and_segments(packed: bool) -> None:
    """By the masks themselves; padding is a segment of the mask, and no work of the model."""
    ours, _ = pair(torch.float32)
    rows = batch()
    ends = ENDS if packed else torch.full((2, 1), LENGTH)
    text = torch.arange(LENGTH) < ends[:, -1:]  # [R, L]
    inputs = ours.model.attention_inputs(rows["tokens"], None, ends, fused=False)
    missing = {}
    for is_global, kind in inputs.items():
        missing[is_global] = 2 * LENGTH**2 - int((kind.mask[:, 0] & text[:, None] & text[:, :, None]).sum())
    # Layers 0 and 3 are global, and the last one has 1 + 8 queries.
    expected = 4 * 16 * (missing[True] * (1 + 9 / LENGTH) + 2 * missing[False])
    fields = {"tokens": rows["tokens"], "masked_positions": rows["masked"]} | ({"segment_ends": ENDS} if packed else {})
    spared = ours.spared_flops(ours.settings, Batch(fields=fields, keys=torch.arange(2), start=0))
    assert spared == pytest.approx(expected, rel=1e-12)


def test_segments_have_starts_and_bounds() -> None:
    packed = PackedSegments.from_ends(torch.tensor([[2, 5, 5], [1, 2, 6]]), 6)
    assert packed.starts.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 2, 2, 2]]
    assert packed.positions().tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]
    assert packed.bounds.tolist() == [0, 2, 5, 5, 6, 7, 8, 12, 12]


def test_a_cpu_has_no_kernel() -> None:
    assert attention.HAS_WINDOWS
    assert not attention.has_segment_kernel(torch.zeros(1, dtype=torch.bfloat16))


PACKED = {
    "model__kind": "modern",
    "model__dropout": 0.0,
    "model__local_attention": 8,
    "objective__next_sentence": "off",
    "checkpoint__every": 3,
}


def build_batch(dataset: Path, run: Path, count: int = 12) -> Batch:
    """The first rows of the first block; the fourth is absent."""
    config = parse(flags(dataset, run, **PACKED)).config
    rows = open_rows(config, parse_paths(str(dataset)))  # type: ignore[arg-type]
    addresses = Addresses(
        keys=np.arange(count),
        member=np.zeros(count, dtype=np.int64),
        block=np.zeros(count, dtype=np.int64),
        row=np.arange(count),
        epoch=np.zeros(count, dtype=np.int64),
        present=np.arange(count) != 3,
    )
    return rows.builder.build(addresses, 0)


def test_a_block_with_more_segments_than_stated_is_unreadable(packed_dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(packed_dataset, tmp_path / "data")
    path = tmp_path / "data" / "dataset.json"
    path.write_text(path.read_text().replace('"segments_per_row": 8', '"segments_per_row": 1'))
    batch = build_batch(tmp_path / "data", tmp_path / "run")
    assert batch["segment_ends"].shape == (12, 1) and not batch["row_weights"].any()
    (reason,) = batch.reasons.values()
    assert "not at most 1" in reason


def test_a_batch_masks_text_only_and_has_the_ends_of_its_segments(packed_dataset: Path, tmp_path: Path) -> None:
    count = 12
    batch = build_batch(packed_dataset, tmp_path / "run", count)
    assert "attention_mask" not in batch.fields and "kept" not in batch.fields
    tokens, ends = batch["tokens"].clone(), batch["segment_ends"]
    assert ends.shape == (count, 8) and ends[3].tolist() == [0] * 8
    line = torch.arange(count)[:, None].expand_as(batch["masked_positions"])
    used = batch["label_weights"] > 0
    tokens[line[used], batch["masked_positions"][used]] = batch["labels"][used]  # without masks
    special = open_tokenizer(packed_dataset / "tokenizer", flag="").all_special_ids
    assert not set(batch["labels"][used].tolist()) & (set(special) - {1})  # an unknown piece is text
    starts = PackedSegments.from_ends(ends, 64).starts
    for row in (0, 1, 2, 11):
        for start in set(starts[row, : ends[row, -1]].tolist()):
            assert tokens[row, start] == 2, (row, start)  # [CLS]
        for end in set(ends[row].tolist()):
            assert tokens[row, end - 1] == 3, (row, end)  # [SEP]
    assert tokens[3].tolist() == [0] * 64 and batch["row_weights"][3] == 0


def test_a_run_goes_on_exactly_and_its_sources_are_tasks(packed_dataset: Path, tmp_path: Path) -> None:
    """Two names of one data set as sources; another size of micro-batches only rounds."""
    path = f"a:0.7={packed_dataset},b:0.3={packed_dataset}"
    changes = {**PACKED, "data__path": path, "objective__tasks": "sources", "optimizer__schedule": "constant"}
    for name, steps in (("whole", 6), ("halves", 3), ("halves", 6)):
        pretrain_here(flags(packed_dataset, tmp_path / name, **changes, training__steps=steps))
    pretrain_here(flags(packed_dataset, tmp_path / "large", **changes, training__steps=6, batch__micro_size=8))
    whole, halves, large = (read_full_state(find_checkpoint(tmp_path / name)) for name in ("whole", "halves", "large"))
    for name, weight in whole.items():
        assert torch.equal(weight, halves[name]), name
        torch.testing.assert_close(weight, large[name], rtol=1e-5, atol=1e-6)


def test_bert_has_no_packed_rows(packed_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        pretrain_here(flags(packed_dataset, tmp_path / "run"))
    assert "model.kind is bert" in str(refused.value) and str(packed_dataset) in str(refused.value)
