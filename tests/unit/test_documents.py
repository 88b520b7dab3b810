"""What is named exists: documents wherever the tree names one, and files of the tree wherever a document names one."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

import trp_scale
from trp_scale.config.registry import registered_components, runs

ROOT = Path(__file__).parents[2]
TOP = ("trp_scale", "tests", "docs", "benchmarks", "launch", "data_tools", "ds_configs", "examples", ".ci")
"""Folders of the tree; what a text names elsewhere (data/, runs/) is a user's."""
OWN = (Path("tests/unit/test_documents.py"), Path("tests/unit/reporting/test_paired_tests.py"))
"""They name documents without their folder, and those that a command writes."""
PAGES_BY_NAME = {Path(name) for name in ("mkdocs.yml", "tests/distributed/test_readme_commands.py")}
"""They name pages as the site does, from docs/."""
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".sh", ".sbatch", ""}

DOCUMENT = re.compile(r"(?<![\w/.:*-])((?:[\w.-]+/)*[\w-]+\.md)\b")
SOURCE = re.compile(r"(?<![\w/.:*{}-])((?:[\w-]+/)+[\w-]+\.py)\b")
FILE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(map(re.escape, TOP))})/[\w./-]*\w/?)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)|\]\(#([^)\s]+)\)")
SETTING = re.compile(r"`(?:--)?([a-z_]+\.[a-z_]+)(?: ([\w.]+))?`")
TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
WITHIN = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) (?:of `\w+` )?in `([\w./-]+\.py)`")


def alternatives(hint: Any) -> Iterator[Any]:
    """What a type's arguments are, those of a Literal in a union too."""
    for each in get_args(hint):
        yield from alternatives(each) if get_args(each) else (each,)


def known_settings() -> dict[str, set[str]]:
    """Every setting as `section.field`, of any kind, with the words that it takes; empty where it takes others too."""
    sections: dict[str, list[type[Any]]] = {}
    for kind in (settings for _, _, settings in runs()):
        instance = kind()
        for field in fields(kind):
            if is_dataclass(own := getattr(instance, field.name)):
                sections.setdefault(field.name, []).append(type(own))
    for role, name, settings in registered_components():
        sections.setdefault(name if role == "hook" else role, []).append(settings)
    found: dict[str, set[str]] = {}
    for section, kinds in sections.items():
        for settings in kinds:
            hints = get_type_hints(settings)
            for field in fields(settings):
                words = {str(word) for word in alternatives(hints[field.name])}
                found.setdefault(f"{section}.{field.name.rstrip('_')}", set()).update(words)
    return found


def known_metrics() -> set[str]:
    """Names in metrics.jsonl, by the tables of docs/run_directory.md, which tests/documents/test_run_directory.py
    compares with runs."""
    tables = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([a-z_]+\.[a-z_.A-Z]+)` \|", tables, re.MULTILINE))


def wrong_settings(text: str, known: dict[str, set[str]]) -> list[str]:
    """Settings that a text names as `section.field` or `section.field value`, and that there are not; the names of
    metrics are none."""
    metrics = known_metrics()
    sections = {name.partition(".")[0] for name in known}
    named = [
        (name, value)
        for name, value in SETTING.findall(text)
        if name.partition(".")[0] in sections and not name.endswith((".safetensors", ".json")) and name not in metrics
    ]
    return [
        f"{name} {value}".strip()
        for name, value in named
        if name not in known or (value.isalpha() and value.islower() and known[name] and value not in known[name])
    ]


def tracked() -> list[Path]:
    """Text files that git knows or would add, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    paths = [Path(line) for line in listed]
    return [path for path in paths if path.suffix in TEXT and (ROOT / path).is_file() and path.name != "LICENSE"]


def documents() -> list[Path]:
    """Documents relative to the root, without the two histories, which also name what is gone."""
    histories = ("CHANGELOG.md", "experiments.md")
    return [path for path in tracked() if path.suffix == ".md" and path.name not in histories]


def missing_documents(text: str, folder: Path) -> list[str]:
    """Documents that a text names and that are neither at the root nor beside the text."""
    return [
        name for name in DOCUMENT.findall(text) if not ((ROOT / name).is_file() or (ROOT / folder / name).is_file())
    ]


def missing_sources(text: str, folder: Path) -> list[str]:
    """Paths of Python files that a text gives, with a folder, and that are neither at the root, in the package, beside
    the text, nor in the standard library."""
    folders = [ROOT, ROOT / "trp_scale", ROOT / folder, Path(sysconfig.get_path("stdlib"))]
    return [name for name in SOURCE.findall(text) if not any((parent / name).is_file() for parent in folders)]


def missing_files(text: str) -> list[str]:
    """Files and folders of the tree that a text names and that are not there."""
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Links of a document to files or headings that are not there."""

    def broken() -> Iterator[str]:
        for target, anchor, own in LINK.findall(text):
            if own and own not in anchors(text):
                yield f"#{own}"
            if not target or "://" in target:
                continue
            path = ROOT / folder / target
            if not path.exists():
                yield target
            elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
                yield f"{target}#{anchor}"

    return list(broken())


def missing_names(text: str) -> list[str]:
    """Of "`name` in `file.py`", the names that the file does not have."""
    missing = []
    for names, path in WITHIN.findall(text):
        if (ROOT / path).is_file():
            source = (ROOT / path).read_text(encoding="utf-8")
            missing += [name for name in re.findall(r"`([\w.]+)`", names) if name.rsplit(".", 1)[-1] not in source]
    return missing


def missing_tests(text: str) -> list[str]:
    """Of `tests/file.py::test_name`, those whose file has no such test."""

    def exists(path: str, name: str) -> bool:
        return (ROOT / path).is_file() and f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")

    return [f"{path}::{name}" for path, name in TEST.findall(text) if not exists(path, name)]


def test_every_document_that_is_named_exists() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in tracked() if path not in OWN}
    of_pages = {path for path in texts if path.is_relative_to("tests/documents")} | PAGES_BY_NAME
    places = {path: Path("docs") if path in of_pages else path.parent for path in texts}
    missing = {str(path): missing_documents(text, places[path]) for path, text in texts.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_every_source_that_the_package_names_exists() -> None:
    paths = [path for path in tracked() if path.parts[0] in ("trp_scale", "benchmarks")]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    missing = {str(path): missing_sources(text, path.parent) for path, text in texts.items()}
    assert {path: names for path, names in missing.items() if names} == {}


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert missing_files(text) == []
    assert broken_links(text, path.parent) == []
    assert missing_names(text) == []
    assert missing_tests(text) == []
    assert wrong_settings(text, known_settings()) == []


def test_each_fault_names_its_test() -> None:
    """A row of docs/reliability_tests.md on a fault is there with a test that shows it."""
    faults = (ROOT / "docs" / "reliability_tests.md").read_text(encoding="utf-8")
    rows = [line for line in faults.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    assert len(rows) > 30
    assert [row for row in rows if row.count(" | ") != 4 or not TEST.search(row.rpartition(" | ")[2])] == []


def test_the_citation_is_of_this_version_and_these_papers() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == trp_scale.__version__ and cited["license"] == "Apache-2.0"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [paper["url"] for paper in cited["references"]] == re.findall(
        r'^"Paper: .*" = "(.*)"$', project, re.MULTILINE
    )
    assert all(author["family-names"] for paper in cited["references"] for author in paper["authors"])
