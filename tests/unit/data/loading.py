"""A training process for test_workers.py: opens a data set with workers, says who they are, then waits or fails.

python -m tests.unit.data.loading DATASET WORKERS wait|fail
"""

from __future__ import annotations

import multiprocessing
import sys
import time

from tests.unit.data.stored import config_for
from trp_scale.pretraining.base import open_sources


def main(path: str, workers: int, then: str) -> None:
    """Print the workers' process ids after the first window."""
    sources = open_sources(config_for(path, data={"workers": workers}), rank=0, world=1)
    sources.train.next_window()
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    if then == "fail":
        raise RuntimeError(f"a fault while {sources} is open")  # which the traceback keeps alive
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
