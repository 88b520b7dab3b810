"""The package does not grow, and its language gets no worse: tests/unit/size.json holds the most that is allowed.

A number rises only in a commit that names an issue and what it grants. `python -m tests.unit.test_size` lowers the
numbers to today's.
"""

from __future__ import annotations

import ast
import collections
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("size.json")

HEADS = re.compile(
    r"^(What|Of|That|Those|These|The same|As|For|By|From|With|In|To|At|Whose|Who|Which|While|Its|All that|Nothing)\b"
    r"(?!-)"
)
"""First words of a docstring that names no result."""
QUESTIONS = re.compile(r"^(How|Where|Why|When)\b")
"""Allowed for modules and classes, not for functions."""
RIDDLES = {"found", "made", "taken", "given", "said", "told", "each", "one", "own", "place", "there"}
BARE = RIDDLES | {"sent", "left", "held", "of", "at", "by", "together", "apart", "beside", "over", "leave", "so_far"}
PARTICIPLE = re.compile(r"[a-z]+(?:ed|wn|ept|ought|aken|iven|osen|itten)")
NOT_PARTICIPLES = {"embed", "seed", "reseed", "speed", "need", "feed", "exceed", "shed", "bed"}
TRAILING = re.compile(r"(?!fan_)\w+_(of|at|by|in|for|with|as)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def count_lines(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def has_bare_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    name = function.name.strip("_")
    if any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return False
    is_participle = PARTICIPLE.fullmatch(name) is not None and name not in NOT_PARTICIPLES
    return name in BARE or is_participle or TRAILING.fullmatch(name) is not None


def has_bad_docstring(node: ast.AST) -> bool:
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
        return False
    text = ast.get_docstring(node) or ""
    return bool(HEADS.match(text) or (isinstance(node, FUNCTIONS) and QUESTIONS.match(text)))


def is_riddle(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in RIDDLES
    return stored or (isinstance(node, ast.arg) and node.arg in RIDDLES)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    text = function.body[0] if ast.get_docstring(function) else None
    documented = (text.end_lineno or 0) - text.lineno + 1 if text else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def measure_language(sources: list[str]) -> dict[str, int]:
    counts = collections.Counter[str]()
    longest = 0
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            counts["docstrings that name no result"] += has_bad_docstring(node)
            counts["variables named found, each, one, ..."] += is_riddle(node)
            if isinstance(node, FUNCTIONS):
                counts["functions named by a participle or preposition"] += has_bare_name(node)
                longest = max(longest, code_lines(node))
    return {**counts, "lines of the longest function": longest}


def measure() -> dict[str, dict[str, int]]:
    package = sorted((ROOT / "trp_scale").rglob("*.py"))
    rooms = collections.defaultdict[str, list[Path]](list)
    for path in package:
        parts = path.relative_to(ROOT / "trp_scale").parts
        rooms[parts[0] if len(parts) > 1 else "."].append(path)
    lines = {f"trp_scale/{room}": count_lines(paths) for room, paths in sorted(rooms.items())}
    lines |= {name: count_lines(sorted((ROOT / name).rglob("*.py"))) for name in ("tests", "benchmarks")}
    return {"lines": lines, "language": measure_language([path.read_text(encoding="utf-8") for path in package])}


def test_no_number_is_above_its_limit() -> None:
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    above = {
        f"{kind}: {name}": f"{value}, allowed: {limits[kind].get(name, 0)}"
        for kind, values in measure().items()
        for name, value in values.items()
        if value > limits[kind].get(name, 0)
    }
    assert not above


if __name__ == "__main__":
    LIMITS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
