"""Whose masks the network chooses after a lesson: its own before it, and those of the network that the seed made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.synthetic import Layout
from tests.synthetic_masks import MasksRun, mask_config, masks_run
from trp_scale.methods.learned_masks.masks import Hypergradient, Selection

CYCLE = {"unroll": 1, "every": 1, "lr": 0.3}


def masked_by(network: nn.Module, selection: Selection) -> Tensor:
    """[B, N] bool: the most probable ones, of equal ones those with the lowest numbers."""
    probabilities = network(selection.embeddings)
    found = torch.zeros_like(probabilities, dtype=torch.bool)
    for row, values in enumerate(probabilities.tolist()):
        ranked = sorted((-value, place) for place, value in enumerate(values))
        found[row, [place for _, place in ranked[: selection.masked.shape[1]]]] = True
    return found


def shared(one: nn.Module, other: nn.Module, selections: Sequence[Selection]) -> float:
    both = [(masked_by(one, each), masked_by(other, each)) for each in selections]
    return sum(int((a & b).sum()) for a, b in both) / sum(int(a.sum()) for a, _ in both)


class Lessons:
    """The masking network before and after each lesson of a run, and the masks it learned from."""

    def __init__(self, run: MasksRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.networks = [copy.deepcopy(run.networks[0])]
        self.selections: list[list[Selection]] = []
        self.found: list[dict[str, float]] = []
        masker, step = run.hook.masker, run.hook.masker.outer_step

        def watched(hypergradient: Hypergradient, scale: float) -> bool:
            self.selections.append([each for window, _ in hypergradient for each in window.selections])
            made = step(hypergradient, scale)
            self.networks.append(copy.deepcopy(run.networks[0]))
            self.found.append({name: float(value) for name, value in masker.lesson.items()})
            return made

        monkeypatch.setattr(masker, "outer_step", watched)


@pytest.mark.parametrize("mode", ["committed", "look_ahead"])
@torch.no_grad()
def test_overlaps_are_with_the_untrained_network_and_the_last_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"multilevel": {**CYCLE, "mode": mode}, "training": {"steps": 4}}
    run = masks_run(Layout(micro_size=4), mask_config(Layout(micro_size=4), **changes))
    lessons = Lessons(run, monkeypatch)
    with torch.enable_grad():
        for _ in range(4):
            run.trainer.train_step()
    untrained = lessons.networks[0]
    assert len(lessons.found) == 4
    for number, found in enumerate(lessons.found):
        before, after = lessons.networks[number : number + 2]
        selections = lessons.selections[number]
        assert found["overlap_last"] == pytest.approx(shared(after, before, selections), abs=1e-12), number
        assert found["overlap_untrained"] == pytest.approx(shared(after, untrained, selections), abs=1e-12), number
    assert len({found["overlap_untrained"] for found in lessons.found}) > 1, "the masks change"
    assert lessons.found[-1]["overlap_untrained"] != lessons.found[-1]["overlap_last"]
    for parameter, own in zip(lessons.networks[-1].parameters(), run.networks[0].parameters(), strict=True):
        assert torch.equal(parameter, own), "the comparison leaves the network as it was"


def test_rows_that_are_not_there_do_not_count() -> None:
    """A window's filler rows have weight 0. Each row has two crops."""
    layout = Layout(micro_size=4)
    run = masks_run(layout, mask_config(layout, multilevel=CYCLE, training={"steps": 1}))
    run.trainer.train_step()
    masker, hook = run.hook.masker, run.hook
    ctx: Any = run.trainer.context(list(run.trainer.source.next_window()), torch.ones(1).double())
    window = hook.choose(ctx, ctx.own_window)
    micro = window.micros[0]
    micro.fields["row_weights"] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for other in window.micros[1:]:
        other.fields["row_weights"] = torch.zeros(4)
    alone = masker._overlaps([window])
    selections = [
        Selection(
            visible=s.visible[:2], masked=s.masked[:2], probabilities=s.probabilities[:2], embeddings=s.embeddings[:2]
        )
        for s in window.selections[:1]
        if s.embeddings is not None
    ]
    untrained = copy.deepcopy(run.networks[0])
    for parameter, part in zip(untrained.parameters(), masker.untrained.parts, strict=True):
        parameter.data.copy_(part.view_as(parameter))
    assert float(alone["overlap_untrained"]) == pytest.approx(shared(run.networks[0], untrained, selections))


def test_a_run_that_learned_nothing_yet_has_none_and_one_that_goes_on_has_the_last() -> None:
    layout = Layout(micro_size=4)
    config = mask_config(layout, multilevel={"unroll": 2}, training={"steps": 4})
    run, other = masks_run(layout, config), masks_run(layout, config)
    run.trainer.train_step()
    assert "overlap_last" not in run.hook.metrics()
    run.trainer.train_step()
    other.hook.load_state_dict(run.hook.state_dict())
    names = ("gradient_norm", "below_eps", "overlap_untrained", "overlap_last")
    assert {name: float(other.hook.masker.lesson[name]) for name in names} == {
        name: run.hook.metrics()[name] for name in names
    }
