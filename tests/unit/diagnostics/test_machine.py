"""What `trp-scale doctor` finds on one host: each wrong thing is named with what to change."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.launcher.runner import _parse_hostfile

from trp_scale.cli import main as cli
from trp_scale.diagnostics import machine as doctor
from trp_scale.diagnostics.machine import Finding
from trp_scale.distributed.groups import ALONE
from trp_scale.distributed.launchers import RankInfo

FOUR = RankInfo(world=4, local_world=4, launcher="torchrun")


def only(findings: Iterable[Finding], check: str) -> Finding:
    (found,) = [each for each in findings if each.check == check]
    return found


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, prints: str, status: int = 0, visible: int = 0) -> None:
    """A driver that tells this of its GPUs, of which torch sees some."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)


def test_without_gpus_it_says_that_ranks_compute_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = only(doctor._check_gpus(RankInfo()), "gpus")
    assert (found.state, found.result) == (
        "ok",
        "none: ranks compute on CPUs (nvidia-smi is not installed)",
    )


def test_gpus_are_told_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{index}, NVIDIA A100-SXM4-80GB, 580.65, 81920, 4, [N/A]" for index in range(4)]
    nvidia_smi(tmp_path, monkeypatch, "\n".join(rows), visible=4)
    (found,) = doctor._check_gpus(FOUR)
    assert found.state == "ok"
    assert found.result.startswith("4 (NVIDIA A100-SXM4-80GB, driver 580.65), 4 of them for torch")


def test_gpus_that_idle_are_in_use_or_damaged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "0, NVIDIA H100, 580.65, 81559, 60000, 0\n1, NVIDIA H100, 580.65, 81559, 4, 3"
    nvidia_smi(tmp_path, monkeypatch, f"{busy}\n" * 4, visible=8)
    found = [*doctor._check_gpus(FOUR)]
    assert [(each.check, each.state) for each in found[:3]] == [
        ("gpus", "warning"),
        ("gpu memory", "warning"),
        ("gpu errors", "wrong"),
    ]
    assert "for 4 ranks" in found[0].result and "start 8 ranks per host" in found[0].change
    assert "GPU 0 has 60000 of 81559 MiB in use" in found[1].result and "end it, or use other GPUs" in found[1].change
    assert "GPU 1 has 3 uncorrectable memory errors" in found[2].result


def test_gpus_that_torch_does_not_see_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA A100, 470.1, 40960, 0, 0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = only(doctor._check_gpus(RankInfo()), "gpus")
    assert hidden.state == "wrong" and hidden.change == "set CUDA_VISIBLE_DEVICES to the GPUs' numbers"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "install a driver that supports it" in only(doctor._check_gpus(RankInfo()), "gpus").change


def test_a_driver_that_does_not_answer_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "Unable to determine the device handle for GPU 3", status=15)
    found = only(doctor._check_gpus(RankInfo()), "gpus")
    assert (found.state, found.result) == (
        "wrong",
        "nvidia-smi ended with 15: Unable to determine the device handle for GPU 3",
    )


def test_few_open_files_are_told_with_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, state in (((1024, 2048), "warning"), ((4096, 4096), "ok"), ((resource.RLIM_INFINITY,) * 2, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: limit)
        finding = doctor._check_open_files()
        assert (finding.check, finding.state) == ("limits", state)
        assert ("ulimit -n 4096" in finding.change) == (state == "warning")


def test_shared_memory_is_a_gibibyte_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 30))
    assert doctor._check_shared_memory(RankInfo(), tmp_path).state == "ok"
    small = doctor._check_shared_memory(FOUR, tmp_path)
    assert small.state == "warning" and "--shm-size" in small.change and "2.0 GiB free" in small.result
    monkeypatch.undo()
    assert doctor._check_shared_memory(FOUR, tmp_path / "none").state == "wrong"


def test_ports_of_the_rendezvous_that_connections_may_take_are_told(tmp_path: Path) -> None:
    listed = tmp_path / "range"
    for text, state in (("32768\t60999\n", "ok"), ("1024\t65535\n", "warning")):
        listed.write_text(text, encoding="utf-8")
        (found,) = doctor._check_ports(listed)
        assert found.state == state
    assert "sysctl net.ipv4.ip_local_port_range" in found.change and "1024 to 65535" in found.result


