"""Learned masks beside other hooks, what goes wrong in a step, and FLOPs against what torch counts in whole cycles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import always
from tests.synthetic import Layout
from tests.synthetic_images import CROPS, PATCHES, VISIBLE
from tests.synthetic_masks import MasksRun, mask_config, masks_run
from trp_scale.config import Config
from trp_scale.methods.learned_masks.masks import scheduled_split
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.mae.upstream import ImageUpstream

STILL = {"lr": 1e-30, "weight_decay": 0.0}
"""A masking network that does not learn: every outer objective then gives the same run."""


def started(micro_size: int = 4, **changes: Any) -> MasksRun:
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, **changes))


def after(steps: int, **changes: Any) -> MasksRun:
    run = started(**changes)
    for _ in range(steps):
        run.trainer.train_step()
    return run


@pytest.mark.parametrize("update", ["parallel", "sequential"])
def test_an_adversary_climbs_along_the_step_s_gradient_alone(update: str) -> None:
    """Whatever passes the hypergradients make between steps."""

    def climbed(mode: str, selection: str) -> tuple[Tensor, Tensor]:
        adversary = {"kind": "absolute_embedding", "ascent": "sgd", "lr": 10.0, "eps": 0.3, "update": update}
        run = after(
            4,
            adversary=adversary,
            vision={"tokens": "all"},
            multilevel={"mode": mode, "selection": selection, **STILL},
        )
        assert run.hook.outer_steps == 2
        (vector,) = (each.vector.detach() for each in run.trainer.hooks.all if hasattr(each, "vector"))
        return vector, run.model.patch_embed.weight.detach()  # type: ignore[union-attr, return-value]

    vector, weight = climbed("committed", "hard")
    assert vector.abs().max() > 0.01
    for mode, selection in (("look_ahead", "hard"), ("committed", "straight_through"), ("look_ahead", "softsort")):
        other, same = climbed(mode, selection)
        assert torch.equal(vector, other) and torch.equal(weight, same), (mode, selection)


def test_a_head_s_gradient_that_is_not_finite_changes_nothing_and_teaches_nothing() -> None:
    run = after(4)
    head: Any = run.hook.outer.level.head  # type: ignore[attr-defined]
    kept = [tensor.clone() for tensor in head._tensors()]
    head.adamw_step(torch.full_like(head.parameters.flat(), torch.nan), 1.0)
    assert all(torch.equal(one, other) for one, other in zip(kept, head._tensors(), strict=True))
    before = {name: value.detach().clone() for name, value in run.networks[0].named_parameters()}
    head.own.bias.data.fill_(torch.nan)
    for _ in range(2):
        run.trainer.train_step()
    assert run.hook.outer_steps == 2 and run.hook.metrics()["gradient_norm"] != run.hook.metrics()["gradient_norm"]
    assert all(torch.equal(before[name], value) for name, value in run.networks[0].named_parameters())


def test_a_cycle_looks_ahead_once_also_when_its_first_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(multilevel={"mode": "look_ahead"})
    check, outer_steps = run.engine.check_gradients, []
    for step in range(6):
        skipped = step in (2, 3)
        monkeypatch.setattr(
            run.engine, "check_gradients", lambda skipped=skipped: check() * (torch.inf if skipped else 1)
        )
        run.trainer.train_step()
        outer_steps.append(run.hook.outer_steps)
    assert outer_steps == [1, 1, 2, 2, 2, 2]


def test_a_curriculum_s_counts_are_those_of_the_masks_that_were_learned_from() -> None:
    run = after(6, multilevel={"final_ratio": 0.9})
    config = run.trainer.config
    images = config.batch.global_size * config.crops.count
    masked = [scheduled_split(step, config).masked for step in range(6)]
    assert masked[0] < masked[-1]
    assert [stats.task_counts for stats in run.trainer.history] == [(images * each,) for each in masked]  # type: ignore[attr-defined]


def test_nothing_large_is_held_between_steps() -> None:
    run = after(2)
    assert all(each.embeddings is None for each in run.hook.window.selections)
    outer: Any = run.hook.outer
    assert outer.base is None and outer.last is None


ROWS = 8
LAYOUT = Layout(micro_size=ROWS)


def counted_cycle(config: Config) -> int:
    """What torch counts in the model and the masking network in a cycle with one update of the network."""
    run = masks_run(Layout(micro_size=config.batch.micro_size), config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in range(config.multilevel.unroll * config.multilevel.every):
            run.trainer.train_step()
    assert run.hook.outer_steps == 1
    counts = counter.get_flop_counts()
    return sum(sum(counts[type(module).__name__].values()) for module in (run.model, run.networks[0]))


def step_flops(config: Config, ranks: int = 1) -> float:
    return ImageUpstream.outline(config, DataFacts()).step_flops(ranks)


def of_pixels(config: Config, patches: int) -> int:
    """The gradient of the patch embedding's input, which nobody needs, for `patches` patches."""
    return 2 * patches * 3 * config.vision.patch_size**2 * config.model.hidden_size


CASES: list[dict[str, Any]] = [
    {},
    {"multilevel": {"micro_size": 4}},
    {"multilevel": {"unroll": 1, "every": 3, "batch_size": 4, "micro_size": 4}},
    {"multilevel": {"unroll": 2, "every": 2, "micro_size": 2, "network": "patchwise"}},
    {"multilevel": {"selection": "softsort"}},
    {"multilevel": {"mode": "look_ahead", "every": 2}},
    {"multilevel": {"mode": "look_ahead", "derivative": "full", "unroll": 3, "micro_size": 2}},
    {"multilevel": {"kind": "joint", "batch_size": 4, "micro_size": 2}},
    {"multilevel": {"kind": "fine_tuning", "unroll": 1, "every": 2}},
    {"multilevel": {"kind": "reconstruction", "unroll": 1, "every": 2}},
    {"multilevel": {"kind": "reconstruction", "selection": "straight_through"}},
]


@pytest.mark.parametrize("changes", always(CASES, *(CASES[number] for number in (0, 1, 3, 6, 7, 8, 10))), ids=str)
def test_a_cycle_is_what_torch_counts_in_it(changes: dict[str, Any]) -> None:
    config = mask_config(LAYOUT, model={"layers": 1}, **changes)
    settings = config.multilevel
    steps = settings.unroll * settings.every
    backward = steps  # passes through the model with masks
    if config.multilevel.selection != "hard":
        backward += 1 if settings.kind == "reconstruction" else 2
    if settings.kind == "head" and settings.mode == "look_ahead":
        backward += settings.unroll + (2 * (settings.unroll - 1) if settings.derivative == "full" else 0)
    unneeded = backward * of_pixels(config, ROWS * CROPS * VISIBLE)
    if settings.reads_labels:
        images, _ = settings.batches(config)
        on_train = {"head": 1, "joint": steps, "fine_tuning": settings.every}[settings.kind]
        unneeded += (on_train + 1) * of_pixels(config, images * CROPS * PATCHES)
    expected = steps * step_flops(config) - unneeded
    assert counted_cycle(config) == pytest.approx(expected, rel=1e-12)


def test_ranks_that_hold_their_share_in_one_pass_need_no_pass_for_the_head_alone() -> None:
    one, parts = mask_config(LAYOUT), mask_config(LAYOUT, multilevel={"micro_size": ROWS // 4})
    assert step_flops(parts, ranks=4) == step_flops(one) < step_flops(parts, ranks=1)
