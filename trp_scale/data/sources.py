"""Data sources of a run: opened data sets (`Rows`), training and validation sources with cursors, the split of a global
batch over ranks, D_tr and D_val."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from trp_scale.config import Config, PretrainConfig, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder, Fetcher, MicroBatches, start_worker_server
from trp_scale.data.hashing import Integers
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath, describe_shares, parse_paths
from trp_scale.data.plan import Blocks, ByBlock, HeldOutPlan, MixtureMember, Plan, TrainPlan, held_out
from trp_scale.data.prefetch import Share, StoredTars
from trp_scale.data.raw_files import require_dataset
from trp_scale.distributed.launchers import NodeRanks, ranks_of_node
from trp_scale.storage.cache import CacheUse

if TYPE_CHECKING:
    from trp_scale.data.images.dataset import ImageDataset, ImageMeta
    from trp_scale.data.text.dataset import TextDataset, TextMeta

Run = TypeVar("Run", bound=Config)

TRAIN, VALIDATION = "downstream_train", "downstream_validation"
"""Names of D_tr and D_val in cursors and in the hash of their orders."""


KINDS = ("text", "image")
"""Kinds in dataset.json."""


Chosen = npt.NDArray[np.bool_]
"""[n] mask of the blocks of a data set that belong to a source."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Opened data sets of one kind.

    Attributes:
        blocks: blocks of each data set.
        meta: properties of all rows; `None` for labelled sentences.
        limit: predicted positions of a sequence: masked slots of a text row, or masked patches of a crop (of all input
            modalities together).
        builder: builds batches of the rows.
        digests: digest of each data set.
        labels: class of each image in stored order, for each data set; -1 without classes.
        stored: data sets; tars under URLs are prefetched.
    """

    blocks: Sequence[Blocks]
    meta: TextMeta | ImageMeta | None
    limit: int
    builder: BatchBuilder
    digests: list[str]
    labels: list[Integers] | None = None
    stored: Sequence[StoredTars] = ()

    @classmethod
    def from_datasets(
        cls,
        datasets: Sequence[TextDataset | ImageDataset],
        meta: TextMeta | ImageMeta,
        builder: BatchBuilder,
        labels: list[Integers] | None = None,
    ) -> Rows:
        """Create the rows of opened data sets."""
        return cls(
            blocks=[dataset.blocks for dataset in datasets],
            meta=meta,
            limit=builder.limit,
            builder=builder,
            digests=[dataset.digest() for dataset in datasets],
            labels=labels,
            stored=datasets,
        )

    def digest(self) -> str:
        """Hash of the data sets as this process sees them (names, sizes, indexes)."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.digests:
            digest.update(part.encode())
        return digest.hexdigest()

    def members(self, paths: Sequence[MemberPath], chosen: Sequence[Chosen]) -> list[MixtureMember]:
        """Return the data sets with the blocks that belong to one source."""
        return [
            MixtureMember(name=path.name, weight=path.weight, table=blocks, chosen=mask)
            for path, blocks, mask in zip(paths, self.blocks, chosen, strict=True)
        ]


def require_kind(paths: Sequence[MemberPath], wanted: str) -> None:
    """Refuse data of a kind that the encoder does not read.

    Raises:
        DataError: a data set is missing.
        RefusedError: a data set has another kind.
    """
    for path in paths:
        require_dataset(path.path)
        kind = read_json(path.path / "dataset.json").get("kind")
        if kind != wanted and isinstance(kind, str) and kind in KINDS:
            raise RefusedError(
                f"{path.path}: kind {kind!r} found, but this run's encoder reads kind "
                f"{wanted!r}; give other data (--data.path), or choose a recipe for {kind} data"
            )


GLOBAL_BATCH = ("batch.global_size", "batch.micro_size")
"""Settings of the global and the micro-batch size."""