@pytest.mark.parametrize(("value", "state"), [("eth0", "ok"), ("eth", "wrong"), ("eth0,ib9", "wrong")])
def test_an_interface_that_does_not_exist_is_wrong(value: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    finding = doctor._check_network(ALONE)
    assert (finding.check, finding.state) == ("network", state) and "lo, eth0, ib0" in finding.result


def test_a_host_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", fail)
    finding = doctor._check_network(ALONE)
    assert finding.state == "warning" and "GLOO_SOCKET_IFNAME" in finding.change


def test_the_command_prints_lines_or_json_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--storage", str(tmp_path), "--mebibytes", "1"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    for check in ("gpus", "limits", "versions", "compute", "all-reduce", "storage"):
        assert f" {check} " in printed
    assert printed.rstrip().endswith(", 0 wrong")
    assert not [*tmp_path.iterdir()]
    assert cli.main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["launcher"], told["device"]) == (1, "single", "cpu")
    assert {each["state"] for each in told["findings"]} <= {"ok", "warning"}
    assert [each["check"] for each in told["findings"]].count("storage") == 1


def test_storage_that_is_not_there_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--storage", str(tmp_path / "none")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "wrong storage" in printed and "No such file or directory" in printed
    assert "to do: give a writable directory that all hosts share" in printed


@pytest.mark.exhaustive  # tests/unit/cli/test_main.py: rank 0 speaks
def test_two_ranks_under_torchrun_print_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).parents[3] / "launch" / "doctor.py"
    done = subprocess.run(
        [*command, str(script), "--json", "--mebibytes", "1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ranks"], told["launcher"]) == (2, "torchrun")
    assert "over gloo on 2 ranks of 1 host(s), 1 MiB" in next(
        each["result"] for each in told["findings"] if each["check"] == "all-reduce"
    )


def test_two_ranks_are_started_by_torchrun_and_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], str]] = []

    def launch(command: list[str], *, env: dict[str, str], **_: object) -> SimpleNamespace:
        calls.append((command, env["NCCL_MULTI_RANK_GPU_ENABLE"]))
        return SimpleNamespace(returncode=1, stdout="", stderr="NCCL error: duplicate GPU")

    monkeypatch.setattr("trp_scale.cli.training.subprocess.run", launch)
    assert cli.main(["doctor", "--two_ranks", "--mebibytes", "1"]) == 1
    ((command, shared),) = calls
    assert command[-5:] == ["trp_scale", "doctor", "--two_ranks", "--mebibytes", "1"] and shared == "1"
    assert "duplicate GPU" in capsys.readouterr().out


@pytest.mark.exhaustive  # the same in parts: above, and tests/distributed/test_doctor.py
def test_two_ranks_examine_each_other() -> None:
    command = [sys.executable, "-m", "trp_scale", "doctor", "--two_ranks", "--json", "--mebibytes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ranks"], told["launcher"]) == (0, 2, "torchrun")
    assert only(doctor_findings(told), "collectives").state == "ok"


def doctor_findings(told: dict[str, list[dict[str, object]]]) -> list[Finding]:
    return [Finding(**finding) for finding in told["findings"]]  # type: ignore[arg-type]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name that reaches hosts called node*, and asks the others for a password."""
    program = tmp_path / "ssh"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert sys.argv[1:5] == ['-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5'] and sys.argv[6] == 'true'\n"
        "sys.exit(0 if sys.argv[5].startswith('node') else f'root@{sys.argv[5]}: Permission denied (publickey).')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize(
    ("text", "state", "result"),
    [
        ("# two\nnode1 slots=8\n\n node2   slots=8  # spare\n", "ok", "hosts: 2 hosts, 16 slots"),
        ("node1 slots=8\nnode2:8\n", "wrong", "hosts:2: 'node2:8'"),
        ("node1 slots=0\n", "wrong", "hosts:1: 'node1 slots=0'"),
        ("node1 slots=8\nnode1 slots=8\n", "wrong", "hosts:2: 'node1 slots=8'"),
        ("# none\n", "wrong", "hosts: names no host"),
        ("localhost slots=8\n", "wrong", "localhost: root@localhost: Permission denied"),
    ],
)
def test_a_hostfile_is_examined_as_deepspeed_reads_it(tmp_path: Path, text: str, state: str, result: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    findings = [*doctor.examine_hostfile(path)]
    assert findings[0].state == state and findings[0].result.replace(f"{path}", "hosts").startswith(result)
    try:
        _parse_hostfile(text.splitlines(keepends=True))
    except ValueError:
        assert state == "wrong"


@pytest.mark.usefixtures("ssh")
def test_a_hostfile_or_ssh_that_does_not_exist_is_wrong(tmp_path: Path) -> None:
    (missing,) = doctor.examine_hostfile(tmp_path / "nowhere")
    assert missing.state == "wrong" and "nowhere" in missing.result
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    (tmp_path / "ssh").unlink()
    (unreachable,) = doctor.examine_hostfile(tmp_path / "hosts")
    assert unreachable.state == "wrong" and "ssh" in unreachable.result
