"""The notebook runs from top to bottom, at a smaller size."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[3] / "examples" / "first_run.ipynb"
SIZES, SMALL = "SCENES, STEPS = 1024, 120", "SCENES, STEPS = 160, 2"


@pytest.mark.exhaustive  # tests/unit/test_api.py calls what it calls
def test_it_runs_and_shows_curves_and_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    (settings,) = (cell for cell in notebook.cells if SIZES in cell.source)
    settings.source = settings.source.replace(SIZES, SMALL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    assert (tmp_path / "first_run" / "run" / "report.txt").is_file()
