"""Named sources of batches and their cursors: what the training loop calls."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any, Literal, overload

from trp_scale.batch import Batch
from trp_scale.config import Config, RefusedError
from trp_scale.data.fetch import BatchBuilder, Fetcher, MicroBatches, start_worker_server
from trp_scale.data.kinds import BUILDERS, Rows, open_rows
from trp_scale.data.mixture import parse_paths
from trp_scale.data.partition import check_partition
from trp_scale.data.plan import HeldOutPlan, Member, Plan, TrainPlan
from trp_scale.data.split import held_out


class TrainSource:
    """The endless stream of training rows, in windows of one global batch.

    Attributes:
        rows: rows per epoch (of a mixture: of all its members).
        cursor: rows consumed by all ranks together; the only state there is.
        accumulation: micro-batches per window.
        wait_seconds: time that the last window kept the caller waiting.
    """

    def __init__(
        self, plan: Plan, builder: BatchBuilder, config: Config, *, rank: int, world: int, pin_memory: bool
    ) -> None:
        self.rows = plan.rows
        self.cursor = 0
        self.wait_seconds = 0.0
        self.accumulation = check_partition(config.batch.global_size, config.batch.micro_size, world)
        self._fetcher = Fetcher(plan, builder)
        self._global_size, self._micro_size = config.batch.global_size, config.batch.micro_size
        self._rank_size = config.batch.global_size // world
        self._rank = rank
        self._workers, self._prefetch, self._pin_memory = config.data.workers, config.data.prefetch, pin_memory
        self._batches: MicroBatches | None = None
        self._stream: Iterator[Batch] | None = None

    def next_window(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch.

        Rank r gets positions [cursor + r B / W, cursor + (r + 1) B / W), cut into contiguous micro-batches.
        """
        began = time.perf_counter()
        if self._stream is None:
            self._stream = self._open()
        window = [next(self._stream) for _ in range(self.accumulation)]
        self.cursor += self._global_size
        self.wait_seconds = time.perf_counter() - began
        return window

    def seek(self, cursor: int) -> None:
        """Continue at `cursor` rows; whatever was fetched ahead is dropped.

        Raises:
            ValueError: a negative cursor.
        """
        if cursor < 0:
            raise ValueError(f"train source: cursor {cursor} found, at least 0 allowed")
        self.close()
        self.cursor = cursor

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: {"cursor": rows consumed}."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state_dict` was taken, on any number of ranks."""
        self.seek(state["cursor"])

    def close(self) -> None:
        """End the workers; the next window starts new ones."""
        self._stream = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _open(self) -> Iterator[Batch]:
        self._batches = MicroBatches(
            self._fetcher,
            self._positions(self.cursor),
            workers=self._workers,
            prefetch=self._prefetch,
            pin_memory=self._pin_memory,
        )
        return iter(self._batches)

    def _positions(self, cursor: int) -> Iterator[range]:
        """Positions of this rank's micro-batches from `cursor` on, without end."""
        while True:
            start = cursor + self._rank * self._rank_size
            for first in range(start, start + self._rank_size, self._micro_size):
                yield range(first, first + self._micro_size)
            cursor += self._global_size


