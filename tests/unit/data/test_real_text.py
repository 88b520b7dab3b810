"""The loader on what trp-scale shard-text writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.fixtures import small_text_dataset
from tests.unit.data.stored import config_for
from trp_scale.core.batch import Batch
from trp_scale.data.sources import Sources
from trp_scale.pretraining.base import open_sources


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_text_dataset(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="module")
def sources(directory: Path) -> Sources:
    config = config_for(directory, data={"validation_fraction": 0.1, "verify": True})
    config.batch.global_size = config.batch.micro_size = 64
    return open_sources(config, rank=0, world=1)


@pytest.fixture(scope="module")
def epoch(sources: Sources) -> list[Batch]:
    """One epoch of training rows, and a little more."""
    return [sources.train.next_window()[0] for _ in range(-(-sources.train.rows // 64))]


def test_all_rows_are_there(directory: Path, sources: Sources) -> None:
    document = json.loads((directory / "dataset.json").read_text())
    assert sources.train.rows + sources.validation.rows == document["rows"]
    assert sources.validation.rows > 0


def test_nothing_is_damaged_and_statistics_hold(epoch: list[Batch]) -> None:
    assert [batch.corrupt for batch in epoch] == [[]] * len(epoch)
    assert all((batch["row_weights"] == 1).all() for batch in epoch)
    attended = sum(int(batch["attention_mask"].sum()) - 3 * batch.rows for batch in epoch)
    masked = sum(float(batch["label_weights"].sum()) for batch in epoch)
    assert abs(masked / attended - 0.15) < 0.01  # rounding and the limit, on short sequences
    wrong = torch.cat([batch["next_sentence"] for batch in epoch]).double()
    assert abs(float(wrong.mean()) - 0.5) < 4 * 0.5 / np.sqrt(len(wrong))


def test_labels_restore_english(directory: Path, epoch: list[Batch]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    batch = epoch[0]
    tokens = batch["tokens"].clone()
    used = batch["label_weights"] > 0
    row, slot = torch.nonzero(used, as_tuple=True)
    tokens[row, batch["masked_positions"][row, slot]] = batch["labels"][row, slot]
    assert tokenizer.mask_token_id not in tokens
    text = " ".join(tokenizer.batch_decode(tokens, skip_special_tokens=True)).split()
    assert sum(word in {"the", "of", "a", "is", "to", "and", "in"} for word in text) > 0.08 * len(text)
    pairs = [tokenizer.decode(line) for line in tokens]
    assert all(pair.startswith("[CLS] ") and pair.count("[SEP]") == 2 for pair in pairs)
