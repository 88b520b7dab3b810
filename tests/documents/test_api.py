"""docs/api.md: its examples are one script, which runs; the file that it shows is run by tests/unit/test_api.py."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import trp_scale as trp
from tests.documents.pages import blocks, read
from tests.runs import environment

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
