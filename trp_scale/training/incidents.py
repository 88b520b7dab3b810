"""RUN_DIR/incidents.jsonl: what went wrong while a run went on, a line each, over all its starts.

{"at": "...", "step": 120, "kind": "unreadable", "key": "image-000001/scene-00000148", "reason": "..."}
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trp_scale.config.json_files import json_lines, parse_json
from trp_scale.errors import RefusedError
from trp_scale.training.metrics import drop_torn_line

INCIDENTS_FILE = "incidents.jsonl"


class Incidents:
    """Appends lines on rank 0. A disk that takes none does not stop the run: they are kept, and written with the next.

    Args:
        run_dir: of the run.
        enabled: False on other ranks: nothing is written.
    """

    def __init__(self, run_dir: Path, *, enabled: bool = True) -> None:
        self._path, self._enabled = run_dir / INCIDENTS_FILE, enabled
        self._waiting: list[str] = []

    def add(self, kind: str, step: int, **fields: Any) -> None:
        """One incident at `step`; the fields are JSON values."""
        if not self._enabled:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._waiting = [*self._waiting, json.dumps({"at": now, "step": step, "kind": kind, **fields})][-_MOST_WAITING:]
        with contextlib.suppress(OSError):
            drop_torn_line(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
            self._waiting = []


_MOST_WAITING = 1000


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    """The lines that can be read, oldest first; none where there is no such file."""
    incidents = []
    with contextlib.suppress(RefusedError):
        for number, line in json_lines(run_dir / INCIDENTS_FILE):
            with contextlib.suppress(RefusedError):
                document = parse_json(line, f"line {number}")
                if isinstance(document, dict):
                    incidents.append(document)
    return incidents
