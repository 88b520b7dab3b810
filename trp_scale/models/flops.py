"""How fast a run is: arithmetic of a step, the device's peak, memory, and the time until the first step is made."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trp_scale.config import ModelConfig, split_patches
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import MaskedAutoencoderConfig, OnImages
from trp_scale.core.engine import CompiledGraphs
from trp_scale.core.flops import FlopCounterMode

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
    model: ModelConfig,
    *,
    rows: int,
    length: int,
    predicted: int,
    vocabulary: int,
    next_sentence: bool = True,
    read: int | None = None,
    kept: float = 1.0,
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
        read: positions of a sequence that the last layer is computed at, keys and values left out, which are of all;
            None = all.
        kept: share of the positions that is computed, the rest being padding, which attention alone goes over.
    """
    width, computed = model.hidden_size, kept * length
    read = length if read is None else read

    def layer(queries: float, asked: int) -> float:
        at_queries = 4 * width**2 + 4 * width * model.intermediate_size
        return 4 * computed * width**2 + queries * at_queries + 4 * asked * length * width

    head = 2 * predicted * width**2 + 2 * predicted * width * vocabulary
    pooler = (2 * width**2 + 4 * width) if next_sentence else 0
    last = layer(computed if read == length else read, read)
    layers = (model.layers - 1) * layer(computed, length) + last
    return float(TRAINING_OVER_FORWARD * rows * (layers + head + pooler))


def mae_step_flops(config: MaskedAutoencoderConfig, *, rows: int, computed: bool = False) -> float:
    """Model FLOPs of one training step of a masked autoencoder; one multiply-add is 2 FLOPs.

    A block on N tokens is counted as in `bert_step_flops`; relative positions add the product of
    queries and offsets' vectors. Norms, activations, lookups and the sums that positions and perturbations
    take part in are left out. So is the interpolation of relative tables, once for each block and micro-batch whatever
    its rows, and what an adversary adds, which is more of it at most: together 0.27 % of adpe_vit_b for a micro-batch
    of one crop, less for larger ones. A pass of its own (adversary.update = sequential) is left out as recomputation
    is.

    Args:
        config: settings of the run.
        rows: crops of the step on all ranks.
        computed: count the last block as it is computed, with the masked tokens alone as queries, instead of as a
            whole.
    """
    model, vision = config.model, config.vision
    values = 3 * vision.patch_size**2
    split = split_patches(config.crops.size, vision.patch_size, config.masking.ratio)
    patches, visible, masked = split.patches, split.visible, split.masked

    def blocks(count: int, patches: int, width: int, heads: int, intermediate: int, *, last: bool) -> int:
        whole = vit_block_flops(config, patches, 1 + patches, width, heads, intermediate)
        if not (last and computed):
            return count * whole
        end = vit_block_flops(config, patches, masked, width, heads, intermediate)
        return (count - 1) * whole + end

    width, linear = model.hidden_size, vision.decoder == "linear"
    seen = patches if vision.tokens == "all" else visible
    flops = 2 * visible * values * width
    flops += blocks(model.layers, seen, width, model.heads, model.intermediate_size, last=linear)
    if not linear:
        entering, width = 2 * (1 + seen) * width * vision.decoder_hidden_size, vision.decoder_hidden_size
        flops += entering + blocks(vision.decoder_layers, patches, width, vision.decoder_heads, 4 * width, last=True)
    flops += 2 * masked * width * values
    return float(TRAINING_OVER_FORWARD * rows * flops)


