"""What incidents.jsonl keeps."""

from __future__ import annotations

from pathlib import Path

from trp_scale.training.incidents import INCIDENTS_FILE, Incidents, read_incidents


def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    """As a kill leaves it, or a disk that took half of it."""
    Incidents(tmp_path).add("spike", 5)
    with (tmp_path / INCIDENTS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"at": "2026-')
    Incidents(tmp_path).add("restart", 6)
    assert [(each["kind"], each["step"]) for each in read_incidents(tmp_path)] == [("spike", 5), ("restart", 6)]
