"""FSDP2 with a copy of everything on each few ranks (`fsdp.shard_ranks`), and DeepSpeed's with a second copy of the
weights (hpZ): the same run, each element owned once.

One copy on each of two ranks is the layout `hybrid` of all grids of engines. Here: two copies, each over two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.shard_probe import Double, ShardProbe, largest_difference
from tests.distributed.test_checkpoint_engines import walk
from tests.grids import always
from tests.parity import test_balancers, test_learned_masks
from tests.parity.compare import RELATIVE, TRAVELLED, run_alone, steps_too_far, too_far
from tests.ranks import Ranks
from tests.synthetic import Layout, Result, hybrid, refusal, run, small_config, small_engine, trainer_for
from tests.synthetic_images import run_images
from tests.synthetic_masks import run_masks
from trp_scale.engines.shards import assign_to_least_loaded

TWO_BY_TWO = hybrid(2, micro_size=1)
"""Four ranks, two micro-batches each."""
HPZ: dict[str, Any] = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
COPIES = {
    "FSDP2": TWO_BY_TWO,
    "hpZ": Layout(engine="deepspeed", stage=3, micro_size=1, document={"zero_optimization": HPZ}),
}
"""hpZ keeps a second copy of the weights on each two ranks from the forward pass on. No parameter is so small that it
stays whole."""

RUNS: dict[str, tuple[Callable[[Layout, dict[str, Any]], Result], dict[str, Any]]] = {
    "minimax, clipped": (run, {"optimizer": {"kind": "sgd", "lr": 4.0, "clipping": 0.5}}),
    "LAMB": (run, {"optimizer": {"kind": "lamb", "lr": 0.01, "clipping": 1.0, "weight_decay": 0.1}}),
    "Muon": (run, {"optimizer": {"kind": "muon", "lr": 0.01, "clipping": 1.0, "weight_decay": 0.1}}),
    "adversary": (
        run_images,
        {
            "adversary": {"kind": "relative_embedding", "ascent": "sgd", "norm": "l2", "lr": 300.0, "eps": 0.2},
            "optimizer": {"lr": 3e-3, "eps": 1e-4},
        },
    ),
}


def reference(name: str) -> Result:
    found: Result = run_alone(*RUNS[name])
    return found


@pytest.mark.parametrize("name", always(RUNS, "minimax, clipped"))
def test_two_copies_over_two_ranks_each_give_the_weights_of_one_rank(four_ranks: Ranks, name: str) -> None:
    function, changes = RUNS[name]
    ours = four_ranks(function, TWO_BY_TWO, changes)
    theirs = reference(name)
    assert theirs.moved
    assert too_far(ours[0], theirs) == []
    assert [far for each in ours for far in steps_too_far(each, theirs)] == []
    if name == "adversary":
        vector, expected = ours[3].vector, theirs.vector  # type: ignore[attr-defined]
        apart = float((vector - expected).norm())
        assert apart <= RELATIVE * float(expected.norm())
        assert apart <= TRAVELLED * theirs.travelled  # type: ignore[attr-defined]


@pytest.mark.exhaustive  # a checkpoint that goes through all of them is held to the losses and weights of one rank
def test_hpz_gives_the_weights_of_one_rank(four_ranks: Ranks) -> None:
    ours = four_ranks(run, COPIES["hpZ"], {})[0]
    assert ours.moved
    assert too_far(ours, run_alone(run, {})) == []


@pytest.mark.exhaustive
def test_hpz_of_one_engine_is_not_another_s(four_ranks: Ranks) -> None:
    assert set(four_ranks(hpz_groups)) == {(True, False, True)}


def hpz_groups() -> tuple[bool, ...]:
    """Whether engines that are made one after the other have copies: one with, one without, one with."""
    found = []
    for layout in (COPIES["hpZ"], Layout(engine="deepspeed", stage=3, micro_size=1), COPIES["hpZ"]):
        engine = small_engine(layout)
        found.append(any(each.ds_zero_param_process_group is not None for each in engine.module.parameters()))  # type: ignore[attr-defined]
        engine.close()
    return tuple(found)


@pytest.mark.exhaustive
def test_a_balancer_of_gradient_norms_is_the_same(four_ranks: Ranks) -> None:
    first, *others = four_ranks(test_balancers.run, TWO_BY_TWO, "weights")
    assert test_balancers.differences(first, "weights") == []
    for _, state in others:
        assert unequal(*(dict(test_balancers.tensors(each)) for each in (state, first[1]))) == []


@pytest.mark.exhaustive
def test_three_levels_are_the_same(four_ranks: Ranks) -> None:
    test_learned_masks.agree(four_ranks(run_masks, TWO_BY_TWO, test_learned_masks.changes("patchwise"))[0], "patchwise")


def held(layout: Layout) -> tuple[dict[str, Tensor], dict[str, tuple[int, bool]], bool]:
    """This rank's parts after two steps, with their length and whether they are its own; whether a gradient that is not
    finite on this rank's copy alone was seen."""
    trainer = trainer_for(layout, small_config(layout))
    trainer.engine.train(True)
    for _ in range(2):
        trainer.train_step()
    parts = {piece.name: piece.tensors["exp_avg"].clone() for piece in trainer.engine.pieces()}
    owned = {piece.name: (piece.region.size, piece.owner) for piece in trainer.engine.pieces()}
    loss = trainer.objective(trainer.engine, trainer.source.next_window()[0]).sums.sum()
    trainer.engine.backward(loss, last=True)
    if trainer.engine.data_group.rank == 3:
        next(trainer.engine.module.parameters()).grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
    seen = not bool(trainer.engine.check_gradients().isfinite())
    trainer.engine.discard_gradients()
    trainer.engine.close()
    return parts, owned, seen


