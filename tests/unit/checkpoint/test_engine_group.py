"""A run's engine and those of its hooks in one checkpoint (checkpoint/engine_group.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.checkpoint.fake_engine import (
    SHAPES,
    FakeEngine,
    assemble,
    assert_equal_state,
    on_ranks,
    random_split,
    save_step,
    whole_state,
)
from tests.unit.checkpoint.test_export_images import MAE, write_run
from tests.unit.models.small_images import small_model
from trp_scale.checkpoint.engine_group import EngineGroup, other_engines
from trp_scale.checkpoint.export import export
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import load
from trp_scale.config.loader import to_dict
from trp_scale.core.pieces import Shards
from trp_scale.distributed.groups import Group
from trp_scale.errors import CheckpointError

ALONE = Group("world")
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


def test_an_export_holds_the_run_s_own_model_alone(tmp_path: Path) -> None:
    model = small_model(MAE, dtype=torch.float32)
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    split = {name: [(0, tensor.numel(), 0)] for name, tensor in weights.items()}
    group = EngineGroup(FakeEngine(0, split, {"weight": weights}, steps=0), {NAME: held(2)})
    save_step(tmp_path / "with", 4, engine=group, config=to_dict(MAE), extra={})
    write_run(tmp_path / "without", MAE)
    for run in ("with", "without"):
        export(tmp_path / run, tmp_path / f"{run}_timm", to="timm")
    assert files(tmp_path / "with_timm") == files(tmp_path / "without_timm")


def test_the_engines_beside_the_main_one_are_named_by_their_step_counts() -> None:
    state = EngineGroup(held(1), {NAME: held(2, steps=7), "second": held(3)}).extra_state()
    assert state[f"{NAME}.optimizer_steps"] == 7
    assert other_engines(state) == [NAME, "second"]


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
