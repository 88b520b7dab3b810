"""`batch.micro_size: auto`: rows of a micro-batch, chosen once at the start of a run.

The result of a step does not depend on it (docs/decisions.md, "Losses are sums and counts"), but its speed does: with
small micro-batches kernel launches dominate, and exact minimax needs no extra pass for a window of one micro-batch.

On a GPU it is the largest divisor of a rank's share of the global batch that fits into memory with weights, gradients
and moments. The memory of a row is estimated: the forward pass runs on fake tensors for two numbers of rows, and a line
is fitted to the bytes saved for the backward pass. Passes of hooks are not included, so recipes with learned masks set
a number. On a CPU it is the largest divisor with at most `POSITIONS_A_CORE` positions for each thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import general_problems
from trp_scale.config.registry import engine_rules
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.run import Objective
from trp_scale.data.sources import check_partition
from trp_scale.distributed.environment import Environment
from trp_scale.engines.compiled import checkpoint_blocks
from trp_scale.errors import listed_problems
from trp_scale.models.counting import fake_pass, saved_bytes
from trp_scale.models.initialise import build_with_initialisers
from trp_scale.pretraining.base import Upstream

POSITIONS_A_CORE, POSITIONS = 6144, 16384
"""Largest micro-batch on a CPU in positions, for each thread and in all. On one thread the tiny recipes are fastest at
3,100 to 6,100 and 4 to 7 % slower at twice that (docs/experiments.md). 16,384 of BERT-base need 14 GiB."""

SURE = 0.8
"""Share of the free memory up to which the estimate is trusted; above it a step is tried."""

WORKSPACE = 2 << 30
"""Bytes reserved for libraries (matrix products, collectives) and fragmentation."""

METHODS = 12
"""Bytes per parameter reserved for methods: a weight average, a copy of the weights, a direction."""

BESIDE_GRAPHS = 0.25
"""Share of a row's bytes reserved in captured runs. CUDA graphs keep their memory, so a validation needs its own: a
forward pass without saved activations. Static batches are included. Not measured."""

FITTED = (2, 4)
"""Rows of the two estimates; even, because mixup mixes pairs of rows."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that training needs: `fixed`, and `row` for each row of a micro-batch."""

    fixed: int
    row: int

    def step_bytes(self, rows: int) -> int:
        """Bytes with micro-batches of `rows` rows."""
        return self.fixed + self.row * rows


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Chosen number of rows, and the reason."""

    rows: int
    why: str

    def __str__(self) -> str:
        return f"micro-batches of {self.rows} row{'s' if self.rows > 1 else ''}: {self.why}"


def choose(
    config: Config,
    environment: Environment,
    *,
    build: Callable[[Config, Environment], Upstream],
    engine_name: str,
    ds_document: Mapping[str, Any] | None = None,
    stored: Mapping[str, Any] | None = None,
    free: int | None = None,
) -> Choice:
    """Choose `batch.micro_size`, equal on all ranks. Collective.

    Args:
        build: builds the upstream with the smallest micro-batch; it is closed again.
        engine_name, ds_document: as in EngineRules.build.
        stored: settings of the checkpoint to resume; its size is kept if it still divides the share.
        free: free bytes of this rank's device; None: queried. On a CPU None skips the estimate.

    Raises:
        RefusedError: no size is valid with the other settings, or the memory of a row cannot be estimated.
    """
    group = environment.data
    sizes = candidates(config, group.size)
    before = (stored or {}).get("batch", {}).get("micro_size")
    if before in sizes:
        return Choice(rows=before, why="as in the checkpoint")
    probed = copy.deepcopy(config)
    probed.batch.micro_size = sizes[0]
    probed.training.compile = "none"  # compiled graphs of tried sizes would be discarded; they need less memory
    upstream = build(probed, environment)
    try:
        if free is None and environment.device.type == "cpu":
            positions = upstream.positions_per_step / probed.batch.global_size
            return choose_by_cores(sizes, positions, min(group.gather_objects(torch.get_num_threads())))
        need = count_memory(upstream, probed, environment, engine_name, ds_document)
        if free is None:
            torch.cuda.empty_cache()  # memory that torch caches counts as free
            free = torch.cuda.mem_get_info(environment.device)[0]
        free = min(group.gather_objects(free))

        def attempt(rows: int) -> bool:
            sized = replace(probed, batch=replace(probed.batch, micro_size=rows))
            return fits(upstream, sized, environment, engine_name, ds_document)

        return choose_by_memory(sizes, need, free, attempt if group.size == 1 else None)
    finally:
        upstream.sources.close()


def candidates(config: Config, ranks: int) -> list[int]:
    """Return the divisors of a rank's share of the global batch that are valid with the other settings, ascending.

    Raises:
        RefusedError: none is valid, with the problems of the settings or the partition.
    """
    share = check_partition(config.batch.global_size, 1, ranks)
    problems: list[str] = []
    sizes = []
    for rows in (size for size in range(1, share + 1) if share % size == 0):
        sized = copy.copy(config)
        sized.batch = replace(config.batch, micro_size=rows)
        reasons = list(general_problems(sized))
        problems += reasons
        if not reasons:
            sizes.append(rows)
    if not sizes:
        listed = listed_problems([*dict.fromkeys(problems)])
        raise RefusedError(f"--batch.micro_size auto: no divisor of a rank's {share} rows can be used:\n{listed}")
    return sizes


def choose_by_cores(sizes: Sequence[int], positions: float, threads: int) -> Choice:
    """Choose the largest size with at most POSITIONS_A_CORE positions for each thread and POSITIONS in all, or the
    smallest size.

    Args:
        positions: positions of a row.
    """
    allowed = min(POSITIONS_A_CORE * threads, POSITIONS)
    rows = max([size for size in sizes if size * positions <= allowed], default=sizes[0])
    cores = f"{threads} core{'s' if threads > 1 else ''}"
    whole = ", a rank's whole share" if rows == sizes[-1] else ""
    return Choice(rows=rows, why=f"{rows * positions:,.0f} of at most {allowed:,} positions for {cores}{whole}")


def choose_by_memory(sizes: Sequence[int], need: Need, free: int, attempt: Callable[[int], bool] | None) -> Choice:
    """Choose the largest size that fits into memory.

    Args:
        sizes: ascending.
        free: bytes, equal on all ranks.
        attempt: tries a step with a number of rows; used if the estimate is close to `free`. None on several ranks: one
            that is out of memory would leave the others in a collective.
    """
    for rows in reversed(sizes):
        needed = need.step_bytes(rows)
        words = f"estimated {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free"
        if needed <= SURE * free:
            whole = ", a rank's whole share" if rows == sizes[-1] else ""
            return Choice(rows=rows, why=f"{words}{whole}")
        if attempt is not None and needed <= free and attempt(rows):
            return Choice(rows=rows, why=f"{words}, one step succeeded")
    return Choice(rows=sizes[0], why=f"{words}; it is the smallest size and may not fit")


def fits(
    upstream: Upstream, config: Config, environment: Environment, engine_name: str, ds_document: Any = None
) -> bool:
    """Whether a step with micro-batches of `batch.micro_size` fits into memory, with moments allocated."""
    engine: Engine | None = None
    ran = False
    with suppress(torch.OutOfMemoryError):
        rules, model = engine_rules(engine_name), build_with_initialisers(upstream.model)
        device, group = environment.device, environment.data
        engine = rules.build(model, config, device=device, data_group=group, ds_document=ds_document)
        assert engine is not None, "built"
        engine.create_optimizer_state()
        engine.train(True)
        rows = first_rows(upstream, config.batch.micro_rows)
        losses = upstream.objective(engine, rows.to(engine.device))
        engine.backward((losses.sums / losses.counts.clamp(min=1)).sum(), last=True)
        engine.discard_gradients()
        ran = True
    if engine is not None:
        engine.close()
    del engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ran


def count_memory(
    upstream: Upstream,
    config: Config,
    environment: Environment,
    engine_name: str,
    ds_document: Mapping[str, Any] | None,
) -> Need:
    """Estimate the memory of a step. Raises what `saved_by_rows` raises."""
    activations = saved_by_rows(
        upstream.model,
        upstream.objective,
        partial(first_rows, upstream),
        config,
        device=environment.device,
        rounded=config.training.weights == "bf16",
    )
    model = build_with_initialisers(upstream.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stage = None if ds_document is None else int(ds_document.get("zero_optimization", {}).get("stage", 0))
    # Other engines refuse FSDP2's settings. Offloaded states are not on the device.
    shared_by = config.fsdp.shard_ranks or environment.data.size
    states = METHODS + (0.0 if config.fsdp.offload else state_bytes(engine_name, stage, shared_by))
    states += 2 * (config.training.weights == "bf16")  # in addition to the fp32 masters
    states += static_gradient_bytes(config, shared_by if engine_rules(engine_name).shards_everything else 1)
    row = round(activations.row * (1 + BESIDE_GRAPHS * (config.training.capture == "on")))
    return Need(fixed=activations.fixed + round(states * parameters) + WORKSPACE, row=row)


def saved_by_rows(
    make_model: Callable[[], nn.Module],
    objective: Objective,
    rows_of: Callable[[int], Batch],
    config: Config,
    *,
    device: torch.device,
    rounded: bool,
) -> Need:
    """Estimate the bytes that a forward pass saves for its backward pass, as a line over the rows.

    Args:
        make_model: builds the model; called twice with activation checkpointing.
        rows_of: returns a batch with a number of rows.
        rounded: forwards read bf16 weights.

    Raises:
        RefusedError: the forward pass reads the content of its tensors, so it does not run on fake tensors.
    """
    model, how = build_with_initialisers(make_model), config.training.activation_checkpointing
    shares = [(model, 1.0)]
    if how != "none":
        checkpointed = build_with_initialisers(make_model)
        checkpoint_blocks(checkpointed, how)
        shares = [(checkpointed, 1.0), (model, 1 / len(model.layers))]  # type: ignore[arg-type]  # a recomputed block
    half, saved = config.training.precision != "fp32", [0.0, 0.0]
    batches = [rows_of(rows) for rows in FITTED]
    try:
        for counted_model, share in shares:
            with fake_pass(counted_model, device=device, half=half, rounded=rounded) as losses_of:
                for number, batch in enumerate(batches):
                    saved[number] += share * saved_bytes(counted_model, partial(losses_of, objective, batch))
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RefusedError(
            f"--batch.micro_size auto: cannot estimate the memory of a row, the forward pass does not run on fake "
            f"tensors ({type(error).__name__}: {first}); allowed: a number"
        ) from error
    few, more = map(round, saved)
    row = (more - few) // (FITTED[1] - FITTED[0])
    return Need(fixed=max(0, few - row * FITTED[0]), row=max(1, row))


def state_bytes(engine_name: str, stage: int | None, ranks: int) -> float:
    """Return the bytes per parameter of fp32 weights, gradients and two moments on one rank (benchmarks/memory.py).

    16 in all. FSDP2 shards them over the ranks. ZeRO-1 and 2 keep weights and gradients whole and shard 12 bytes (a
    second copy of the weights, and the moments). ZeRO-3 keeps the weights twice."""
    if engine_rules(engine_name).shards_everything:
        return 16 / ranks
    if stage in (1, 2):
        return 8 + 12 / ranks
    if stage == 3:
        return 20 / ranks
    return 16


def static_gradient_bytes(config: Config, ranks: int) -> float:
    """Return the bytes per parameter of the fp32 gradients that outlive CUDA graphs. The graphs compute others.

    Args:
        ranks: ranks that share the gradients.
    """
    return 4 / ranks if config.training.capture == "on" else 0.0


def first_rows(upstream: Upstream, count: int) -> Batch:
    """Return the first `count` rows of the data order as a batch of worst-case size."""
    return upstream.worst_case_batch(upstream.sources.train.first_rows(count))
