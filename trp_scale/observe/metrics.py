"""metrics.jsonl: one JSON object a logged step, flushed line by line, safe to append to after a kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from trp_scale.config import RefusedError

METRICS_FILE = "metrics.jsonl"

LONGEST_LINE = 1 << 24
"""Bytes at the end of the file that are searched for the last newline."""


def finite(value: Any) -> Any:
    """`value` with every number that is not finite replaced by None: strict JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def drop_torn_line(path: Path) -> None:
    """Cut a last line without a newline, left by a process that was killed while it wrote."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LONGEST_LINE)
        file.seek(start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


class MetricsWriter:
    """Appends to `run_dir`/metrics.jsonl.

    Raises:
        TypeError: a value that JSON does not know (a tensor, say), with the line's step.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(finite(line), allow_nan=False)
        except TypeError as error:
            raise TypeError(f"{self.path}: step {line.get('step')}: {error}; metrics must be plain numbers") from error
        # One write call per line, so that a reader who follows the file never sees half of one.
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, oldest first; a torn last line is left out.

    Raises:
        RefusedError: the directory holds no metrics.jsonl.
        ValueError: a whole line is not a JSON object, with its number.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise RefusedError(f"{path} does not exist: {run_dir} is not a run directory, or the run made no step")
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not JSON ({error})") from error
            if not isinstance(line, dict):
                raise ValueError(f"{path}: line {number} is a {type(line).__name__}, expected an object")
            yield line
