"""Joint steps and a fine-tuned second encoder from the command line, beside an adversary and U-MAE's uniformity."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.runs import image_flags, lines, pretrain_here
from tests.unit.data.images.stored import sample, write_images
from trp_scale.checkpoint.document import read_document
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import Fetcher

STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 3 classes in blocks of 2."""
    samples = [sample(number, 40, 40) for number in range(60)]
    return write_images(tmp_path_factory.mktemp("images") / "data", [samples], rows_per_block=2)


def flags(data: Path, run_dir: Path, level: str, **changes: object) -> list[str]:
    settings = {
        "multilevel__network": "patchwise",
        "multilevel__kind": level,
        "multilevel__unroll": 2,
        "training__steps": STEPS,
        "checkpoint__every": STEPS,
        "data__validation_fraction": 0.2,
        "validation__every": STEPS,
        **changes,
    }
    return image_flags("mae_vit_b", data, run_dir, **settings)


def test_joint_steps_leave_two_tasks_and_three_cursors(data: Path, tmp_path: Path) -> None:
    others = {
        "objective__uniformity": 0.01,
        "adversary__kind": "pixels",
        "adversary__eps": 0.03,
    }
    assert pretrain_here(flags(data, tmp_path, "joint", multilevel__gamma=0.25, **others)) == 0
    document = read_document(tmp_path / "checkpoints" / f"step_{STEPS:08d}")
    size = document.config["batch"]["global_size"]
    crops = document.config["crops"]["count"]
    assert document.cursors == {
        "train": STEPS * size,
        "downstream_train": STEPS * size,
        "downstream_validation": STEPS // 2 * size,
    }
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert rows.keys() == {"train", "validation", "downstream_train", "downstream_validation"}
    assert f"rows: train {rows['train']}, downstream_train" in (tmp_path / "report.txt").read_text()
    found = lines(tmp_path)
    for line in found:
        tasks = line["tasks"]
        assert {name: task["weight"] for name, task in tasks.items()} == {
            "reconstruction": 0.25,
            "uniformity": 0.01,
            "classification": 1.0,
        }
        assert tasks["classification"]["count"] == tasks["uniformity"]["count"] == size * crops
        assert line["loss"] == pytest.approx(sum(task["weight"] * task["loss"] for task in tasks.values()), rel=1e-9)
    validation = found[-1]["validation"]
    assert validation["tasks"]["classification"] == {"loss": None, "count": 0}
    assert validation["loss"] == validation["tasks"]["reconstruction"]["loss"] is not None


def test_a_step_counts_its_waiting_for_every_source(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the loop for D_u, and that of the hook for D_tr and D_val."""
    spent: list[float] = []
    fetch = Fetcher.__getitems__

    def slowly(self: Fetcher, positions: range) -> Batch:
        began = time.perf_counter()
        time.sleep(0.02)
        batch = fetch(self, positions)
        spent.append(time.perf_counter() - began)
        return batch

    monkeypatch.setattr(Fetcher, "__getitems__", slowly)
    assert pretrain_here(flags(data, tmp_path, "head", validation__every=0)) == 0
    assert len(spent) == 2 * (STEPS + STEPS // 2 + STEPS // 2), "two micro-batches a window: of D_u, D_tr, D_val"
    waited = sum(line["data_wait_seconds"] for line in lines(tmp_path))
    seconds = sum(line["step_seconds"] for line in lines(tmp_path))
    assert sum(spent) <= waited < seconds
    share = waited / seconds
    assert json.loads((tmp_path / "summary.json").read_text())["data_wait_share"] == pytest.approx(share)
    assert f"waited for data: {share:.1%}" in (tmp_path / "report.txt").read_text()


def test_a_fine_tuned_encoder_is_in_the_checkpoint(data: Path, tmp_path: Path) -> None:
    assert pretrain_here(flags(data, tmp_path, "fine_tuning", multilevel__proximity=10.0)) == 0
    document = read_document(tmp_path / "checkpoints" / f"step_{STEPS:08d}")
    first = {name for name in document.tensors if not name.startswith(("fine_tuned.", "masking_network."))}
    assert {name for name in document.tensors if name.startswith("fine_tuned.")} == {f"fine_tuned.{n}" for n in first}
    assert document.engine_state["fine_tuned.optimizer_steps"] == STEPS // 2
    assert all(line["multilevel"]["distance"] > 0 for line in lines(tmp_path)[-1:])


def test_a_balancer_that_would_have_nothing_to_do_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"--balancer.kind .*minimax"):
        pretrain_here(flags(data, tmp_path, "joint", balancer__kind="minimax"))
