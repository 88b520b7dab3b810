"""Sharding on several machines: portions as tasks of a Ray cluster (extra `[ray]`), or parts as jobs of a SLURM array
plus a merge job. All nodes share storage and have trp_scale installed.

A portion is a Ray task, not an actor call: Ray reschedules the tasks of a lost node, while a restarted actor would wait
for a CPU that other actors hold. A process keeps its worker between tasks.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trp_scale.config.registry import load_module, own_modules
from trp_scale.errors import DataError
from trp_scale.sharding.parts import SpreadSettings
from trp_scale.sharding.workers import Advance, PortionT, ProgressBar, ReportT, process_died

RETRIES = 5
"""Retries of a portion after its process or node was lost."""

_AHEAD = 2
"""Submitted portions per available slot. Waiting tasks let an autoscaling cluster grow."""

_PASSED_VARIABLES = ("NLTK_DATA", "HF_HOME", "HF_HUB_OFFLINE", "TRP_SCALE_CACHE", "TRP_SCALE_CACHE_GB")
"""Environment variables copied to the processes of the cluster."""


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Context with a running cluster; yields the module ray.

    Raises:
        DataError: ray is not installed, or the cluster of RAY_ADDRESS does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    try:
        import ray
    except ImportError as error:
        raise DataError(f"--executor ray: ray is not installed ({error}): pip install 'trp-scale[ray]'") from error
    starts_cluster = not ray.is_initialized()
    if starts_cluster:
        try:
            ray.init(logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS")
            raise DataError(
                f"--executor ray: no cluster at RAY_ADDRESS {address!r} ({error}); start one with `ray start`, or "
                "unset the variable to use this machine only"
            ) from error
    try:
        yield ray
    finally:
        if starts_cluster:
            ray.shutdown()


def cluster_gpus() -> int:
    """Return the number of GPUs of the cluster."""
    with ray_cluster() as ray:
        return int(ray.cluster_resources().get("GPU", 0))


def cpus_of_task(gpus: int) -> int:
    """Return the CPUs of a task: 1, or the share of its GPUs."""
    with ray_cluster() as ray:
        resources = ray.cluster_resources()
    return max(1, int(resources.get("CPU", 0) * gpus / max(1, resources.get("GPU", 0)))) if gpus else 1


def _slots(ray: Any, needs: Mapping[str, int]) -> int:
    """Return the number of concurrent tasks, at least 1: a lost last node may be replaced."""
    has = ray.cluster_resources()
    return max(1, min(int(has.get(name, 0) / count) for name, count in needs.items() if count))


class _Worker:
    """Worker in a process of the cluster; returns its counts with each report.

    Args:
        make, arguments: as of `run_on_ray`.
        counters: number of counters.
        directory: working directory for relative paths.
        modules: of --module.
    """

    def __init__(
        self, make: Callable[..., Any], arguments: tuple[Any, ...], counters: int, directory: str, modules: list[str]
    ) -> None:
        self._counts = [0] * counters
        if Path(directory).is_dir():
            os.chdir(directory)
        for module in modules:
            load_module(module)
        self._worker = make(*arguments, self._advance)

    def _advance(self, *steps: int) -> None:
        for number, step in enumerate(steps):
            self._counts[number] += step

    def __call__(self, portion: Any) -> tuple[Any, list[int]]:
        self._counts[:] = [0] * len(self._counts)
        return self._worker(portion), list(self._counts)


_workers: dict[str, _Worker] = {}


def _portion(run: str, work: tuple[Any, ...], portion: Any) -> tuple[Any, list[int]]:
    """Run one portion in a process of the cluster. The process makes one worker per run."""
    if run not in _workers:
        _workers.clear()
        _workers[run] = _Worker(*work)
    return _workers[run](portion)


def run_on_ray(
    portions: Sequence[PortionT],
    make: Callable[..., Callable[[PortionT], ReportT]],
    arguments: tuple[Any, ...],
    *,
    processes: int,
    gpus: int,
    bar: ProgressBar,
    advance: Advance,
) -> dict[int, ReportT]:
    """Make the shards of `portions` and return their reports by number.

    Args:
        make, arguments, gpus: as of `run_portions`.
        processes: concurrent portions; 0 = one per CPU or GPU of the cluster.
        bar: counters of a worker, and name of the work for messages.
        advance: called with the counts of each finished portion.

    Raises:
        DataError: the cluster has no CPU or GPU, or a portion failed after all retries.
    """
    with ray_cluster() as ray:
        needs = {"CPU": cpus_of_task(gpus), "GPU": gpus}
        has = ray.cluster_resources()
        if lacking := [f"{has.get(name, 0):g} {name}s" for name, count in needs.items() if has.get(name, 0) < count]:
            raise DataError(f"--executor ray: the cluster has {', '.join(lacking)}; {needs} are needed: add a node")
        run, work = os.urandom(8).hex(), ray.put((make, arguments, len(bar.counters), str(Path.cwd()), own_modules()))
        task = ray.remote(_portion).options(
            num_cpus=needs["CPU"],
            num_gpus=gpus,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}},
        )
        reports: dict[int, ReportT] = {}
        waiting = list(reversed(portions))
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < (processes or _AHEAD * _slots(ray, needs)):
                    portion = waiting.pop()
                    running[task.remote(run, work, portion)] = portion.number
                (done, *_), _ = ray.wait(list(running))
                report, counted = ray.get(done)
                reports[running.pop(done)] = report
                advance(*counted)
        except ray.exceptions.RayTaskError as error:  # what the worker raised
            raise (error.cause or error) from None
        except ray.exceptions.RayError as error:
            raise process_died(bar.title) from error
        return reports  # after an error running tasks are not cancelled: cancelling can crash ray 2.60


MERGE_MINUTES = 60


def submit_array(command: str, argv: Sequence[str], settings: SpreadSettings, directory: Path) -> None:
    """Submit a job array with one part per job, and print the job numbers. Preempted jobs are requeued; running the
    command again makes the missing shards.

    Args:
        command: such as "shard-text".
        argv: its command-line flags.
        directory: of the data set.

    Raises:
        DataError: fewer than 2 parts are requested, or SLURM refuses the jobs.
    """
    if settings.num_shards < 2 or settings.shard_index:
        raise DataError(
            f"--executor slurm-array: --num_shards {settings.num_shards} and --shard_index {settings.shard_index} "
            "found; allowed: 2 parts or more, one per job, and no --shard_index"
        )
    program = shlex.join([sys.executable, "-m", "trp_scale"])
    array_flags = '--executor local --sbatch "" --no-progress --shard_index "$SLURM_ARRAY_TASK_ID"'
    array = submit_job(
        f"--job-name=trp-scale-{command} --requeue --array=0-{settings.num_shards - 1}",
        settings.sbatch,
        f"exec {program} {command} {shlex.join(argv)} {array_flags}",
    )
    # afterany: the merge job also runs after failures, and names the missing parts.
    merge = submit_job(
        f"--job-name=trp-scale-merge --dependency=afterany:{array} --time={MERGE_MINUTES}",
        settings.sbatch,
        f"exec {program} merge {shlex.quote(str(directory))}",
    )
    print(f"{directory}: {settings.num_shards} parts are array job {array}, job {merge} merges them")
    print(
        f"follow them with: squeue --jobs={array},{merge}; their output is in slurm-{array}_*.out and slurm-{merge}.out"
    )


def submit_job(array_flags: str, flags: str, script: str) -> str:
    """Submit a job and return its number.

    Args:
        array_flags: of sbatch.
        flags: of sbatch, from the user.
        script: command of the job.

    Raises:
        DataError: SLURM refuses the job or is not installed.
    """
    words = ["sbatch", "--parsable", *shlex.split(array_flags), *shlex.split(flags), "--wrap", script]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DataError("--executor slurm-array: there is no sbatch here; run it on a login node") from error
    if done.returncode:
        raise DataError(f"{shlex.join(words)}: {done.stderr.strip() or 'no reason given'}")
    return done.stdout.strip().partition(";")[0]
