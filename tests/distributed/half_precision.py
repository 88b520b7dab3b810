"""fp16 where there is no GPU: torch's CPU kernels have it, and DeepSpeed believes what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator

from tests.synthetic import Layout
from trp_scale.engines.deepspeed import DeepSpeedEngine


@contextmanager
def fp16_on_a_cpu() -> Iterator[None]:
    """In this context DeepSpeedEngine takes fp16 on a CPU; both DeepSpeed and the engine are as before after it."""
    accelerator, before = get_accelerator(), DeepSpeedEngine.fp16_devices
    DeepSpeedEngine.fp16_devices = ("cpu",)
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        DeepSpeedEngine.fp16_devices = before
        del accelerator.is_fp16_supported


def fp16_layout(stage: int, **block: Any) -> Layout:
    """A ZeRO stage in fp16; `block` are keys of DeepSpeed's fp16 block."""
    return Layout(engine="deepspeed", stage=stage, document={"fp16": {"enabled": True, "hysteresis": 1, **block}})
