"""Ranks that are started once and shared by all distributed tests: a launch costs seconds, a call milliseconds."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.young_objects import look_through_young_objects

TIMEOUT_SECONDS = 240.0
MOST_THREADS = 128
"""Of a rank's process, which then is started again. Each group of gloo has threads that wake a hundred times a second,
and FSDP2's meshes and hpZ keep their groups for good; 180 threads take a fifth of a core."""


class RankError(AssertionError):
    """A function raised on some rank; the message holds every rank's traceback."""


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    look_through_young_objects()
    while True:
        try:
            function, arguments, named = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments, **named)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # what all its functions have imported takes seconds to put away


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """`world` processes with a gloo group, each running the same function when asked.

    Functions must be importable by name and may call any collective. When one raises on some rank while others wait in
    a collective, the processes are ended and started again at the next call.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Run `function` on all ranks; returns what each returned, in rank order."""
        if self.threads() > MOST_THREADS:
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments, named))
        answers: list[Any] = [None] * self.world
        failed = ""
        patience = TIMEOUT_SECONDS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(patience):
                failed += f"rank {rank}: no answer within {patience:.0f} s\n"
                patience = 5.0
                continue
            try:
                fine, answers[rank] = pipe.recv()
            except EOFError:
                fine, answers[rank] = False, "the process ended"
            if not fine:
                failed += f"rank {rank}: {answers[rank]}\n"
                patience = 5.0  # the others may wait for this one in a collective
        if failed:
            self.close()
            raise RankError(failed)
        return answers

    def threads(self) -> int:
        """Of the first rank's process; 0 where none was started."""
        return len([*Path(f"/proc/{self._processes[0].pid}/task").iterdir()]) if self._processes else 0

    def close(self) -> None:
        """End the processes that this object started; the next call starts them again."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
