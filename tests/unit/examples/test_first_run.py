"""The notebooks run from top to bottom, at a smaller size, and are kept with small outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.unit.examples.notebooks import KEPT, NOTEBOOKS, outputs, run_notebook

TEXT, IMAGES = NOTEBOOKS
MOST_BYTES = 400_000


@pytest.mark.exhaustive  # tests/unit/test_api.py calls what they call
def test_the_one_on_text_runs(tmp_path: Path) -> None:
    sizes = {"STEPS, TUNING_STEPS, SENTENCES = 180, 60, 600": "STEPS, TUNING_STEPS, SENTENCES = 10, 2, 40"}
    notebook = run_notebook(TEXT, tmp_path, sizes)
    data = [output.get("data", {}) for output in outputs(notebook)]
    assert sum("image/png" in shown for shown in data) == 1
    assert sum("<iframe srcdoc=" in shown.get("text/html", "") for shown in data) == 1
    written = ("run/report.html", "probed/results.json", "tuned/results.json", "exported/config.json")
    assert all((tmp_path / "first_run" / name).is_file() for name in written)


@pytest.mark.exhaustive
def test_the_one_on_images_runs(tmp_path: Path) -> None:
    notebook = run_notebook(IMAGES, tmp_path, {"SCENES, STEPS = 1024, 240": "SCENES, STEPS = 160, 2"})
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 3
    assert (tmp_path / "first_images" / "probe" / "results.json").is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.name))
def test_outputs_are_kept_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    assert {kind for output in outputs(notebook) for kind in output.get("data", {})} <= set(KEPT)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES and "/tmp/" not in text and str(Path.home()) not in text
