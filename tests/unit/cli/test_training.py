"""`trp-scale launch-files`: the repository's own files, and never over a file that somebody has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trp_scale.cli import main as cli

ROOT = Path(__file__).parents[3]


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_files_are_those_of_the_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch-files", str(tmp_path / "a" / "b")]) == 0
    for name in ("ds_configs", "launch"):
        assert files_below(tmp_path / "a" / "b" / name) == files_below(ROOT / name)
    assert os.access(tmp_path / "a" / "b" / "launch" / "torchrun.sh", os.X_OK)
    printed = set(capsys.readouterr().out.split())
    assert printed == {str(tmp_path / "a" / "b" / name) for name in files_below(tmp_path / "a" / "b")}


def test_a_changed_file_is_kept_and_an_equal_one_is_no_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch-files", str(tmp_path)]) == 0
    assert cli.main(["launch-files", str(tmp_path)]) == 0
    changed = tmp_path / "ds_configs" / "zero2.json"
    changed.write_text("{}", encoding="utf-8")
    assert cli.main(["launch-files", str(tmp_path)]) == 2
    assert f"error: {changed}" in capsys.readouterr().err
    assert changed.read_text(encoding="utf-8") == "{}"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["launch-files", str(tmp_path / "file")]) == 2
    assert f"error: {tmp_path / 'file'}" in capsys.readouterr().err


def test_the_wheel_takes_every_file_of_the_package() -> None:
    """tests/wheel.sh installs it; this names a file that pyproject.toml has forgotten."""
    tomllib = pytest.importorskip("tomllib", reason="only Python 3.11 and later read TOML by themselves")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    package = ROOT / "trp_scale"
    taken = {path for pattern in setuptools["package-data"]["trp_scale"] for path in package.glob(pattern)}
    links = package / "launch_files"
    others = {
        Path(directory) / name
        for directory, _, names in os.walk(package, followlinks=True)
        for name in names
        if "__pycache__" not in directory and (not name.endswith(".py") or links in Path(directory).parents)
    }
    assert others - taken == set()
    folders = {path.parent for path in package.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
