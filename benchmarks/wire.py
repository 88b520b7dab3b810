"""What travels between two ranks in a training step, on each engine, and what a second rank is worth.

    python benchmarks/wire.py [--model mae] [--layers 4 --hidden_size 256 --rows 16] [--engines ddp tp2 ...]
        [--rounds 9] [--half]

tp1 and tp2 are --engine megatron with one and two ranks to a matrix; in tp2sp the two split the tokens.

Counted: collectives of a step and their payload in bytes a parameter, for one and for four micro-batches. On the wire,
of many ranks, an all-reduce is twice its payload, a gather or a reduce-scatter once. The loss sums, the agreement of
the ranks and the like are among the collectives; their bytes are too few to show.

Timed with --rounds: steps of `rows` on one rank alone alternate with steps of 2 x `rows` on both, one thread each;
"2 ranks / 1" is rows a second of both over rows a second of the one, median over the rounds, of 2 at best.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_setting import ENGINES, Setting, engine_of
from benchmarks.rounds import on_ranks
from benchmarks.steps import Precision, Workload, endless, trainer_of, whole_step
from benchmarks.workloads import LENGTH, build_workload, random_batch, random_images, set_encoder, text_config
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.distributed.environment import Environment
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertModelConfig
from trp_scale.training.loop import Trainer

ACCUMULATIONS = (1, 4)
"""Micro-batches of a step."""
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "gather",
    "reducescatter": "scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
}
"""Part of an operation's name -> column. The first part that is in a name counts, so that "reduce" comes late."""


TENSOR = {"tp1": 1, "tp2": 2, "tp2sp": 2}
"""Ranks that share each large matrix, by the name of a layout; with sp they split the tokens."""


@dataclass(kw_only=True)
class Options:
    """A model, and what to do with it."""

    model: Literal["bert", "mae"] = "bert"
    """bert; or mae: a masked autoencoder with relative positions over two crops of 49 patches, all of which enter the
    encoder, and a decoder of two blocks."""
    layers: int = 4
    """Transformer blocks, of the encoder."""
    hidden_size: int = 256
    """Width; a head is 64."""
    rows: int = 16
    """Of a micro-batch."""
    engines: list[str] = field(default_factory=lambda: [*(name for name in ENGINES if name != "plain"), *TENSOR])
    """Which ones."""
    shard_ranks: int = 0
    """Of fsdp: ranks that share one copy; 0: all."""
    half: bool = False
    """Weights that forwards read, and gradients that are sent, in bf16; of ddp and fsdp."""
    rounds: int = 0
    """Timed rounds of each; 0: only counted."""


class CountsCollectives(TorchDispatchMode):
    """Collectives and their bytes by kind; a collective's payload is the largest of its tensors or lists of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        space, _, name = function.name().partition("::")
        if space == "c10d":
            plain = name.replace("_base_", "").replace("_", "")
            kind = next((word for part, word in KINDS.items() if part in plain), name)
            self.calls[kind] += 1
            self.bytes[kind] += max(
                sum(each.nbytes for each in tree_leaves(one) if isinstance(each, Tensor)) for one in arguments
            )
        return function(*arguments, **(named or {}))


def workload(options: Options, world: int, accumulation: int = 1) -> Workload:
    """A rank's `accumulation` micro-batches of a run on `world` ranks."""
    precision: Precision = "bf16" if options.half else "fp32"
    own = options.rows * accumulation
    if options.model == "mae":
        images = autoencoder(options, accumulation * world, precision)
        work = replace(build_workload(images), rows=random_images(images, own))
    else:
        work = replace(build_workload(bert(options, accumulation * world, precision)), rows=random_batch(own))
    work.config.training.weights = work.config.training.gradients = precision
    work.config.fsdp.shard_ranks = options.shard_ranks
    return work


def bert(options: Options, micro_batches: int, precision: Precision) -> PosBertConfig:
    """Settings of a run whose step has so many micro-batches over all ranks."""
    model = set_encoder(PosBertModelConfig(max_positions=LENGTH, dropout=0.0), options.layers, options.hidden_size)
    return text_config(model, rows=options.rows, accumulation=micro_batches, precision=precision)


