"""Run the notebooks of examples/. `python -m tests.unit.examples.notebooks` runs them at their size and keeps what they
print: text, and pictures as small PNG; not pages, which are megabytes of script. With a name, such as first_run, it
runs that one only."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]
NOTEBOOKS = tuple(ROOT / "examples" / name for name in ("first_run.ipynb", "first_images.ipynb"))
KEPT = ("text/plain", "image/png")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run_notebook(path: Path, directory: Path, replaced: dict[str, str] | None = None) -> Any:
    """The notebook with its outputs, run in `directory`. `replaced`: texts that occur in it once."""
    notebook = nbformat.read(path, as_version=4)
    for before, after in (replaced or {}).items():
        (cell,) = (cell for cell in notebook.cells if before in cell.source)
        cell.source = cell.source.replace(before, after)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(directory)}}).execute()
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def keep_outputs(notebook: Any, directory: Path) -> None:
    """Leave text without colours and pictures; no warnings of libraries, and no paths of this machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    for output in outputs(notebook):
        if "data" in output:
            output.data = {kind: value for kind, value in output.data.items() if kind in KEPT}
        for holder, key in ((output, "text"), (output.get("data", {}), "text/plain")):
            if key in holder:
                holder[key] = COLOURS.sub("", holder[key].replace(f"{directory}/", ""))


if __name__ == "__main__":
    for path in [path for path in NOTEBOOKS if not sys.argv[1:] or path.stem in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as directory:
            notebook = run_notebook(path, Path(directory))
            keep_outputs(notebook, Path(directory))
        nbformat.write(notebook, path)
        print(f"{path}: {path.stat().st_size} bytes")
