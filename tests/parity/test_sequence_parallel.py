"""Invariant 1 where ranks that share matrices split the tokens between them (--megatron.sequence_parallel)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.synthetic as synthetic
from tests.distributed.engine_layouts import needs_megatron
from tests.distributed.test_precision import LOSSES, TRAVELLED, apart
from tests.grids import always
from tests.parity.compare import kept_bytes, steps_too_far, too_far
from tests.parity.test_partition import sometimes_absent
from tests.parity.test_tensor_parallel import DROPOUT, METHODS, CutApart, changes, half_by_half
from tests.parity.test_tensor_parallel import reference as reference_of
from tests.ranks import Ranks
from tests.synthetic import Layout, Result, data_group, make_engine, refusal, run, small_config
from trp_scale.core.batch import Batch
from trp_scale.pretraining.pos_bert.model import Layer

pytestmark = needs_megatron

CUT: dict[str, Any] = {"tensor_parallel": 2}
SPLIT = {**CUT, "sequence_parallel": True}


def layout(settings: dict[str, Any], **others: Any) -> Layout:
    return Layout(engine="megatron", settings={"megatron": settings}, **others)


@pytest.mark.parametrize("method", always(METHODS, "exact"))
def test_two_ranks_that_split_tokens_give_the_weights_of_one(two_ranks: Ranks, method: str) -> None:
    ours = two_ranks(run, layout(SPLIT), changes(method), sometimes_absent)[0]
    assert ours.moved
    assert too_far(ours, reference_of(method)) == steps_too_far(ours, reference_of(method)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard_moments", [True, False])
def test_four_ranks_split_tokens_and_the_batch(four_ranks: Ranks, shard_moments: bool) -> None:
    own = layout({**SPLIT, "shard_moments": shard_moments})
    ours = four_ranks(run, own, changes("exact"), sometimes_absent)[0]
    assert too_far(ours, reference_of("exact")) == []


def unpadded(positions: range, absent: tuple[int, ...] = ()) -> Batch:
    """Rows without padding: neither a mask nor a list."""
    found = batch_of(positions, absent)
    for name in ("attention_mask", "kept"):
        del found.fields[name]
    return found


batch_of = synthetic.batch


def run_rows(own: Layout) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "batch", unpadded)
        return run(own, {})


@pytest.mark.exhaustive
def test_places_of_whole_rows_are_split_too(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks(run_rows, layout(SPLIT))[0], run_rows(Layout())
    assert too_far(ours, theirs) == []
    assert too_far(ours, run(Layout(), {})), "these rows have no padding"


@pytest.mark.parametrize("weights", always(["fp32", "bf16"], "bf16"))
def test_bf16_follows_plain_bf16(two_ranks: Ranks, weights: str) -> None:
    training = {"precision": "bf16", "weights": weights}
    ours = two_ranks(run, layout(SPLIT), {"training": training})[0]
    losses, weights = apart(ours, run(Layout(), {"training": training}))
    assert losses < LOSSES and weights < TRAVELLED


def list_by_halves(dropout: nn.Dropout, tokens: Tensor) -> Tensor:
    """A whole list's dropout as two ranks draw it, each for half of the places; other tensors' as ever."""
    if tokens.dim() != 2 or not dropout.training:
        return forward(dropout, tokens)
    before, parts = torch.get_rng_state(), []
    for member, half in enumerate(nn.functional.pad(tokens, (0, 0, 0, len(tokens) % 2)).chunk(2)):
        torch.set_rng_state(before)
        with CutApart(member).drawing():
            parts.append(forward(dropout, half))
    return torch.cat(parts)[: len(tokens)]


forward = nn.Dropout.forward


@lru_cache
def reference_with_dropout() -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "attend", half_by_half)
        patch.setattr(nn.Dropout, "forward", list_by_halves)
        return run(Layout(micro_size=2), changes("exact", **DROPOUT), sometimes_absent)


def test_each_rank_draws_the_dropout_of_its_tokens(two_ranks: Ranks) -> None:
    ours = two_ranks(run, layout(SPLIT), changes("exact", **DROPOUT), sometimes_absent)[0]
    assert too_far(ours, reference_with_dropout()) == []


def saved_bytes(own: Layout, layers: int) -> int:
    config = small_config(own, model={"layers": layers, **DROPOUT["model"]})
    engine, objective = make_engine(own, config, data_group(config))
    engine.train(True)
    return kept_bytes(engine, lambda forward: objective(forward, unpadded(range(8))))


def of_a_block(own: Layout) -> int:
    """That one more block keeps."""
    return saved_bytes(own, 4) - saved_bytes(own, 3)


def test_a_block_keeps_half_of_what_is_not_cut(two_ranks: Ranks) -> None:
    """Heads and hidden units are cut anyway. Beside them a block keeps numbers of [K, 32] six times: what entered the
    queries, keys and values, and the feed-forward; the inputs of two norms; two masks of dropout. All of it halves, and
    so do the norms' means and deviations."""
    (cut, split), places = (two_ranks(of_a_block, layout(own))[0] for own in (CUT, SPLIT)), 8 * 16
    assert cut - split == 4 * (6 * places * 32 + 4 * places) / 2


def test_a_model_without_blocks_to_split_is_refused(two_ranks: Ranks) -> None:
    """Its last layer is its only one."""
    said = two_ranks(refusal, layout(SPLIT), run, {"model": {"layers": 1}})[0]
    assert "BertForMaskedPositions has no blocks whose tokens can be split" in said


def there_and_back(count: int) -> tuple[tuple[int, ...], bool, Tensor]:
    """Of so many tokens: the shape of a rank's own, whether they come back whole, and the gradient of one that each
    rank has weighed by its own number."""
    from trp_scale.engines.megatron import SplitTokens, megatron_groups

    group = megatron_groups(2, local_world=2)[1]
    cut = SplitTokens(group, torch.device("cpu"))
    tokens = torch.randn(3, count, 4, generator=torch.Generator().manual_seed(count), requires_grad=True)
    own = cut.split(tokens)
    whole = cut.whole(own)
    (whole * torch.arange(1.0, count + 1)[:, None]).sum().backward()
    assert tokens.grad is not None
    return tuple(own.shape), torch.equal(whole, tokens), tokens.grad[0, :, 0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_tokens_that_do_not_divide_come_back_without_what_was_added(two_ranks: Ranks, count: int) -> None:
    for shape, same, gradient in two_ranks(there_and_back, count):
        assert shape == (3, (count + 1) // 2, 4) and same
        assert gradient.tolist() == list(range(1, count + 1))
