"""Runs on two hosts: launch/torchrun.sh on each, deepspeed with a hostfile from one, and a host that is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Host, lacking, two_hosts
from tests.runs import ROOT, essence, flags, lines, wait_until

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
