"""Invariant 1: the same weights after 8 steps however the global batch is split, on every engine."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import always, grid
from tests.parity.compare import run_alone, steps_too_far, too_far
from tests.ranks import Ranks
from tests.synthetic import ADVERB, INTERJECTION, TWO_RANKS, Layout, Result, run, small_config, trainer_for
from trp_scale.core.batch import TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.methods.balancing.base import Uniform

BALANCING: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "exact": {"kind": "minimax", "estimate": "exact"},
    "lagged": {"kind": "minimax", "estimate": "lagged"},
}


def never_absent(step: int) -> tuple[int, ...]:
    return ()


def sometimes_absent(step: int) -> tuple[int, ...]:
    """Adverbs come first at step 2 (so that a lagged weight is asked for one never seen) and are gone again at 5."""
    return (ADVERB,) if step in (0, 1, 5) else ()


ABSENCE = {"present": never_absent, "absent": sometimes_absent}


def reference(balancing: str, absence: str, optimizer: str = "adamw") -> Result:
    found: Result = run_alone(run, changes(balancing, optimizer), ABSENCE[absence])
    return found


def changes(balancing: str, optimizer: str = "adamw") -> dict[str, Any]:
    rate = 1e-3 if optimizer == "adamw" else 0.5
    return {"balancer": BALANCING[balancing], "optimizer": {"kind": optimizer, "lr": rate}}


def test_the_task_counts_are_uneven_and_a_task_is_missing_from_some_micro_batches() -> None:
    trainer = trainer_for(Layout(micro_size=2), small_config(Layout(micro_size=2)))
    window = trainer.source.next_window()
    counts = torch.stack([trainer.objective.count(micro) for micro in window])  # [4, T]
    present = counts[:, :INTERJECTION] > 0
    assert (present.any(0) & ~present.all(0)).any(), "no task is in some micro-batches only"
    assert counts.sum(0).unique().numel() > 3


def test_a_task_can_be_missing_from_a_whole_global_batch() -> None:
    trainer = trainer_for(Layout(micro_size=2), small_config(Layout(micro_size=2)), absent=sometimes_absent)
    counts = torch.stack([trainer.objective.count(micro) for micro in trainer.source.next_window()]).sum(0)
    assert counts[ADVERB] == 0


@pytest.mark.parametrize(("balancing", "absence"), grid(BALANCING, ABSENCE))
def test_accumulation_does_not_change_the_weights(balancing: str, absence: str) -> None:
    whole = run(Layout(micro_size=8), changes(balancing), ABSENCE[absence])
    assert whole.moved
    assert too_far(whole, reference(balancing, absence)) == []


@pytest.mark.parametrize(("layout", "balancing", "absence"), grid(TWO_RANKS, BALANCING, ABSENCE))
def test_two_ranks_give_the_weights_of_one(two_ranks: Ranks, layout: str, balancing: str, absence: str) -> None:
    ours = two_ranks(run, TWO_RANKS[layout], changes(balancing), ABSENCE[absence])[0]
    theirs = reference(balancing, absence)
    assert too_far(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.parametrize("layout", always(TWO_RANKS, "zero2"))
def test_key_biases_agree_under_sgd(two_ranks: Ranks, layout: str) -> None:
    ours = two_ranks(run, TWO_RANKS[layout], changes("exact", "sgd"), never_absent)[0]
    theirs = reference("exact", "present", "sgd")
    key_biases = [name for name in theirs.weights if name.endswith("key.bias")]
    assert len(key_biases) == 2
    for name in key_biases:  # they start at 0 and have no gradient in exact arithmetic: only rounding moves them
        assert (ours.weights[name] - theirs.weights[name]).abs().max() < 1e-7, name
    assert [far for far in too_far(ours, theirs) if "key.bias" not in far] == []


WHOLE_MATRICES: dict[str, dict[str, Any]] = {
    "lamb": {"optimizer": {"kind": "lamb", "lr": 0.01, "clipping": 1.0, "weight_decay": 0.1}},
    "muon": {"optimizer": {"kind": "muon", "lr": 0.01, "clipping": 1.0, "weight_decay": 0.1}},
}
"""Optimizers whose updates depend on all elements of a matrix."""


@pytest.mark.parametrize(
    ("layout", "kind"),
    always(product(TWO_RANKS, WHOLE_MATRICES), ("zero2", "lamb"), ("fsdp", "muon")),
)
def test_updates_of_whole_matrices_agree(two_ranks: Ranks, layout: str, kind: str) -> None:
    """However an engine shards a matrix."""
    settings = {**changes("exact"), **WHOLE_MATRICES[kind]}
    ours = two_ranks(run, TWO_RANKS[layout], settings)[0]
    assert ours.moved and too_far(ours, run_alone(run, settings)) == []


MODERN: dict[str, Any] = {
    "model": {"kind": "modern", "layers": 3, "global_every": 2, "local_attention": 4, "layer_norm_eps": 1e-5},
    "objective": {"next_sentence": "off"},
    "optimizer": {"kind": "muon", "lr": 1e-3},
}
"""Global layers at both ends, a local one between them."""


@pytest.mark.parametrize(
    ("layout", "packed"),
    always(product(TWO_RANKS, (False, True)), ("fsdp", False), ("ddp", True)),
)
def test_modern_encoders_agree(two_ranks: Ranks, layout: str, packed: bool) -> None:
    arguments = ({**changes("exact"), **MODERN}, never_absent, packed)
    ours = two_ranks(run, TWO_RANKS[layout], *arguments)[0]
    assert ours.moved and too_far(ours, run_alone(run, *arguments)) == []


def test_packed_rows_do_not_depend_on_accumulation() -> None:
    arguments = ({**changes("exact"), **MODERN}, never_absent)
    whole = run(Layout(micro_size=8), *arguments, True)
    assert too_far(whole, run_alone(run, *arguments, True)) == []
    assert too_far(whole, run_alone(run, *arguments, False)) != []


@pytest.mark.parametrize("layout", always(["ddp", "fsdp", "zero2", "zero3"], "fsdp"))
def test_clipping_acts_on_the_norm_of_the_global_gradient(two_ranks: Ranks, layout: str) -> None:
    # A large rate: the distance travelled must stay far above the rounding of the weights themselves.
    clipped = {**changes("exact", "sgd"), "optimizer": {"kind": "sgd", "lr": 4.0, "clipping": 0.5}}
    ours = two_ranks(run, TWO_RANKS[layout], clipped, never_absent)[0]
    theirs = run(Layout(micro_size=2), clipped)
    assert all(stats.grad_norm > 0.5 for stats in theirs.steps), "nothing was clipped"
    assert too_far(ours, theirs) == []


def mean_of_means(balancer: Uniform, ctx: StepContext, losses: TaskLosses) -> torch.Tensor:
    """The usual mistake: each micro-batch divides by its own counts, and the means are averaged."""
    assert ctx.weights is not None
    return (ctx.weights / losses.counts.clamp(min=1) * losses.sums).sum() / len(ctx.window)


def test_a_mean_of_means_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference("uniform", "present")
    monkeypatch.setattr(Uniform, "total", mean_of_means)
    wrong = run(Layout(micro_size=2), changes("uniform"))
    wrong_whole = run(Layout(micro_size=8), changes("uniform"))
    assert too_far(wrong_whole, right) == [], "with one micro-batch a mean of means is the mean"
    assert len(too_far(wrong, right)) > 10


def prepass_and_weighted_losses(layout: Layout, dropout: float) -> tuple[list[float], list[float], list[float]]:
    """Task sums of the pre-pass, of the weighted pass that follows, and of a pass at the next step's seed."""
    config = small_config(layout, model={"dropout": dropout}, balancer={"kind": "minimax", "estimate": "exact"})
    trainer = trainer_for(layout, config)
    trainer.engine.train(True)
    window = trainer.source.next_window()
    counts = torch.stack([trainer.objective.count(micro) for micro in window]).sum(0)
    ctx = trainer.context(window, trainer.engine.data_group.sum(counts))
    trainer.hooks.before_step(ctx)
    assert ctx.sums is not None
    sums = torch.zeros_like(ctx.sums)
    for number, micro in enumerate(window):
        losses = ctx.compute_losses(micro)
        trainer.engine.backward(trainer.hooks.total(ctx, losses), last=number == len(window) - 1)
        sums += losses.sums.detach()
    again = trainer.engine.data_group.sum(sums)
    trainer.finish(ctx)
    trainer.state.step += 1
    later = trainer.context(window, ctx.counts)
    with torch.no_grad():
        other = torch.stack([later.compute_losses(micro).sums for micro in window]).sum(0)
    trainer.engine.close()
    return ctx.sums.tolist(), again.tolist(), trainer.engine.data_group.sum(other).tolist()


@pytest.mark.parametrize("layout", always(["plain", *TWO_RANKS], "plain", "fsdp", "zero2"))
def test_the_prepass_sees_the_dropout_of_the_weighted_pass(two_ranks: Ranks, layout: str) -> None:
    chosen = {"plain": Layout(micro_size=4), **TWO_RANKS}[layout]
    for prepass, weighted, later in two_ranks.run_layout(prepass_and_weighted_losses, chosen, 0.1):
        assert prepass == weighted  # bit for bit
        assert prepass != later, "dropout is off, or the same at every step"
