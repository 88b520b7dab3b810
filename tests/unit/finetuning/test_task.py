"""What all tasks have in common: how long a run is."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, TrainPlan
from trp_scale.data.sources import Rows
from trp_scale.errors import RefusedError
from trp_scale.finetuning.task import label_counts, sample_rows, set_length


@pytest.mark.parametrize(
    ("epochs", "share", "steps", "warmup"),
    [
        (3.0, 0.06, 30, 2),  # 100 rows in batches of 10
        (0.5, 0.5, 5, 2),  # half of an odd number goes to the even one
        (0.21, 0.0, 3, 7),  # a part of a step is a step; without a share the warm-up stays
        (0.001, 0.0, 1, 7),
        (0.0, 0.1, 40, 4),  # without epochs the steps stay
    ],
)
def test_steps_follow_from_epochs_and_the_warm_up_from_its_share(
    epochs: float, share: float, steps: int, warmup: int
) -> None:
    config = FinetuneConfig()
    config.batch.global_size, config.training.steps, config.optimizer.warmup_steps = 10, 40, 7
    config.downstream.epochs, config.downstream.warmup_share = epochs, share
    set_length(config, 100)
    assert (config.training.steps, config.optimizer.warmup_steps) == (steps, warmup)


@dataclass(frozen=True)
class Table:
    """Blocks of 10 rows."""

    keys: list[str]

    @property
    def identities(self) -> Words:
        return np.array([name_hash(key) for key in self.keys], dtype=np.uint64)

    @property
    def rows(self) -> Integers:
        return np.full(len(self.keys), 10)


class AddressBuilder:
    """A builder that hands over the addresses."""

    def build(self, addresses: Addresses, start: int) -> Batch:
        fields = {name: torch.from_numpy(getattr(addresses, name)) for name in ("member", "block", "row")}
        return Batch(fields=fields, keys=torch.from_numpy(addresses.keys), start=start, epoch=0, fetch_seconds=0.0)


TABLES = [Table([f"a{number}" for number in range(20)]), Table([f"b{number}" for number in range(10)])]
LABELS = [np.arange(200) % 10, np.arange(100) % 10]
PATHS = [MemberPath(name=name, weight=Fraction(1, 2), path=None) for name in "ab"]  # type: ignore[arg-type]


def whole() -> Rows:
    return Rows(blocks=TABLES, meta=None, limit=0, builder=AddressBuilder(), digests=["", ""], labels=LABELS)


def training_rows(rows: Rows) -> set[tuple[int, int, int]]:
    """(data set, block, row) of all that a long run would learn from, as the builder is told."""
    chosen = [np.ones(len(table.rows), dtype=np.bool_) for table in rows.blocks]
    plan = TrainPlan(seed=3, members=rows.members(PATHS, chosen), blocks_per_group=4)
    batch = rows.builder.build(plan.locate(np.arange(20 * plan.rows)), 0)
    return set(zip(*(batch[name].tolist() for name in ("member", "block", "row")), strict=True))


def all_blocks() -> list[np.ndarray]:
    return [np.ones(len(table.rows), dtype=np.bool_) for table in TABLES]


def test_sample_has_the_requested_size_and_is_stratified() -> None:
    found = training_rows(sample_rows(whole(), all_blocks(), 60, seed=0))
    assert len(found) == 60
    labels = [int(LABELS[member][10 * block + row]) for member, block, row in found]
    assert np.bincount(labels).tolist() == [6] * 10


def test_larger_samples_contain_smaller_ones_and_seeds_differ() -> None:
    few, more, other = (
        training_rows(sample_rows(whole(), all_blocks(), n, seed=s)) for n, s in ((20, 0), (100, 0), (20, 1))
    )
    assert few < more
    assert few != other


def test_samples_are_of_allowed_blocks() -> None:
    allowed = [np.arange(20) < 7, np.arange(10) < 3]
    found = training_rows(sample_rows(whole(), allowed, 100, seed=0))
    assert found == {(0, block, row) for block in range(7) for row in range(10)} | {
        (1, block, row) for block in range(3) for row in range(10)
    }
    with pytest.raises(RefusedError, match=r"--downstream\.rows is 101, .* 100 "):
        sample_rows(whole(), allowed, 101, seed=0)


def test_sampled_rows_keep_their_keys() -> None:
    """So that crops and masks are those of the whole data set."""
    path = [MemberPath(name="", weight=Fraction(1), path=None)]  # type: ignore[arg-type]
    every_row = Rows(blocks=TABLES[:1], meta=None, limit=0, builder=AddressBuilder(), digests=[""], labels=LABELS[:1])
    chosen = sample_rows(every_row, all_blocks()[:1], 40, seed=0)
    located = []
    for rows in (chosen, every_row):
        plan = TrainPlan(
            seed=3, members=rows.members(path, [np.ones(len(rows.blocks[0].rows), bool)]), blocks_per_group=4
        )
        located.append(plan.locate(np.arange(plan.rows)))
    few, every = located
    keys = {(block, row): key for block, row, key in zip(every.block, every.row, every.keys, strict=True)}
    batch = chosen.builder.build(few, 0)
    told = zip(batch["block"].tolist(), batch["row"].tolist(), strict=True)
    assert [keys[place] for place in told] == few.keys.tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0, 1))
def test_label_counts_add_up_and_are_in_proportion(sizes: list[int], part: float) -> None:
    count = round(part * sum(sizes))
    found = label_counts(np.array(sizes), count)
    assert found.sum() == count
    assert (found <= np.array(sizes)).all()
    assert (np.abs(found - count * np.array(sizes) / sum(sizes)) <= 1).all()
