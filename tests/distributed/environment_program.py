"""Started by test_environment.py under real launchers: one line of JSON per rank, then what the argument says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from trp_scale.config import RefusedError  # noqa: E402
from trp_scale.distributed.environment import Environment  # noqa: E402


def main(directory: Path, behaviour: str) -> None:
    with Environment(timeout_minutes=8.0) as environment:
        environment.ensure_process_group()
        info = environment.info
        seen = {
            **vars(info),
            "sum": int(environment.world.sum(torch.tensor(info.rank + 1))),
            "path": environment.world.broadcast_object(f"rank {info.rank}"),
            "threads": torch.get_num_threads(),
            "cpus": environment.cpus,
            "device": str(environment.device),
            "LOCAL_RANK": os.environ["LOCAL_RANK"],
        }
        (directory / f"{info.rank}.json").write_text(json.dumps(seen), encoding="utf-8")
        if behaviour == "one_fails" and info.rank == 1:
            raise ValueError("broken")
        if behaviour == "one_is_refused" and info.rank == 1:
            raise RefusedError("no such thing")
        if behaviour.startswith("one_"):
            # What the others do meanwhile: they sit in a collective.
            environment.world.barrier()
            time.sleep(1200)
    assert not dist.is_initialized()


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
