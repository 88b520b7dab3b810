"""GLUE's own files: columns between tabs, nothing quoted, most with a header."""

from __future__ import annotations

from pathlib import Path

from trp_scale.data.index import DataError
from trp_scale.downstream.glue.examples import Examples, column, number_labels
from trp_scale.downstream.glue.formats import GlueFormat


def read_tsv(path: Path, task: GlueFormat, *, allowed_bad: int = 0) -> Examples:
    """Read one file of a task, with or without a byte-order mark, its lines ended by LF or CR LF.

    Quotation marks are text: GLUE quotes nothing, and has single ones in every file.

    Args:
        allowed_bad: lines with too few or too many columns that are left out (the published QQP has some, broken by a
            line end within a question).

    Raises:
        DataError: no such file, not UTF-8, a column is missing, no examples, more bad lines than allowed, or a label
            that is none of the task's; names file and line.
    """
    lines = _lines(path)
    first = 0
    # Only CoLA's training and dev files have no header: what a line of theirs holds is no column's name.
    if task.headerless and lines and not _is_header(lines[0], task):
        names = list(task.headerless)
    else:
        names, first = (lines[0].split("\t") if lines else []), 1
    where = f"{path}:1"
    chosen = [column(names, allowed, where) for allowed in task.sentences]
    labelled = any(name in names for name in task.label)
    rows, places, left_out = [], [], []
    for number, line in enumerate(lines[first:], start=first + 1):
        cells = line.split("\t")
        if len(cells) != len(names):
            left_out.append(f"{path}:{number}: {len(cells)} columns found, {len(names)} expected")
            continue
        rows.append(cells)
        places.append(number)
    if len(left_out) > allowed_bad:
        more = f" (and {len(left_out) - 1} more such lines)" if len(left_out) > 1 else ""
        raise DataError(
            f"{left_out[0]}{more}; mend the file, or give --data.max_corrupt_blocks {len(left_out)} to leave them out"
        )
    if not rows:
        raise DataError(f"{path}: no examples found")
    labels = None
    if labelled:
        place = column(names, task.label, where)
        labels = number_labels([cells[place] for cells in rows], task, places, str(path))
    return Examples(
        name=path.stem,
        sentences=tuple([cells[place] for cells in rows] for place in chosen),
        labels=labels,
        places=places,
        left_out=left_out,
    )


def _is_header(line: str, task: GlueFormat) -> bool:
    names = line.split("\t")
    return all(any(name in names for name in allowed) for allowed in task.sentences)


def _lines(path: Path) -> list[str]:
    """Split at line feeds alone: `splitlines` would also do so at characters that occur within sentences."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
