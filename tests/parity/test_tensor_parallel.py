"""Invariant 1 on the engine megatron: matrices cut over ranks give the weights of one rank that has them whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.engine_layouts import needs_megatron
from tests.distributed.test_precision import LOSSES, TRAVELLED, apart
from tests.grids import always
from tests.parity import test_adversary, test_learned_masks, test_modalities
from tests.parity.compare import run_alone, steps_too_far, too_far
from tests.parity.test_partition import BALANCING, MODERN, sometimes_absent
from tests.ranks import Ranks
from tests.synthetic import Layout, Result, refusal, run, small_config, trainer_for
from tests.synthetic_images import AdversarialResult, run_images
from tests.synthetic_masks import run_masks
from tests.synthetic_modalities import run_modalities
from trp_scale.core.run import per_member_rng
from trp_scale.models.tensor_plan import Cut
from trp_scale.pretraining.pos_bert.model import Layer

pytestmark = needs_megatron


def megatron(tensor_parallel: int, **layout: Any) -> Layout:
    return Layout(engine="megatron", settings={"megatron": {"tensor_parallel": tensor_parallel}}, **layout)


METHODS: dict[str, dict[str, Any]] = {
    **BALANCING,
    "gradnorm": {"kind": "gradnorm", "lr": 0.05},
    "gradnorm, representation": {"kind": "gradnorm", "lr": 0.05, "at": "representation", "total": "paper"},
}
LAYOUTS = {"1": megatron(1), "2": megatron(2)}


def changes(method: str, **others: Any) -> dict[str, Any]:
    return {"balancer": METHODS[method], "optimizer": {"lr": 1e-3, "clipping": 1.0}, **others}


def reference(method: str) -> Result:
    found: Result = run_alone(run, changes(method), sometimes_absent)
    return found


@pytest.mark.parametrize(
    ("ranks", "method"),
    always(
        [("1", "uniform"), ("1", "exact"), *(("2", method) for method in METHODS)], ("1", "uniform"), ("2", "gradnorm")
    ),
)
def test_two_ranks_give_the_weights_of_one(two_ranks: Ranks, ranks: str, method: str) -> None:
    ours, theirs = two_ranks(run, LAYOUTS[ranks], changes(method), sometimes_absent)[0], reference(method)
    assert ours.moved
    assert too_far(ours, theirs) == steps_too_far(ours, theirs) == []


DROPOUT = {"model": {"dropout": 0.2}}


class CutApart(Cut):
    """Draws as this member of a group."""

    def __init__(self, member: int) -> None:
        self.member = member

    def drawing(self) -> AbstractContextManager[None]:
        return per_member_rng(torch.device("cpu"), self.member)


def half_by_half(layer: Layer, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """A whole layer's attention with the dropout of two ranks, each of which has half of the heads."""
    whole = [each.chunk(2, dim=-1) for each in (queries, keys, values)]
    before, parts = torch.get_rng_state(), []
    for member, half in enumerate(zip(*whole, strict=True)):
        torch.set_rng_state(before)
        layer.cut = CutApart(member)
        parts.append(attend(layer, *half, mask))
    return torch.cat(parts, dim=-1)


attend = Layer.attend


@lru_cache
def reference_with_dropout() -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "attend", half_by_half)
        return run(Layout(micro_size=2), changes("exact", **DROPOUT), sometimes_absent)


@pytest.mark.exhaustive
def test_each_rank_draws_the_dropout_of_its_heads_and_all_the_same_elsewhere(two_ranks: Ranks) -> None:
    ours = two_ranks(run, LAYOUTS["2"], changes("exact", **DROPOUT), sometimes_absent)[0]
    assert too_far(ours, reference_with_dropout()) == []
    assert too_far(ours, run(Layout(micro_size=2), changes("exact", **DROPOUT), sometimes_absent))
    assert too_far(ours, reference("exact"))


