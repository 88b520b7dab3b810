"""Sources: one order for every split, exact resume, maskings, validation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.grids import always, grid
from tests.unit.data.loaded import FIELDS, assert_same, joined, steps, table_of
from tests.unit.data.stored import SPECIAL, config_for, write_dataset
from trp_scale.config import Config, RefusedError
from trp_scale.data.sources import check_partition
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert.batch import kept_positions


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """58 rows in 9 blocks of 2 shards."""
    directory = tmp_path_factory.mktemp("loader") / "data"
    return write_dataset(directory, block_rows=[[5, 7, 3, 9], [8, 6, 4, 11, 5]])


@pytest.fixture(scope="module")
def reference(dataset: Path) -> list[dict[str, torch.Tensor]]:
    """Ten steps on one rank, in this process, in micro-batches of 3."""
    return steps(config_for(dataset), 1, 10)


def test_shapes_and_types(dataset: Path) -> None:
    sources = open_sources(config_for(dataset), rank=0, world=1)
    window = sources.train.next_window()
    assert len(window) == sources.train.accumulation == 4
    for number, batch in enumerate(window):
        assert batch.start == 3 * number and batch.rows == 3 and batch.keys.dtype == torch.int64
        assert set(batch.fields) == {*FIELDS, "kept"}
        assert torch.equal(batch["kept"], torch.from_numpy(kept_positions(batch["attention_mask"].numpy())))
        assert batch["kept"].is_contiguous()
        for name, (dtype, shape) in FIELDS.items():
            assert (batch[name].dtype, tuple(batch[name].shape)) == (dtype, (3, *shape)), name
            assert batch[name].is_contiguous()
    assert sources.meta.length == 24 and sources.limit == 4


def test_rows_without_padding_have_no_mask(tmp_path: Path) -> None:
    """Full rows, each alone in its block, so that every pair is right and fills its row; then one that does not."""
    full = write_dataset(tmp_path / "full", block_rows=[[1] * 12], shortest=21)
    batch = open_sources(config_for(full), rank=0, world=1).train.next_window()[0]
    assert set(batch.fields) == set(FIELDS) - {"attention_mask"} and (batch["tokens"] != SPECIAL["pad"]).all()
    short = write_dataset(tmp_path / "short", block_rows=[[1] * 12], shortest=20)
    window = open_sources(config_for(short), rank=0, world=1).train.next_window()
    padded = [bool((batch["tokens"] == SPECIAL["pad"]).any()) for batch in window]
    for name in ("attention_mask", "kept"):
        assert any(padded) and [name in batch.fields for batch in window] == padded


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_batches_of_a_compiled_run_are_of_one_form(tmp_path: Path, how: str) -> None:
    """Without a mask where a micro-batch happens to be full there would be two graphs of each block."""
    short = write_dataset(tmp_path / "short", block_rows=[[1] * 12], shortest=20)
    window = open_sources(config_for(short, training={"compile": how}), rank=0, world=1).train.next_window()
    padded = [bool((batch["tokens"] == SPECIAL["pad"]).any()) for batch in window]
    assert any(padded) and not all(padded)
    assert all(set(batch.fields) == {*FIELDS, "kept"} for batch in window)
    assert [not bool(batch["attention_mask"].all()) for batch in window] == padded


def test_sequences_are_well_formed(reference: list[dict[str, torch.Tensor]]) -> None:
    for step in reference:
        for row in range(12):
            tokens, attended = step["tokens"][row].clone(), step["attention_mask"][row]
            used = step["label_weights"][row] > 0
            tokens[step["masked_positions"][row][used]] = step["labels"][row][used]
            end = int(attended.sum())
            assert attended[:end].all() and (tokens[end:] == SPECIAL["pad"]).all()
            separators = (tokens == SPECIAL["sep"]).nonzero().ravel().tolist()
            assert len(separators) == 2 and separators[1] == end - 1
            assert tokens[0] == SPECIAL["cls"] and (tokens == SPECIAL["cls"]).sum() == 1
            assert (tokens[:end] != SPECIAL["mask"]).all()
            types = torch.zeros(24, dtype=torch.int64)
            types[separators[0] + 1 : end] = 1
            assert torch.equal(step["token_types"][row], types)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_sees_the_same_global_batches(
    dataset: Path, reference: list[dict[str, torch.Tensor]], world: int
) -> None:
    for micro in (1, 12 // world):
        assert_same(steps(config_for(dataset, batch={"micro_size": micro}), world, 10), reference)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("workers", "world"), always(product([1, 3], [1, 2, 3, 4]), (1, 2), (3, 1)))
def test_workers_change_nothing(
    dataset: Path, reference: list[dict[str, torch.Tensor]], workers: int, world: int
) -> None:
    config = config_for(dataset, data={"workers": workers, "prefetch": 2}, batch={"micro_size": 3 if world == 4 else 2})
    assert_same(steps(config, world, 10), reference)


def test_every_row_once_an_epoch(dataset: Path) -> None:
    config = config_for(dataset, batch={"global_size": 29, "micro_size": 29})  # two steps are one epoch
    _, blocks = table_of(dataset)
    expected = sorted(
        int(identity + row) & (2**63 - 1)
        for identity, rows in zip(blocks.identities.tolist(), blocks.rows.tolist(), strict=True)
        for row in range(rows)
    )
    found = steps(config, 1, 6)
    for epoch in range(3):
        keys = torch.cat([found[2 * epoch]["keys"], found[2 * epoch + 1]["keys"]])
        assert sorted(keys.tolist()) == expected


@pytest.mark.parametrize("workers", always([0, 1], 1))
def test_resume_equals_the_uninterrupted_run(
    dataset: Path, reference: list[dict[str, torch.Tensor]], workers: int
) -> None:
    config = config_for(dataset, data={"workers": workers})
    before = open_sources(config, rank=0, world=1)
    for _ in range(4):
        before.train.next_window()
    cursors = before.cursors()
    assert cursors == {"train": 48}
    after = open_sources(config, rank=0, world=1)
    after.seek(cursors)
    assert_same([joined([after.train.next_window()]) for _ in range(6)], reference[4:])
    after.train.seek(12)  # back, with batches fetched ahead
    assert_same([joined([after.train.next_window()])], reference[1:2])
    before.close()
    after.close()
    assert_same(steps(config_for(dataset), 2, 6, cursor=48), reference[4:])
    with pytest.raises(ValueError, match="cursor -1"):
        after.train.seek(-1)


def by_key(config: Config, epochs: int) -> list[dict[int, tuple[list[int], list[int], int]]]:
    """Per epoch: row key -> tokens, masked positions, next-sentence label."""
    config.batch.global_size = config.batch.micro_size = 58
    found = steps(config, 1, epochs)
    return [
        {
            key: (step["tokens"][row].tolist(), step["masked_positions"][row].tolist(), int(step["next_sentence"][row]))
            for row, key in enumerate(step["keys"].tolist())
        }
        for step in found
    ]


def test_maskings_repeat_exactly(dataset: Path) -> None:
    first, second, third, fourth, fifth = by_key(config_for(dataset, masking={"maskings": 2}), 5)
    assert first == third == fifth and second == fourth
    assert sum(first[key] != second[key] for key in first) > 50
    fresh = by_key(config_for(dataset, masking={"maskings": 0}), 3)
    assert sum(fresh[0][key] != fresh[2][key] for key in fresh[0]) > 50
    assert fresh[0] == first  # epoch 0 is masking 0
    other = by_key(config_for(dataset, training={"seed": 1}), 1)[0]
    assert sum(first[key] != other[key] for key in first) > 50


def test_masks_do_not_depend_on_how_blocks_are_grouped(dataset: Path) -> None:
    assert by_key(config_for(dataset), 2) == by_key(config_for(dataset, data={"blocks_per_group": 1}), 2)


def test_without_pairs_a_row_is_one_segment(dataset: Path) -> None:
    (step,) = steps(config_for(dataset, objective={"next_sentence": "off"}), 1, 1)
    assert (step["token_types"] == 0).all() and (step["next_sentence"] == 0).all()
    assert ((step["tokens"] == SPECIAL["sep"]).sum(dim=1) == 1).all()


def test_other_words_are_spared_when_asked(dataset: Path) -> None:
    found = steps(config_for(dataset, objective={"other": "unmasked"}), 1, 5)
    groups = torch.cat([step["label_groups"][step["label_weights"] > 0] for step in found])
    assert len(groups) > 100 and (groups < 9).all()


@pytest.mark.parametrize(("world", "workers"), grid([1, 2, 3], [0, 1]))
def test_validation_covers_the_held_out_rows_once(dataset: Path, world: int, workers: int) -> None:
    config = config_for(dataset, data={"validation_fraction": 0.3, "workers": workers})
    config.batch.micro_size, config.batch.global_size = 4, 24
    ranks = [open_sources(config, rank=rank, world=world) for rank in range(world)]
    passes = [[list(sources.validation.windows()) for sources in ranks] for _ in range(2)]
    assert len({len(batches) for batches in passes[0]}) == 1
    first, second = (joined(batches) for batches in passes)
    assert_same([first], [second])  # every pass is the same
    there = first["row_weights"] == 1
    assert (first["keys"][~there] == -1).all() and (first["label_weights"][~there] == 0).all()
    assert first["attention_mask"].any(dim=1).all()  # attention over nothing would be NaN
    held_out = sorted(first["keys"][there].tolist())
    rows = ranks[0].validation.rows
    assert len(held_out) == len(set(held_out)) == rows and 0 < rows < 58
    for sources in ranks:
        sources.close()
    one_epoch = config_for(dataset, data={"validation_fraction": 0.3}, batch={"global_size": 1, "micro_size": 1})
    trained = torch.cat([step["keys"] for step in steps(one_epoch, 1, 58 - rows)]).tolist()
    assert len(set(trained)) == 58 - rows and not set(trained) & set(held_out)


def test_nothing_held_out(dataset: Path) -> None:
    sources = open_sources(config_for(dataset), rank=0, world=1)
    assert sources.validation.rows == 0 and list(sources.validation.windows()) == []
    with pytest.raises(RefusedError, match=r"data\.validation_fraction is 0"):
        open_sources(config_for(dataset, validation={"every": 5}), rank=0, world=1)


def test_the_global_generator_is_left_alone(dataset: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    sources = open_sources(config_for(dataset, data={"workers": 1}), rank=0, world=1)
    sources.train.next_window()
    sources.close()
    assert (torch.rand(1), np.random.rand()) == expected


def test_accumulation_is_derived() -> None:
    assert check_partition(256, 32, 1) == 8
    assert check_partition(256, 32, 8) == 1
    assert check_partition(12, 2, 3) == 2


def test_message_names_what_does_divide() -> None:
    with pytest.raises(RefusedError, match=r": 1, 2, 4, 8;.*on 3 ranks: none"):
        check_partition(256, 32, 3)
    with pytest.raises(RefusedError, match=r": none;.*on 2 ranks: 1, 2, 3, 6 "):
        check_partition(12, 5, 2)
    with pytest.raises(RefusedError, match=": 1, 2"):  # smaller than one round
        check_partition(8, 4, 4)
