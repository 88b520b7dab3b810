"""`--executor slurm-array`: the parts of a data set as the jobs of a SLURM array, and a last job that merges them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trp_scale.errors import DataError
from trp_scale.sharding.job.parts import SpreadSettings

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
