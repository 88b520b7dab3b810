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
from torch import Tensor

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
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import EngineGroup, load
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.core.pieces import Shards
from trp_scale.distributed.groups import Group, RankError
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


def test_an_engine_that_leaves_out_elements_cannot_save(tmp_path: Path) -> None:
    """test_format.py has all gaps and overlaps."""
    engine = FakeEngine(0, {**ONE, "bias": [(0, 4, 0), (6, 13, 0)]}, whole_state(0))
    with pytest.raises(RankError, match="bias: elements 4:6 of 13 are in no piece"):
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


NAME = "masking_network"
SHARED = whole_state(8)["weight"]


def held(seed: int, *, rank: int = 0, world: int = 1, steps: int = 5, scale: float = 1024.0) -> FakeEngine:
    """An engine with moments."""
    return FakeEngine(rank, random_split(seed, world), whole_state(seed), steps=steps, extra={"loss_scale": scale})


def fresh(seed: int, *, rank: int = 0, world: int = 1, steps: int = 0) -> FakeEngine:
    """An engine without moments, with weights that no other has."""
    return FakeEngine.empty(rank, random_split(seed, world), 100 + seed, steps=steps, extra={})


def files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def test_without_others_a_checkpoint_is_byte_for_byte_the_engine_s_own(tmp_path: Path) -> None:
    alone = save_step(tmp_path / "alone", 4, engine=held(1))
    group = EngineGroup(held(1), {})
    group.prepare()
    grouped = save_step(tmp_path / "grouped", 4, engine=group)
    assert files(alone) == files(grouped)


def test_each_engine_comes_back_on_any_split_with_its_own_steps_and_state(tmp_path: Path) -> None:
    def write(group: Group) -> Path:
        main, other, third = (held(seed, rank=group.rank, world=3, steps=2 * seed, scale=seed) for seed in (1, 2, 3))
        return save_step(tmp_path, 4, engine=EngineGroup(main, {NAME: other, "second": third}), group=group)

    def read(group: Group) -> list[FakeEngine]:
        main, other, third = (fresh(seed, rank=group.rank, world=2) for seed in (1, 2, 3))
        loaded = load(path, engine=EngineGroup(main, {"second": third, NAME: other}), group=group)
        assert loaded.optimizer_steps == 2
        return [main, other, third]

    path = on_ranks(3, write)[0]
    for seed, engines in enumerate(zip(*on_ranks(2, read), strict=True), start=1):
        assert_equal_state(assemble(list(engines)), whole_state(seed))
        for engine in engines:
            assert engine.loaded_steps == 2 * seed
            assert engine.extra["loss_scale"] == seed


@pytest.mark.parametrize("main_steps, other_steps", [(3, 0), (0, 0), (0, 3)])
def test_an_engine_may_have_made_no_step_yet(tmp_path: Path, main_steps: int, other_steps: int) -> None:
    """Its moments are those that it would start with."""
    engines = [held(1) if main_steps else fresh(1), held(2) if other_steps else fresh(2)]
    engines[0].steps, engines[1].steps = main_steps, other_steps
    group = EngineGroup(engines[0], {NAME: engines[1]})
    group.prepare()
    before = [piece.tensors["weight"].clone() for piece in group.pieces()]
    path = save_step(tmp_path, 4, engine=group)
    loaded = [fresh(3), fresh(4)]
    load(path, engine=EngineGroup(loaded[0], {NAME: loaded[1]}), group=ALONE)
    assert [engine.loaded_steps for engine in loaded] == [main_steps, other_steps]
    found = assemble([loaded[0]]), assemble([loaded[1]])
    for engine, steps, state in zip((1, 2), (main_steps, other_steps), found, strict=True):
        expected = whole_state(engine) if steps else {"weight": whole_state(100 + engine)["weight"]}
        assert_equal_state(state, expected)
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, moment in state[kind].items():
                assert steps or len(moment.unique()) == 1, f"{kind} of {name} is not as it was made"
    assert all(torch.equal(a, b.tensors["weight"]) for a, b in zip(before, group.pieces(), strict=True))


def test_a_missing_or_unexpected_engine_is_refused_by_name(tmp_path: Path) -> None:
    both = save_step(tmp_path / "both", 4, engine=EngineGroup(held(1), {NAME: held(2)}))
    with pytest.raises(CheckpointError, match=rf"{NAME}"):
        load(both, engine=EngineGroup(fresh(1), {}), group=ALONE)
    one = save_step(tmp_path / "one", 4, engine=EngineGroup(held(1), {}))
    with pytest.raises(CheckpointError, match=rf"{NAME}"):
        load(one, engine=EngineGroup(fresh(1), {NAME: fresh(2)}), group=ALONE)


def test_the_weights_of_one_engine_are_read_without_the_others(tmp_path: Path) -> None:
    path = save_step(tmp_path, 4, engine=EngineGroup(held(1), {NAME: held(2)}))
    for engine, seed in (("", 1), (NAME, 2)):
        found = read_full_state(path, "exp_avg", engine)
        assert found.keys() == SHAPES.keys()
        assert all(torch.equal(found[name], value) for name, value in whole_state(seed)["exp_avg"].items())


def vector(engine: FakeEngine, whole: dict[str, Tensor]) -> Shards:
    """A vector over all parameters as the engine's pieces lie; whole tensors are given."""
    return Shards(
        parts=[piece.region.of(whole[piece.name]).clone() for piece in engine.held],
        owned=[piece.owner for piece in engine.held],
        group=ALONE,
    )


def test_a_hook_s_vector_comes_back_on_any_split(tmp_path: Path) -> None:
    average, zero = SHARED, {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def write(group: Group) -> Path:
        main, other = (held(seed, rank=group.rank, world=3) for seed in (1, 2))
        engines = EngineGroup(main, {NAME: other}, lambda: {"weight_average": vector(main, average)})
        return save_step(tmp_path, 4, engine=engines, group=group)

    def read(group: Group) -> tuple[FakeEngine, Shards]:
        main, other = (fresh(seed, rank=group.rank, world=2) for seed in (1, 2))
        own = vector(main, zero)
        load(path, engine=EngineGroup(main, {NAME: other}, lambda: {"weight_average": own}), group=group)
        return main, own

    path = on_ranks(3, write)[0]
    answers = on_ranks(2, read)
    assert_equal_state(assemble([main for main, _ in answers]), whole_state(1))
    for main, own in answers:
        for piece, part in zip(main.held, own.parts, strict=True):
            assert torch.equal(part, piece.region.of(average[piece.name])), piece.name
    found = read_full_state(path, "weight_average")
    assert found.keys() == SHAPES.keys() and all(torch.equal(found[name], average[name]) for name in SHAPES)


def test_a_vector_that_only_one_of_checkpoint_and_run_has_is_refused(tmp_path: Path) -> None:
    main = held(1)
    path = save_step(tmp_path / "with", 4, engine=EngineGroup(main, {}, lambda: {"average": vector(main, SHARED)}))
    with pytest.raises(CheckpointError, match="F32"):
        load(path, engine=fresh(1), group=ALONE)
    path, new = save_step(tmp_path / "without", 0, engine=fresh(1)), fresh(1)
    with pytest.raises(CheckpointError, match="F32"):
        load(path, engine=EngineGroup(new, {}, lambda: {"average": vector(new, SHARED)}), group=ALONE)
