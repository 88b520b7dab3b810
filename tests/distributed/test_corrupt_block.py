"""A damaged block in a run: left out and named once, or the end of the run on all ranks together."""

from __future__ import annotations

import shutil
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.engine_layouts import ENGINE_FLAGS
from tests.distributed.launched import launch, started_with
from tests.distributed.test_resume import run_and_listen
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import flags, lines
from tests.unit.data.loaded import damage, table_of
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.data.plan import MixtureMember, TrainPlan, held_out

EPOCH = {"batch__global_size": 32, "batch__micro_size": 16, "data__verify": True, "optimizer__schedule": "constant"}

ENGINES = {name: ENGINE_FLAGS[name] for name in ("fsdp", "zero2")}


@pytest.fixture
def damaged(text_dataset: Path, tmp_path: Path) -> tuple[Path, str, int]:
    """A copy of the data with a training block whose bytes changed; its key, and the steps of an epoch."""
    copy = tmp_path / "damaged"
    shutil.copytree(text_dataset, copy)
    _, blocks = table_of(copy)
    training = np.flatnonzero(~held_out(blocks.identities, 0.1, where=""))
    # The last bytes are padding of a stored row: every value is still allowed, only the checksum tells.
    key = damage(copy, block=int(training[0]), member=0, place=-2, content=b"\x07\x00")
    return copy, key, -(-int(blocks.rows[training].sum()) // EPOCH["batch__global_size"])


@pytest.mark.parametrize("name", always(ENGINES, "fsdp"))
def test_one_allowed_block_is_left_out_and_named_once(
    two_ranks: Ranks, damaged: tuple[Path, str, int], tmp_path: Path, name: str
) -> None:
    data, key, steps = damaged
    changes: dict[str, Any] = {**EPOCH, "data__max_corrupt_blocks": 1, "model__dropout": 0.0, "training__steps": steps}
    alone = run_and_listen(flags(data, tmp_path / "one", data__workers=2, **changes))  # both workers come across it
    together = two_ranks(run_and_listen, flags(data, tmp_path / name, **changes, **ENGINES[name]))
    assert [status for status, _ in (alone, *together)] == [0, 0, 0]
    for printed in (alone[1], together[0][1]):
        assert printed.count(f"block {key} ") == 1
        assert "checksum" in printed, "and why"
    assert key not in together[1][1], "rank 1 is silent"
    same_losses(lines(tmp_path / name), lines(tmp_path / "one"), steps)


def same_losses(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], steps: int) -> None:
    """Two runs over the damaged data that left out the same rows, of which there are some."""
    assert len(ours) == len(theirs) == steps
    missing = 0
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for task, values in other["tasks"].items():
            assert line["tasks"][task]["count"] == values["count"]
            assert line["tasks"][task]["loss"] == (pytest.approx(values["loss"], rel=1e-5) if values["count"] else None)
        missing += EPOCH["batch__global_size"] - line["tasks"]["next_sentence"]["count"]
    assert missing > 0, "no row of the block was drawn"


@pytest.mark.parametrize("name", always(ENGINES, "zero2"))
def test_one_too_many_stops_all_ranks_together(
    two_ranks: Ranks, damaged: tuple[Path, str, int], tmp_path: Path, name: str
) -> None:
    data, key, steps = damaged
    answers = two_ranks(run_and_listen, flags(data, tmp_path / "run", training__steps=steps, **EPOCH, **ENGINES[name]))
    assert answers[0] == answers[1]
    status, message = answers[0]
    assert status == 1
    assert message.startswith("1 ") and key in message
    assert "--data.max_corrupt_blocks" in message and "trp-scale verify" in message
    assert len(lines(tmp_path / "run")) < steps
    assert key in (tmp_path / "run" / "summary.json").read_text(encoding="utf-8")


LAUNCHED: dict[str, dict[str, Any]] = {"torchrun": {"engine": "fsdp"}, "deepspeed": ENGINES["zero2"]}


def seed_with_rank_1_first(data: Path) -> int:
    """A seed whose order has rank 1 come across the damaged block some steps before rank 0 does."""
    _, blocks = table_of(data)
    training = ~held_out(blocks.identities, 0.1, where="")
    member = MixtureMember(name="", weight=Fraction(1), table=blocks, chosen=training)
    size = EPOCH["batch__global_size"]
    for seed in range(20):
        plan = TrainPlan(seed=seed, members=[member], blocks_per_group=1)
        blocks = plan.locate(np.arange(8 * plan.rows)).block  # of some epochs
        steps, places = np.divmod(np.flatnonzero(blocks == np.flatnonzero(training)[0]), size)
        first, second = (steps[places // (size // 2) == rank] for rank in (0, 1))
        if first.size and second.size and 1 <= second.min() < first.min() - 1:
            return seed
    raise AssertionError("no seed of 20")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "allowed"), [pytest.param("torchrun", 0, marks=pytest.mark.exhaustive), ("deepspeed", 1)]
)
def test_a_block_that_a_loader_worker_of_a_launched_rank_comes_across(
    damaged: tuple[Path, str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, allowed: int
) -> None:
    data, key, steps = damaged
    monkeypatch.setenv("TRP_SCALE_TEST", str(tmp_path))
    run_dir = tmp_path / "run"
    changes: dict[str, Any] = {**EPOCH, "data__blocks_per_group": 1, "training__steps": steps, **LAUNCHED[launcher]}
    changes |= {"training__seed": seed_with_rank_1_first(data), "data__workers": 1, "data__max_corrupt_blocks": allowed}
    process = launch(launcher, flags(data, run_dir, **changes))
    output = process.communicate(timeout=600)[0]
    assert started_with("TRP_SCALE_TEST", str(tmp_path)) == [], "a rank or a loader worker lives on"
    if allowed:
        assert process.returncode == 0, output
        assert output.count(f"block {key} ") == 1
        assert len(lines(run_dir)) == steps
        assert [step for step, _ in checkpoints(run_dir)] == [steps]
        return
    assert process.returncode not in (0, -signal.SIGKILL)
    said = f"error: 1 blocks could not be read ({key}: "
    # Rank 1 says it too, with its number before it, where a busy machine lets it outlive rank 0 by seconds.
    assert [line.startswith(said) for line in output.splitlines()].count(True) == 1, output
    ours = output.partition("torch/distributed/elastic")[0]  # torchrun ends with a traceback of its own
    assert "Traceback" not in ours, f"a rank stopped in the middle of something: {ours}"
    summary = (run_dir / "summary.json").read_text(encoding="utf-8")
    assert f"1 blocks could not be read ({key}: " in summary, "rank 0 did not hear of rank 1's block"
    assert 1 <= len(lines(run_dir)) < steps
