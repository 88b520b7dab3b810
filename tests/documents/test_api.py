"""docs/api.md: its examples are one script, which runs (the file that it shows is run by tests/unit/test_api.py); and
the README's Python runs, with less text and fewer steps."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import trp_scale as trp
from tests.documents.pages import README, blocks, read
from tests.runs import environment
from trp_scale.sharding.text.corpus import embedded_documents

PAGE = "api.md"


def examples() -> str:
    return "\n".join(block.text for block in blocks(PAGE) if block.language == "python" and "@trp." not in block.text)


def test_each_function_has_an_example() -> None:
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(examples()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    named = {name for name in trp.__all__ if f"`trp.{name}`" in read(PAGE).partition("## Arguments")[0]}
    functions = {name for name in named if name.islower()}
    assert len(functions) > 10 and functions <= called | {"recipe", "known_recipes"}
    assert {"report", "metrics"} <= called


@pytest.mark.exhaustive  # tests/unit/test_api.py calls what it calls
def test_the_examples_are_a_script_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "examples.py"
    body = textwrap.indent(examples(), "    ")
    script.write_text(f'def main():\n{body}\n\nif __name__ == "__main__":\n    main()\n', encoding="utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in ("scenes/report.html", "tuned/results.json", "comparison.csv", "exported/model.safetensors"):
        assert (tmp_path / "runs" / name).is_file()


SMALLER = {
    "vocab_size=8192": 'vocab_size=1000, tagger="textblob", processes=1',
    "rows_per_block=64": "rows_per_block=4",
    'plan("pos_modern_base"': 'plan("pos_modern_base", model={"layers": 3}',
    'data={"path": data})': 'data={"path": data, "workers": 0, "validation_fraction": 0.1}, '
    'training={"steps": 3}, optimizer={"warmup_steps": 1, "decay_steps": 1})',
}


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for long, short in SMALLER.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    monkeypatch.chdir(tmp_path)
    Path("my_texts").mkdir()
    for number, (_, document) in zip(range(24), embedded_documents(), strict=False):
        (Path("my_texts") / f"{number}.txt").write_text(document[:2000], encoding="utf-8")
    printed, names = io.StringIO(), dict[str, object]()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(README), "exec"), names)
    assert isinstance(worst := names["worst"], list) and len(worst) == 3
    assert "Pre-training report" in printed.getvalue() and "best: " in printed.getvalue()
    assert (tmp_path / "exported" / "model.safetensors").is_file()
