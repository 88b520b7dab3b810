"""`data_tools/glue_text.py`: the training sentences of GLUE's tasks as text to pre-train on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.runs import ROOT

SCRIPT = str(ROOT / "data_tools" / "glue_text.py")


def write(folder: Path, name: str, lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_sentences_of_training_files_alone_in_order(tmp_path: Path) -> None:
    """Of both sentences of a pair; 20 to a document; development rows stay out."""
    single = [f"x\t1\t\tSentence {number}." for number in range(25)]
    write(tmp_path / "CoLA", "train.tsv", single)
    write(tmp_path / "CoLA", "dev.tsv", ["x\t1\t\tHeld out."])
    header = "\t".join(["index", "sentence1", "sentence2", "score"])
    write(tmp_path / "STS-B", "train.tsv", [header, "0\tA plane.\tA bird.\t1.0"])
    write(tmp_path / "STS-B", "dev.tsv", [header, "0\tHeld.\tOut.\t2.0"])
    output = tmp_path / "text.jsonl"
    done = subprocess.run([sys.executable, SCRIPT, str(tmp_path), str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("27 sentences")
    first, second = (json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines())
    assert first == " ".join(f"Sentence {number}." for number in range(20))
    assert second == " ".join([*(f"Sentence {number}." for number in range(20, 25)), "A plane.", "A bird."])


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, str(tmp_path), str(tmp_path / "x")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GLUE task found" in done.stderr
    assert "Traceback" not in done.stderr
