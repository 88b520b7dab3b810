"""Every engine in the ways it is shipped, for tests that run on each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator

from tests.ranks import Ranks
from tests.synthetic import Layout, hybrid
from trp_scale.engines.deepspeed import DeepSpeedEngine
from trp_scale.engines.ds_config import read

ROOT = Path(__file__).parents[2]


def shipped(name: str) -> Layout:
    """DeepSpeed with a configuration file of this repository."""
    document = read(ROOT / name)
    return Layout(engine="deepspeed", stage=int(document["zero_optimization"]["stage"]), document=document)


LAYOUTS = {
    "plain": Layout(),
    "ddp": Layout(engine="ddp"),
    "fsdp": Layout(engine="fsdp"),
    "hybrid": hybrid(1),
    "fsdp_offload": Layout(engine="fsdp", settings={"fsdp": {"offload": True}}),
    "zero0": shipped("tests/distributed/zero0.json"),
    "zero1": shipped("ds_configs/zero1.json"),
    "zero2": shipped("ds_configs/zero2.json"),
    "zero3": shipped("ds_configs/zero3.json"),
    "zero3_offload": shipped("ds_configs/zero3_offload.json"),
}


SHARED_MOMENTS = {"megatron": Layout(engine="megatron")}
"""The engine on megatron-core with one rank to a matrix, which shares the moments of its rows."""
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: the extra [megatron]"
)
"""For tests whose ranks import it; the tests' own process does not, which takes seconds."""
AND_SHARED_MOMENTS = pytest.param("megatron", marks=[pytest.mark.exhaustive, needs_megatron])


ENGINE_FLAGS: dict[str, dict[str, str]] = {
    **{name: {"engine": name} for name in ("plain", "ddp", "fsdp")},
    "zero0": {"ds_config": "tests/distributed/zero0.json"},
    **{name: {"ds_config": f"ds_configs/{name}.json"} for name in ("zero1", "zero2", "zero3", "zero3_offload")},
}
"""Flags of a command that trains on an engine, as `changes` of `tests.runs.flags`."""


def on_each_rank(two_ranks: Ranks, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
    """What `function(layout, *arguments)` gives on two ranks; on one, in this process, for the plain engine."""
    return two_ranks.run_layout(function, {**LAYOUTS, **SHARED_MOMENTS}[name], *arguments, **named)


@functools.cache
def on_each_rank_once(two_ranks: Ranks, name: str, function: Callable[..., Any]) -> list[Any]:
    """Return the same, kept for other tests that look at it; copied, since each tensor of another process keeps a file
    open."""
    return copy.deepcopy(on_each_rank(two_ranks, name, function))


@contextmanager
def fp16_on_a_cpu() -> Iterator[None]:
    """In this context DeepSpeedEngine takes fp16 on a CPU; both DeepSpeed and the engine are as before after it."""
    supported = mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True)
    with supported, mock.patch.object(DeepSpeedEngine, "fp16_devices", ("cpu",)):
        yield


def fp16_layout(stage: int, **block: Any) -> Layout:
    """A ZeRO stage in fp16; `block` are keys of DeepSpeed's fp16 block."""
    return Layout(engine="deepspeed", stage=stage, document={"fp16": {"enabled": True, "hysteresis": 1, **block}})
