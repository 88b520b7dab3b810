"""The site: every page is in the navigation, every block of code is run or says why not, nothing is fetched."""

from __future__ import annotations

import re
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
