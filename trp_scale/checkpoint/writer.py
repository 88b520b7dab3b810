"""Asynchronous checkpoints of a run.

step n       every rank copies its pieces into host memory (`HostCopy`), with hooks, cursors and counters; rank 0
             checks the free space and creates checkpoints/.step_n.tmp
steps n+1..  a thread of each rank writes and flushes its file, with checksums, without collectives. The step's
             all-reduce contains one number per rank: its part is written or has failed
step n+k     all parts are written: ranks exchange their file lists, rank 0 writes checkpoint.json and renames the
             directory; in the background it verifies the bytes, removes older checkpoints and uploads (keeper.py)

A second checkpoint waits for the first. If storage fails, training continues and the next due checkpoint is tried;
after `max_failures` consecutive failures the run stops.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trp_scale.checkpoint.document import split_state, stored_bytes
from trp_scale.checkpoint.format import StoredPiece, join_pieces, without_values
from trp_scale.checkpoint.keeper import Keeper, lower_priority, open_url
from trp_scale.checkpoint.manager import CheckpointPart, Content, finish, owned_pieces, write_part
from trp_scale.checkpoint.run_directory import Kept, checkpoint_path, newest_step, publish, temporary_path
from trp_scale.config import CheckpointConfig
from trp_scale.core.engine import Stores
from trp_scale.core.pieces import Piece
from trp_scale.distributed.environment import control_groups, read_lines
from trp_scale.distributed.groups import Group, RankError, StorageError, on_rank_zero, run_on_all_ranks
from trp_scale.errors import CheckpointError

logger = logging.getLogger(__name__)

PAUSE_AT_END = 5.0
"""Seconds before the last checkpoint of a run is retried."""

BESIDE_TENSORS = 8 << 20
"""Free bytes required in addition to the tensors: for keys in files and checkpoint.json."""

SHARE_OF_MEMORY = 0.8
"""Maximum share of the available memory for the copy, when it is first made; steps need some, too."""

_ALIGNED = 64


class HostCopy:
    """Copy of a rank's pieces in host memory, made between two steps. The next `take` overwrites it.

    The memory is reused for all checkpoints, so a run has one copy at most. Under CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._registered = False

    def lacks(self, pieces: Iterable[Piece]) -> int:
        """Return the bytes to allocate for these pieces."""
        wanted = _copied_bytes(pieces)
        return 0 if self._memory is not None and self._memory.numel() >= wanted else wanted

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy pieces, and return them with the copies in place of the engine's tensors. Wait for the device. Raises
        RuntimeError: not enough memory."""
        held = list(pieces)
        on_gpu = any(tensor.is_cuda for piece in held for tensor in piece.tensors.values())
        memory = self._of_size(_copied_bytes(held), pinned=on_gpu)
        copied, start = [], 0
        for piece in held:
            tensors = {}
            for state, tensor in piece.tensors.items():
                target = memory[start : start + tensor.nbytes].view(tensor.dtype)
                copy_into(target, tensor.detach())
                tensors[state] = target
                start += _padded_size(tensor.nbytes)
            copied.append(replace(piece, tensors=tensors))
        if on_gpu:
            torch.cuda.synchronize()
        return copied

    def release(self) -> None:
        """Free the memory."""
        if self._registered and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory, self._registered = None, False

    def _of_size(self, size: int, *, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size:
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8)
            if pinned and size:
                # Not pin_memory=True: torch rounds pinned memory up to a power of two.
                error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
                self._registered = int(error) == 0
                if not self._registered:
                    logger.warning("%d bytes for checkpoints could not be pinned: copies from the GPU are slower", size)
        return self._memory


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into host memory; from a GPU asynchronously.

    One thread copies. torch's own copy took 1.6 s for 1.3 GB on two busy cores, this 0.2 s: torch's threads wait for
    each other after every tensor.
    """
    if source.is_cuda or not source.is_contiguous():
        target.copy_(source, non_blocking=source.is_cuda)
    else:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def available_memory() -> int:
    """Return the bytes of host memory that can be allocated now, limited by the machine and by this process's control
    groups (version 2)."""
    meminfo = (line.split() for line in read_lines(Path("/proc/meminfo")))
    free = next((int(words[1]) * 1024 for words in meminfo if words[0] == "MemAvailable:"), 2**50)
    for folder in control_groups():
        limit, used = read_lines(folder / "memory.max"), read_lines(folder / "memory.current")
        if limit and used and limit[0] != "max":
            stat = (line.split() for line in read_lines(folder / "memory.stat"))
            cached = next((int(words[1]) for words in stat if words[0] == "inactive_file"), 0)
            free = min(free, int(limit[0]) - int(used[0]) + cached)
    return max(0, free)


