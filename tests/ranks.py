"""Ranks that are started once and shared by all distributed tests: a launch costs seconds, a call milliseconds."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.shortcuts import take_shortcuts

if TYPE_CHECKING:
    from tests.synthetic import Layout

TIMEOUT_SECONDS = 600.0
MOST_THREADS = 128
"""Of a rank's process, which then is started again. Each group of gloo has threads that wake a hundred times a second,
and FSDP2's meshes and hpZ keep their groups for good; 180 threads take a fifth of a core."""

MODULES = ["deepspeed", "torch._inductor.compile_fx", "trp_scale.training.pretrain", "trp_scale.engines.fsdp"]
SERVER = forkserver.ForkServer()
"""Imports what ranks need once and forks them; the server of the loader's workers is another and blocks signals."""
SERVER.set_forkserver_preload([*MODULES, "tests.synthetic_modalities", "tests.synthetic_hypergradients"])


def fork(function: Callable[..., Any], *arguments: Any, daemon: bool = False) -> Any:
    """Start a process from SERVER that calls a function; spawning one takes 12 s of imports."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=daemon)
    with patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
        process.start()
    return process


class RankError(AssertionError):
    """A function raised on some rank; the message holds every rank's traceback."""


def _serve(rank: int, world: int, port: int, pipe: Connection, variables: dict[str, str]) -> None:
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.clear()
    os.environ.update(variables | {name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    take_shortcuts()
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
    """A port nobody listens on now, for a launcher that must be given one.

    Of those that no system gives away unasked (Linux begins at 32768): between this look and the launch, a connection
    of any other test could otherwise take it. Not from the seeded generator, which other workers seed alike.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class Ranks:
    """`world` processes with a gloo group, each running the same function when asked.

    Functions must be importable by name and may call any collective. When one raises on some rank while others wait in
    a collective, or a rank's process ends, the processes are ended and started again at the next call.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def _start(self) -> None:
        # Listens from here on: a port that is found and let go may be another's when the first rank has started.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        for rank in range(self.world):
            ours, theirs = multiprocessing.Pipe()
            process = fork(_serve, rank, self.world, port, theirs, dict(os.environ), daemon=True)
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
            with contextlib.suppress(OSError):  # the process has ended, which is told where its answer is read
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
            except (EOFError, OSError):
                self._processes[rank].join(timeout=5)
                fine, answers[rank] = False, f"its process ended with {self._processes[rank].exitcode}"
            if not fine:
                failed += f"rank {rank}: {answers[rank]}\n"
                patience = 5.0  # the others may wait for this one in a collective
        if failed:
            self.close()
            raise RankError(failed)
        return answers

    def run_layout(self, function: Callable[..., Any], layout: Layout, *arguments: Any, **named: Any) -> list[Any]:
        """Return what `function(layout, ...)` returns on each rank; a plain layout is run by this process alone."""
        if layout.engine == "plain":
            return [function(layout, *arguments, **named)]
        return self(function, layout, *arguments, **named)

    def threads(self) -> int:
        """Of the first rank's process; 0 where none runs."""
        return len([*Path(f"/proc/{self._processes[0].pid}/task").glob("*")]) if self._processes else 0

    def close(self) -> None:
        """End the processes that this object started; the next call starts them again."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None
