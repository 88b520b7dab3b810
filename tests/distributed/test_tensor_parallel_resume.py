"""Invariant 3 with matrices cut over ranks: a run goes from two tensor ranks to every engine and back, and its export
is that of a run on one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import stored_state
from tests.distributed.engine_layouts import needs_megatron
from tests.distributed.launched import launch, rank_of_two, wait_for_steps
from tests.distributed.test_learned_masks_resume import CYCLE, EXACT_ENOUGH, stored
from tests.grids import always
from tests.parity.compare import RELATIVE, TRAVELLED, without_gradient
from tests.ranks import Ranks
from tests.runs import flags, image_flags, lines, pretrain_here
from trp_scale.checkpoint.export import export
from trp_scale.checkpoint.run_directory import checkpoint_path

pytestmark = needs_megatron

Changes = dict[str, Any]

TENSOR: Changes = {"engine": "megatron", "megatron__tensor_parallel": 2}
SPLIT: Changes = {**TENSOR, "megatron__sequence_parallel": True}
ELSEWHERE: list[Changes] = [
    {"engine": "megatron", "megatron__tensor_parallel": 1},
    {"engine": "ddp"},
    {"engine": "fsdp"},
    {"ds_config": "ds_configs/zero2.json"},
]
"""A step on each, between two parts on two tensor ranks."""


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor], before: dict[str, Tensor]) -> Iterator[str]:
    """Tensors that are not within invariant 1 of the others', by the way since `before`."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith(("qkv.bias", "/step")) or without_gradient(name) or "/lesson/" in name:
            continue  # a third of the biases, or all, have no gradient but rounding's; figures of a lesson are no weig
        way = (value - before[name]).norm()
        if (ours[name] - value).norm() > TRAVELLED * way + RELATIVE * value.norm():
            yield name


def exported(run_dir: Path, output: Path, to: str) -> dict[str, Tensor]:
    """What transformers or timm would read."""
    export(run_dir, output, to=to)
    return load_file(output / "model.safetensors")


def same_export(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names, and each tensor within 1e-5."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)


def started_by_torchrun(arguments: list[str], run_dir: Path) -> int:
    """Two ranks of torchrun's are asked to stop; returns the steps that they have made."""
    process = launch("torchrun", [*arguments, "--training.steps", "100000"])
    wait_for_steps(process, run_dir, 2)
    os.kill(rank_of_two(process, 1), signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return int(lines(run_dir)[-1]["step"])


@pytest.mark.parametrize("launcher", always(["shared ranks", "torchrun"]))
def test_a_text_run_is_stopped_and_goes_on_elsewhere(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, launcher: str
) -> None:
    changes: Changes = {"optimizer__schedule": "constant", "model__dropout": 0.0, "checkpoint__keep": 0}
    plain, parts, stopped = tmp_path / "plain", tmp_path / "parts", 3
    if launcher == "torchrun":
        stopped = started_by_torchrun(flags(text_dataset, parts, **changes, **TENSOR), parts)
    else:
        two_ranks(pretrain_here, flags(text_dataset, parts, training__steps=stopped, **changes, **TENSOR))
    assert pretrain_here(flags(text_dataset, plain, training__steps=stopped, **changes)) == 0
    same_export(exported(parts, tmp_path / "of_two", "hf"), exported(plain, tmp_path / "of_one", "hf"))
    first = stored_state(checkpoint_path(parts, stopped))
    for number, other in enumerate([*ELSEWHERE, SPLIT], 1):
        words = flags(text_dataset, parts, training__steps=stopped + number, **changes, **other)
        assert set(two_ranks(pretrain_here, words)) == {0}
    steps = stopped + 1 + len(ELSEWHERE)
    assert pretrain_here(flags(text_dataset, plain, training__steps=steps, **changes)) == 0
    ours, theirs = (stored_state(checkpoint_path(run_dir, steps)) for run_dir in (parts, plain))
    assert list(apart(ours, theirs, first)) == []
    for mine, other in zip(lines(parts)[stopped:], lines(plain)[stopped:], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5), mine["step"]


def test_a_run_that_learns_masks_goes_on_elsewhere(two_ranks: Ranks, image_dataset: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a cycle of its levels, which is four steps long here."""
    changes: Changes = {"optimizer__schedule": "constant", "checkpoint__keep": 0, **CYCLE, **EXACT_ENOUGH}
    plain, parts = tmp_path / "plain", tmp_path / "parts"
    steps, first = 8, 3
    for layout, last in zip([TENSOR, {"engine": "fsdp"}, SPLIT], [first, 6, steps], strict=True):
        words = image_flags("mlo_mae_tiny", image_dataset, parts, training__steps=last, **changes, **layout)
        assert set(two_ranks(pretrain_here, words)) == {0}
    assert pretrain_here(image_flags("mlo_mae_tiny", image_dataset, plain, training__steps=steps, **changes)) == 0
    assert list(apart(stored(parts, steps), stored(plain, steps), stored(parts, first))) == []
    timm = (exported(run_dir, tmp_path / name, "timm") for run_dir, name in ((parts, "of_two"), (plain, "of_one")))
    same_export(*timm)
