"""Rank and world from the variables that each launcher sets, and two launchers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trp_scale.config import RefusedError
from trp_scale.distributed.launchers import RankInfo, discover, first_host

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "812345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}
# srun with one task per node, each of which starts torchrun or deepspeed.
SRUN_PER_NODE = {
    **SRUN,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# What a batch script sees without srun: the job's variables, and no step of its own.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "812345",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}


def test_a_process_of_its_own() -> None:
    assert discover({"HOME": "/root", "PATH": "/bin"}) == RankInfo()
    assert RankInfo().world == 1


@pytest.mark.parametrize(
    ("environ", "launcher", "port"), [(TORCHRUN, "torchrun", 29400), (DEEPSPEED, "deepspeed", 29500)]
)
def test_torchrun_and_deepspeed(environ: dict[str, str], launcher: Any, port: int) -> None:
    place: dict[str, Any] = {"rank": 5, "world": 8, "local_rank": 1, "local_world": 4, "master_addr": "node1"}
    assert discover(environ) == RankInfo(**place, master_port=port, launcher=launcher)


def test_srun() -> None:
    info = discover(SRUN)
    assert (info.rank, info.world, info.local_rank, info.local_world) == (5, 8, 1, 4)
    assert (info.master_addr, info.launcher) == ("gpu007", "slurm")
    assert 1024 < info.master_port < 32768
    # Every rank finds the same port; another step, and another job, find another.
    assert discover({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == info.master_port
    assert discover({**SRUN, "SLURM_STEP_ID": "1"}).master_port != info.master_port
    assert discover({**SRUN, "SLURM_JOB_ID": "812347"}).master_port != info.master_port


def test_a_single_task_of_srun_finds_nobody_by_name() -> None:
    alone = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    alone |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert (discover(alone).world, discover(alone).master_addr) == (1, "127.0.0.1")


def test_srun_with_an_address_of_the_users() -> None:
    info = discover({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 4000)


def test_srun_with_nodes_of_different_sizes() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "2", "SLURM_LOCALID": "3"}
    assert discover(uneven).local_world == 4


def test_a_batch_script_without_srun_is_a_single_process() -> None:
    assert discover(BATCH_SCRIPT) == RankInfo()
    assert discover({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"}) == RankInfo()


def test_torchrun_and_deepspeed_in_a_batch_script_or_under_one_task_per_node_are_themselves() -> None:
    assert discover({**BATCH_SCRIPT, **TORCHRUN}).launcher == "torchrun"
    assert discover({**SRUN_PER_NODE, **TORCHRUN}).launcher == "torchrun"
    assert discover({**SRUN_PER_NODE, **DEEPSPEED}).launcher == "deepspeed"
    assert discover({**SRUN_PER_NODE, **TORCHRUN}).local_world == 4


def test_an_interactive_shell_under_srun_may_start_torchrun() -> None:
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    shell |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    one_node = {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}
    assert discover({**shell, **one_node}).world == 4


def test_a_wrapper_that_copies_slurms_numbers_is_srun() -> None:
    copied = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu007", "MASTER_PORT": "4000"}
    info = discover({**SRUN, **copied})
    assert (info.rank, info.local_rank, info.local_world, info.master_port) == (5, 1, 4, 4000)
    assert info.launcher == "slurm"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**SRUN, **TORCHRUN}, "srun started 8 tasks (4 on this node)"),
        ({**SRUN, **DEEPSPEED}, "set by deepspeed"),
        # torchrun without --nnodes on each of two nodes: two runs that would write to one place.
        ({**SRUN_PER_NODE, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "--nnodes $SLURM_NNODES"),
        ({**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK 0 and WORLD_SIZE 2"),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"},
            "RANK and WORLD_SIZE not set",
        ),
        ({**TORCHRUN, **DEEPSPEED}, "torchrun (TORCHELASTIC_RUN_ID) and of deepspeed (CROSS_SIZE)"),
    ],
)
def test_two_launchers_at_once_are_refused_with_what_to_do(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        discover(environ)
    assert "two launchers" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "unset RANK WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "five"}, "RANK is 'five'"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8 processes"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4 processes"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"}, "expected the form 4(x2),1"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun started 4 processes"),
    ],
)
def test_variables_that_cannot_be_are_refused(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        discover(environ)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[1-2]node[04-05]", "rack1node04"),
        ("gpu-a-[01-02]-ib,gpu-b-1", "gpu-a-01-ib"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_the_first_host_of_slurms_notation(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_process_that_leaves_removes_its_own_socket_directory_alone(tmp_path: Path) -> None:
    """A forked one has its parent's, which other processes still use."""
    script = f"""
import os, tempfile
from multiprocessing import util
tempfile.tempdir = {str(tmp_path)!r}
from trp_scale.distributed.launchers import exit_process
print(util.get_temp_dir(), flush=True)
if os.fork() == 0:
    exit_process(0)
os.wait()
print(os.path.isdir(util.get_temp_dir()), flush=True)
exit_process(0)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    made, is_there = shown.stdout.split()
    assert is_there == "True" and made.startswith(str(tmp_path)) and not list(tmp_path.iterdir())