def _copied_bytes(pieces: Iterable[Piece]) -> int:
    return sum(_padded_size(tensor.nbytes) for piece in pieces for tensor in piece.tensors.values())


def _padded_size(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class AbandonedError(Exception):
    """The run fails, and its writing thread must stop."""


@dataclass(kw_only=True)
class _PendingCheckpoint:
    """One checkpoint that is being written: data common to all ranks, and this rank's part. `result`, `error`: of this
    rank's part, after it is written or has failed."""

    step: int
    final: Path
    temporary: Path
    kept: Kept
    facts: dict[str, Any]
    hooks: dict[str, Any]
    result: CheckpointPart | None = None
    error: Exception | None = None
    passed: int = 0
    abandoned: bool = False
    thread: threading.Thread | None = None

    def write(self, rank: int, pieces: Callable[[], Iterable[Piece]], tensors: dict[str, Tensor]) -> None:
        """Write this rank's part; store an error instead of raising it."""
        try:
            self.result = write_part(self.temporary, rank, lambda: self._count(pieces()), tensors)
        except Exception as error:  # raised on all ranks by run_on_all_ranks
            self.error = error

    def _count(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self.abandoned:
                raise AbandonedError
            self.passed += 1
            yield piece

    @property
    def over(self) -> bool:
        """Whether this rank's part is written or has failed."""
        return self.thread is None or not self.thread.is_alive()

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait for this rank's part; send a heartbeat when the thread makes progress."""
        passed = -1
        while self.thread is not None and self.thread.is_alive():
            if self.passed != passed:
                passed = self.passed
                beat()
            self.thread.join(timeout=1.0)

    def part(self) -> CheckpointPart:
        """Return the files that this rank has written; raise the error if it failed."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "waited for"
        return self.result


@dataclass(kw_only=True)
class CheckpointWriter:
    """Writer of a run's checkpoints. All ranks make the same calls at the same steps; only `has_written` and `abandon`
    are not collective.

    Attributes:
        beat: receives heartbeats during waits.
        whole: called on all ranks with each finished checkpoint.
        no_copy: reason not to copy weights and moments into host memory; empty = copy.
        failures: number of consecutive storage failures.
        problem: message of the last failure.
        newest: step of the newest finished checkpoint, -1 if none exists.
    """

    run_dir: Path
    group: Group
    settings: CheckpointConfig
    beat: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda line: None
    whole: Callable[[Path], None] = lambda path: None
    no_copy: str = ""
    failures: int = 0
    problem: str = ""
    newest: int = -1
    _copy: HostCopy = field(default_factory=HostCopy, init=False)
    _pending: _PendingCheckpoint | None = field(default=None, init=False)
    _keeper: Keeper | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Find the newest checkpoint, and check the URL of the mirror on all ranks."""

        def begin() -> int:
            if self.settings.mirror:
                open_url(self.settings.mirror)
            return newest_step(self.run_dir)

        self.newest = on_rank_zero(self.group, "looking for checkpoints", begin)
        if self.no_copy and self.settings.asynchronous and self.settings.every:
            self.tell(f"checkpoints are written synchronously: {self.no_copy}")

    def save(self, content: Content, *, wait: bool = False, before: int = 0, best: int = 0) -> None:
        """Start a checkpoint, or write it completely; first finish a pending one.

        Args:
            content: of the present step; not read after this call returns, unless `wait`.
            wait: return when the checkpoint is finished or storage has failed; no copy is made.
            before: keep the newest checkpoint before this step; 0 = no such rule.
            best: keep the checkpoint of this step; 0 = no such rule.

        Raises:
            RankError: on every rank: an error other than a storage failure on any rank.
        """
        self.settle()
        wait = wait or not self.settings.asynchronous or bool(self.no_copy)
        try:
            behind = self._start(content, wait=wait, before=before, best=best)
        except StorageError as error:
            self._note_failure(content.step, error)
            return
        except CheckpointError as error:
            raise RankError(str(error)) from error
        if not behind:
            self.settle()

    def has_written(self) -> bool:
        """Return whether this rank's part of a pending checkpoint is over; called once per step."""
        self._log_messages()
        return self._pending is not None and self._pending.over

    def settle(self) -> None:
        """Finish the pending checkpoint, if there is one; wait for its parts. Raises RankError: on every rank: an error
        other than a storage failure on any rank."""
        pending = self._pending
        if pending is None:
            return
        pending.wait(self.beat)
        self._pending = None

        def name() -> None:
            finish(pending.temporary, parts, pending.hooks, pending.facts)
            publish(pending.temporary, pending.final)

        try:
            parts = run_on_all_ranks(self.group, f"writing the checkpoint {pending.final}", pending.part)
            on_rank_zero(self.group, f"finishing the checkpoint {pending.final}", name)
        except StorageError as error:
            self._remove(pending.temporary)
            self._note_failure(pending.step, error)
            return
        except (CheckpointError, RankError) as error:
            self._remove(pending.temporary)
            raise RankError(str(error)) from error
        self.failures, self.problem, self.newest = 0, "", pending.step
        if self.group.rank == 0:
            self._keeper = self._keeper or Keeper(self.run_dir, self.settings.mirror)
            self._keeper.note_written(pending.final, pending.kept)
        self.whole(pending.final)

    def given_up(self) -> str | None:
        """Return why the run stops after repeated storage errors, or `None`."""
        if self.failures < self.settings.max_failures:
            return None
        return f"{self.failures} checkpoints in a row could not be written: {self.problem}"

    def finish(self, again: Callable[[], None]) -> None:
        """Finish the last checkpoint at the end of the run, remove older ones, and upload it. `again`: writes the
        checkpoint of this last step again, after a storage failure."""
        self.settle()
        while self.failures and self.given_up() is None:
            self.beat()
            time.sleep(PAUSE_AT_END)
            again()
            self.settle()
        self.close()

    def close(self) -> None:
        """Finish the pending checkpoint, wait for removals and uploads, and free memory. Collective."""
        self.settle()
        if self._keeper is not None:
            self._keeper.finish(self.beat)
        self._log_messages()
        self._copy.release()

    def abandon(self) -> None:
        """End after an error, when other ranks may have exited: a pending checkpoint stays half-written until the next
        start removes it; with one rank it is finished."""
        if self._pending is not None and self.group.size > 1:
            self._pending.abandoned = True
            if self._pending.thread is not None:
                self._pending.thread.join(timeout=30.0)
        elif self._pending is not None:
            self.whole = lambda path: None  # hooks have ended
            with contextlib.suppress(RankError):  # the original error is more important
                self.settle()
        if self._keeper is not None:
            self._keeper.abandon()
        self._log_messages()

    def _start(self, content: Content, *, wait: bool, before: int, best: int) -> bool:
        """List the pieces of all ranks, check the free space on rank 0, and start writing in the background or write
        now.

        Returns:
            whether it is written in the background, the same on every rank.
        """
        settings = self.settings
        final, temporary = checkpoint_path(self.run_dir, content.step), temporary_path(self.run_dir, content.step)
        hooks: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}

        def list_pieces() -> tuple[list[StoredPiece], str, int, int]:
            document, hooks_tensors = split_state(content.hooks_state)
            hooks.update(document)
            tensors.update(hooks_tensors)
            pieces = list(owned_pieces(content.engine))
            lacking = 0 if wait else self._copy.lacks(pieces)
            return [without_values(piece) for piece in pieces], socket.gethostname(), lacking, available_memory()

        ranks = run_on_all_ranks(self.group, f"listing the tensors for {final}", list_pieces)
        join_pieces(piece for pieces, *_ in ranks for piece in pieces)  # the same on every rank, errors included
        needed = sum(stored_bytes(piece.states, piece.region.size) for pieces, *_ in ranks for piece in pieces)
        needed += sum(tensor.nbytes for tensor in tensors.values()) + BESIDE_TENSORS
        on_rank_zero(self.group, f"preparing the checkpoint {final}", lambda: make_room(temporary, needed))
        behind = not wait and not self._too_large([(host, lacking, free) for _, host, lacking, free in ranks])
        pending = _PendingCheckpoint(
            step=content.step,
            final=final,
            temporary=temporary,
            kept=Kept(
                newest=settings.keep, every=settings.keep_every, before=before, best=best, regular=settings.every
            ),
            facts=content.facts(self.group),
            hooks=hooks,
        )
        self._pending = pending
        self.beat()
        if behind:
            self._write_behind(pending, content.engine, tensors)
        else:
            pending.write(self.group.rank, lambda: owned_pieces(content.engine), tensors)
        return behind

    def _write_behind(self, pending: _PendingCheckpoint, engine: Stores, tensors: dict[str, Tensor]) -> None:
        """Write this rank's part in a thread, from a copy."""
        try:
            copied = self._copy.take(owned_pieces(engine))
        except (RuntimeError, MemoryError) as error:  # other processes may have allocated the memory
            self.tell(f"step {pending.step}: the checkpoint is written synchronously: {error}")
            pending.write(self.group.rank, lambda: owned_pieces(engine), tensors)
            return
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

        def work() -> None:
            lower_priority()
            pending.write(self.group.rank, lambda: copied, tensors)

        pending.thread = threading.Thread(target=work, name=f"trp_scale checkpoint {pending.step}", daemon=True)
        pending.thread.start()

    def _too_large(self, ranks: list[tuple[str, int, int]]) -> bool:
        """Return whether a host lacks memory for its ranks' copies; then later checkpoints are written without a
        copy."""
        for host in dict.fromkeys(host for host, _, _ in ranks):
            lacking = sum(lacks for name, lacks, _ in ranks if name == host)
            free = min(free for name, _, free in ranks if name == host)
            if lacking > SHARE_OF_MEMORY * free:
                self.no_copy = (
                    f"a copy of weights and moments needs {_size(lacking)} of host memory on {host}, which has "
                    f"{_size(free)}"
                )
                self.tell(f"checkpoints are written synchronously: {self.no_copy}")
                return True
        return False

    def _note_failure(self, step: int, error: StorageError) -> None:
        self.failures += 1
        self.problem = str(error)
        newest = f"the newest is of step {self.newest}" if self.newest >= 0 else "none exists yet"
        self.tell(
            f"step {step}: no checkpoint, {newest} ({self.failures} of {self.settings.max_failures} failures in a row, "
            f"--checkpoint.max_failures); {error}"
        )

    def _remove(self, temporary: Path) -> None:
        if self.group.rank == 0:  # the next start removes what cannot be removed now
            shutil.rmtree(temporary, ignore_errors=True)

    def _log_messages(self) -> None:
        for message in self._keeper.messages() if self._keeper is not None else ():
            self.tell(message)


def make_room(temporary: Path, needed: int) -> None:
    """Create the directory of an unfinished checkpoint, on rank 0, if the disk has enough free space. Raises OSError:
    not enough space, or the directory cannot be created."""
    if temporary.exists():  # of the same step, before a rollback
        shutil.rmtree(temporary)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(temporary.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{temporary.parent} has {_size(free)} free, a checkpoint needs {_size(needed)}: make room there, or keep "
            "fewer (--checkpoint.keep, --checkpoint.keep_every)",
        )
    temporary.mkdir()


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
