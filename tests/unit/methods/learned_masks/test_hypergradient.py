"""The hypergradient against automatic differentiation through committed and unrolled steps, in float64 (MLO-MAE eq.
6-11); sign and scale of both ways in which the encoder acts on the validation loss, each alone; and the comparison that
a run makes on request."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Path, Watched, exact, flat, update
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Rule, Weights, hypergradient, soft_mask
from trp_scale.core.pieces import Shards

DOUBLE = torch.float64
FINE = {"difference": 1e-4}


def start(*, micro_size: int = 8, **changes: Any) -> MasksRun:
    """A run in float64 whose network, head and weights have already moved a little."""
    changes["multilevel"] = {**FINE, **changes.get("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, **changes), dtype=DOUBLE)


def copies(module: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def relative(found: Weights, expected: Weights) -> float:
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([value.flatten() for value in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"unroll": 1, "pooling": "class", "network": "patchwise"}},
        {"multilevel": {"unroll": 1, "weights": "normalised"}},
        {"multilevel": {"unroll": 1}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_committed_steps_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    changes = {**settings, "multilevel": {**FINE, **settings["multilevel"]}}
    ours = update(Layout(micro_size=micro_size), changes, dtype=DOUBLE)
    assert relative(ours.gradient, exact([ours])) < 1e-6


SHARE = 0.1
"""Each path is at least this much of the whole, so that one that is wrong shows."""


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("network", ["flattened", "patchwise"])
def test_each_path_is_that_of_exact_differentiation(network: str, micro_size: int, unroll: int) -> None:
    changes = {"multilevel": {"network": network, "unroll": unroll, **FINE}}
    sizes: dict[Path, float] = {}
    for path in get_args(Path):
        ours = update(Layout(micro_size=micro_size), changes, path=path, dtype=DOUBLE)
        theirs = exact([ours], path)
        assert relative(ours.gradient, theirs) < 1e-6, path
        sizes[path] = float(flat(theirs).norm())
    assert min(sizes.values()) >= SHARE * sizes["both"]


def compared(dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, float]:
    """Metrics after two cycles."""
    layout = Layout(micro_size=4)
    own = {"exact_every": 2, "difference": 1e-4 if dtype == torch.float64 else 1e-2, **changes.pop("multilevel", {})}
    run = masks_run(layout, mask_config(layout, multilevel=own, **changes), dtype=dtype)
    for step in range(2 * run.trainer.config.multilevel.unroll):
        run.trainer.train_step()
        if step < run.trainer.config.multilevel.unroll:
            assert "exact_cosine" not in run.hook.metrics(), "compared each second time only"
    return dict(run.hook.metrics())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"multilevel": {"mode": "look_ahead", "unroll": 1, "head_norm": "layer", "head_dropout": 0.3}},
        {"multilevel": {"mode": "look_ahead", "unroll": 2, "derivative": "full"}},
        {"multilevel": {"selection": "softsort", "weights": "normalised"}},
        {"multilevel": {"kind": "joint", "gamma": 0.5}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 20.0, "selection": "softsort"}},
    ],
)
def test_in_float64_both_agree(changes: dict[str, Any]) -> None:
    found = compared(**changes)
    assert found["exact_cosine"] == pytest.approx(1.0, abs=1e-9)
    assert found["exact_norm_ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_wrong_direction_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the direction's elements turned round."""
    times = Shards.times

    def turned(self: Shards, factor: Any) -> Shards:
        made = times(self, factor)
        return made if factor != 0.125 else Shards(parts=[-p for p in made.parts], owned=made.owned, group=made.group)

    monkeypatch.setattr(Shards, "times", turned)
    found = compared(multilevel={"mode": "look_ahead", "unroll": 1, "look_ahead_lr": 0.125})
    assert found["exact_cosine"] < 0.99


RATE = 0.05


def descent(rate: float) -> Rule:
    return lambda name, weight, gradient: weight - rate * gradient


def looked_ahead(
    settings: dict[str, Any], *, unroll: int, micro_size: int = 4, **kind: Any
) -> tuple[Weights, Weights, MasksRun]:
    """(ours, exact) at the start of the second cycle, whose weights, head and network have moved."""
    own = {"mode": "look_ahead", "unroll": unroll, "look_ahead_lr": RATE, **settings.pop("multilevel", {})}
    run = start(micro_size=micro_size, multilevel=own, **settings)
    watched, config = Watched(run), run.trainer.config
    for _ in range(unroll):
        run.trainer.train_step()
    weights, head = copies(run.model), run.hook.outer.level.head.parameters  # type: ignore[attr-defined]
    run.trainer.train_step()
    size = config.batch.global_size
    exact = hypergradient(
        run.model,
        weights,
        run.networks[0],
        watched.network,
        (head.weight, head.bias),
        # A full derivative goes through the steps from the last to the first.
        lower=[watched.lower(number) for number in reversed(range(len(watched.windows)))],
        train=labelled(range(D_TR + size, D_TR + 2 * size)),
        validation=labelled(range(D_VAL + size, D_VAL + 2 * size)),
        encoder_rule=descent(RATE),
        head_rule=descent(config.multilevel.head_lr),
        **kind,
    )
    return watched.gradient, exact, run


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("settings", [{}, {"vision": {"tokens": "all", "positions": "relative"}}])
def test_one_step_is_exact(settings: dict[str, Any], micro_size: int) -> None:
    ours, exact, _ = looked_ahead(dict(settings), unroll=1, micro_size=micro_size)
    assert relative(ours, exact) < 1e-6


@pytest.mark.parametrize("unroll", [2, 3])
def test_several_steps_are_exact_with_the_full_derivative(unroll: int) -> None:
    ours, exact, run = looked_ahead({"multilevel": {"derivative": "full"}}, unroll=unroll)
    assert run.hook.outer_steps == 2
    assert relative(ours, exact) < 1e-5


@pytest.mark.parametrize(
    ("selection", "kind"),
    [
        ({"selection": "straight_through"}, {"mask_of": lambda sigma, masked: sigma}),
        ({"selection": "softsort", "temperature": 0.3}, {"mask_of": soft_mask(0.3)}),
        (
            {"selection": "softsort", "temperature": 0.3, "weights": "normalised"},
            {"mask_of": soft_mask(0.3), "normalise": True},
        ),
    ],
)
def test_a_choice_with_a_derivative_of_its_own(selection: dict[str, Any], kind: dict[str, Any]) -> None:
    ours, exact, _ = looked_ahead({"multilevel": selection}, unroll=1, **kind)
    hard, _, _ = looked_ahead({"multilevel": {**selection, "selection": "hard"}}, unroll=1)
    assert relative(ours, exact) < 1e-6
    assert relative(hard, exact) > 0.05, "the choice's derivative is no part of what is compared"


def test_the_steps_are_taken_back_and_the_real_ones_see_the_same_images() -> None:
    """With a network that does not learn, a run that unrolls steps is one that does not, bit for bit."""

    def weights(mode: str) -> Weights:
        run = start(multilevel={"mode": mode, "unroll": 2, "lr": 1e-30, "weight_decay": 0.0, "head_lr": 0.03})
        for _ in range(4):
            run.trainer.train_step()
        assert run.hook.outer_steps == 2
        return copies(run.model)

    committed, ahead = weights("committed"), weights("look_ahead")
    assert all(torch.equal(committed[name], ahead[name]) for name in committed)
