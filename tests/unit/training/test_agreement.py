"""What cannot be read is left out and named once: an image of D_val, or a block that a step was to have."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.runs import image_flags, lines, pretrain_here
from tests.synthetic import Layout, small_config, trainer_for
from tests.unit.data.images.stored import sample, write_images
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.split import downstream_validation
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError
from trp_scale.training.agreement import Agreed, StepAgreement
from trp_scale.training.incidents import Incidents, read_incidents


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, str]:
    """40 images of 3 classes, of which one of D_val is no picture; and its name."""
    samples = [sample(number, 40, 40) for number in range(40)]
    blocks = open_image_dataset(write_images(tmp_path / "whole", [samples], rows_per_block=2)).blocks
    every = np.ones(len(blocks.keys), dtype=np.bool_)
    chosen = downstream_validation(blocks.identities, 0.2, training=every, where="")
    number = int(blocks.first[np.flatnonzero(chosen)[0]])
    samples[number] = sample(number, 40, 40, jpg=b"no picture")
    return write_images(tmp_path / "data", [samples], rows_per_block=2), f"image-000000/n{number:05d}"


def flags(data: Path, run_dir: Path, allowed: int) -> list[str]:
    return image_flags(
        "mae_vit_b",
        data,
        run_dir,
        multilevel__kind="head",
        multilevel__network="patchwise",
        multilevel__unroll=1,
        training__steps=8,
        data__max_corrupt_blocks=allowed,
        data__validation_fraction=0.0,
    )


def test_it_is_left_out_and_named_once(
    damaged: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, name = damaged
    assert pretrain_here(flags(data, tmp_path / "run", allowed=1)) == 0
    assert capfd.readouterr().out.count(f"block {name} ") == 1
    logged = [line["multilevel"] for line in lines(tmp_path / "run")]
    assert all(np.isfinite(line["validation_loss"]) for line in logged)


def test_more_than_allowed_end_the_run(damaged: tuple[Path, str], tmp_path: Path) -> None:
    data, name = damaged
    with pytest.raises(DataError, match=name):
        pretrain_here(flags(data, tmp_path / "run", allowed=0))


def test_what_one_rank_could_not_read_is_told_though_another_has_no_rows_and_the_step_is_not_made(
    tmp_path: Path,
) -> None:
    trainer = trainer_for(Layout(), small_config(Layout(), training={"steps": 3}))
    trainer.control.incidents = Incidents(tmp_path)
    agreed = Agreed(counts=torch.zeros(0), stop=True, new_corrupt={"a.tar:0": "torn"}, without_rows=True)
    with mock.patch.object(trainer.agreement, "reach", return_value=agreed):
        trainer.train_step()
    assert trainer.state.step == 0
    (told,) = read_incidents(tmp_path)
    assert (told["kind"], told["key"], told["reason"]) == ("unreadable", "a.tar:0", "torn")
    trainer.engine.close()


def test_unreadable_blocks_in_step_after_step_are_the_storage() -> None:
    agreement = StepAgreement(Group("world"), max_corrupt_blocks=1000, max_corrupt_steps=3)

    def step(*keys: str) -> None:
        batch = Batch(fields={"row_weights": torch.ones(1)}, keys=torch.zeros(1, dtype=torch.int64), start=0)
        batch.corrupt = list(keys)
        agreement.reach(torch.zeros(1, dtype=torch.float64), [batch], stop=False)

    for number in range(3):
        step(f"block {number}")
    step()  # one that could be read
    for number in range(3, 6):
        step(f"block {number}")
    with pytest.raises(DataError, match=r"4 steps .*max_corrupt_steps .*3"):
        step("block 6")
