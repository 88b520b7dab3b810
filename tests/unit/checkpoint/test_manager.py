"""What was saved by any ranks comes back on any others, bit for bit, or not at all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.fake_engine import (
    SHAPES,
    STATES,
    FakeEngine,
    assemble,
    assert_equal_state,
    on_ranks,
    random_split,
    renew_digest,
    save_step,
    whole_state,
)
from trp_scale.checkpoint.agreement import RankError
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import load
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.distributed.groups import Group
from trp_scale.errors import CheckpointError

ALONE = Group("world")
ONE = {name: [(0, torch.Size(shape).numel(), 0)] for name, shape in SHAPES.items()}


def load_one(path: Path, engine: FakeEngine) -> Any:
    return load(path, engine=engine, group=ALONE)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), writers=st.integers(1, 4), readers=st.integers(1, 4), replicas=st.booleans())
def test_any_split_is_read_into_any_other(seed: int, writers: int, readers: int, replicas: bool) -> None:
    state = whole_state(seed)
    before, after = random_split(seed, writers), random_split(seed + 1, readers)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)

        def write(group: Group) -> Path:
            engine = FakeEngine(group.rank, before, state, replicas=replicas)
            return save_step(run_dir, 12, engine=engine, group=group)

        paths = on_ranks(writers, write)
        assert paths == [run_dir / "checkpoints" / "step_00000012"] * writers

        def read(group: Group) -> FakeEngine:
            engine = FakeEngine.empty(group.rank, after, replicas=replicas)
            loaded = load(paths[0], engine=engine, group=group)
            assert (loaded.step, loaded.optimizer_steps, loaded.cursors) == (12, 5, {"train": 96})
            return engine

        engines = on_ranks(readers, read)
        assert [engine.loaded_steps for engine in engines] == [5] * readers
        assert_equal_state(assemble(engines), state)
        for engine in engines:  # replicas too, not only what a rank owns
            for piece in engine.held:
                for key in STATES:
                    assert torch.equal(piece.tensors[key], piece.region.of(state[key][piece.name]))
        assert_equal_state({key: read_full_state(paths[0], key) for key in STATES}, state)


def test_everything_beside_the_tensors_comes_back(tmp_path: Path) -> None:
    hooks = {
        "balancer": {
            "losses": torch.tensor([0.1, float("nan")], dtype=torch.float64),
            "list": [1, None, {"x": torch.ones(2, 0)}],
        },
        "with/slash": {"flag": True, "ratio": 0.1, "count": torch.tensor(3)},
        "with": {"slash": {"flag": torch.tensor(False)}},
        "nothing": {},
    }
    config = {"model": {"layers": 2}, "data": {"path": "/données"}}
    path = save_step(tmp_path, 3, hooks_state=hooks, config=config, extra={"data_digest": "abc"})
    engine = FakeEngine.empty(0, ONE, extra={})
    loaded = load_one(path, engine)
    assert (loaded.config, loaded.extra, loaded.cursors) == (config, {"data_digest": "abc"}, {"train": 24})
    assert (loaded.engine, loaded.zero_stage, loaded.world_size) == ("fake", None, 1)
    assert engine.extra == {"loss_scale": 1024.0}
    assert loaded.hooks.keys() == hooks.keys()
    torch.testing.assert_close(loaded.hooks, hooks, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"hook": {"pair": (1, 2)}}, "hook/pair: a tuple"),
        ({"hook": {3: 1}}, "hook: the key 3"),
        ({"hook": {"object": object()}}, "hook/object: a object"),
    ],
)
def test_hook_state_that_would_come_back_changed_is_refused(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(RankError, match=said):
        save_step(tmp_path, 3, hooks_state=state)
    assert list(tmp_path.glob("checkpoints/*")) == []


def test_before_the_first_step_moments_are_zero(tmp_path: Path) -> None:
    fresh = FakeEngine(0, ONE, {"weight": whole_state(0)["weight"]}, steps=0)
    path = save_step(tmp_path, 0, engine=fresh)
    engine = FakeEngine.empty(0, random_split(4, 1))
    load_one(path, engine)
    state = assemble([engine])
    assert_equal_state({"weight": state["weight"]}, {"weight": whole_state(0)["weight"]})
    assert all(tensor.eq(0).all() for key in STATES[1:] for tensor in state[key].values())


def test_missing_moments_after_a_step_are_refused(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1, engine=FakeEngine(0, ONE, {"weight": whole_state(0)["weight"]}, steps=1))
    with pytest.raises(CheckpointError, match=r"exp_avg.*F32"):
        load_one(path, FakeEngine.empty(0, ONE))


def test_a_model_that_differs_is_refused_tensor_by_tensor(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    shapes = {"matrix": (5, 7), "bias": (13,), "scalar": (), "cube": (4, 3, 2), "new": (2,)}
    engine = FakeEngine(0, random_split(0, 1, shapes), whole_state(0, shapes))
    with pytest.raises(CheckpointError) as caught:
        load_one(path, engine)
    assert "matrix: shape (7, 5) in the checkpoint, (5, 7) in the model" in str(caught.value)
    assert "new: in the model, not in the checkpoint" in str(caught.value)
    assert "one: in the checkpoint, not in the model" in str(caught.value)
    assert "bias" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(0, 4, 0), (6, 13, 0)], "bias: elements 4:6 of 13 are in no piece"),
        ([(0, 4, 0), (2, 13, 0)], "bias: elements 2:4 of 13 are in more than one piece"),
        ([(0, 9, 0)], "bias: elements 9:13 of 13 are in no piece"),
    ],
)
def test_an_engine_that_leaves_out_or_repeats_elements_cannot_save(tmp_path: Path, parts: Any, said: str) -> None:
    engine = FakeEngine(0, {**ONE, "bias": parts}, whole_state(0))
    with pytest.raises(RankError, match=said):
        save_step(tmp_path, 1, engine=engine)
    assert checkpoints(tmp_path) == []


def test_a_checkpoint_whose_files_have_a_gap_is_refused(tmp_path: Path) -> None:
    """The list of files is right and every checksum too, but one rank's file was left out of the list."""
    split = {**ONE, "bias": [(0, 6, 0), (6, 13, 1)]}
    on_ranks(2, lambda group: save_step(tmp_path, 1, engine=FakeEngine(group.rank, split, whole_state(0)), group=group))
    path = tmp_path / "checkpoints" / "step_00000001"
    document = json.loads((path / "checkpoint.json").read_text())
    document["files"] = [entry for entry in document["files"] if entry["name"] != "rank-00001.safetensors"]
    (path / "checkpoint.json").write_text(json.dumps(document))
    renew_digest(path / "checkpoint.json")
    with pytest.raises(CheckpointError, match=r"6:13.*of 13"):
        load_one(path, FakeEngine.empty(0, ONE))


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "hooks.safetensors"])
def test_one_changed_byte_is_found_on_every_rank(tmp_path: Path, name: str) -> None:
    split = random_split(3, 2)
    on_ranks(2, lambda group: save_step(tmp_path, 1, engine=FakeEngine(group.rank, split, whole_state(0)), group=group))
    path = tmp_path / "checkpoints" / "step_00000001"
    content = bytearray((path / name).read_bytes())
    content[-3] ^= 1
    (path / name).write_bytes(content)
    engines = [FakeEngine.empty(rank, split) for rank in range(2)]
    errors = on_ranks(2, lambda group: load(path, engine=engines[group.rank], group=group))
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"{name}: bytes 0:{len(content)} do not have the checksum" in str(error)
    assert all(engine.loaded_steps is None for engine in engines)


