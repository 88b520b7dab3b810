"""Runs on two hosts: launch/torchrun.sh on each, deepspeed with a hostfile from one, and a host that is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, environment, essence, flags, lines, wait_until

PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
SSHD = """
Port 22
HostKey {directory}/key
AuthorizedKeysFile {directory}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
"""
SSH = """#!/bin/sh
exec {ssh} -i {directory}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


def lacking() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install iproute2 openssh-server pdsh)"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Host:
    """A host that is up.

    Attributes:
        name: what the other one and itself resolve to `address`.
        address: on the cable.
        directory: its HOME, which both share; programs in it come first in PATH.
    """

    name: str
    address: str
    directory: Path

    def start(self, command: Sequence[str | Path], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in the checkout; what it prints goes to the end of a file."""
        environ = {**environment(), **variables, "HOME": str(self.directory)}
        environ["PATH"] = f"{self.directory}{os.pathsep}{environ['PATH']}"
        words = [*self._inside(), *(str(word) for word in command)]
        with output.open("ab") as file:
            return subprocess.Popen(words, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """As when it loses its power, but for sshd: a kill -9 of all else."""
        for pid in _call("ip", "netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if "sshd" not in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)

    def _inside(self) -> list[str]:
        named = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, self.name]


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Up, and gone at the end with all that runs on them."""
    one, other = (
        Host(f"trp-{place}-{os.getpid()}", f"10.83.0.{number}", directory)
        for number, place in enumerate(("a", "b"), start=1)
    )
    _write_keys(directory)
    daemons = []
    try:
        for host in (one, other):
            _call("ip", "netns", "add", host.name)
            names = Path("/etc/netns", host.name)  # ip netns exec lays these over /etc
            names.mkdir(parents=True)
            known = {"localhost": "127.0.0.1", one.name: one.address, other.name: other.address}
            (names / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        _call("ip", "link", "add", "eth0", "netns", one.name, "type", "veth", "peer", "eth0", "netns", other.name)
        for host in (one, other):
            _call("ip", "-netns", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _call("ip", "-netns", host.name, "link", "set", link, "up")
        for host in (one, other):
            sshd = [str(shutil.which("sshd")), "-D", "-e", "-f", directory / "sshd.conf"]
            daemons.append(host.start(sshd, directory / f"{host.name}.sshd"))
        for host in (one, other):
            reach = ["ssh", host.name, "true"]
            wait_until(lambda: one.start(reach, directory / "ssh.out").wait() == 0, f"{reach}, see {directory}", 10)  # noqa: B023
        yield one, other
    finally:
        for host in (one, other):
            with contextlib.suppress(AssertionError):
                host.kill()
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(timeout=10)
        for host in (one, other):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)


def _write_keys(directory: Path) -> None:
    _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "key"))
    (directory / "sshd.conf").write_text(SSHD.format(directory=directory))
    # What deepspeed's launcher sets on both; of other variables it passes on those of NCCL and Python alone.
    (directory / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nTRP_SCALE_PROGRESS=plain\n")
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
    ssh = directory / "ssh"
    ssh.write_text(SSH.format(ssh=shutil.which("ssh"), directory=directory))
    ssh.chmod(0o755)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(lacking()), reason=lacking())]

STEPS = 50
Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as up:
        yield up


def arguments(text_dataset: Path, run_dir: Path) -> list[str]:
    changes: dict[str, Any] = {"training__steps": STEPS, "validation__every": 0, "model__dropout": 0.1}
    return flags(text_dataset, run_dir, checkpoint__every=10, resume="auto", **changes)


def by_torchrun(hosts: Hosts, words: list[str], output: Path) -> list[subprocess.Popen[bytes]]:
    """launch/torchrun.sh as its first lines say, one rank a host."""
    first = hosts[0]
    return [
        host.start(
            [ROOT / "launch" / "torchrun.sh", *words],
            output,
            NNODES="2",
            NODE_RANK=str(number),
            MASTER_ADDR=first.name,
            RANKS_PER_NODE="1",
        )
        for number, host in enumerate(hosts)
    ]


def by_deepspeed(hosts: Hosts, words: list[str], output: Path) -> list[subprocess.Popen[bytes]]:
    """Deepspeed's own launcher, from the first host over ssh."""
    hostfile = output.with_suffix(".hostfile")
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    config = ["--ds_config", "ds_configs/zero2.json"]
    command = ["deepspeed", "--hostfile", hostfile, "--master_addr", hosts[0].address]
    return [hosts[0].start([*command, "launch/pretrain.py", *words, *config], output)]


@pytest.fixture(scope="module")
def whole(hosts: Hosts, text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two hosts that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    started = by_torchrun(hosts, arguments(text_dataset, run_dir), run_dir.with_suffix(".log"))
    assert [process.wait(timeout=120) for process in started] == [0, 0], run_dir.with_suffix(".log").read_text()
    return run_dir


def told(run_dir: Path) -> list[dict[str, Any]]:
    return [essence(line) for line in lines(run_dir)]


def test_a_lost_host_ends_the_run_and_the_next_start_goes_on_at_the_same_row(
    hosts: Hosts, text_dataset: Path, tmp_path: Path, whole: Path
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "run.log"
    words = arguments(text_dataset, run_dir)
    started = by_torchrun(hosts, words, output)
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 12, f"steps in {output}")
    hosts[1].kill()
    assert all(process.wait(timeout=60) != 0 for process in started), "the host that is left does not wait for ever"
    assert 12 < len(lines(run_dir)) < STEPS
    again = by_torchrun(hosts, words, output)
    assert [process.wait(timeout=120) for process in again] == [0, 0], output.read_text()
    assert "resuming from" in output.read_text()
    assert told(run_dir) == told(whole)


def test_a_hostfile_gives_what_two_torchruns_give(
    hosts: Hosts, text_dataset: Path, tmp_path: Path, whole: Path
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "run.log"
    (launched,) = by_deepspeed(hosts, arguments(text_dataset, run_dir), output)
    assert launched.wait(timeout=150) == 0, output.read_text()
    for found, wanted in zip(told(run_dir), told(whole), strict=True):
        assert found["step"] == wanted["step"]
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    said = output.read_text()
    assert all(f"{host.name}: " in said for host in hosts), "both hosts have a rank"
