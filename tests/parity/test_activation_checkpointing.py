"""Blocks that keep less for their backward pass: the same run, and fewer bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.grids import always
from tests.parity.compare import kept_bytes, run_alone
from tests.parity.test_compiled import traced
from tests.ranks import Ranks
from tests.runs import flags
from tests.synthetic import TWO_RANKS, Layout, Result, refusal, run, small_config, trainer_for
from tests.synthetic_images import run_images
from tests.synthetic_masks import run_masks
from tests.synthetic_modalities import run_modalities
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.distributed.environment import Environment
from trp_scale.engines import compiled
from trp_scale.pretraining.base import build_upstream
from trp_scale.training.micro_size import count_memory

WAYS = ("selective", "full")
RUNS: dict[str, tuple[Callable[[Layout, dict[str, Any]], Result], dict[str, Any]]] = {
    "minimax with dropout": (run, {"model": {"dropout": 0.1}}),
    "GradNorm": (run, {"balancer": {"kind": "gradnorm"}}),
    "AdPE": (run_images, {"adversary": {"kind": "relative_embedding", "norm": "l2", "lr": 300.0, "eps": 0.2}}),
    "MM-MAE": (run_modalities, {}),
    "learned masks": (run_masks, {"multilevel": {"network": "patchwise"}}),
}


def same(found: Result, wanted: Result, bound: float) -> None:
    assert wanted.moved
    for name, value in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize(
    ("model", "how"),
    always(product(RUNS, WAYS), ("minimax with dropout", "full"), ("AdPE", "selective"), ("MM-MAE", "full")),
)
def test_a_run_is_the_same_to_the_last_bit(model: str, how: str) -> None:
    function, changes = RUNS[model]
    same(
        function(Layout(), {**changes, "training": {"activation_checkpointing": how}}), function(Layout(), changes), 0.0
    )


def run_and_count(layout: Layout, how: str) -> tuple[Result, int]:
    """The run, and how often a block's forward pass was checkpointed."""
    original, calls = compiled.checkpoint, []

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*arguments, **named)

    with mock.patch.object(compiled, "checkpoint", counting):
        return run(layout, {"training": {"activation_checkpointing": how}}), len(calls)


STAGE_3 = [name for name, layout in TWO_RANKS.items() if layout.stage == 3]
"""Refuse selective."""


@pytest.mark.parametrize(
    ("layout", "how"),
    always(
        [*product([name for name in TWO_RANKS if name not in STAGE_3], WAYS), *product(STAGE_3, ["full"])],
        ("fsdp", "full"),
        ("zero2", "full"),
    ),
)
def test_every_engine_gives_what_one_rank_does(two_ranks: Ranks, layout: str, how: str) -> None:
    found, calls = two_ranks(run_and_count, TWO_RANKS[layout], how)[0]
    assert calls == 2 * 2 * len(found.steps)  # two blocks of two micro-batches
    same(found, run_alone(run, {}), 1e-5)


def test_selective_is_refused_on_stage_3(two_ranks: Ranks) -> None:
    said = two_ranks(refusal, TWO_RANKS["zero3"], training={"activation_checkpointing": "selective"})[0]
    assert "selective gives wrong gradients with ZeRO stage 3" in said


def bytes_kept(how: str) -> int:
    """By the blocks of a step's first forward pass, for its backward pass."""
    trainer = trainer_for(Layout(), small_config(Layout(), training={"activation_checkpointing": how}))
    return kept_bytes(trainer.engine, lambda engine: trainer.objective(engine, trainer.source.next_window()[0]))


def test_full_keeps_fewer_bytes_than_selective_would_and_none() -> None:
    """What selective checkpointing keeps lies in its own store, which these hooks do not see."""
    assert bytes_kept("full") < 0.6 * bytes_kept("none")


def test_auto_counts_what_is_kept(text_dataset: Path, tmp_path: Path) -> None:
    rows = {}
    for how in ("none", "full"):
        words = flags(text_dataset, tmp_path, batch__micro_size=1, training__activation_checkpointing=how)
        config = parse(words).config
        with Environment() as environment:
            rows[how] = count_memory(build_upstream(config, environment), config, environment, "plain", None).row
    assert rows["full"] < rows["none"]


@pytest.mark.parametrize(
    ("how", "compile", "allowed"), [("full", "whole", "blocks"), ("selective", "blocks", "none or full")]
)
def test_what_does_not_go_together_is_refused(
    text_dataset: Path, tmp_path: Path, how: str, compile: str, allowed: str
) -> None:
    words = flags(text_dataset, tmp_path, training__activation_checkpointing=how, training__compile=compile)
    with pytest.raises(RefusedError, match=f"activation_checkpointing is {how}.*allowed.*{allowed}"):
        parse(words)


@pytest.mark.exhaustive
def test_compiled_blocks_are_made_again() -> None:
    together = {"training": {"activation_checkpointing": "full", "compile": "blocks"}}
    found, graphs = traced(lambda: run(Layout(), together))
    assert graphs > 0
    same(found, run_alone(run, {}), 1e-5)