def encoder_forward_flops(config: OnImages) -> float:
    """FLOPs of a masked autoencoder's encoder over one whole crop, no patch masked, forward only."""
    model, vision = config.model, config.vision
    patches = (config.crops.size // vision.patch_size) ** 2
    block = vit_block_flops(config, patches, 1 + patches, model.hidden_size, model.heads, model.intermediate_size)
    return float(2 * patches * 3 * vision.patch_size**2 * model.hidden_size + model.layers * block)


def classifier_step_flops(config: ImageTaskConfig) -> float:
    """Model FLOPs of one training step of an image classifier, encoder and head, on all ranks; counted as there."""
    head = 2 * config.model.hidden_size * config.downstream.classes
    return TRAINING_OVER_FORWARD * config.batch.global_size * (encoder_forward_flops(config) + head)


def vit_block_flops(config: OnImages, patches: int, queries: int, width: int, heads: int, intermediate: int) -> int:
    """FLOPs of one block over a class token and patches, forward only; `queries` of the patches ask."""
    tokens = 1 + patches
    flops = 6 * tokens * width**2 + queries * (2 * width**2 + 4 * width * intermediate + 4 * tokens * width)
    if config.vision.positions == "relative":
        flops += 2 * queries * relative_vectors(config) * width
    return flops


def relative_vectors(config: OnImages) -> int:
    """Vectors that queries meet: those of the offsets that differ, the class token's, and zeros up to a multiple of 8
    (models/relative_positions.py)."""
    index, adversary = config.vision.index, getattr(config, "adversary", None)
    if adversary is not None and adversary.kind == "relative_coordinate":
        index = adversary.index
    span = 2 * (config.crops.size // config.vision.patch_size) - 1
    along = 7 if index == "rounded" else min(span, 15)
    return -(-(along**2 + 2) // 8) * 8


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


def seconds_of_process() -> float:
    """Since this process was started, imports included; on other systems than Linux since this module was imported."""
    if not sys.platform.startswith("linux"):
        return time.monotonic() - _IMPORTED
    after_the_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_the_name[19]) / os.sysconf("SC_CLK_TCK")


_IMPORTED = time.monotonic()


class StartUp:
    """How long a run takes to start: until its first step is made, most of which may be compiling; and which graphs it
    made later that none of its modes needed. Call it at the start of every step, and once after the last.

    On a GPU the host is a little ahead: the first step may still be under way there.

    Args:
        graphs: of the engine; None where nothing is compiled.
        say: prints a line.
    Attributes:
        seconds: from the start of the process to the end of the first step; None before that.
        compiling: how many of them were spent on compiling.
    """

    def __init__(self, graphs: CompiledGraphs | None, say: Callable[[str], None]) -> None:
        self.graphs, self.say = graphs, say
        self.seconds: float | None = None
        self.compiling = 0.0
        self._begun = False
        self._told = 0

    def __call__(self) -> None:
        """A step begins, or the last has ended."""
        if self.seconds is None and self._begun:
            self._first_step_made()
        self._begun = True
        for words in [] if self.graphs is None else self.graphs.surplus[self._told :]:
            self._told += 1
            self.say(f"warning: {words}")

    def _first_step_made(self) -> None:
        self.seconds = seconds_of_process()
        line = f"the first step was made {self.seconds:.1f} s after the start of the process"
        if self.graphs is not None:
            self.compiling = self.graphs.seconds()
            total, found = self.graphs.made, self.graphs.found()
            line += f", {self.compiling:.1f} s of them for compiling (graphs: {total}, found in the cache: {found})"
        self.say(line)

    def figures(self) -> dict[str, Any]:
        """Figures for summary.json."""
        graphs = self.graphs
        made = graphs and {
            "made": graphs.made,
            "surplus": len(graphs.surplus),
            "found": graphs.found(),
            "seconds": graphs.seconds(),
        }
        return {"start_seconds": self.seconds, "start_compile_seconds": self.compiling, "graphs": made}


def forward_flops(model: nn.Module, *inputs: Tensor) -> float:
    """FLOPs of one forward pass, one multiply-add being 2: matrix products, convolutions and attention.

    Nothing is computed: the pass goes over shapes alone, on torch's `meta` device, and leaves the model as it is.

    Args:
        model: on any device; what it does may depend on the shapes of its inputs, not on their values.
        inputs: of `forward`; only their shapes and types matter.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, {name: tensor.to("meta") for name, tensor in named}, tuple(x.to("meta") for x in inputs))
    return float(counter.get_total_flops())
