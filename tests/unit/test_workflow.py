"""The public checks run `.ci/run` once on the oldest Python, with pinned actions and an end."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


class Workflow(yaml.SafeLoader):
    """YAML 1.2's booleans: `on` is a key."""


Workflow.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not (first in "oO" and tag == "tag:yaml.org,2002:bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"), Workflow)
    return found


def test_it_runs_the_checks_and_ends() -> None:
    checks = workflow()
    (job,) = checks["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert 0 < job["timeout-minutes"] <= 120 and job["runs-on"].startswith("ubuntu")
    assert {"push", "pull_request"} <= set(checks["on"])
    assert set(checks["concurrency"]) == {"group", "cancel-in-progress"} and checks["permissions"] == {
        "contents": "read"
    }


def test_actions_are_pinned_by_their_major_version() -> None:
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions and [name for name in actions if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)] == []


def test_the_python_is_the_oldest_that_the_package_takes() -> None:
    (asked,) = [
        step["with"]["python-version"]
        for job in workflow()["jobs"].values()
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={asked}"
