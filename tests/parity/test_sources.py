"""Invariant 1 with tasks by source: the same weights and task weights for every split of the batch and every engine."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import always
from tests.parity.compare import run_alone, steps_too_far
from tests.parity.test_modalities import differences as weight_differences
from tests.ranks import Ranks
from tests.synthetic import SOURCES, TWO_RANKS, Layout, Result, row_source, run, small_config, trainer_for
from tests.synthetic_images import run_images
from tests.synthetic_modalities import modality_config, modality_trainer, run_modalities

PATH = ",".join(f"{name}:{weight}=DIR" for name, weight in zip(SOURCES, ("0.6", "0.3", "0.1"), strict=True))
BALANCING: dict[str, dict[str, Any]] = {
    "minimax": {"kind": "minimax"},
    "group_dro": {"kind": "group_dro", "rate": 0.3, "adjustment": 1.0, "group_sizes": "batch"},
    "gradnorm": {"kind": "gradnorm", "lr": 0.05},
}
TASKS = ("sources", "parts_of_speech_by_sources")


def changes(balancing: str, tasks: str) -> dict[str, Any]:
    return {
        "balancer": BALANCING[balancing],
        "objective": {"tasks": tasks},
        "data": {"path": PATH},
        "training": {"steps": 5},
    }


IMAGES: dict[str, dict[str, Any]] = {
    "mae": {"balancer": {"kind": "minimax", "alpha": 4.0}, "objective": {"tasks": "sources"}},
    "u_mae": {"balancer": {"kind": "minimax", "alpha": 4.0}, "objective": {"tasks": "sources", "uniformity": 0.1}},
    "modalities": {"balancer": BALANCING["gradnorm"], "objective": {"tasks": "sources"}},
    "by_sources": {"balancer": BALANCING["gradnorm"], "objective": {"tasks": "modalities_by_sources"}},
}


def run_of_images(layout: Layout, name: str) -> Result:
    changes = {**IMAGES[name], "data": {"path": PATH}, "training": {"steps": 5}}
    return run_images(layout, changes) if "mae" in name else run_modalities(layout, changes)


def differences(ours: Result, theirs: Result) -> list[str]:
    return [*weight_differences(ours, theirs), *steps_too_far(ours, theirs, names=["task_weights"])]


def test_the_sums_of_sources_add_up_to_those_of_parts_of_speech() -> None:
    """The loss of all words is the same however it is split; the loss of a source is that of its rows alone."""
    losses = {}
    for tasks in ("parts_of_speech", *TASKS):
        trainer = trainer_for(Layout(), small_config(Layout(micro_size=8), **changes("minimax", tasks)))
        (micro,) = trainer.source.next_window()
        losses[tasks] = trainer.objective(trainer.engine, micro)
        if tasks == "sources":
            for number, name in enumerate(trainer.objective.tasks[:-1]):
                rows = [row for row in range(8) if row_source(row) == number]
                words = micro["label_weights"][rows].sum()
                assert losses[tasks].counts[number] == words, name
    by_part, by_source, both = (losses[tasks].sums[:-1].detach() for tasks in ("parts_of_speech", *TASKS))
    torch.testing.assert_close(both.view(len(SOURCES), -1).sum(0), by_part, rtol=1e-12, atol=0)
    torch.testing.assert_close(both.view(len(SOURCES), -1).sum(1), by_source, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("balancing", always(BALANCING, "minimax"))
def test_accumulation_changes_neither_weights_nor_task_weights(balancing: str, tasks: str) -> None:
    whole = run(Layout(micro_size=8), changes(balancing, tasks))
    assert whole.moved
    first, last = whole.steps[0].task_weights, whole.steps[-1].task_weights
    assert max(abs(a - b) for a, b in zip(first, last, strict=True)) > 1e-3, "the task weights did not change"
    assert differences(whole, run_alone(run, changes(balancing, tasks))) == []


@pytest.mark.parametrize(
    ("balancing", "layout"),
    always(product(BALANCING, TWO_RANKS), ("minimax", "zero2"), ("group_dro", "ddp"), ("gradnorm", "fsdp")),
)
def test_two_ranks_give_the_weights_of_one(two_ranks: Ranks, balancing: str, layout: str) -> None:
    ours = two_ranks(run, TWO_RANKS[layout], changes(balancing, "sources"))[0]
    assert differences(ours, run_alone(run, changes(balancing, "sources"))) == []


@pytest.mark.parametrize("name", IMAGES)
def test_accumulation_of_images_changes_neither_weights_nor_task_weights(name: str) -> None:
    whole = run_of_images(Layout(micro_size=8), name)
    assert whole.moved and len(set(whole.steps[-1].task_weights)) > 2
    assert differences(whole, run_alone(run_of_images, name)) == []


@pytest.mark.parametrize(
    ("name", "layout"),
    always(product(IMAGES, ("ddp", "fsdp", "zero2", "zero3")), ("u_mae", "fsdp"), ("by_sources", "zero2")),
)
def test_two_ranks_give_the_image_weights_of_one(two_ranks: Ranks, name: str, layout: str) -> None:
    ours = two_ranks(run_of_images, TWO_RANKS[layout], name)[0]
    assert differences(ours, run_alone(run_of_images, name)) == []


def test_the_sums_of_sources_of_images_add_up_to_those_of_modalities() -> None:
    losses = {}
    for tasks in ("modalities", "sources", "modalities_by_sources"):
        config = modality_config(Layout(micro_size=8), objective={"tasks": tasks}, data={"path": PATH})
        trainer = modality_trainer(Layout(), config)
        (micro,) = trainer.source.next_window()
        losses[tasks] = trainer.objective(trainer.engine, micro)
    for values in ("sums", "counts"):
        by_modality, by_source, both = (getattr(parts, values).detach() for parts in losses.values())
        torch.testing.assert_close(both.view(len(SOURCES), -1).sum(0), by_modality, rtol=1e-12, atol=0)
        torch.testing.assert_close(both.view(len(SOURCES), -1).sum(1), by_source, rtol=1e-12, atol=0)
