"""Invariant 1 where each of the ranks that split the batch updates rows of its own (--megatron.shard_moments)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.engine_layouts import needs_megatron
from tests.distributed.test_checkpoint_engines import walk
from tests.distributed.test_precision import LOSSES, TRAVELLED, apart
from tests.grids import always
from tests.parity import test_learned_masks
from tests.parity.compare import run_alone, steps_too_far, too_far
from tests.parity.test_partition import sometimes_absent
from tests.ranks import Ranks
from tests.synthetic import Layout, Result, run, small_config, trainer_for
from tests.synthetic_masks import run_masks
from trp_scale.config import Config
from trp_scale.core.engine import EngineError
from trp_scale.core.hooks import Hooks
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.distributed.groups import Group
from trp_scale.methods.settings import WeightAverageSettings
from trp_scale.methods.weight_average import WeightAverage

pytestmark = needs_megatron


def sharded(tensor_parallel: int, *, shard_moments: bool = True, **layout: Any) -> Layout:
    own = {"tensor_parallel": tensor_parallel, "shard_moments": shard_moments}
    return Layout(engine="megatron", settings={"megatron": own}, **layout)


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"lr": 1e-3, "clipping": 1.0}},
    "lamb": {"optimizer": {"kind": "lamb", "lr": 1e-2, "clipping": 1.0, "weight_decay": 0.1}},
    "sgd": {"optimizer": {"kind": "sgd", "lr": 0.1, "clipping": 1.0}},
    "gradnorm": {"balancer": {"kind": "gradnorm", "lr": 0.05}},
}


def reference(kind: str) -> Result:
    found: Result = run_alone(run, KINDS[kind], sometimes_absent)
    return found


@pytest.mark.parametrize("kind", always(KINDS, "lamb"))
def test_two_halves_of_the_rows_are_the_whole_update(two_ranks: Ranks, kind: str) -> None:
    ours = two_ranks(run, sharded(1), KINDS[kind], sometimes_absent)[0]
    assert ours.moved
    assert too_far(ours, reference(kind)) == steps_too_far(ours, reference(kind), names=["grad_norm"]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_four_ranks_cut_matrices_and_share_their_rows(four_ranks: Ranks, kind: str, tensor_parallel: int) -> None:
    """On four data ranks some have no row of the next-sentence head's two."""
    ours = four_ranks(run, sharded(tensor_parallel, micro_size=1), KINDS[kind], sometimes_absent)[0]
    assert too_far(ours, reference(kind)) == []


@pytest.mark.exhaustive
def test_with_all_moments_on_each_rank_the_run_is_the_same(two_ranks: Ranks) -> None:
    ours = two_ranks(run, sharded(1, shard_moments=False), KINDS["adamw"], sometimes_absent)[0]
    assert too_far(ours, reference("adamw")) == []


@pytest.mark.exhaustive
def test_bf16_weights_and_gradients_follow_plain(two_ranks: Ranks) -> None:
    """The rows are the only masters."""
    half = {"precision": "bf16", "weights": "bf16"}
    ours = two_ranks(run, sharded(1), {"training": {**half, "gradients": "bf16"}})[0]
    losses, weights = apart(ours, run(Layout(), {"training": half}))
    assert losses < LOSSES and weights < TRAVELLED
    assert apart(ours, run(Layout(), {}))[0] > 1e-6, "this was fp32"


@pytest.mark.parametrize("variant", always(["flattened", "look ahead", "softsort"], "flattened"))
def test_masks_are_learned_from_shared_rows(two_ranks: Ranks, variant: str) -> None:
    """Finite differences move rows on the rank that has them; forwards read all of them."""
    test_learned_masks.agree(two_ranks(run_masks, sharded(1), test_learned_masks.changes(variant))[0], variant)


@pytest.mark.exhaustive
def test_masks_are_learned_on_four_ranks(four_ranks: Ranks) -> None:
    test_learned_masks.agree(four_ranks(run_masks, sharded(2), test_learned_masks.changes("flattened"))[0], "flattened")


