"""What a run directory says of its run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.distributed.environment import Environment, RankInfo
from trp_scale.distributed.groups import ALONE
from trp_scale.errors import ExitStatus
from trp_scale.training import rundir
from trp_scale.training.rundir import INCIDENTS_FILE, STOP_RECORD, Ending, Incidents, read_incidents


def test_the_name_has_the_recipe_and_the_time_and_is_never_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [rundir.create_run_directory(None, "mine", ALONE) for _ in range(3)]
    assert len(set(made)) == 3
    assert all(path.parent == tmp_path / "runs" and path.name.startswith("mine-20") for path in made)


def test_a_given_directory_is_made_and_kept(tmp_path: Path) -> None:
    for _ in range(2):
        assert rundir.create_run_directory(tmp_path / "deep" / "run", "", ALONE) == tmp_path / "deep" / "run"
    assert (tmp_path / "deep" / "run").is_dir()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="file/run"):
        rundir.create_run_directory(tmp_path / "file" / "run", "", ALONE)


def start(run_dir: Path, engine: str = "plain", stage: int | None = None, steps: int = 7) -> None:
    config = load_recipe("pos_bert_tiny")
    config.training.steps, config.batch.micro_size = steps, 4
    environment = Environment(RankInfo(launcher="torchrun"), use_gpu=False)
    environment.cpus = 3
    rundir.write_start(run_dir, config, environment, SimpleNamespace(name=engine, zero_stage=stage))  # type: ignore[arg-type]


def test_config_yaml_is_a_recipe_with_every_setting(tmp_path: Path) -> None:
    for steps in (7, 9):
        start(tmp_path, steps=steps)
        assert load_recipe(tmp_path / "config.yaml").training.steps == steps
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "environment.json"}


def test_environment_json_says_how_each_start_was_made(tmp_path: Path) -> None:
    for engine, stage in (("plain", None), ("deepspeed", 3), ("fsdp", None)):
        start(tmp_path, engine, stage)
    written = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert (written["engine"], written["zero_stage"], written["world_size"]) == ("fsdp", None, 1)
    assert (written["launcher"], written["cpus_per_rank"], written["micro_size"]) == ("torchrun", 3, 4)
    assert torch.__version__.startswith(written["versions"]["torch"])
    assert written["devices"][0].startswith("cpu")
    assert [(earlier["engine"], earlier["zero_stage"]) for earlier in written["earlier"]] == [
        ("plain", None),
        ("deepspeed", 3),
    ]


def test_a_damaged_environment_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{", encoding="utf-8")
    with pytest.raises(RefusedError, match=r"environment\.json"):
        start(tmp_path)


def test_git_state_is_that_of_a_checkout_that_tracks_the_package(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert rundir.git_state(tmp_path) is None
    git("init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n", encoding="utf-8")
    assert rundir.git_state(package) is None  # in somebody's checkout, but not part of it
    git("add", ".")
    git("commit", "-m", "first")
    assert rundir.git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("a = 2\n", encoding="utf-8")
    assert rundir.git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_the_command_that_continues_a_run_names_its_directory() -> None:
    started = Path("runs/mae-1")
    assert rundir.continue_command(["trp-scale", "pretrain"], started) == "trp-scale pretrain --run_dir runs/mae-1"
    assert rundir.continue_command(["pretrain", "--run_dir=my runs"], started) == "pretrain '--run_dir=my runs'"
    assert rundir.continue_command(["finetune"], Path("runs/glue-1/rte/seed_3")) == "finetune --run_dir runs/glue-1"


def ending(run_dir: Path, rank: int = 0) -> Ending:
    found = Ending(run_dir=run_dir, rank=rank)
    found.begin()
    return found


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / STOP_RECORD).read_text())
    return found


@pytest.mark.parametrize(
    ("why", "status", "again"),
    [
        ("finished", 0, False),
        ("SIGTERM (rank 3)", 0, True),
        ("its launcher, process 12, has ended", 0, True),
        ("--training.max_hours 1 reached", 0, True),
        ("Ctrl-C", 0, False),
        ("the file /runs/a/STOP", 0, False),
        ("11 steps skipped, --training.max_skipped_steps allows 10", 3, False),
    ],
)
def test_an_agreed_end(tmp_path: Path, why: str, status: int, again: bool) -> None:
    ending(tmp_path).note_stop(why, 12, ExitStatus(status))
    found = record(tmp_path)
    assert (found["why"], found["step"], found["status"], found["again"]) == (why, 12, status, again)
    assert found["advice"]


@pytest.mark.parametrize("got_on", [True, False])
def test_what_broke_is_started_again_if_it_had_got_on(tmp_path: Path, got_on: bool) -> None:
    checkpoint_path(tmp_path, 4).mkdir(parents=True)
    found = ending(tmp_path, rank=1)
    if got_on:
        checkpoint_path(tmp_path, 8).mkdir()
    found.broke(OSError("the disk is gone"))
    assert record(tmp_path) | {"again": got_on, "status": 1, "rank": 1} == record(tmp_path)
    assert "OSError: the disk is gone" in record(tmp_path)["why"]


def test_what_is_refused_is_not(tmp_path: Path) -> None:
    found = ending(tmp_path)
    checkpoint_path(tmp_path, 8).mkdir(parents=True)
    found.broke(RefusedError("--optimizer.lr: ..."))
    assert (record(tmp_path)["status"], record(tmp_path)["again"]) == (2, False)


def test_the_first_ranks_record_stays_until_the_next_start(tmp_path: Path) -> None:
    first, second = ending(tmp_path, 1), ending(tmp_path, 0)
    first.hung(7, "rank 0 did not report")
    second.broke(RuntimeError("connection closed by peer"))
    assert record(tmp_path)["status"] == 4
    ending(tmp_path)
    assert not (tmp_path / STOP_RECORD).exists()


def test_a_disk_without_room_hides_no_error(tmp_path: Path) -> None:
    found = ending(tmp_path)
    found.run_dir = tmp_path / "gone"
    found.broke(OSError("no space"))


def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    """As a kill leaves it, or a disk that took half of it."""
    Incidents(tmp_path).add("spike", 5)
    with (tmp_path / INCIDENTS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"at": "2026-')
    Incidents(tmp_path).add("restart", 6)
    assert [(each["kind"], each["step"]) for each in read_incidents(tmp_path)] == [("spike", 5), ("restart", 6)]
