"""A trace of a few steps: what the host and the device did, operation by operation (`logging.profile`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trp_scale.config import LoggingConfig

DIRECTORY = "profile"
COSTLIEST = 10
"""Operations in the table."""


class StepProfile:
    """Traces the steps that `logging.profile` names, in this process. Call it at the start of every step.

    Writes into the run directory profile/steps-START-STOP.json.gz, a Chrome trace (chrome://tracing, ui.perfetto.dev),
    a table of the costliest operations beside it, and with `logging.memory_snapshot` what the GPU's allocator did
    (pytorch.org/memory_viz). Tracing slows the traced steps down; their numbers stay.

    Args:
        run_dir: the run directory.
        config: which steps.
        device: where the run trains.
        say: prints a line.
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