class ValidationSource:
    """The held-out rows, all of them once per pass; every pass is the same, with the masks and
    crops of epoch 0.

    Attributes:
        rows: held-out rows over all ranks; 0 when nothing is held out.
        micro_batches: micro-batches per pass on each rank, the same on all.
    """

    def __init__(
        self, plan: Plan | None, builder: BatchBuilder, config: Config, *, rank: int, world: int, pin_memory: bool
    ) -> None:
        micro = config.batch.micro_size
        self.rows = 0 if plan is None else plan.rows
        self.micro_batches = -(-self.rows // (micro * world))
        self._positions = [
            range(first, first + micro) for first in (micro * (n * world + rank) for n in range(self.micro_batches))
        ]
        self._batches = None
        if plan is not None:
            self._batches = MicroBatches(
                Fetcher(plan, builder),
                self._positions,
                workers=min(1, config.data.workers),  # one is enough: a forward pass takes longer than a fetch
                prefetch=config.data.prefetch,
                pin_memory=pin_memory,
            )

    def windows(self) -> Iterator[Batch]:
        """This rank's micro-batches; the last ones are filled with rows of row_weights 0 and label_weights 0."""
        return iter(()) if self._batches is None else iter(self._batches)

    def close(self) -> None:
        """End the worker; there are no more passes."""
        if self._batches is not None:
            self._batches.close()


class Sources:
    """The sources of one run, by name: sources["train"], sources["validation"].

    Attributes:
        meta: what all rows have in common: a `TextMeta`, or an `ImageMeta` when the objective learns from images.
        limit: predicted places of a sequence (kinds.Rows).
    """

    def __init__(self, train: TrainSource, validation: ValidationSource, rows: Rows) -> None:
        self.train, self.validation = train, validation
        self.meta: Any = rows.meta  # the caller knows which kind it has asked for
        self.limit = rows.limit
        digest = hashlib.blake2b(digest_size=16)
        for part in rows.digests:
            digest.update(part.encode())
        self._digest = digest.hexdigest()

    @overload
    def __getitem__(self, name: Literal["train"]) -> TrainSource: ...
    @overload
    def __getitem__(self, name: Literal["validation"]) -> ValidationSource: ...
    def __getitem__(self, name: str) -> TrainSource | ValidationSource:
        sources: dict[str, TrainSource | ValidationSource] = {"train": self.train, "validation": self.validation}
        if name not in sources:
            raise KeyError(f"no source {name!r}; there are {', '.join(sources)}")
        return sources[name]

    def digest(self) -> str:
        """Hash of what this process sees of the storage (names, sizes, indexes): ranks compare it at start."""
        return self._digest

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Cursors by source."""
        return {"train": self.train.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Continue where `state_dict` was taken."""
        self.train.load_state_dict(state["train"])

    def close(self) -> None:
        """End all workers."""
        self.train.close()
        self.validation.close()


def open_sources(config: Config, *, rank: int, world: int, device_type: str = "cpu") -> Sources:
    """Open a run's data on one rank: read dataset.json and the indexes, check the tars' sizes; starts no worker yet.

    Args:
        config: the run.
        rank, world: place in, and size of, the data-parallel group.
        device_type: "cuda" pins the batches' memory.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: settings that do not fit the data, the number of ranks, or each other, or data of a kind that the
            objective does not learn from.
    """
    if config.data.workers > 0:
        start_worker_server(BUILDERS[config.objective.kind])  # first, so that its imports go on beside everything else
    paths = parse_paths(config.data.path)
    rows = open_rows(config, paths)
    fraction = config.data.validation_fraction
    if config.validation.every > 0 and fraction == 0.0:
        raise RefusedError(
            "validation.every is set but data.validation_fraction is 0: nothing is held out; set one of them"
        )
    masks = [
        held_out(blocks.identities, fraction, where=str(path.path))
        for blocks, path in zip(rows.blocks, paths, strict=True)
    ]
    plans = [
        [
            Member(name=path.name, weight=path.weight, table=blocks, chosen=mask == (split == "validation"))
            for path, blocks, mask in zip(paths, rows.blocks, masks, strict=True)
        ]
        for split in ("train", "validation")
    ]
    train = TrainPlan(seed=config.training.seed, members=plans[0], blocks_per_group=config.data.blocks_per_group)
    validation = HeldOutPlan(members=plans[1]) if fraction > 0.0 else None
    pin = device_type == "cuda"
    return Sources(
        TrainSource(train, rows.builder, config, rank=rank, world=world, pin_memory=pin),
        ValidationSource(validation, rows.builder, config, rank=rank, world=world, pin_memory=pin),
        rows,
    )