def autoencoder(options: Options, micro_batches: int, precision: Precision) -> MaeConfig:
    """The same of a masked autoencoder: the small recipe's, without its adversary."""
    config = load_recipe("adpe_tiny")
    assert isinstance(config, MaeConfig)
    set_encoder(config.model, options.layers, options.hidden_size)
    config.adversary = make_settings("adversary", "none")
    return endless(config, options.rows, accumulation=micro_batches, precision=precision)


def trainer_on(environment: Environment, layout: str, work: Workload) -> Trainer:
    """The loop over the same rows at every step."""
    if layout in TENSOR:
        from trp_scale.engines.megatron import MegatronEngine, megatron_groups

        work.config.megatron.tensor_parallel = TENSOR[layout]
        work.config.megatron.sequence_parallel = layout.endswith("sp")
        environment.ensure_process_group()
        data, _ = megatron_groups(TENSOR[layout], local_world=environment.world.size)
        return trainer_of(MegatronEngine(work.module, work.config, device=environment.device, data_group=data), work)
    return trainer_of(engine_of(Setting(environment=environment, small=True), layout, work), work)


def counted(environment: Environment, layout: str, work: Workload) -> CountsCollectives:
    """The collectives of a step, after one that makes what is made once."""
    trainer = trainer_on(environment, layout, work)
    trainer.train_step()
    found = CountsCollectives()
    with found:
        trainer.train_step()
    trainer.engine.close()
    return found


def counted_of(
    environment: Environment, layout: str, options: Options, world: int, accumulation: int
) -> CountsCollectives:
    return counted(environment, layout, workload(options, world // TENSOR.get(layout, 1), accumulation))


def gain(environment: Environment, layout: str, options: Options) -> list[float]:
    """Rows a second of both ranks over those of rank 0 alone, round by round."""
    both, alone = trainer_on(environment, layout, workload(options, 2 // TENSOR.get(layout, 1))), None
    if environment.data.rank == 0:
        alone = whole_step(workload(options, 1), environment.device)
    found = []
    for number in range(options.rounds + 2):
        environment.world.barrier()
        began = time.perf_counter()
        if alone is not None:
            alone()
        one = time.perf_counter() - began
        environment.world.barrier()
        began = time.perf_counter()
        both.train_step()
        if number >= 2:
            found.append(2 * one / (time.perf_counter() - began))
    both.engine.close()
    return found


Answers = tuple[list[tuple[dict[str, int], dict[str, int]]], list[float]]
"""Calls and bytes by kind of each number of micro-batches; and what a second rank is worth."""


def measure(world: int, layout: str, options: Options) -> Answers:
    """Count on this rank, and time if asked."""
    with Environment() as environment:
        environment.ensure_process_group()
        counts = [counted_of(environment, layout, options, world, number) for number in ACCUMULATIONS]
        gains = gain(environment, layout, options) if options.rounds else []
        return [(dict(count.calls), dict(count.bytes)) for count in counts], gains


def measure_engines(world: int, options: Options) -> Iterator[tuple[str, Answers]]:
    """Yield each engine with the answers of a rank."""
    for layout in options.engines:
        yield layout, on_ranks(world, measure, world, layout, options)[0]


def main(options: Options) -> None:
    """Print a line for each engine and number of micro-batches."""
    parameters = sum(parameter.numel() for parameter in workload(options, 2).module.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, 2 ranks of 1 thread, {options.rows} rows a micro-batch")
    columns = [*KINDS.values()]
    print(f"{'engine':<7}{'micro':>6}{'calls':>7}" + "".join(f"{name + ' B/p':>16}" for name in columns), end="")
    print(f"{'on the wire B/p':>17}{'2 ranks / 1':>13}")
    for layout, (counts, gains) in measure_engines(2, options):
        for accumulation, (calls, payload) in zip(ACCUMULATIONS, counts, strict=True):
            each = {name: payload.get(name, 0) / parameters for name in columns}
            wire = sum(each.values()) + each["all-reduce"]
            worth = f"{median(gains):.2f}" if gains and accumulation == 1 else ""
            print(f"{layout:<7}{accumulation:>6}{sum(calls.values()):>7}", end="")
            print("".join(f"{each[name]:>16.2f}" for name in columns) + f"{wire:>17.2f}{worth:>13}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
