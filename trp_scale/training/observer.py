"""Observers of a run: metrics, display and report on rank 0; peak FLOP/s and memory; start-up time; a trace of a few
steps. None of them makes a collective call."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trp_scale.checkpoint.run_directory import SUMMARY_FILE
from trp_scale.config import Config, LoggingConfig
from trp_scale.config.files import read_object
from trp_scale.core.engine import Trains
from trp_scale.distributed.stop import process_status
from trp_scale.storage.files import write_text
from trp_scale.training.metrics import MetricsWriter, RunInfo, StepRecord, finite, read_history, worst_task
from trp_scale.training.progress import PlainDisplay, open_display
from trp_scale.training.report import REPORT_FILE, report, report_table
from trp_scale.training.sinks import Sink, TensorBoardSink, WandbSink

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
    ("RTX 4090", 165.2e12),
    ("L4", 121e12),
    ("A10", 125e12),
)
"""Dense bf16 FLOP/s from data sheets, by a part of the device's name; the first match counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in FLOP/s; `None` for a CPU, an unlisted GPU, or fp32 (its peak depends on the
    TF32 setting)."""
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
    """Return the peak memory of this process: torch's allocations on its GPU, or the resident set on a CPU."""
    if on_gpu:
        return int(torch.cuda.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def seconds_of_process() -> float:
    """Return the seconds since the start of this process, including imports."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_status("self")[19]) / os.sysconf("SC_CLK_TCK")


class StartUp:
    """Measure the time until the first step is made, and log surplus graphs. Call it at the start of every step, and
    once after the last.

    On a GPU the host runs ahead: the first step may not be complete yet.

    Args:
        engine: reports its compiled and captured graphs.
    Attributes:
        seconds: from the start of the process to the end of the first step; None before.
        compiling: seconds of them spent on compilation.
    """

    def __init__(self, engine: Trains, say: Callable[[str], None]) -> None:
        self.graphs, self.captured, self.say = engine.graphs, engine.captured_graphs, say
        self.seconds: float | None = None
        self.compiling = 0.0
        self._begun = False
        self._told = self._told_captured = 0

    def __call__(self) -> None:
        """Record that a step starts, or that the last one has ended."""
        if self.seconds is None and self._begun:
            self.seconds = seconds_of_process()
            line = f"the first step was made {self.seconds:.1f} s after the start of the process"
            if self.graphs is not None:
                self.compiling = self.graphs.seconds()
                graphs = f"(graphs: {self.graphs.made}, found in the cache: {self.graphs.found()})"
                line += f", {self.compiling:.1f} s of them compilation {graphs}"
            self.say(line)
        self._begun = True
        for words in [] if self.graphs is None else self.graphs.surplus[self._told :]:
            self._told += 1
            self.say(f"warning: {words}")
        for words in [] if self.captured is None else self.captured.notices[self._told_captured :]:
            self._told_captured += 1
            self.say(words)

    def figures(self) -> dict[str, Any]:
        """Figures for summary.json."""
        graphs = self.graphs
        summary = graphs and {
            "made": graphs.made,
            "surplus": len(graphs.surplus),
            "found": graphs.found(),
            "seconds": graphs.seconds(),
        }
        captured = self.captured and {"replays": self.captured.replays, "uncaptured": self.captured.uncaptured}
        return {
            "start_seconds": self.seconds,
            "start_compile_seconds": self.compiling,
            "graphs": summary,
            "captured": captured,
        }


DIRECTORY = "profile"
COSTLIEST = 10
"""Number of operations in the table."""


class StepProfile:
    """Trace the steps of `logging.profile` in this process. Call it at the start of every step.

    Writes RUN_DIR/profile/steps-START-STOP.json.gz, a Chrome trace (chrome://tracing, ui.perfetto.dev), a table of the
    costliest operations, and with `logging.memory_snapshot` the history of the GPU's allocator
    (pytorch.org/memory_viz). Traced steps are slower; their results do not change.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig, device: torch.device, say: Callable[[str], None]) -> None:
        steps = config.profiled_steps()
        self.first, self.last = (steps.start, steps.stop - 1) if steps else (0, 0)
        self.memory = config.memory_snapshot
        self.directory, self.device, self.say = run_dir / DIRECTORY, device, say
        self._trace: profile | None = None
        self._step = 0

    def __call__(self, step: int) -> None:
        """Record that step `step` (from 1) starts."""
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
        """Write the running trace, if any."""
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
        self.say(f"trace of steps {self.first} to {self._step}: {path}")


SUMMARISED = (
    *("step_seconds", "data_wait_share", "tokens_per_second", "model_flops_utilisation", "peak_memory_bytes"),
    *("skipped_steps", "worst_task", "validation"),
)
"""Fields of a run's history that summary.json has unchanged."""


class Observer:
    """Write metrics, show progress, and write the report at the end. Makes no collective call.

    Args:
        config: the run's settings (`logging`, `validation`, `training.steps`, `training.precision` are read).
        tasks: names of the objective's tasks, in order.
        info: constants of the run.
        enabled: True on rank 0; elsewhere every method does nothing.
        cache_use: returns this rank's use of the cache of remote tars since the last call; empty without use.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        tasks: tuple[str, ...],
        info: RunInfo,
        enabled: bool = True,
        cache_use: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.config = config
        self.tasks = tasks
        self.info = info
        self.enabled = enabled
        self.cache_use = cache_use
        self.peak_flops = peak_flops(info.device_name, config.training.precision)
        self._began = time.monotonic()
        self._seconds: list[float] = []
        self._used: list[float] = []
        self._waits: list[float] = []
        self._held: dict[str, Any] | None = None
        # Not the first step of a resumed run: it logs the same lines as an uninterrupted run.
        self._first = info.start_step == 0
        self._made = False
        self._summary: dict[str, Any] | None = None
        self._refused: list[Sink] = []
        if enabled:
            self._writer = MetricsWriter(self.run_dir, self.message)
            self._sinks: list[Sink] = []
            if config.logging.wandb:
                self._sinks.append(WandbSink(self.run_dir, config))
            if config.logging.tensorboard:
                self._sinks.append(TensorBoardSink(self.run_dir, info.start_step))
            self._display: PlainDisplay = open_display(config, info, self.run_dir)

    def wants(self, step: int) -> bool:
        """Whether this step gets a line: every `logging.every` steps, the run's first and last, validated steps."""
        every, last = self.config.logging.every, self.config.training.steps
        return self._first or step % max(1, every) == 0 or step >= last or self._is_validated(step)

    def step(self, record: StepRecord) -> None:
        """Record a step; call it for every step. Writes a line if `wants` is true or the step was skipped.

        The line of a validated step is written with its validation: call `validation` next, and write the checkpoint of
        that step after it.
        """
        if not self.enabled:
            return
        self._made = True
        self._write_held()
        self._seconds.append(record.step_seconds)
        self._used.append(record.processor_seconds)
        self._waits.append(record.data_wait_seconds)
        logged = self.wants(record.step) or not record.applied
        self._first = False
        speed = self.info.positions_per_step / max(statistics.fmean(self._seconds), 1e-9)
        losses = {name: task.loss for name, task in record.tasks.items()}
        counts = {name: task.count for name, task in record.tasks.items()}
        self._display.update(record, speed, worst_task(losses, counts, self.info.outside_tasks))
        if not record.applied:
            is_finite = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
            why = "are far above those of the last steps" if is_finite else "are not finite"
            self.message(
                f"step {record.step} skipped: loss {record.loss:g} and gradient norm {record.grad_norm:g} {why}"
            )
        if logged:
            self._held = self._line(record, speed)
            self._seconds, self._used, self._waits = [], [], []
            if not self._is_validated(record.step):
                self._write_held()

    def validation(self, step: int, losses: Mapping[str, Any]) -> None:
        """Record the result of `validate` after `step`."""
        if not self.enabled:
            return
        self._made = True
        if self._held is not None and self._held["step"] == step:
            self._held["validation"] = dict(losses)
            self._write_held()
        else:
            self._write({"step": step, "validation": dict(losses)})
        total = losses.get("loss")
        self.message(f"step {step}: validation loss {total:.4f}" if total is not None else f"step {step}: validated")

    def message(self, text: str) -> None:
        """Print a line above the live display."""
        if self.enabled:
            self._display.message(text)

    def divergence(self) -> str:
        """Return why the run diverged (`RunHistory.diverged`), or ""."""
        self._write_held()
        why = read_history(self.run_dir).diverged
        return why and f"diverged: {why}"

    def close(self, reason: str, start: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End the display, write summary.json and report.txt, print the report. A second call does nothing.

        Args:
            reason: why the run ends: "finished", "SIGTERM", "max_hours", an error's text.
            start: further fields of the summary (StartUp.figures).

        Returns:
            Contents of summary.json; empty on ranks other than 0.
        """
        if not self.enabled:
            return {}
        if self._summary is not None:
            return self._summary
        self._write_held()
        self._writer.close()
        self._display.close()
        self._summary = self._summarise(reason, start or {})
        path = self.run_dir / SUMMARY_FILE
        # A start without a step keeps the summary of the start that made the last step.
        if self._made or not path.is_file() or read_object(path).get("steps") != self.info.start_step:
            text = json.dumps(self._summary, indent=2, allow_nan=False) + "\n"
            self._write_file(SUMMARY_FILE, lambda: text)
            self._write_file(REPORT_FILE, lambda: report(self.run_dir))
        for sink in self._sinks:
            self._to_sink(sink, partial(sink.close, self._summary))
        self._display.show(report_table(self.run_dir))
        return self._summary

    def _is_validated(self, step: int) -> bool:
        every = self.config.validation.every
        return every > 0 and (step % every == 0 or step >= self.config.training.steps)

    def _line(self, record: StepRecord, speed: float) -> dict[str, Any]:
        missing = [name for name in self.tasks if name not in record.tasks]
        if missing:
            raise ValueError(
                f"step {record.step}: tasks {missing} are missing; expected: absent tasks with count 0 and loss None"
            )
        seconds, on_gpu = statistics.fmean(self._seconds), self.info.device_name != "cpu"
        utilisation = None
        if self.peak_flops and self.info.flops_per_step:
            utilisation = self.info.flops_per_step / (max(seconds, 1e-9) * self.peak_flops * self.info.devices)
        line: dict[str, Any] = {
            "step": record.step,
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "tasks": {name: asdict(record.tasks[name]) for name in self.tasks},
            "outside_tasks": list(self.info.outside_tasks),
            "step_seconds": seconds,
            "processor_seconds": None if on_gpu else statistics.fmean(self._used),
            "data_wait_seconds": statistics.fmean(self._waits),
            "data_wait_share": statistics.fmean(self._waits) / max(seconds, 1e-9),
            "tokens_per_second": speed,
            **({"images_per_second": self.info.image_count(speed)} if self.info.images_per_step else {}),
            "model_flops": self.info.flops_per_step or None,
            "model_flops_utilisation": utilisation,
            "peak_memory_bytes": peak_memory_bytes(on_gpu=on_gpu),
            "applied": record.applied,
        }
        if record.replays is not None:
            line["replays"] = record.replays
        if use := self.cache_use():
            line["cache"] = dict(use)
        collisions = sorted(set(line) & set(record.hooks))
        if collisions:
            raise ValueError(f"hook names {collisions} are also fields of metrics.jsonl; rename the hooks")
        return line | {name: dict(values) for name, values in record.hooks.items()}

    def _write_held(self) -> None:
        if self._held is not None:
            line, self._held = self._held, None
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._writer.write(line)
        self._display.add_line(line)
        for sink in self._sinks:
            self._to_sink(sink, partial(sink.write, line))

    def _to_sink(self, sink: Sink, action: Callable[[], None]) -> None:
        """Write to a sink. Storage errors are only logged, since metrics.jsonl has all values."""
        try:
            action()
        except OSError as error:
            if sink not in self._refused:
                self.message(f"{type(sink).__name__}: cannot be written ({error}); its curves miss steps")
                self._refused.append(sink)

    def _write_file(self, name: str, content: Callable[[], str]) -> None:
        """Write a file of the run directory atomically; retry if storage fails."""
        path = self.run_dir / name
        for pause in (0.2, 1.0, 0.0):
            try:
                write_text(path, content(), durable=False)
                return
            except OSError as error:
                refused = error
            time.sleep(pause)
        print(f"{path}: could not be written ({refused})", file=sys.stderr)

    def _summarise(self, reason: str, start: Mapping[str, Any]) -> dict[str, Any]:
        history = read_history(self.run_dir)
        summary = {
            "exit_reason": reason,
            "steps": history.last_step,
            "steps_asked": self.config.training.steps,
            "start_step": self.info.start_step,
            "wall_seconds": time.monotonic() - self._began,
            "tokens": history.last_step * self.info.positions_per_step,
            "loader_workers": self.info.workers,
            "loader_workers_asked": self.info.workers_asked,
            **{name: getattr(history, name) for name in SUMMARISED},
            "cache": history.cache or None,
            "loss": history.loss_end,
            "tasks": {name: asdict(task) for name, task in history.tasks.items()},
            "rows": dict(self.info.rows),
            "description": self.info.description,
            "hooks": list(self._display.hook_lines.values()),
            **start,
        }
        cleaned: dict[str, Any] = finite(summary)
        return cleaned
