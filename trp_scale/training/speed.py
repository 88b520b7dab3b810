"""Speed of a run: the device's peak, memory, the time until the first step is made, and a trace of a few steps."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trp_scale.config import LoggingConfig
from trp_scale.core.engine import CompiledGraphs

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
            made, found = self.graphs.made, self.graphs.found()
            line += f", {self.compiling:.1f} s of them for compiling (graphs: {made}, found in the cache: {found})"
        self.say(line)

    def figures(self) -> dict[str, Any]:
        """Figures for summary.json."""
        graphs = self.graphs
        summary = graphs and {
            "made": graphs.made,
            "surplus": len(graphs.surplus),
            "found": graphs.found(),
            "seconds": graphs.seconds(),
        }
        return {"start_seconds": self.seconds, "start_compile_seconds": self.compiling, "graphs": summary}


DIRECTORY = "profile"
COSTLIEST = 10
"""Operations in the table."""


class StepProfile:
    """Traces the steps that `logging.profile` names, in this process. Call it at the start of every step.

    Writes into the run directory profile/steps-START-STOP.json.gz, a Chrome trace (chrome://tracing, ui.perfetto.dev),
    a table of the costliest operations beside it, and with `logging.memory_snapshot` what the GPU's allocator did
    (pytorch.org/memory_viz). Tracing slows the traced steps down; their numbers stay.

    """

    def __init__(self, run_dir: Path, config: LoggingConfig, device: torch.device, say: Callable[[str], None]) -> None:
        steps = config.profiled_steps()
        self.first, self.last = (steps.start, steps.stop - 1) if steps else (0, 0)
        self.memory = config.memory_snapshot
        self.directory, self.device, self.say = run_dir / DIRECTORY, device, say
        self._trace: profile | None = None
        self._step = 0

    def __call__(self, step: int) -> None:
        """Step `step` begins; the first step of a run is 1."""
        if step == self.first:
            self._begin()
        elif self._trace is not None and step > self.last:
            self.close()
        self._step = step

    def _begin(self) -> None:
        self.directory.mkdir(exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        self._trace = profile(activities=activities, record_shapes=True, acc_events=True)
        self._trace.start()

    def close(self) -> None:
        """Write what has been traced; nothing if no trace is under way."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        path = self.directory / f"steps-{self.first}-{self._step}.json.gz"
        trace.export_chrome_trace(str(path))
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=order, row_limit=COSTLIEST, max_name_column_width=60)
        path.with_suffix("").with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
        if self.memory:
            torch.cuda.memory._dump_snapshot(str(path.with_suffix("").with_suffix(".memory.pickle")))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        self.say(f"steps {self.first} to {self._step} are traced in {path}")
