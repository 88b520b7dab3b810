"""The site: every page is in the navigation, every block of code is run or says why not, nothing is fetched."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import trp_scale as trp
from tests.commands import ROOT
from tests.documents.pages import DOCS, WALKTHROUGHS, Block, blocks, pages, read

RUN_ELSEWHERE = {
    "extending.md": "tests/distributed/test_extending.py",
    "api.md": "tests/unit/test_api.py",
    "run_directory.md": "tests/documents/test_run_directory.py",
}
"""Pages whose Python another test takes out and runs. Commands of all pages are checked by test_commands.py."""


class Plain(yaml.SafeLoader):
    """mkdocs.yml, without the Python object that makes anchors."""


Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Plain)
    return found


def navigation(entries: list[Any]) -> list[str]:
    """The pages of a navigation, in order."""
    found = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += navigation(value) if isinstance(value, list) else [value]
    return found


def test_every_extra_is_explained() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(
        r"^([a-z]+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M
    )
    assert {"vision", "deepspeed", "test"} <= set(extras)
    table = read("install.md")
    assert [name for name in extras if f"`{name}`" not in table] == []


def test_every_page_is_in_the_navigation_once() -> None:
    listed = navigation(settings()["nav"])
    reports = [str(path.relative_to(DOCS)) for path in sorted(DOCS.glob("studies/*/README.md"))]
    assert sorted(listed) == sorted([*pages(), *reports])


def accounted(block: Block) -> bool:
    """Whether a block of code is run, or its commands are checked, or the page says why neither is done."""
    if block.why_not or block.page in WALKTHROUGHS or block.page in RUN_ELSEWHERE:
        return True
    return block.language == "bash"


@pytest.mark.parametrize("page", pages())
def test_every_block_of_code_is_run_or_checked_or_says_why_not(page: str) -> None:
    code = [block for block in blocks(page) if block.language in ("bash", "python", "sh", "shell", "console")]
    assert [str(block) for block in code if not accounted(block)] == []
    assert [str(block) for block in blocks(page) if not block.language] == [], "a fence without a language"
    commands = re.compile(r"^(?:trp-scale|make|deepspeed|torchrun|python) ", re.MULTILINE)
    hidden = [block for block in blocks(page) if block.language == "text" and commands.search(block.text)]
    assert [str(block) for block in hidden if not accounted(block)] == [], "commands that no test looks at"


def test_the_reference_has_every_stable_name() -> None:
    named = set(re.findall(r"\b(\w+)\b", read("reference.md")))
    assert set(trp.__all__) - named <= {"__version__", "PretrainConfig"}


def test_a_page_loads_nothing_from_elsewhere() -> None:
    assert settings()["theme"]["font"] is False
    assert "offline" not in settings()["plugins"], "it has each page load a script for search from the disk"
    for page in pages():
        assert not re.search(r"!\[[^]]*\]\(https?:|<(?:script|link|img|iframe)[^>]+https?:", read(page)), page


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`: mkdocs-material")
def test_a_broken_link_or_anchor_is_an_error(tmp_path: Path) -> None:
    """The build itself is `make docs`; this is that its command would fail."""
    (options,) = re.findall(r"\$\(BIN\)/(mkdocs .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    validation = settings()["validation"]
    site = {"site_name": "x", "strict": True, "docs_dir": "docs", "site_dir": "site", "validation": validation}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(site), encoding="utf-8")

    def build(text: str) -> int:
        (tmp_path / "docs" / "index.md").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", *options.split()]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False).returncode

    assert build("# A\n[there](#a)\n") == 0
    assert build("# A\n[nowhere](#b)\n") != 0
    assert build("# A\n[nowhere](b.md)\n") != 0
