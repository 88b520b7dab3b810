"""The launch scripts, run with stand-ins for SLURM's and torch's programs that write down how they were called; and
launch/kubernetes/pretrain.yaml: what Kubernetes would refuse, and what it would accept and never start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trp_scale.config.run_flags import parse

LAUNCH = Path(__file__).parents[3] / "launch"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for stand-ins, first on PATH."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def stand_in(programs: Path, name: str, script: str = "") -> None:
    path = programs / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{programs.parent}/calls"\n{script}\n', encoding="utf-8")
    path.chmod(0o755)


def calls(programs: Path) -> list[str]:
    path = programs.parent / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def environ(programs: Path, **variables: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "NODE", "RANK"))
    }
    return kept | {"PATH": f"{programs}:{os.environ['PATH']}"} | variables


def torchrun(programs: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stand_in(programs, "torchrun")
    return subprocess.run(
        [str(LAUNCH / "torchrun.sh"), *argv],
        env=environ(programs, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchrun_on_one_node(programs: Path) -> None:
    torchrun(programs, "--recipe", "a b", RANKS_PER_NODE="2")
    assert calls(programs) == [f"torchrun --standalone --nproc_per_node 2 {LAUNCH}/pretrain.py --recipe a b"]


def test_torchrun_on_two_nodes(programs: Path) -> None:
    torchrun(programs, NNODES="2", NODE_RANK="1", MASTER_ADDR="node1")
    (call,) = calls(programs)
    assert "--nnodes 2 --node_rank 1 --master_addr node1 --master_port 29500 --nproc_per_node gpu" in call


def test_torchrun_on_two_nodes_says_what_is_missing(programs: Path) -> None:
    done = torchrun(programs, NNODES="2", NODE_RANK="1")
    assert done.returncode != 0
    assert "set MASTER_ADDR to the first node" in done.stderr
    assert calls(programs) == []


def batch(
    programs: Path,
    srun: str,
    job: str = "JobState=RUNNING PreemptTime=None",
    *,
    script: str = "pretrain.sbatch",
    **variables: str,
) -> subprocess.Popen[str]:
    """`job`: what scontrol shows of it, beside when it started."""
    stand_in(programs, "srun", srun)
    stand_in(programs, "scontrol", f'[[ $* != *show* ]] || echo "JobId=77 StartTime=2026-01-02T08:00:00 {job}"')
    stand_in(programs, "scancel", f'touch "{programs.parent}/told"')
    return subprocess.Popen(
        [str(shutil.which("bash")), str(LAUNCH / "slurm" / script), "--recipe", "pos_bert_base"],
        cwd=LAUNCH.parent,
        env=environ(programs, SLURM_JOB_ID="77", SLURM_CPUS_PER_TASK="4", **variables),
        text=True,
    )


def acts(programs: Path) -> list[str]:
    """Calls that do something."""
    return [call for call in calls(programs) if not call.startswith("scontrol --oneliner show job")]


def test_slurm_starts_one_step_and_passes_its_status_on(programs: Path) -> None:
    assert batch(programs, "exit 3").wait(timeout=120) == 3
    (call,) = acts(programs)
    assert call.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=4 --cpu-bind=cores python -u launch/pretrain.py")
    assert call.endswith("--resume auto --run_dir runs/slurm-77 --recipe pos_bert_base")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(
    ("status", "job", "requeued"),
    [
        (0, "JobState=RUNNING PreemptTime=None", True),
        (1, "JobState=RUNNING PreemptTime=None", False),
        (0, "JobState=COMPLETING PreemptTime=None", False),
    ],
    ids=["stopped well", "failed", "cancelled"],
)
def test_slurm_requeues_after_the_run_has_stopped_well(
    programs: Path, number: int, status: int, job: str, requeued: bool
) -> None:
    # The step ends only when it is told to, a moment later, as a run that writes its checkpoint does.
    told = programs.parent / "told"
    process = batch(programs, f'while [[ ! -e "{told}" ]]; do sleep 0.05; done; sleep 0.3; exit {status}', job)
    deadline = time.monotonic() + 120
    while not calls(programs) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=120) == status
    ended = ["scontrol requeue 77"] if requeued else []
    assert acts(programs)[1:] == ["scancel --signal=TERM 77.0", *ended]


@pytest.mark.parametrize(
    ("preempted", "requeued"), [("None", False), ("2026-01-02T09:00:00", True), ("2026-01-02T07:00:00", False)]
)
def test_a_run_that_ends_by_itself_is_requeued_only_where_preemption_told_it(
    programs: Path, preempted: str, requeued: bool
) -> None:
    assert batch(programs, "exit 0", f"JobState=RUNNING PreemptTime={preempted}").wait(timeout=120) == 0
    assert acts(programs)[1:] == (["scontrol requeue 77"] if requeued else [])


def test_jobs_of_an_array_make_a_run_each_and_speak_of_themselves_alone(programs: Path) -> None:
    """The array's last job has the array's number, 77."""
    preempted = "JobState=RUNNING PreemptTime=2026-01-02T09:00:00"
    place = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert batch(programs, "exit 0", preempted, script="finetune.sbatch", **place).wait(timeout=120) == 0
    assert acts(programs)[0].endswith("python -u launch/finetune.py --only 3 --recipe pos_bert_base")
    assert {call.split()[-1] for call in calls(programs)[1:]} == {"77_3"}


def test_the_job_that_joins_an_array_makes_all_runs(programs: Path) -> None:
    assert batch(programs, "exit 0", script="finetune.sbatch").wait(timeout=120) == 0
    assert acts(programs)[0].endswith("python -u launch/finetune.py --recipe pos_bert_base")


def test_the_scripts_have_no_mistake_that_shellcheck_finds() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [LAUNCH / "torchrun.sh", *sorted((LAUNCH / "slurm").iterdir()), LAUNCH.parent / "tests" / "wheel.sh"]
    done = subprocess.run([shellcheck, "--shell=bash", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


MANIFEST = Path(__file__).parents[3] / "launch" / "kubernetes" / "pretrain.yaml"
VERSION = "1.31"


@pytest.fixture
def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def test_it_follows_the_schema(documents: dict[str, Any]) -> None:
    assert set(documents) == {"Service", "Job"}
    for document in documents.values():
        kubernetes_validate.validate(document, VERSION, strict=True)
    documents["Job"]["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        kubernetes_validate.validate(documents["Job"], VERSION, strict=True)


def test_every_pod_finds_the_first(documents: dict[str, Any]) -> None:
    service, job = documents["Service"], documents["Job"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    assert "NODE_RANK" in variables
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}, "Kubernetes gives each pod of a Job this label"


def test_the_container_mounts_what_it_names(documents: dict[str, Any]) -> None:
    pod = documents["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert set(mounted.values()) == {each["name"] for each in pod["volumes"]}
    run = parse([word for flag in container["args"] for word in flag.split("=", 1)])
    for path in (run.config.data.path, run.run_dir):
        assert any(str(path).startswith(f"{mount}/") for mount in mounted), path
    assert (MANIFEST.parents[2] / container["command"][0]).is_file()