def test_copies_are_equal_bit_for_bit_and_each_part_is_owned_once(four_ranks: Ranks) -> None:
    found = four_ranks(held, TWO_BY_TWO)
    whole = sum(weight.numel() for weight in reference("minimax, clipped").weights.values())
    written = []
    for (parts, owned, seen), (copy, _, _) in zip(found, (*found[2:], *found[:2]), strict=True):
        assert unequal(copy, parts) == []
        assert seen, "another copy's gradient was not finite, and this rank did not see it"
        assert sum(size for size, _ in owned.values()) <= 0.55 * whole
        written.append(sum(size for size, owner in owned.values() if owner))
    assert sum(written) == whole
    assert max(written) < 0.35 * whole, "the ranks do not share the writing"


def between_steps(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float, float]:
    """Weights, a gradient, its norm, and losses at the weights and moved along it."""
    probe = ShardProbe(layout)
    probe.step(0)
    weights, gradient = probe.engine.full_weights(), probe.engine.compute_gradient(probe.shares(1, "reconstruction"))
    at_weights = probe.look(3)
    with probe.engine.perturb_weights(gradient, 0.05 / float(gradient.norm())):
        moved = probe.look(3)
    found = weights, probe.whole(gradient), float(gradient.norm()), at_weights, moved
    probe.engine.close()
    return found


@pytest.mark.parametrize("name", always(COPIES))
def test_between_steps_each_element_counts_once_and_forwards_read_what_was_written(
    four_ranks: Ranks, name: str
) -> None:
    weights, gradient, norm, at_weights, moved = four_ranks(between_steps, COPIES[name])[0]
    double = Double(weights)
    assert largest_difference(gradient, double.gradient(1, "reconstruction")) < 1e-5
    assert norm == pytest.approx(float(torch.cat([each.flatten() for each in gradient.values()]).norm()), rel=1e-6)
    assert at_weights == pytest.approx(double.look(3), rel=1e-5)
    assert moved == pytest.approx(double.moved(gradient, 0.05 / norm).look(3), rel=1e-5)


PATH = [Layout(), TWO_BY_TWO, COPIES["hpZ"], Layout()]
"""One rank or four."""


def test_a_checkpoint_goes_to_other_layouts_and_back(four_ranks: Ranks, tmp_path: Path) -> None:
    walk(PATH, tmp_path, four_ranks)


def test_ranks_that_do_not_divide_are_refused(four_ranks: Ranks) -> None:
    said = "--fsdp.shard_ranks is 3 and does not divide the 4 ranks of this run; allowed: 0 for all of them, "
    assert all(each.startswith(said) for each in four_ranks(refusal, hybrid(3), run, {}))


def test_owning_copies_share_the_bytes() -> None:
    assert assign_to_least_loaded([4, 1, 4, 1, 2], 2) == [0, 1, 1, 0, 0]
    assert assign_to_least_loaded([5, 5], 1) == [0, 0]
