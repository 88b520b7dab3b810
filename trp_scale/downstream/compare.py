"""`trp-scale compare`: what several runs reached on their downstream tasks, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trp_scale.config import RefusedError
from trp_scale.downstream import result_tables
from trp_scale.downstream.comparison import Comparison, compare_results
from trp_scale.downstream.results import read_results


def compare(runs: Sequence[Path], *, markdown: Path | None = None, csv: Path | None = None) -> None:
    """Print what the runs reached, and write it as Markdown and as CSV where a file is given.

    Raises:
        RefusedError: a directory without results.json, the same one twice, or a file that cannot be written.
    """
    comparison = compare_directories(runs)
    result_tables.print_comparison(comparison)
    for path, text in ((markdown, result_tables.markdown), (csv, result_tables.csv_text)):
        if path is not None:
            _write(path, text(comparison))
            print(path)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}") from error


def compare_directories(runs: Sequence[Path]) -> Comparison:
    """Read results.json of each and put them side by side."""
    if not runs:
        raise RefusedError("no run is given; allowed: one or more directories with results.json")
    return compare_results(dict(zip(names(runs), map(read_results, runs), strict=True)))


def names(runs: Sequence[Path]) -> list[str]:
    """Last parts of the paths, as many as tell them apart.

    Raises:
        RefusedError: the same directory twice.
    """
    parts = [path.resolve().parts for path in runs]
    twice = [str(path) for path, count in Counter(map(Path.resolve, runs)).items() if count > 1]
    if twice:
        raise RefusedError(f"{twice[0]} is given twice; allowed: directories that differ")
    for kept in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-kept:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise AssertionError("different paths have different parts")
