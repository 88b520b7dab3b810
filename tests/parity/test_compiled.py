"""A compiled run, on every engine that can and with methods that take passes of their own, gives the same weights.

Traced by aot_eager, since the default backend takes minutes of a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from torch._dynamo.utils import counters

from tests.grids import always
from tests.parity import test_adversary, test_learned_masks, test_modalities, test_uniformity
from tests.parity.compare import too_far
from tests.parity.test_partition import MODERN
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, Layout, Result, refusal, run
from tests.synthetic_images import run_images
from tests.synthetic_masks import run_masks
from tests.synthetic_modalities import run_modalities

Found = TypeVar("Found")

CHANGES: dict[str, Any] = {"optimizer": {"eps": 1e-4}, "balancer": {"kind": "minimax", "estimate": "exact"}}
LAYOUTS = [name for name in TWO_RANKS if name not in ("hybrid", "zero0", "zero3")]
STEPS = 3
GRAPHS = {"blocks": 4, "whole": 2}
"""A block and the last one, or the model; each with gradients and without (the pass that finds the weights)."""


def traced(train: Callable[[], Found]) -> tuple[Found, int]:
    """What a run gives, and how many graphs were made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        torch._dynamo.reset()
        counters.clear()
        return train(), counters["stats"]["unique_graphs"]


def compiled(layout: Layout, how: str, **training: str) -> tuple[Result, int]:
    return traced(lambda: run(layout, {**CHANGES, "training": {"compile": how, "steps": STEPS, **training}}))


@lru_cache
def reference() -> Result:
    return run(Layout(micro_size=2), {**CHANGES, "training": {"steps": STEPS}})


@pytest.mark.parametrize("how", always(GRAPHS, "blocks"))
def test_one_rank_gives_the_weights_of_the_plain_run(how: str) -> None:
    found, graphs = compiled(Layout(micro_size=2), how)
    assert found.moved and too_far(found, reference()) == []
    assert graphs == GRAPHS[how]


@pytest.mark.parametrize(("how", "packed"), always(product(GRAPHS, (False, True)), ("whole", False), ("blocks", True)))
def test_modern_encoders(how: str, packed: bool) -> None:
    """Global blocks, local ones and the last are different graphs; without a pass that finds weights, one of each."""
    changes = {**CHANGES, **{name: MODERN[name] for name in ("model", "objective")}, "balancer": {"kind": "uniform"}}

    def train(**training: Any) -> Result:
        return run(Layout(micro_size=2), {**changes, "training": {"steps": STEPS, **training}}, packed=packed)

    found, graphs = traced(lambda: train(compile=how))
    assert graphs >= GRAPHS[how] // 2
    assert too_far(found, train()) == []


@pytest.mark.parametrize(("layout", "how"), always(product(LAYOUTS, GRAPHS), ("fsdp", "blocks")))
def test_two_ranks_give_the_weights_of_the_plain_run(two_ranks: Ranks, layout: str, how: str) -> None:
    found, graphs = two_ranks(compiled, TWO_RANKS[layout], how)[0]
    assert too_far(found, reference()) == []
    if (layout, how) != ("fsdp", "whole"):  # it breaks at each unit, whose weights are gathered outside a graph
        assert graphs == GRAPHS[how]


def losses(result: Result) -> list[float]:
    return [loss for stats in result.steps for loss in (stats.loss, *stats.task_losses)]


@pytest.mark.parametrize(("layout", "how"), always(product(["plain", "ddp"], GRAPHS)))
def test_bf16_weights_give_the_losses_of_the_plain_run_with_them(two_ranks: Ranks, layout: str, how: str) -> None:
    """To 1e-5, a hundredth of what bf16 changes: the traced operations are the same, in the same precision."""
    chosen = {"plain": Layout(micro_size=2), **TWO_RANKS}[layout]
    half = {"precision": "bf16", "weights": "bf16"}
    found = [two_ranks.run_layout(compiled, chosen, each, **half)[0] for each in (how, "none")]
    (ours, graphs), (theirs, none) = found
    assert (graphs, none) == (GRAPHS[how], 0)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    assert losses(ours) != pytest.approx(losses(reference()), rel=1e-4), "nothing was rounded"


def with_compile(changes: dict[str, Any], how: str) -> dict[str, Any]:
    return {**changes, "training": {**changes["training"], "compile": how}}


@pytest.mark.parametrize(("variant", "how"), always(product(["flattened", "look ahead"], GRAPHS)))
def test_masks_that_are_learned(how: str, variant: str) -> None:
    """Differences of losses at moved weights, and steps on a second source."""
    changes = with_compile(test_learned_masks.changes(variant), how)
    found, graphs = traced(lambda: run_masks(Layout(micro_size=2), changes))
    assert graphs > 0
    test_learned_masks.agree(found, variant)


@pytest.mark.exhaustive  # tests/unit/methods/balancing/test_gradnorm.py compiles a model with taps
@pytest.mark.parametrize(("balancing", "how"), product(["minimax", "gradnorm"], GRAPHS))
def test_several_modalities(how: str, balancing: str) -> None:
    """With taps and without."""
    changes = with_compile(test_modalities.changes(balancing), how)
    found, graphs = traced(lambda: run_modalities(Layout(micro_size=2), changes, test_modalities.sometimes_absent))
    assert graphs > 0 and test_modalities.differences(found, test_modalities.reference(balancing)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", GRAPHS)
def test_class_tokens_that_spread(how: str) -> None:
    """A pass through the encoder alone before each step."""
    changes = with_compile(test_uniformity.changes("alone"), how)
    found, graphs = traced(lambda: run_images(Layout(micro_size=2), changes))
    assert graphs > 0 and too_far(found, test_uniformity.reference("alone")) == []


# What the passes over the window see: the parallel one always asks for the perturbation's gradient; of the sequential
# ones the first asks for it, the second does not. By blocks: one of the encoder, one of the decoder.
OF_AN_ADVERSARY = {
    ("whole", "parallel"): 1,
    ("whole", "sequential"): 2,
    ("blocks", "parallel"): 2,
    ("blocks", "sequential"): 4,
}


@pytest.mark.parametrize(("how", "update"), always(OF_AN_ADVERSARY))
def test_an_adversary(how: str, update: str) -> None:
    changes = test_adversary.changes("relative_coordinate", update=update)
    theirs = test_adversary.reference(changes)
    ours, graphs = traced(lambda: run_images(Layout(micro_size=2), with_compile(changes, how)))
    assert graphs == OF_AN_ADVERSARY[how, update], "compiled anew in the run, or never"
    assert too_far(ours, theirs) == test_adversary.vector_too_far(ours, theirs, 1e-6, 1e-6) == []


def test_stage_3_is_refused(two_ranks: Ranks) -> None:
    said = two_ranks(refusal, TWO_RANKS["zero3"], training={"compile": "blocks"})[0]
    assert "does not work with ZeRO stage 3" in said
