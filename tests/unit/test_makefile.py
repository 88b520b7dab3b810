"""`make setup`: only a finished installation counts as one. A stand-in for Python plays venv, pip and uv."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/bin/sh
# Plays python -c, venv, pip and uv, noting each; TOOL fails while the file `broken_TOOL` exists.
case "$1 $2" in
    -c*) exec "$REAL_PYTHON" "$@" ;;
    "-m venv") echo venv >> calls; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    -m*) echo "$2" >> calls; echo "$*" > last; touch .venv/half_a_package; if [ -e "broken_$2" ]; then exit 1; fi ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def make(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "REAL_PYTHON": sys.executable}
    command = ["make", f"PYTHON={project / 'python'}", *words]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=240)


def setup(project: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return make(project, "setup", *given)


def calls(project: Path) -> list[str]:
    return (project / "calls").read_text(encoding="utf-8").split()


def test_a_finished_installation_is_not_repeated(project: Path) -> None:
    for _ in range(2):
        assert setup(project).returncode == 0
    assert calls(project) == ["venv", "pip", "uv"]


def test_pip_installs_what_uv_cannot(project: Path) -> None:
    (project / "broken_uv").touch()
    assert setup(project).returncode == 0
    assert calls(project) == ["venv", "pip", "uv", "pip"] and " -e .[" in (project / "last").read_text()


def test_an_unfinished_one_starts_again_from_nothing(project: Path) -> None:
    (project / "broken_pip").touch()
    assert setup(project).returncode != 0
    assert not (project / ".venv" / ".installed").exists()
    (project / ".venv" / "left_over").touch()
    (project / "broken_pip").unlink()
    result = setup(project)
    assert result.returncode == 0
    assert not (project / ".venv" / "left_over").exists()
    assert calls(project) == ["venv", "pip", "venv", "pip", "uv"]


@pytest.mark.parametrize(
    ("given", "wanted"), [((), "torch torchvision"), (("EXTRAS=text,pictures",), "torch")], ids=["all", "text"]
)
def test_without_a_gpu_torch_comes_from_where_it_has_no_cuda(
    project: Path, given: tuple[str, ...], wanted: str
) -> None:
    shown = setup(project, "--dry-run", "DEVICE=cpu", "TORCH_CPU=https://an.index/cpu", *given).stdout
    first, second = (line for line in shown.splitlines() if " -m uv pip install " in line)
    assert first.rstrip().endswith(f" -c constraints.txt --index-url https://an.index/cpu {wanted}")
    assert "--index-url" not in second and " -e '.[" in second


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml"])
def test_new_pins_are_installed(project: Path, changed: str) -> None:
    assert setup(project).returncode == 0
    stamp = (project / ".venv" / ".installed").stat().st_mtime
    os.utime(project / changed, (stamp + 10, stamp + 10))
    assert setup(project).returncode == 0
    assert calls(project) == ["venv", "pip", "uv"] * 2


def test_extras_that_are_not_there_are_added(project: Path) -> None:
    assert setup(project, "EXTRAS=vision,pictures").returncode == 0
    for given in ([], ["EXTRAS=pictures"], ["EXTRAS=pictures,vision"]):
        assert setup(project, *given).returncode == 0
        assert calls(project) == ["venv", "pip", "uv"], given
    assert setup(project, "EXTRAS=vision,text").returncode == 0
    assert calls(project) == ["venv", "pip", "uv"] * 2 and "-e .[vision,text]" in (project / "last").read_text()
    assert setup(project, "EXTRAS=text,pictures").returncode == 0
    assert calls(project) == ["venv", "pip", "uv"] * 2


def test_an_old_python_is_refused(project: Path) -> None:
    old = STAND_IN.replace('exec "$REAL_PYTHON" "$@"', "echo python is 3.8 >&2; exit 1")
    (project / "python").write_text(old, encoding="utf-8")
    result = setup(project)
    assert result.returncode != 0
    assert not (project / "calls").exists()


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    for pin in pins:
        requirement, _, marker = pin.partition(" ; ")
        name, version = requirement.split("==")
        assert name.replace("-", "").replace("_", "").replace(".", "").isalnum(), pin
        assert all(part.isalnum() for part in version.split(".")), pin
        assert marker in ("", 'python_version < "3.11"', 'python_version >= "3.11"'), pin


def test_pretraining_takes_a_free_port_unless_one_is_given(project: Path) -> None:
    """29500, the launcher's own, may be another run's."""
    assert setup(project).returncode == 0

    def port(*given: str) -> int:
        return int(re.findall(r"--master_port (\d+)", make(project, "-n", "pretrain", *given).stdout)[-1])

    assert port("MASTER_PORT=29500") == 29500
    with socket.socket() as probe:
        probe.bind(("", port()))
