"""A SLURM of its own for the tests: two nodes that are both this machine, a partition that takes nodes from another."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import free_port
from tests.runs import wait_until

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
