"""A run of many steps takes no more memory and no more open files at its end than at its beginning."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from tests.runs import flags, lines, start

STEPS, MICRO_BATCHES = 5000, 16

FEW = {
    "model__layers": 1,
    "model__hidden_size": 8,
    "model__intermediate_size": 8,
    "model__heads": 1,
    "batch__global_size": MICRO_BATCHES,
    "batch__micro_size": 1,
    "training__steps": STEPS,
    "checkpoint__every": 200,
    "validation__every": 500,
    "logging__every": 10,
    "logging__progress": False,  # nobody reads the pipe before the end
    "data__workers": 1,
}


@pytest.mark.faults
def test_memory_and_open_files_stay_as_they_are(text_dataset: Path, tmp_path: Path) -> None:
    process = start(flags(text_dataset, tmp_path, **FEW))
    log = tmp_path / "metrics.jsonl"
    seen: list[tuple[int, int, int]] = []
    while process.poll() is None:
        if log.exists() and (found := lines(tmp_path)):
            place = Path(f"/proc/{process.pid}")
            pages = int((place / "statm").read_text().split()[1])
            seen.append((found[-1]["step"], pages * os.sysconf("SC_PAGE_SIZE"), len([*(place / "fd").iterdir()])))
        time.sleep(1.0)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    parts = [
        [each for each in seen if first <= each[0] < first + 1000] for first in (1000, 2000, 3000, 4000)
    ]  # the first thousand steps fill caches
    memory = [statistics.median(size for _, size, _ in part) / 2**20 for part in parts]
    files = [statistics.median(count for _, _, count in part) for part in parts]
    print(f"MiB {memory}, open files {files}")
    assert max(memory) - memory[0] < 8, (memory, files)
    assert max(files) <= files[0], (memory, files)
