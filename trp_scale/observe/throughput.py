"""How fast a run is: arithmetic of a step, the device's peak, memory, and time without stopping the device."""

from __future__ import annotations

import resource
import sys
import time

import torch

from trp_scale.config import ModelConfig

TRAINING_OVER_FORWARD = 3
"""The backward pass does twice the forward's arithmetic. Recomputation is not counted: these are model FLOPs."""

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
)
"""Dense bf16 matrix FLOP/s from the makers' data sheets, by a part of the device's name; the first that fits counts."""


def bert_step_flops(
    model: ModelConfig, *, rows: int, length: int, predicted: int, vocabulary: int, next_sentence: bool = True
) -> float:
    """Model FLOPs of one training step of BERT; one multiply-add is 2 FLOPs.

    Forward of a layer on N positions of width d and feed-forward width i: 8 N d^2 (query, key, value, output) + 4 N d i
    (feed-forward) + 4 N^2 d (scores and their sum over values), which is 24 N d^2 + 4 N^2 d for i = 4 d. Embeddings,
    norms and activations are left out.

    Args:
        model: the encoder.
        rows: sequences of the step on all ranks.
        length: positions of a sequence, padding included.
        predicted: positions of a sequence that go through the transform and the vocabulary.
        vocabulary: columns of the output matrix.
        next_sentence: pooler and two-way head on the first position.
    """
    width = model.hidden_size
    layer = 8 * length * width**2 + 4 * length * width * model.intermediate_size + 4 * length**2 * width
    head = 2 * predicted * width**2 + 2 * predicted * width * vocabulary
    pooler = (2 * width**2 + 4 * width) if next_sentence else 0
    return float(TRAINING_OVER_FORWARD * rows * (model.layers * layer + head + pooler))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s, None where it is not known: a CPU, an unlisted GPU, or full precision
    (whose peak depends on the TF32 setting)."""
    if precision == "fp32":
        return None
    name = device_name.lower()
    words = name.replace("-", " ").split()
    for part, flops in PEAK_FLOPS:
        wanted = part.lower().split()
        if all(word in words for word in wanted):
            return flops
    return None


def peak_memory_bytes(*, on_gpu: bool) -> int:
    """Largest memory of this process since it began: what torch allocated on its GPU, or the resident set on a CPU."""
    if on_gpu:
        return int(torch.cuda.max_memory_allocated())
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(largest if sys.platform == "darwin" else largest * 1024)  # Linux counts in KiB, macOS in bytes


class StepTimer:
    """Wall time between calls, without a device synchronisation.

    The loop's own read of the gradient norm keeps host and device within one step of each other, so that the mean over
    steps is right and a single step is off by at most what is still queued.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call, or since the timer was made."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
