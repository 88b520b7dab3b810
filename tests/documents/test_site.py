"""The site: every page is in the navigation, every block of code is run or says why not, nothing is fetched."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def test_no_page_scrolls_sideways_or_asks_a_server(browser: Any, site: Path) -> None:
    """Tables and code scroll by themselves, on a phone too."""
    paths = [
        site / page.replace("README.md", "index.html").replace(".md", ".html") for page in navigation(settings()["nav"])
    ]
    with browser.new_context(viewport={"width": 390, "height": 900}) as context:
        window, asked = context.new_page(), []
        window.on("request", lambda request: asked.append(request.url))
        widths = {}
        for path in paths:
            window.goto(path.as_uri())
            widths[path.name] = window.evaluate("document.documentElement.scrollWidth")
    assert {name: width for name, width in widths.items() if width > 390} == {}
    assert [url for url in asked if not url.startswith("file:")] == []
