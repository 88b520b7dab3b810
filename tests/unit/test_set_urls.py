"""`.ci/set_urls.py` on a copy: a second call changes nothing, a call with other URLs replaces them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("README.md", "pyproject.toml", "CITATION.cff", "mkdocs.yml")
FIRST, SECOND = "https://github.com/first/trp_scale", "https://git.example.org/group/second/trp"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The four files and the script, with a clone line that has the placeholder."""
    for name in (*FILES, ".ci/set_urls.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\n```bash\ngit clone --depth 1 https://github.com/OWNER/trp_scale\n```\n")
    return tmp_path


def set_urls(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, copy / ".ci/set_urls.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def texts(copy: Path) -> dict[str, str]:
    return {name: (copy / name).read_text(encoding="utf-8") for name in FILES}


def urls(copy: Path) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return found


def keys(copy: Path, name: str) -> dict[str, str]:
    """The keys and values of a YAML file that have a line of their own."""
    return dict(re.findall(r"^(\w[\w-]*): (\S.*)$", (copy / name).read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_all_files_get_the_urls_and_a_second_call_changes_nothing(copy: Path) -> None:
    papers = urls(copy)
    assert set_urls(copy, FIRST).returncode == 0
    once = texts(copy)
    assert urls(copy).items() >= {**papers, "Repository": FIRST, "Issues": f"{FIRST}/issues"}.items()
    assert urls(copy)["Documentation"] == "https://first.github.io/trp_scale/"
    assert keys(copy, "mkdocs.yml")["repo_url"] == FIRST
    assert keys(copy, "mkdocs.yml")["site_url"] == "https://first.github.io/trp_scale/"
    assert keys(copy, "CITATION.cff")["repository-code"] == FIRST
    assert f"git clone --depth 1 {FIRST}\n" in once["README.md"] and "OWNER" not in once["README.md"]
    assert set_urls(copy, FIRST).stdout.count("unchanged") == len(FILES)
    assert texts(copy) == once


def test_other_urls_replace_the_first(copy: Path) -> None:
    assert set_urls(copy, FIRST).returncode == 0
    assert set_urls(copy, SECOND).returncode == 0
    assert not any("first" in line for text in texts(copy).values() for line in text.splitlines() if "https" in line)
    assert "Documentation" not in urls(copy) and "site_url" not in keys(copy, "mkdocs.yml"), "no site is known there"
    assert set_urls(copy, SECOND, "https://docs.example.org/trp/").returncode == 0
    assert keys(copy, "mkdocs.yml")["site_url"] == "https://docs.example.org/trp/"


@pytest.mark.parametrize(
    "url", ["git@github.com:a/b.git", "https://github.com", "https://github.com/a/b/", "https://github.com/a/b.git"]
)
def test_what_is_no_repository_is_refused(copy: Path, url: str) -> None:
    before = texts(copy)
    done = set_urls(copy, url)
    assert done.returncode == 1 and url in done.stderr
    assert texts(copy) == before