def validated(layout: Layout) -> dict[str, Tensor]:
    """The averaged weights as a validation reads them."""
    trainer = trainer_for(layout, small_config(layout))
    settings = WeightAverageSettings(decay=0.6, warmup=False, validate=True)
    trainer.hooks = Hooks(trainer.hooks.balancer, [WeightAverage(settings, trainer.run_context)])
    trainer.run()
    with trainer.hooks.validation():
        found = {name: tensor.detach().clone() for name, tensor in trainer.engine.module.named_parameters()}
        averaged = trainer.engine.full_weights()
    trainer.engine.close()
    return averaged or found


@pytest.mark.exhaustive
def test_the_average_of_the_weights_is_read_whole(two_ranks: Ranks) -> None:
    theirs = validated(Layout())
    for tensor_parallel in (1, 2):
        ours, read = two_ranks(validated, sharded(tensor_parallel))
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
            assert tensor_parallel == 2 or torch.equal(ours[name], read[name]), "rank 1 has gathered it"


def moments(layout: Layout) -> tuple[int, int, int]:
    """Bytes of moments on this rank, elements that it says it has, and elements of the parameters that it reads."""
    trainer = trainer_for(layout, small_config(layout, training={"steps": 1}))
    trainer.run()
    states = trainer.engine.optimizer.state.values()  # type: ignore[attr-defined]
    found = sum(state[name].untyped_storage().nbytes() for state in states for name in STATE_NAMES)
    pieces = sum(piece.region.size for piece in trainer.engine.pieces())
    parameters = sum(each.numel() for each in trainer.engine.module.parameters())
    trainer.engine.close()
    return found, pieces, parameters


def test_a_rank_has_the_moments_of_its_share(two_ranks: Ranks) -> None:
    """Two numbers of 4 bytes for each element; all first dimensions are even here."""
    for each in two_ranks(moments, sharded(1)):
        held, pieces, parameters = each
        assert held == 8 * pieces == 8 * parameters / 2
    for held, _, parameters in two_ranks(moments, sharded(1, shard_moments=False)):
        assert held == 8 * parameters


@pytest.mark.exhaustive
def test_a_rank_of_four_has_half_of_the_moments_of_half_of_the_matrices(four_ranks: Ranks) -> None:
    for held, _, parameters in four_ranks(moments, sharded(2)):
        assert held == 8 * parameters / 2


ROUND: list[Layout] = [
    sharded(1),
    Layout(engine="fsdp"),
    sharded(1),
    Layout(engine="deepspeed", stage=1),
    sharded(2),
    sharded(1, shard_moments=False),
    Layout(engine="ddp"),
    sharded(1),
]
"""Layouts of a run."""
SHORT_ROUND = [sharded(1), sharded(2), Layout(engine="fsdp"), sharded(1)]


@pytest.mark.parametrize(
    "layouts", [SHORT_ROUND, pytest.param(ROUND, marks=pytest.mark.exhaustive)], ids=["short", "all"]
)
def test_checkpoints_go_to_other_layouts_and_back(two_ranks: Ranks, layouts: list[Layout], tmp_path: Path) -> None:
    walk(layouts, tmp_path, two_ranks)


@pytest.mark.exhaustive
def test_checkpoints_of_four_ranks_go_to_other_layouts_and_back(four_ranks: Ranks, tmp_path: Path) -> None:
    walk([sharded(2, micro_size=1), Layout(engine="fsdp", micro_size=1)] * 2, tmp_path, four_ranks)


class Frozen(nn.Module):
    """A weight that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)


def refusal_of_what_does_not_learn() -> str:
    from trp_scale.engines.ddp import OwnRows

    with pytest.raises(EngineError) as caught:
        OwnRows(Frozen(), Group("data", dist.get_rank(), dist.get_world_size()), rounded=False)
    return str(caught.value)


def test_what_does_not_learn_is_refused_by_name(two_ranks: Ranks) -> None:
    message = "--megatron.shard_moments: scale does not learn, and would not be sent; allowed: --megatron.shard_moments"
    assert all(message in said for said in two_ranks(refusal_of_what_does_not_learn))


def test_it_is_on_where_matrices_are_cut() -> None:
    assert Config().megatron.shard_moments
