"""A small corpus of real English that every CPython carries: its language reference and the library's docstrings.

Sources are parsed, never imported, so nothing runs. The order is fixed for one Python version.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = frozenset({"test", "tests", "turtledemo", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library whose docstrings are not collected."""

TOPICS = "pydoc_data/topics.py"


def embedded_documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text): one document for each topic of the language reference and for each module with docstrings."""
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = _topics(library / TOPICS)
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].strip()
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if LEFT_OUT.isdisjoint(place.parts):
            text = "\n\n".join(_docstrings(path))
            if text:
                yield place.as_posix(), text


def _topics(path: Path) -> dict[str, str]:
    """The dictionary `topics = {...}` of pydoc_data."""
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            value = ast.literal_eval(statement.value)
            return {str(name): str(text) for name, text in value.items()}
    raise LookupError(f"{path}: no topics found; this Python carries no language reference")


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a source file in the order they stand, without the lines of interactive examples."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are broken on purpose
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            prose = _without_examples(inspect.cleandoc(text)) if text else ""
            if prose:
                yield prose
            stack.extend(reversed(node.body))
        elif isinstance(node, ast.If | ast.Try):
            stack.extend(reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]))


def _without_examples(text: str) -> str:
    """Leave out each line from a `>>>` to the next blank one: code and its output are not English."""
    kept = []
    example = False
    for line in text.splitlines():
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            kept.append(line)
    return "\n".join(kept).strip()
