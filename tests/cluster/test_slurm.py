"""The batch files of launch/slurm under a real SLURM: preempted, cancelled, and as an array."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port
from tests.runs import ROOT, SMALL, environment, essence, flags, lines, wait_until
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, write_cola, write_stsb
from tests.unit.sharding.test_parts import content
from trp_scale.config.files import read_object, write_yaml

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
NODES = ("a", "b")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldPort={port}
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=a,b Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=a,b PriorityTier=10
"""


def lacking() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "SLURM's daemons are started by root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (apt install slurm-wlm munge)" if missing else ""


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs.

    Attributes:
        directory: its files.
    """

    directory: Path

    def call(self, *words: str | Path, **variables: str) -> str:
        """What one of its commands prints."""
        environ = {**os.environ, **variables, "SLURM_CONF": str(self.directory / "slurm.conf")}
        done = subprocess.run(
            [str(word) for word in words], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str, field: str) -> str:
        """A field that scontrol shows of a job."""
        shown = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return next((word.partition("=")[2] for word in shown if word.startswith(f"{field}=")), "")


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Slurm]:
    """Started, and ended with all its daemons."""
    slurm = Slurm(directory)
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 "
        "RealMemory=4000 State=UNKNOWN"
        for name in NODES
    )
    for part in ("state", *(f"spool-{name}" for name in NODES)):
        (directory / part).mkdir()
    (directory / "slurm.conf").write_text(
        CONFIGURATION.format(host=socket.gethostname(), directory=directory, port=free_port(), nodes=nodes)
    )
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    daemons = [
        # In the foreground, as root: --force allows that, and directories that others may read.
        ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", f"--key-file={key}"]
        + [f"--{kind}={directory}/munge.{kind[:4]}" for kind in ("pid-file", "log-file", "seed-file")],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]
    environ = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    running = []
    try:
        for daemon in daemons:
            output = (directory / f"{daemon[0]}.out").open("a")
            running.append(subprocess.Popen(daemon, env=environ, stdout=output, stderr=subprocess.STDOUT))
            output.close()
            if daemon[0] == "munged":
                wait_until((directory / "munge.socket").exists, "munge's socket", 10)
        wait_until(lambda: _idle(slurm) == len(NODES), f"nodes that are idle, see {directory}", 30)
        yield slurm
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            slurm.call("scancel", "--user=root", "--full")
            wait_until(lambda: not slurm.call("squeue", "--noheader", "--states=all,R,CG"), "no job", 10)
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:  # a slurmd waits for processes that a job has left
                process.kill()
                process.wait()


def _idle(slurm: Slurm) -> int:
    with contextlib.suppress(AssertionError):
        return slurm.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split().count("idle")
    return 0


pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(lacking()), reason=lacking())]

SIZE = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
STEPS = 300


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(slurm: Slurm, text_dataset: Path, run_dir: Path, **changes: Any) -> str:
    """The number of a job that pre-trains on two nodes of one rank each."""
    settings = {"training__steps": STEPS, "validation__every": 0, "logging__every": 10, "model__dropout": 0.1}
    settings |= changes
    variables = {**environment(), "MASTER_ADDR": "127.0.0.1"}  # the nodes' names are no hosts
    script = ROOT / "launch" / "slurm" / "pretrain.sbatch"
    output = f"--output={run_dir.with_suffix('.log')}"
    words = ["sbatch", "--parsable", "--partition=low", f"--chdir={ROOT}", output, *SIZE, script]
    return slurm.call(*words, *flags(text_dataset, run_dir, **settings), **variables)


def trains(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 3


def test_a_preempted_run_goes_on_at_the_very_next_row(slurm: Slurm, text_dataset: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    first = submit(slurm, text_dataset, whole)
    wait_until(lambda: slurm.job(first, "JobState") == "COMPLETED", f"job {first}, which writes {whole}.log")
    assert slurm.job(first, "Restarts") == "0", "a run that ends by itself is not started again"
    second = submit(slurm, text_dataset, broken)
    wait_until(lambda: trains(broken), f"first steps in {broken}.log")
    slurm.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    wait_until(lambda: slurm.job(second, "JobState") == "PENDING", "the job back in the queue")
    stopped = len(lines(broken))
    assert stopped < STEPS // 10
    slurm.call("scontrol", "update", f"JobId={second}", "StartTime=now")  # it would wait for two minutes
    wait_until(lambda: slurm.job(second, "JobState") == "COMPLETED", f"job {second}, which goes on in {broken}.log")
    assert slurm.job(second, "Restarts") == "1"
    assert [essence(line) for line in lines(broken)] == [essence(line) for line in lines(whole)]
    said = broken.with_suffix(".log").read_text()
    assert "resuming from" in said and "KeyError" not in said, "the signal ended one of Python's helpers"


def test_a_run_whose_rank_is_killed_is_started_again_if_it_had_got_on(
    slurm: Slurm, text_dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = submit(slurm, text_dataset, run, checkpoint__every=20)
    wait_until(lambda: bool(list(run.glob("checkpoints/step_*"))), f"a checkpoint, see {run}.log")
    os.kill(json.loads((run / "lease.json").read_text())["process"], signal.SIGKILL)
    wait_until(lambda: slurm.job(number, "JobState") == "PENDING", "the job back in the queue")
    time.sleep(3)  # started in the same second its nodes refuse it: "Job credential revoked"
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_until(lambda: slurm.job(number, "JobState") == "COMPLETED", f"job {number}, which goes on in {run}.log")
    assert slurm.job(number, "Restarts") == "1"
    assert [line["step"] for line in lines(run)] == [1, *range(10, STEPS + 1, 10)]


def test_a_cancelled_run_stays_so(slurm: Slurm, text_dataset: Path, tmp_path: Path) -> None:
    number = submit(slurm, text_dataset, tmp_path / "run")
    wait_until(lambda: trains(tmp_path / "run"), "first steps")
    slurm.call("scancel", number)
    wait_until(lambda: slurm.job(number, "JobState") == "CANCELLED", "the job's end")
    assert slurm.job(number, "Restarts") == "0"
    assert slurm.call("squeue", "--noheader", f"--jobs={number}", "--states=PD,R") == ""


def test_an_array_fine_tunes_each_task_with_each_seed_and_a_last_job_joins_them(
    slurm: Slurm, text_dataset: Path, tmp_path: Path
) -> None:
    root = write_stsb(write_cola(tmp_path / "glue", 40, 20), 40, 20)
    small = {"downstream__tokenizer": text_dataset / "tokenizer", "downstream__epochs": 0, "training__steps": 4}
    here, there = (
        glue_flags(root, tmp_path / name, "cola,stsb", "scratch", **small, seeds=2) for name in ("here", "there")
    )
    script = ROOT / "launch" / "slurm" / "finetune.sbatch"
    words = ["sbatch", "--parsable", f"--chdir={ROOT}", "--gpus-per-task=0", "--cpus-per-task=1", "--time=10"]
    output = f"--output={tmp_path}/%j.log"
    array = slurm.call(*words, output, "--array=0-3", script, *there, **environment())
    last = slurm.call(*words, output, f"--dependency=afterok:{array}", script, *there, **environment())
    wait_until(lambda: slurm.job(last, "JobState") == "COMPLETED", f"job {last}, see {tmp_path}", 240)
    assert "seed_1" not in (tmp_path / f"{last}.log").read_text(), "the last job trains nothing"
    assert finetune_here(here) == 0
    one, other = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("here", "there"))
    assert one["tasks"] == other["tasks"] and len(one["tasks"]) == 2


def test_arrays_run_a_study_and_go_on_with_it(slurm: Slurm, text_dataset: Path, tmp_path: Path) -> None:
    """An array for what needs nothing, and one for what judges it; a run that fails holds up only what judges that."""
    missing = tmp_path / "later"
    variants: dict[str, Any] = {
        "there": {"title": "there"},
        "not_there": {"title": "not there yet", "settings": {"data.path": str(missing)}},
    }
    scale = {
        "recipe": "pos_bert_tiny",
        "settings": {**SMALL, "data.path": "{text}", "data.validation_fraction": 0.2, "training.steps": 2},
        "judges": {"held_out": {"command": "evaluate", "flags": {}}},
        "seeds": 1,
    }
    study = {
        "title": "A study",
        "question": "Does it run?",
        "inputs": {"text": "a data set"},
        "baseline": "there",
        "source": {"paper": "none", "arxiv": "-", "place": "-"},
        "outcome": {"judges": ["held_out"], "row": "worst"},
        "variants": variants,
        "scales": {"cpu": scale},
    }
    (tmp_path / "study.yaml").write_text(write_yaml(study))
    run_dir = tmp_path / "study"
    words = [sys.executable, "-m", "trp_scale", "study", "run", tmp_path / "study.yaml", "--run_dir", run_dir]
    words += ["--input", f"text={text_dataset}", "--executor", "slurm-array"]
    words += [f"--sbatch=--partition=low --cpus-per-task=1 --time=10 --output={tmp_path}/%A_%a.log"]

    def submitted() -> dict[str, str]:
        """Of each command that has begun, how it ended; after all jobs have."""
        said = slurm.call(*words, **environment())
        last = said.splitlines()[0].rpartition(" ")[2]
        wait_until(lambda: not slurm.call("squeue", "--noheader", f"--jobs={last}"), f"{said}, see {tmp_path}", 240)
        states = [read_object(path) for path in (run_dir / "state").iterdir()]
        return {state["node"]: state["status"] for state in states}

    first = {"runs/there/seed_0": "finished", "judged/held_out/runs/there/seed_0": "finished"}
    assert submitted() == {**first, "runs/not_there/seed_0": "failed"}
    missing.symlink_to(text_dataset)
    finished = run_dir / "runs" / "there" / "seed_0" / "metrics.jsonl"
    written = finished.stat().st_mtime_ns
    others = {"runs/not_there/seed_0": "finished", "judged/held_out/runs/not_there/seed_0": "finished"}
    assert submitted() == first | others
    assert finished.stat().st_mtime_ns == written
    assert "none: everything has finished" in slurm.call(*words, **environment())


@pytest.mark.exhaustive
def test_an_array_shards_a_part_in_each_job_and_a_last_job_merges_them(
    slurm: Slurm, text_dataset: Path, tmp_path: Path
) -> None:
    output = tmp_path / "data"
    said = slurm.call(
        *(sys.executable, "-m", "trp_scale", "shard-text", "--inputs", str(text_dataset.with_suffix(".jsonl"))),
        *("--output", str(output), "--tagger", "textblob", "--length", "64", "--vocab_size", "1000"),
        *("--rows_per_block", "16", "--shard_bytes", "20000", "--processes", "1"),
        *("--executor", "slurm-array", "--num_shards", "2"),
        f"--sbatch=--partition=low --cpus-per-task=1 --time=10 --output={tmp_path}/%j.log",
        **environment(),
    )
    last = said.partition(", job ")[2].partition(" ")[0]
    wait_until(lambda: slurm.job(last, "JobState") == "COMPLETED", f"job {last}, see {tmp_path}", 240)
    assert content(output) == content(text_dataset)
