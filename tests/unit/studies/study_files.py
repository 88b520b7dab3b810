"""A study of a few lines, and a program that stands for trp-scale: it writes what the commands would, in no time."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trp_scale.config.files import write_yaml
from trp_scale.studies.execute import Executor, NodeState, Status
from trp_scale.studies.graph import Graph
from trp_scale.studies.study import load_study

PROGRAM = '''
"""Writes what a command of trp-scale leaves. A directory's name in `fails` fails; `slow` makes runs wait;
`own_head`: one task, and of one variant a second measurement of it."""
import json, sys, time
from pathlib import Path

command, words = sys.argv[1], sys.argv[2:]
flags = {name[2:]: value for name, value in zip(words, words[1:]) if name.startswith("--")}
settings = Path(__file__).with_name("settings.json")
chosen = json.loads(settings.read_text()) if settings.exists() else {}
directory = Path(flags.get("output") or flags.get("run_dir"))
with Path(__file__).with_name("calls.txt").open("a") as calls:
    calls.write(str(directory) + "\\n")
directory.mkdir(parents=True, exist_ok=True)
if any(part in str(directory) for part in chosen.get("fails", [])):
    sys.exit("error: this was to fail")
if command == "pretrain":
    time.sleep(chosen.get("slow", 0))
    seconds = 0.1 * float(flags.get("masking.ratio", 1))
    line = {"step": int(flags["training.steps"]), "loss": 1.0, "tasks": {}}
    line |= {"step_seconds": 7.0, "processor_seconds": seconds}  # the host was busy with something else
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
    (directory / "summary.json").write_text(json.dumps({"exit_reason": "finished"}))
    (directory / "flags.json").write_text(json.dumps(flags))
elif command.startswith("shard"):
    (directory / "dataset.json").write_text("{}")
else:
    run = Path(flags.get("from") or flags["run"])
    of_run = json.loads((run / "flags.json").read_text())
    rate, seed = float(of_run.get("optimizer.lr", 0)), int(of_run["training.seed"])
    seeds = list(range(int(flags.get("seeds", 1))))
    luck = 0.001 * (seed * round(1e4 * rate) % 3)
    tasks = []
    for task, harder in (("easy", 0.0), ("hard", 0.3)):
        values = [0.9 - harder - 100 * abs(rate - 0.002) + 0.01 * (seed % 7) + luck + 0.001 * each
                  for each in seeds]
        tasks.append(dict(task=task, metric="accuracy", split="test", lower_is_better=False, seeds=seeds, values=values,
                          mean=sum(values) / len(values), spread=0.0, metrics={"accuracy": values}, detail=[]))
    if chosen.get("own_head") and "slow" in str(run):
        tasks = [tasks[0], dict(tasks[0], task="own head", judged=False)]
    elif chosen.get("own_head"):
        tasks = tasks[:1]
    (directory / "results.json").write_text(json.dumps({"recipe": "", "encoder": "", "tasks": tasks}))
'''


def write_program(directory: Path) -> list[str]:
    """Write the program and return its command, which imports no site packages."""
    path = directory / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-IS", str(path)]


class ExecutorHere(Executor):
    """Run the program in this process: starting processes is tested in test_execute.py."""

    def _process(self, name: str, words: list[str]) -> tuple[Status, str, float]:
        try:
            with patch.object(sys, "argv", [self.program[-1], *words]):
                runpy.run_path(self.program[-1])
        except SystemExit as error:
            return "failed", str(error), 0.0
        return "finished" if self._is_complete(name) else "failed", "", 0.0


def run_here(graph: Graph, **settings: object) -> dict[str, NodeState | None]:
    """Run all nodes of a graph in this process; `settings` are those of the program."""
    program = write_program(graph.directory.parent)
    (graph.directory.parent / "settings.json").write_text(json.dumps(settings))
    return ExecutorHere(graph, jobs=1, program=program, tell=lambda line: None).run()


def document(**scale: Any) -> dict[str, Any]:
    """A study with an untrained encoder, a baseline and two variants."""
    return {
        "title": "Rates",
        "source": {"paper": "TRP", "arxiv": "2306.12070", "place": "Table 0"},
        "question": "Does the rate matter?",
        "inputs": {"text": "some text"},
        "baseline": "plain",
        "ground": "scratch",
        "outcome": {"judges": ["glue"], "row": "worst"},
        "variants": {
            "scratch": {"title": "untrained", "trained": False},
            "plain": {"title": "plain", "paper": {"easy": 84.6}},
            "slow": {"title": "slow", "settings": {"masking.ratio": 2}},
        },
        "scales": {
            "cpu": {
                "recipe": "pos_bert_tiny",
                "settings": {"data.path": "{words}", "training.steps": 100, "optimizer.lr": 0.001},
                "data": {"words": {"command": "shard-text", "flags": {"inputs": "{text}"}}},
                "judges": {"glue": {"command": "finetune", "seeds": 2, "flags": {"recipe": "glue_tiny"}}},
                "seeds": 2,
                **scale,
            }
        },
    }


def graph_of(directory: Path, given: dict[str, Any] | None = None) -> Graph:
    """The study in a file, and its graph."""
    path = directory / "study.yaml"
    path.write_text(write_yaml(document() if given is None else given))
    study = load_study(str(path))
    return Graph(study, study.scale("cpu"), directory / "study", {"text": str(directory)})