HALF = {"precision": "bf16", "weights": "bf16", "gradients": "bf16"}


@pytest.mark.exhaustive  # tests/parity/test_sequence_parallel.py rounds matrices that are cut and tokens that are split
@pytest.mark.parametrize(
    "training",
    [pytest.param({"precision": "bf16"}, id="autocast"), pytest.param(HALF, id="weights")],
)
def test_bf16_follows_plain_bf16(two_ranks: Ranks, training: dict[str, str]) -> None:
    ours = two_ranks(run, LAYOUTS["2"], {"training": training})[0]
    theirs = run(Layout(), {"training": {**training, "gradients": "fp32"}})
    exact = run(Layout(), {})
    losses, weights = apart(ours, theirs)
    assert losses < LOSSES and weights < TRAVELLED
    assert apart(ours, exact)[0] > 1e-6, "this was fp32"
    assert all(tensor.dtype == torch.float32 for tensor in ours.weights.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("others", [DROPOUT, {}], ids=["dropout", "none"])
def test_four_ranks_cut_matrices_and_split_the_batch(four_ranks: Ranks, others: dict[str, Any]) -> None:
    ours = four_ranks(run, LAYOUTS["2"], changes("exact", **others), sometimes_absent)[0]
    assert too_far(ours, reference_with_dropout() if others else reference("exact")) == []


LAMB = {"optimizer": {"kind": "lamb", "lr": 1e-2, "clipping": 1.0, "weight_decay": 0.1}}


def test_lamb_takes_the_lengths_of_whole_matrices(two_ranks: Ranks) -> None:
    ours = two_ranks(run, LAYOUTS["2"], {**changes("uniform"), **LAMB}, sometimes_absent)[0]
    assert too_far(ours, run(Layout(micro_size=2), {**changes("uniform"), **LAMB}, sometimes_absent)) == []
    assert too_far(ours, reference("uniform"))


def test_packed_matrices_of_modern_encoders_are_cut_by_parts(two_ranks: Ranks) -> None:
    modern = {**changes("exact"), **{name: MODERN[name] for name in ("model", "objective")}}
    ours = two_ranks(run, LAYOUTS["2"], modern)[0]
    assert ours.moved
    assert too_far(ours, run(Layout(micro_size=2), modern)) == []


@pytest.mark.parametrize("variant", always(["flattened", "patchwise", "softsort", "look ahead"], "flattened"))
def test_two_ranks_learn_the_masks_of_one(two_ranks: Ranks, variant: str) -> None:
    """The masking network is small, and each rank holds it whole."""
    test_learned_masks.agree(two_ranks(run_masks, LAYOUTS["2"], test_learned_masks.changes(variant))[0], variant)


IMAGES: dict[str, dict[str, Any]] = {
    "MAE+": {**test_adversary.changes("none"), "adversary": {"kind": "none"}},
    "MAE": {"adversary": {"kind": "none"}, "vision": {"tokens": "visible", "positions": "absolute"}},
    **{kind: test_adversary.changes(kind) for kind in test_adversary.KINDS},
    "per_bucket": test_adversary.changes("relative_embedding", scope="per_bucket"),
    "value": test_adversary.changes("relative_embedding", scope="value"),
    "sequential": test_adversary.changes("relative_coordinate", update="sequential"),
    "linear decoder": {"adversary": {"kind": "none"}, "vision": {"decoder": "linear"}},
    "U-MAE": {"adversary": {"kind": "none"}, "objective": {"uniformity": 0.01}},
}
"""Masked autoencoders: the adversary on relative positions acts inside heads."""


def image_differences(ours: AdversarialResult, name: str) -> list[str]:
    theirs: AdversarialResult = run_alone(run_images, IMAGES[name])
    return too_far(ours, theirs) if theirs.vector is None else test_adversary.differences(ours, theirs)


@pytest.mark.parametrize("name", always(IMAGES, "relative_coordinate"))
def test_two_ranks_give_the_masked_autoencoder_and_the_adversary_of_one(two_ranks: Ranks, name: str) -> None:
    first, second = two_ranks(run_images, LAYOUTS["2"], IMAGES[name])
    assert first.moved and image_differences(first, name) == []
    if first.vector is not None:
        assert torch.equal(first.vector, second.vector)


@pytest.mark.exhaustive  # tests/parity/test_sequence_parallel_images.py splits the tokens, too
@pytest.mark.parametrize("balancing", test_modalities.BALANCING)
def test_two_ranks_give_the_multi_modal_autoencoder_of_one(two_ranks: Ranks, balancing: str) -> None:
    ours = two_ranks(
        run_modalities, LAYOUTS["2"], test_modalities.changes(balancing), test_modalities.sometimes_absent
    )[0]
    theirs = test_modalities.reference(balancing)
    assert ours.moved and test_modalities.differences(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.exhaustive
def test_four_ranks_cut_images_matrices_and_split_the_batch(four_ranks: Ranks) -> None:
    for name in ("relative_coordinate", "relative_embedding"):
        assert image_differences(four_ranks(run_images, LAYOUTS["2"], IMAGES[name])[0], name) == []
    ours = four_ranks(
        run_modalities, LAYOUTS["2"], test_modalities.changes("gradnorm"), test_modalities.sometimes_absent
    )[0]
    assert test_modalities.differences(ours, test_modalities.reference("gradnorm")) == []


def elements_and_copies(layout: Layout) -> tuple[int, int, bool]:
    """Elements that this rank holds and those that it speaks for; whether what is not cut is alike on both."""
    trainer = trainer_for(layout, small_config(layout, training={"steps": 2}, **DROPOUT))
    trainer.run()
    pieces = list(trainer.engine.pieces())
    alike = [piece.tensors["weight"] for piece in pieces if piece.region.size == torch.Size(piece.shape).numel()]
    whole = torch.cat(alike)
    other = whole.clone()
    dist.broadcast(other, 0)
    trainer.engine.close()
    held = sum(piece.region.size for piece in pieces)
    return held, sum(piece.region.size for piece in pieces if piece.owner), torch.equal(whole, other)


def test_a_rank_holds_half_of_what_is_cut_and_copies_stay_alike(two_ranks: Ranks) -> None:
    (held, first, alike), (_, second, other) = two_ranks(elements_and_copies, LAYOUTS["2"])
    assert alike and other
    total = sum(tensor.numel() for tensor in reference("exact").weights.values())
    assert first + second == total
    assert held < 0.7 * total


def threads_after_groups_of_other_sizes() -> int:
    """How many threads more there are when groups of two sizes have been made again, as often as they were before."""

    from trp_scale.engines.megatron import megatron_groups

    def both() -> int:
        for size in (1, 2):
            megatron_groups(size, local_world=2)
        return len([*Path("/proc/self/task").iterdir()])

    before = both()
    return both() - before


def test_groups_of_another_size_leave_no_threads_behind(two_ranks: Ranks) -> None:
    """megatron-core forgets some 17 groups, each with three threads of gloo."""
    for more in two_ranks(threads_after_groups_of_other_sizes):
        assert more < 10


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (3, {}, "tensor_parallel is 3 and does not divide the 2 ranks of this run; allowed: 1, 2"),
    (2, {"heads": 1}, "tensor_parallel is 2 and does not divide --model.heads 1"),
    (2, {"intermediate_size": 63}, "does not divide --model.intermediate_size 63"),
]


@pytest.mark.parametrize(("ranks", "model", "expected"), REFUSED)
def test_what_cannot_be_cut_is_refused(two_ranks: Ranks, ranks: int, model: dict[str, Any], expected: str) -> None:
    assert expected in two_ranks(refusal, megatron(ranks), run, {"model": model})[0]
