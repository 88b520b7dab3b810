"""`trp-scale reference`: losses and mean weights of a run, read back by a balancer, and the shares of a second run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.methods.balancing.toy import ToyObjective, balancer
from trp_scale.cli.main import main
from trp_scale.config import RefusedError
from trp_scale.data.index import read_json
from trp_scale.data.mixture import parse_members
from trp_scale.errors import DataError
from trp_scale.methods.balancing.base import TaskBalancer
from trp_scale.training.metrics import METRICS_FILE
from trp_scale.training.rundir import CONFIG_FILE

STEPS = [{"books": (3.0, 0.25), "wiki": (4.0, 0.75)}, {"books": (2.0, 1.0), "wiki": (None, None)}]
HELD_OUT = {"books": {"loss": 2.5, "count": 90}, "wiki": {"loss": 3.5, "count": 9}, "pairs": {"loss": 0.0, "count": 0}}


def write_run(directory: Path, *, validated: bool = True, path: str = "books:0.5=/a,wiki:0.5=/b") -> Path:
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(f"data:\n  path: {path}\n")
    lines: list[dict[str, Any]] = []
    for step, tasks in enumerate(STEPS, start=1):
        entries = {name: {"loss": loss, "weight": weight, "count": 5} for name, (loss, weight) in tasks.items()}
        entries["pairs"] = {"loss": 0.7, "weight": 1.0, "count": 5}
        lines.append({"step": step, "loss": 1.0, "tasks": entries, "outside_tasks": ["pairs"], "applied": True})
    if validated:
        lines.append({"step": 2, "validation": {"loss": 3.0, "tasks": HELD_OUT}})
    (directory / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_losses_are_held_out_and_the_weights_means_of_the_balanced_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = write_run(tmp_path / "run"), tmp_path / "reference.json"
    assert main(["reference", "--run", str(run), "--output", str(output)]) == 0
    document = read_json(output)
    assert document["losses"] == {"books": 2.5, "wiki": 3.5}
    assert document["weights"] == {"books": 0.625, "wiki": 0.375}
    assert str(tmp_path / "reference.txt") in capsys.readouterr().out
    path = (tmp_path / "reference.txt").read_text().strip()
    assert [(name, int(weight), where) for name, weight, where in parse_members(path)] == [
        ("books", 6250, "/a"),
        ("wiki", 3750, "/b"),
    ]


def test_losses_of_a_run_without_validation_are_those_of_its_last_steps(tmp_path: Path) -> None:
    run, output = write_run(tmp_path / "run", validated=False, path="/a"), tmp_path / "reference.json"
    assert main(["reference", "--run", str(run), "--output", str(output)]) == 0
    assert read_json(output)["losses"] == {"books": 2.0, "pairs": 0.7}
    assert not (tmp_path / "reference.txt").exists()


def test_a_balancer_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"losses": {"a": 1.5, "b": 2.5, "c": 0.5}}))
    three = ToyObjective(tasks=("a", "b", "c"))
    weigher = balancer(three, "minimax", scale="reference", reference_file=str(path))
    assert weigher.reference.tolist() == [1.5, 2.5, 0.5]
    for tasks in (("a", "b", "c", "d"), ("a", "b")):
        with pytest.raises(RefusedError, match="reference_file"):
            balancer(ToyObjective(tasks=tasks), "minimax", scale="reference", reference_file=str(path))
    with pytest.raises(DataError, match=r"missing\.json"):
        balancer(three, "minimax", scale="reference", reference_file=str(tmp_path / "missing.json"))


def test_a_reference_that_changed_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path, two = tmp_path / "reference.json", ToyObjective(tasks=("a", "b"))

    def weigher(a: float) -> TaskBalancer:
        path.write_text(json.dumps({"losses": {"a": a, "b": 2.0}}))
        return balancer(two, "minimax", scale="reference", reference_file=str(path))

    state = weigher(1.0).state_dict()
    weigher(1.0).load_state_dict(state)
    with pytest.raises(RefusedError, match=r"reference\.json"):
        weigher(1.5).load_state_dict(state)