def test_a_large_file_says_which_bytes_are_bad(tmp_path: Path) -> None:
    shapes = {"large": (9 * 2**20,)}  # 36 MiB in fp32: three parts of 16 MiB, the last one shorter
    state = {"weight": {"large": torch.arange(9 * 2**20, dtype=torch.float32)}}
    engine = FakeEngine(0, {"large": [(0, 5, 0), (5, 9 * 2**20, 0)]}, state, steps=0)
    path = save_step(tmp_path, 1, engine=engine)
    assert torch.equal(read_full_state(path)["large"], state["weight"]["large"])
    assert shapes["large"] == tuple(read_full_state(path)["large"].shape)
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(20 * 2**20)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="16777216:33554432"):
        read_full_state(path)


def test_the_failure_of_one_rank_is_the_failure_of_all(tmp_path: Path) -> None:
    save_step(tmp_path, 1)

    class FullDisk(FakeEngine):
        def pieces(self) -> Any:
            yield from list(super().pieces())[:1]
            raise OSError(28, "No space left on device")

    def write(group: Group) -> Path:
        kind = FullDisk if group.rank == 1 else FakeEngine
        return save_step(tmp_path, 2, engine=kind(group.rank, random_split(5, 3), whole_state(0)), group=group)

    for error in on_ranks(3, write):
        assert isinstance(error, RankError)
        assert "failed on 1 of 3 ranks: rank 1: OSError: [Errno 28] No space left on device" in str(error)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_nothing_stored_is_pickled(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    assert sorted(file.name for file in path.iterdir()) == [
        "checkpoint.json",
        "hooks.safetensors",
        "rank-00000.safetensors",
    ]
    for file in path.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert len(content) == 8 + int.from_bytes(content[:8], "little") + max(
            entry["data_offsets"][1] for entry in header.values()
        )


def test_saving_is_the_same_for_the_same_state(tmp_path: Path) -> None:
    first, second = save_step(tmp_path / "a", 1), save_step(tmp_path / "b", 1)
    assert {file.name: file.read_bytes() for file in first.iterdir()} == {
        file.name: file.read_bytes() for file in second.iterdir()
    }
