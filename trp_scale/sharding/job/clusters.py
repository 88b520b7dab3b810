"""Sharding on several machines: portions over the nodes of a Ray cluster (extra `[ray]`), or parts as the jobs of a
SLURM array, with a last job that merges them. All nodes see the same storage, and trp_scale is installed on each.

A portion is a task of Ray, not of an actor: Ray gives the tasks of a node that is lost to others, while an actor that
is started again would wait for a CPU that the other actors keep. A process keeps its worker from task to task.
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
from trp_scale.sharding.job.parts import SpreadSettings
from trp_scale.sharding.job.workers import Advance, PortionT, ReportT, process_died

RETRIES = 5
"""How often a portion is begun again whose process or node was lost."""

_AHEAD = 2
"""Portions that are handed to the cluster for each that it can work at: a cluster that grows by what waits doubles."""

_PASSED_ON = ("NLTK_DATA", "HF_HOME", "HF_HUB_OFFLINE", "TRP_SCALE_CACHE", "TRP_SCALE_CACHE_GB")
"""Variables of this process that those of the cluster get."""


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Context with a cluster; gives the module ray.

    Raises:
        DataError: ray is not installed, or the cluster of RAY_ADDRESS does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here tells nobody of it
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
                f"--executor ray: RAY_ADDRESS {address!r} gives no cluster ({error}); start one with `ray start`, or "
                "take the variable away to use this machine alone"
            ) from error
    try:
        yield ray
    finally:
        if starts_cluster:
            ray.shutdown()


def cluster_gpus() -> int:
    """GPUs of the cluster."""
    with ray_cluster() as ray:
        return int(ray.cluster_resources().get("GPU", 0))


def cpus_of_task(gpus: int) -> int:
    """CPUs of a task: one, or a GPU's share of them."""
    with ray_cluster() as ray:
        resources = ray.cluster_resources()
    return max(1, int(resources.get("CPU", 0) * gpus / max(1, resources.get("GPU", 0)))) if gpus else 1


def _slots(ray: Any, needs: Mapping[str, int]) -> int:
    """Tasks that the cluster can work at, at least 1: its last node may be gone, and another on its way."""
    has = ray.cluster_resources()
    return max(1, min(int(has.get(name, 0) / count) for name, count in needs.items() if count))


class _Worker:
    """A worker, and what it has counted since it was last asked.

    Args:
        make, arguments: as of `run_on_ray`.
        counters: numbers that it counts up.
        directory: that paths start from.
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
    """Run one portion in a process of the cluster, which makes a worker for each run once."""
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
    counters: int,
    gpus: int,
    advance: Advance,
    title: str,
) -> dict[int, ReportT]:
    """Make the shards of `portions` and return their reports by number.

    Args:
        make, arguments, gpus: as of `run_portions`.
        processes: portions that are at work at once; 0 = as many as the cluster has CPUs, or GPUs.
        counters: numbers that a worker counts up.
        advance: told what the workers counted, portion by portion.
        title: of what is done.

    Raises:
        DataError: the cluster has no CPU or GPU, or a portion's processes died again and again.
    """
    with ray_cluster() as ray:
        needs = {"CPU": cpus_of_task(gpus), "GPU": gpus}
        has = ray.cluster_resources()
        if lacking := [f"{has.get(name, 0):g} {name}s" for name, count in needs.items() if has.get(name, 0) < count]:
            raise DataError(f"--executor ray: the cluster has {', '.join(lacking)}; {needs} are needed: add a node")
        run, work = os.urandom(8).hex(), ray.put((make, arguments, counters, str(Path.cwd()), own_modules()))
        task = ray.remote(_portion).options(
            num_cpus=needs["CPU"],
            num_gpus=gpus,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {name: os.environ[name] for name in _PASSED_ON if name in os.environ}},
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
            raise process_died(title) from error
        return reports  # after an error those at work go on to their ends: a task that is cancelled can end ray 2.60


MERGE_MINUTES = 60


def submit_array(command: str, argv: Sequence[str], settings: SpreadSettings, directory: Path) -> None:
    """Submit the command, each job with a part, and print the jobs' numbers. A job that is preempted goes back into the
    queue; asked for again, the same command makes what is missing.

    Args:
        command: such as "shard-text".
        argv: its flags as they were given.
        directory: of the data set.

    Raises:
        DataError: no parts are asked for, or SLURM refuses the jobs.
    """
    if settings.num_shards < 2 or settings.shard_index:
        raise DataError(
            f"--executor slurm-array: --num_shards {settings.num_shards} and --shard_index {settings.shard_index} "
            "found; allowed: 2 parts or more, each of which is a job, and no --shard_index"
        )
    program = shlex.join([sys.executable, "-m", "trp_scale"])
    array_flags = '--executor local --sbatch "" --no-progress --shard_index "$SLURM_ARRAY_TASK_ID"'
    array = submit_job(
        f"--job-name=trp-scale-{command} --requeue --array=0-{settings.num_shards - 1}",
        settings.sbatch,
        f"exec {program} {command} {shlex.join(argv)} {array_flags}",
    )
    # After any: where parts are missing it names them.
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
    """Submit a job, and return its number.

    Args:
        array_flags, flags: of sbatch, the second of the user; script: command that the job runs.

    Raises:
        DataError: SLURM refuses it, or there is none.
    """
    words = ["sbatch", "--parsable", *shlex.split(array_flags), *shlex.split(flags), "--wrap", script]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DataError("--executor slurm-array: there is no sbatch here; run it where jobs are submitted") from error
    if done.returncode:
        raise DataError(f"{shlex.join(words)}: {done.stderr.strip() or 'no reason given'}")
    return done.stdout.strip().partition(";")[0]