def check_partition(global_size: int, micro_size: int, world: int, *, flags: tuple[str, str] = GLOBAL_BATCH) -> int:
    """Return the accumulation steps, global_size / (micro_size x world).

    Args:
        flags: settings of the two sizes, for the message.

    Raises:
        RefusedError: not a whole number; the message lists the worlds and micro-batches that divide.
    """
    steps, rest = divmod(global_size, micro_size * world)
    if rest == 0:
        return steps
    ranks, micros = _list_divisors(global_size, micro_size), _list_divisors(global_size, world)
    raise RefusedError(
        f"global batch {global_size} does not divide over {world} ranks x micro-batch {micro_size}: "
        f"ranks that do: {ranks}; micro-batches that do on {world} ranks: {micros} "
        f"(--{flags[0]}, --{flags[1]})"
    )


def _list_divisors(size: int, factor: int) -> str:
    """List the divisors of size / factor; "none" if that is not a whole number."""
    number, rest = divmod(size, factor)
    return "none" if rest else ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


class TrainSource:
    """Endless stream of training rows, in windows of one global batch.

    Attributes:
        rows: rows per epoch (of all members of a mixture).
        cursor: rows consumed by all ranks together; the only state.
        accumulation: micro-batches per window.
        waited_seconds: time that callers have waited for windows.
        cache_use: cache statistics of this rank's workers up to the last window.
        workers: loader processes; 0 reads in this process.
        stop_requested: returns whether the run was asked to stop; it then does not wait for late rows
            (fetch.StoppedWaitingError).
        reports_to: source whose next window also carries the keys of this source's unreadable blocks, because the loop
            counts such keys in its own windows only; `None` if the loop reads this source.

    Args:
        plan: order of the rows.
        builder: builds batches.
        config: `batch` and the loader's settings are read.
        rank, world: rank in, and size of, the data-parallel group.
        pin_memory: pin batches for copies to a GPU.
        workers: loader processes; `None` for data.workers.
        flags: settings of the two batch sizes, for messages.
        stored: data sets of the order's members (fetch.Fetcher).
        node: ranks of this machine. If there are several machines, each reads whole blocks of a global batch where
            possible (plan.ByBlock). `None` assigns rows in the order of the source.
    """

    def __init__(
        self,
        plan: Plan,
        builder: BatchBuilder,
        config: Config,
        *,
        rank: int,
        world: int,
        pin_memory: bool,
        workers: int | None = None,
        flags: tuple[str, str] = GLOBAL_BATCH,
        stored: Sequence[StoredTars] = (),
        node: NodeRanks | None = None,
    ) -> None:
        self.rows = plan.rows
        self.cursor = 0
        self.waited_seconds = 0.0
        self.reports_to: TrainSource | None = None
        self._reported: set[str] = set()
        self.accumulation = check_partition(config.batch.global_size, config.batch.micro_rows, world, flags=flags)
        self.cache_use = CacheUse()
        self._fetcher = Fetcher(plan, builder, stored)
        self._node = node if node is not None and node.several else None
        self._parts = plan, builder, stored
        self._global_size, self._micro_size = config.batch.global_size, config.batch.micro_rows
        self._rank_size = config.batch.global_size // world
        self._rank = rank
        self.workers = config.data.workers if workers is None else workers
        self._prefetch, self._pin_memory = config.data.prefetch, pin_memory
        self.stop_requested: Callable[[], bool] = lambda: False
        self._stuck_seconds = config.reliability.worker_seconds
        self._batches: MicroBatches | None = None
        self._stream: Iterator[Batch] | None = None
        self._ahead: deque[list[Batch]] = deque()

    def first_rows(self, count: int) -> Batch:
        """Read the first rows of the order in this process; equal on all ranks. The cursor does not move."""
        batch = self._fetcher.__getitems__(range(count))
        self._fetcher.close()
        return batch

    def next_window(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch.

        Rank r gets positions [cursor + r B / W, cursor + (r + 1) B / W) as contiguous micro-batches; on several
        machines the rows of the global batch are sorted by block first.
        """
        window = self._ahead.popleft() if self._ahead else self._fetch()
        self._report(window)
        self.cursor += self._global_size
        return window

    def _report(self, window: list[Batch]) -> None:
        """Pass the corrupt keys of a window to `reports_to`; add those that other sources have passed to this one."""
        if self.reports_to is not None:
            self.reports_to._reported.update(key for micro in window for key in micro.corrupt)
        if self._reported:
            window[0].corrupt = [*window[0].corrupt, *sorted(self._reported)]
            self._reported.clear()

    def peek(self, count: int) -> list[list[Batch]]:
        """Return the next `count` windows without consuming them. `next_window` returns the same objects; `seek` and
        `close` drop them."""
        while len(self._ahead) < count:
            self._ahead.append(self._fetch())
        return list(itertools.islice(self._ahead, count))

    def seek(self, cursor: int) -> None:
        """Continue at `cursor` rows; drop prefetched batches.

        Raises:
            ValueError: a negative cursor.
        """
        if cursor < 0:
            raise ValueError(f"train source: cursor {cursor} found, at least 0 allowed")
        self.close()
        self.cursor = cursor

    def close(self) -> None:
        """End the workers; the next window starts new workers."""
        self._stream = None
        self._ahead.clear()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _fetch(self) -> list[Batch]:
        began = time.perf_counter()
        if self._stream is None:
            self._stream = self._open()
        window = [next(self._stream) for _ in range(self.accumulation)]
        for micro in window:
            self.cache_use = self.cache_use.plus(CacheUse(*micro.cache_use))
        self.waited_seconds += time.perf_counter() - began
        return window

    def _open(self) -> Iterator[Batch]:
        fetcher = self._fetcher
        if self._node is not None:
            plan, builder, stored = self._parts
            size, ranks = self._global_size, self._node
            by_block = ByBlock(plan, first=self.cursor, size=size)
            read = range(size * ranks.first // ranks.world, size * (ranks.first + ranks.count) // ranks.world)
            fetcher = Fetcher(by_block, builder, stored, Share(first=self.cursor, size=size, read=read))
        self._batches = MicroBatches(
            fetcher,
            self._positions(self.cursor),
            workers=self.workers,
            prefetch=self._prefetch,
            pin_memory=self._pin_memory,
            stuck_seconds=self._stuck_seconds,
            stop_requested=self.stop_requested,
        )
        return iter(self._batches)

    def _positions(self, cursor: int) -> Iterator[range]:
        """Yield the positions of this rank's micro-batches from `cursor` on, without end."""
        while True:
            start = cursor + self._rank * self._rank_size
            for first in range(start, start + self._rank_size, self._micro_size):
                yield range(first, first + self._micro_size)
            cursor += self._global_size


class JoinedWindows:
    """Micro-batches of the next global batch of `own`, then those of `joined`, marked as joined, on this rank.

    The micro-batches of `own` come first because they use every parameter: engines require that of the first one.
    """

    def __init__(self, own: TrainSource, joined: TrainSource) -> None:
        self.own, self.joined = own, joined

    def next_window(self) -> list[Batch]:
        """Return the micro-batches of both sources."""
        return [*self.own.next_window(), *(replace(micro, joined=True) for micro in self.joined.next_window())]


@dataclass(frozen=True, kw_only=True)
class Downstream:
    """Sources of levels II and III (MLO-MAE 3.2): endless, with separate orders.

    Attributes:
        train: D_tr.
        validation: D_val; excludes the blocks that data.validation_fraction holds out.
        classes: number of classes.
        notices: messages for the user about the split.
        workers_left: number of data.workers that remain for the unlabelled rows.
    """

    train: TrainSource
    validation: TrainSource
    classes: int
    notices: list[str]
    workers_left: int

    def close(self) -> None:
        """End the workers of both sources."""
        self.train.close()
        self.validation.close()


class ValidationSource:
    """Held-out rows, once per pass; every pass has the masks and crops of epoch 0.

    Attributes:
        rows: held-out rows over all ranks; 0 if nothing is held out.
        micro_batches: micro-batches per pass on each rank, equal on all ranks.
        plan: maps positions to addresses; `None` if nothing is held out.
        cache_use: as in `TrainSource`.
    """

    def __init__(
        self,
        plan: Plan | None,
        builder: BatchBuilder,
        config: Config,
        *,
        rank: int,
        world: int,
        pin_memory: bool,
        stored: Sequence[StoredTars] = (),
    ) -> None:
        micro = config.batch.micro_rows
        self.plan = plan
        self.rows = 0 if plan is None else plan.rows
        self.micro_batches = -(-self.rows // (micro * world))
        self._positions = [
            range(first, first + micro) for first in (micro * (n * world + rank) for n in range(self.micro_batches))
        ]
        self.cache_use = CacheUse()
        self._batches = None
        if plan is not None:
            self._batches = MicroBatches(
                Fetcher(plan, builder, stored),
                self._positions,
                workers=min(1, config.data.workers),  # enough: a forward pass takes longer than a fetch
                prefetch=config.data.prefetch,
                pin_memory=pin_memory,
                stuck_seconds=config.reliability.worker_seconds,
            )

    def windows(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches; padding rows have row_weights 0 and label_weights 0."""
        for micro in () if self._batches is None else self._batches:
            self.cache_use = self.cache_use.plus(CacheUse(*micro.cache_use))
            yield micro

    def close(self) -> None:
        """End the worker; no further pass is possible."""
        if self._batches is not None:
            self._batches.close()


class Sources:
    """Sources of one run: `train`, `validation`.

    Attributes:
        meta: properties of all rows: a `TextMeta`, or an `ImageMeta` for image runs.
        limit: predicted positions of a sequence (`Rows.limit`).
        opened: the data sets.
        downstream: labelled images for learned masks; `None` without them.
        notices: messages for the user about the data.
    """

    def __init__(
        self, train: TrainSource, validation: ValidationSource, rows: Rows, downstream: Downstream | None = None
    ) -> None:
        self.train, self.validation, self.downstream = train, validation, downstream
        self.notices: list[str] = []
        if downstream is not None:
            self.notices += downstream.notices
            downstream.train.reports_to = downstream.validation.reports_to = train
        self.opened = rows
        self._told = CacheUse()
        self.meta: Any = rows.meta  # the caller knows which of the two types it is
        self.limit = rows.limit

    def digest(self) -> str:
        """Return `Rows.digest`; ranks compare it at start."""
        return self.opened.digest()

    def rows(self) -> dict[str, int]:
        """Return the rows per epoch of each source, and those of a validation pass; empty sources are omitted."""
        rows = {name: source.rows for name, source in self._endless().items()} | {"validation": self.validation.rows}
        return {name: count for name, count in rows.items() if count}

    def cursors(self) -> dict[str, int]:
        """Return the rows consumed of each endless source, for checkpoints."""
        return {name: source.cursor for name, source in self._endless().items()}

    def seek(self, cursors: Mapping[str, int]) -> None:
        """Continue at `cursors`, on any number of ranks.

        Raises:
            RefusedError: the cursors belong to other sources.
        """
        sources = self._endless()
        if set(cursors) != set(sources):
            raise RefusedError(
                f"cursors of {', '.join(cursors) or 'nothing'} found, this run's sources are {', '.join(sources)}; "
                "resume a checkpoint of a run with the same kind of masks"
            )
        for name, source in sources.items():
            source.seek(cursors[name])

    @property
    def workers(self) -> int:
        """Loader processes of the endless sources."""
        return sum(source.workers for source in self._endless().values())

    def waited_seconds(self) -> float:
        """Return the time that callers have waited for the endless sources."""
        return sum(source.waited_seconds for source in self._endless().values())

    def cache_use(self) -> dict[str, int]:
        """Return the cache statistics of this rank's workers since the last call; empty without a cache."""
        now = self.validation.cache_use
        for source in self._endless().values():
            now = now.plus(source.cache_use)
        since = CacheUse(*(here - before for here, before in zip(now, self._told, strict=True)))
        self._told = now
        return since._asdict() if any(since) else {}

    def _endless(self) -> dict[str, TrainSource]:
        sources = {"train": self.train}
        if self.downstream is not None:
            sources |= {TRAIN: self.downstream.train, VALIDATION: self.downstream.validation}
        return sources

    def close(self) -> None:
        """End all workers."""
        self.train.close()
        self.validation.close()
        if self.downstream is not None:
            self.downstream.close()


def within_cpus(config: Run, cpus: int) -> Run:
    """Return the settings with at most `cpus` loader workers: more processes than CPUs do not help.

    A run records the unlimited number, so that a larger machine can repeat it.
    """
    capped = copy.copy(config)
    capped.data = copy.copy(config.data)
    capped.data.workers = min(config.data.workers, cpus)
    return capped


OpenLabelled = Callable[[Rows, Sequence[MemberPath], Sequence[Chosen]], tuple[Downstream, Sequence[Chosen]]]
"""Opens labelled sources from (opened data, paths, training blocks); also returns the remaining blocks."""


def open_sources(
    config: PretrainConfig,
    open_rows: Callable[[Sequence[MemberPath]], Rows],
    *,
    workers_import: str,
    labelled: OpenLabelled | None = None,
    rank: int,
    world: int,
    device_type: str = "cpu",
) -> Sources:
    """Open a run's data on one rank: read dataset.json and indexes, and check the tars' sizes. No worker starts yet.

    Args:
        config: settings of the run.
        open_rows: opens the data sets at the given paths.
        workers_import: module of the batch builder, which the worker server imports once.
        labelled: opens labelled sources; `None` without them.
        rank, world: rank in, and size of, the data-parallel group.
        device_type: "cuda" pins the batches' memory.

    Raises:
        DataError: data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: settings do not fit the data, the number of ranks or each other, or the encoder does not read
            data of this kind.
    """
    if config.data.workers > 0:
        start_worker_server(workers_import)  # first: its imports run in parallel
    paths = parse_paths(config.data.path)
    rows = open_rows(paths)
    fraction = config.data.validation_fraction
    if config.validation.every > 0 and fraction == 0.0:
        raise RefusedError(
            "validation.every is set but data.validation_fraction is 0: no rows are held out; set one of them"
        )
    held = [
        held_out(blocks.identities, fraction, where=str(path.path))
        for blocks, path in zip(rows.blocks, paths, strict=True)
    ]
    training: Sequence[Chosen] = [~mask for mask in held]
    pin = device_type == "cuda"
    downstream: Downstream | None = None
    workers = config.data.workers
    if labelled is not None:
        downstream, training = labelled(rows, paths, training)
        workers = downstream.workers_left
    train = TrainPlan(
        seed=config.training.seed,
        members=rows.members(paths, training),
        blocks_per_group=config.data.blocks_per_group,
    )
    validation = HeldOutPlan(members=rows.members(paths, held)) if fraction > 0.0 else None
    sources = Sources(
        TrainSource(
            train,
            rows.builder,
            config,
            rank=rank,
            world=world,
            pin_memory=pin,
            workers=workers,
            stored=rows.stored,
            node=ranks_of_node(os.environ) if world > 1 else None,
        ),
        ValidationSource(validation, rows.builder, config, rank=rank, world=world, pin_memory=pin, stored=rows.stored),
        rows,
        downstream,
    )
    sources.notices += describe_shares(paths)
    return sources
