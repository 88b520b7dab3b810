"""`trp-scale compare`: what several runs reached on their downstream tasks, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import RefusedError
from trp_scale.downstream.comparison import Comparison, compare_results
from trp_scale.downstream.result_tables import csv_text, markdown, print_comparison
from trp_scale.downstream.results import read_results


@dataclass(kw_only=True)
class CompareArguments:
    """Compare runs on their downstream tasks: mean and spread over seeds, the worst task of each run, and whether what
    differs from the first run is more than the seeds do. Figures by another metric or on another split (dev, test) are
    never compared."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(name="run", metavar="RUN [RUN ...]")]
    """Directories with results.json, of trp-scale finetune, evaluate or probe; the first is the baseline."""
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the tables there as Markdown."""
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures there as CSV, one line for each task of each run."""


def compare(argv: Sequence[str]) -> int:
    """Run `trp-scale compare`; returns the exit status.

    Raises:
        RefusedError: a directory without results.json, the same one twice, or a file that cannot be written.
    """
    arguments = tyro.cli(CompareArguments, prog="trp-scale compare", args=argv, use_underscores=True)
    comparison = compare_directories(arguments.runs)
    print_comparison(comparison)
    for path, text in ((arguments.markdown, markdown), (arguments.csv, csv_text)):
        if path is not None:
            _write(path, text(comparison))
            print(path)
    return 0


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
