"""Small random batches with uneven task counts, made from positions alone, and a run over them on any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checkpoints import save_checkpoint
from tests.settings import changed
from trp_scale.checkpoint.document import CheckpointDocument
from trp_scale.checkpoint.manager import load
from trp_scale.config import BatchConfig, Config, OptimizerConfig, PretrainConfig, PretrainTrainingConfig
from trp_scale.config.registry import engine_rules, make_settings
from trp_scale.core.batch import Batch, StepStats, TaskLosses
from trp_scale.core.engine import Engine, Stores
from trp_scale.core.hooks import Hook, StepContext, build_hooks
from trp_scale.core.run import RunContext
from trp_scale.data.text.dataset import GROUPS
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError
from trp_scale.models.initialise import build_with_initialisers
from trp_scale.pretraining.pos_bert.batch import kept_positions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertModelConfig, PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling, make_objective
from trp_scale.pretraining.pos_bert.weights import MODELS
from trp_scale.pretraining.tasks import SOURCE, has_sources
from trp_scale.training.decisions import StepAgreement
from trp_scale.training.loop import Trainer
from trp_scale.training.pretrain import build_second_engine

VOCABULARY = 90
LENGTH = 16
MASKED = 4
INTERJECTION = GROUPS.index("interjection")
ADVERB = GROUPS.index("adverb")


def row(position: int, absent: tuple[int, ...]) -> dict[str, Tensor]:
    """One row: a function of its position. Groups are drawn unevenly; those in `absent` never."""
    generator = torch.Generator().manual_seed(1000 + position)
    share = torch.tensor([4.0, 6.0, 1.5, 1.0, 0.5, 0.5, 1.0, 0.3, 0.1, 2.0])
    share[list(absent)] = 0.0
    length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
    valid = (torch.arange(MASKED) < int(torch.randint(1, MASKED + 1, (), generator=generator))).float()
    return {
        "tokens": torch.randint(0, VOCABULARY, (LENGTH,), generator=generator),
        "token_types": (torch.arange(LENGTH) > length // 2).long(),
        "attention_mask": torch.arange(LENGTH) < length,
        "masked_positions": torch.randperm(length, generator=generator)[:MASKED].sort().values,
        "labels": torch.randint(0, VOCABULARY, (MASKED,), generator=generator),
        "label_groups": torch.multinomial(share, MASKED, replacement=True, generator=generator),
        "label_weights": valid,
        "next_sentence": torch.randint(0, 2, (), generator=generator),
        "row_weights": torch.tensor(1.0),
    }


def stack_rows(rows: list[dict[str, Tensor]], positions: range) -> Batch:
    fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return Batch(fields=fields, keys=torch.tensor(list(positions)), start=positions[0])


SOURCES = ("books", "news", "notes")


def row_source(position: int) -> int:
    """Number of the row's source: books 6, news 3 and notes 1 of ten rows on average."""
    generator = torch.Generator().manual_seed(5000 + position)
    return int(torch.multinomial(torch.tensor([6.0, 3.0, 1.0]), 1, generator=generator))


def add_sources(rows: Batch, config: Config) -> Batch:
    """The batch with the source of each row if the run's tasks are by source."""
    if not (isinstance(config, PretrainConfig) and has_sources(config)):
        return rows
    sources = torch.tensor([row_source(position) for position in rows.keys.tolist()])
    return replace(rows, fields={**rows.fields, SOURCE: sources})


def pack(rows: Batch) -> Batch:
    """The batch as packed rows: each row is two segments and padding."""
    fields = dict(rows.fields)
    ends = fields.pop("attention_mask").sum(1)
    del fields["kept"]
    return replace(rows, fields={**fields, "segment_ends": torch.stack([ends // 2 - rows.keys % 3, ends, ends], dim=1)})


def batch(positions: range, absent: tuple[int, ...] = ()) -> Batch:
    """Rows at `positions` as one micro-batch."""
    rows = stack_rows([row(position, absent) for position in positions], positions)
    rows.fields["kept"] = torch.from_numpy(kept_positions(rows["attention_mask"].numpy()))
    return rows


@dataclass
class SyntheticWindows:
    """Serves the slices of global batches that a real source would."""

    config: Config
    group: Group
    cursor: int = 0

    def micro_batch(self, positions: range, step: int) -> Batch:
        raise NotImplementedError

    def next_window(self) -> list[Batch]:
        size, micro = self.config.batch.global_size, self.config.batch.micro_size
        step, first = self.cursor // size, self.cursor + self.group.rank * size // self.group.size
        self.cursor += size
        starts = range(first, first + size // self.group.size, micro)
        return [add_sources(self.micro_batch(range(start, start + micro), step), self.config) for start in starts]


@dataclass
class SyntheticSource(SyntheticWindows):
    """Attributes: absent: of a step, the groups that its whole global batch lacks."""

    absent: Callable[[int], tuple[int, ...]] = lambda step: ()
    packed: bool = False

    def micro_batch(self, positions: range, step: int) -> Batch:
        rows = batch(positions, self.absent(step))
        return pack(rows) if self.packed else rows


class SilentObserver:
    """Takes no notes."""

    enabled = False

    def message(self, text: str) -> None: ...


@dataclass(kw_only=True)
class Layout:
    """How a run is split. `stage`: ZeRO stage for deepspeed. `settings`: sections that go with it."""

    engine: str = "plain"
    stage: int | None = None
    micro_size: int = 2
    document: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def hybrid(shard_ranks: int, **layout: Any) -> Layout:
    """FSDP2 with a copy on each `shard_ranks` ranks."""
    return Layout(engine="fsdp", settings={"fsdp": {"shard_ranks": shard_ranks}}, **layout)


TWO_RANKS = {
    "ddp": Layout(engine="ddp"),
    "fsdp": Layout(engine="fsdp"),
    "hybrid": hybrid(1),
    "zero0": Layout(engine="deepspeed", stage=0),
    "zero1": Layout(engine="deepspeed", stage=1),
    "zero2": Layout(engine="deepspeed", stage=2),
    "zero3": Layout(engine="deepspeed", stage=3),
}
"""Every engine on two ranks, two micro-batches each."""
SPLITS = {"accumulation 1": Layout(micro_size=8), "accumulation 2": Layout(micro_size=4), **TWO_RANKS}
"""Of a global batch of eight."""


def small_config(layout: Layout, **changes: Any) -> Config:
    """A two-layer BERT at a full learning rate; `changes` are section dicts, such as balancer={"kind": "uniform"}."""
    config = PosBertConfig(
        model=PosBertModelConfig(
            layers=2, hidden_size=32, heads=2, intermediate_size=64, max_positions=LENGTH, dropout=0.0
        ),
        objective=PosBertObjectiveConfig(),
        batch=BatchConfig(global_size=8, micro_size=layout.micro_size),
        training=PretrainTrainingConfig(steps=8, seed=3),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant"),
        balancer=make_settings("balancer", "minimax"),
    )
    return changed(config, **{**layout.settings, **changes})


def data_group(config: Config | None = None) -> Group:
    """All ranks of the process group, or this process alone; those that split the batch of a tensor parallel run."""
    if config is not None and config.megatron.tensor_parallel > 1:
        from trp_scale.engines.megatron import megatron_groups

        return megatron_groups(config.megatron.tensor_parallel, local_world=dist.get_world_size())[0]
    if dist.is_initialized():
        return Group("data", rank=dist.get_rank(), size=dist.get_world_size())
    return Group("data")


def engine_of(layout: Layout, module: nn.Module, config: Config, group: Group, *, second: bool = False) -> Engine:
    """A model in the engine of a layout. `second`: as that of a masking network."""
    build = partial(build_second_engine, layout.engine) if second else engine_rules(layout.engine).build
    document = {"zero_optimization": {"stage": layout.stage}, **deepcopy(layout.document)}
    given = None if layout.stage is None else document
    engine: Engine = build(module, config, device=torch.device("cpu"), data_group=group, ds_document=given)
    return engine


def make_engine(layout: Layout, config: Config, group: Group) -> tuple[Engine, PosMaskedLanguageModelling]:
    """The engine of a layout with the small model in it, made as a run makes it."""
    module = build_with_initialisers(
        lambda: MODELS[config.model.kind](config.model, vocab_size=VOCABULARY, seed=config.training.seed)
    )
    return engine_of(layout, module, config, group), make_objective(config, GROUPS)


def small_engine(layout: Layout, **changes: Any) -> Engine:
    """The engine of a layout with the small model in it."""
    return make_engine(layout, small_config(layout, **changes), data_group())[0]


def refusal(layout: Layout, make: Callable[..., object] = small_engine, *arguments: Any, **named: Any) -> str:
    """Return the message with which `make` refuses a layout, empty if it does not. For shared ranks: those that raise
    are started again."""
    try:
        make(layout, *arguments, **named)
    except RefusedError as error:
        return str(error)
    return ""


@dataclass(kw_only=True)
class Result:
    """What a run gave. `weights` and `initial` are on rank 0 only; `steps` holds the stats of every step."""

    weights: dict[str, Tensor]
    initial: dict[str, Tensor]
    steps: list[StepStats]
    moved: bool


class RecordingTrainer(Trainer):
    """Keeps the stats of every step; whoever asks for them waits."""

    @classmethod
    def over(cls, run: RunContext, source: Any, others: Sequence[Hook] = ()) -> RecordingTrainer:
        """A trainer of a run over a source, whose messages nobody hears; `others` are hooks beside the balancer."""
        return cls(
            run_context=run,
            hooks=build_hooks(run, others) if others else build_hooks(run),
            source=source,
            observer=SilentObserver(),  # type: ignore[arg-type]
            agreement=StepAgreement(data_group(), 0, copies=run.config.megatron.tensor_parallel),
        )

    def spoil(self, change: Callable[[TaskLosses], TaskLosses]) -> None:
        """Have every pass find other losses."""
        objective = self.objective
        functions = {
            "__call__": lambda _, forward, batch: change(objective(forward, batch)),
            "__getattr__": lambda _, name: getattr(objective, name),
        }
        self.run_context = replace(self.run_context, objective=type("Spoilt", (), functions)())

    def result(self, renamed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights) -> Result:
        """Train to the end and close the engine; what came of it, with weights by other names."""
        initial = self.engine.full_weights()
        self.run()
        return self.end(initial, renamed)

    def end(self, initial: dict[str, Tensor], renamed: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Result:
        """Close the engine; what came of the steps since its weights were the initial ones."""
        weights = self.engine.full_weights()
        self.engine.close()
        moved = any(not torch.equal(weights[name], initial[name]) for name in weights)
        return Result(weights=renamed(weights), initial=renamed(initial), steps=self.history, moved=moved)

    @property
    def history(self) -> list[StepStats]:
        return [late.read() for late in self.__dict__.get("steps_made", [])]

    def finish(self, ctx: StepContext) -> bool:
        searched = super().finish(ctx)
        self.__dict__.setdefault("steps_made", []).append(ctx.late)
        return searched


def trainer_for(layout: Layout, config: Config, **source: Any) -> RecordingTrainer:
    """A trainer over synthetic rows."""
    group = data_group(config)
    engine, objective = make_engine(layout, config, group)
    run = RunContext(config=config, objective=objective, engine=engine)
    return RecordingTrainer.over(run, SyntheticSource(config, group, **source))


def run(
    layout: Layout,
    changes: dict[str, Any],
    absent: Callable[[int], tuple[int, ...]] = lambda step: (),
    packed: bool = False,
) -> Result:
    """Train the small model; call on all ranks."""
    return trainer_for(layout, small_config(layout, **changes), absent=absent, packed=packed).result()


def save_trainer(
    trainer: Any, run_dir: Path, engines: Stores | None = None, cursors: Mapping[str, int] | None = None
) -> Path:
    """Write a checkpoint of a trainer over synthetic rows, of all `engines` of the run where there are several."""
    return save_checkpoint(
        run_dir,
        step=trainer.state.step,
        engine=engines or trainer.engine,
        hooks_state=trainer.hooks.state_dict(),
        cursors=cursors or {"train": trainer.source.cursor},
        group=data_group(),
    )


def load_trainer(trainer: Any, path: Path, engines: Any = None) -> CheckpointDocument:
    """Have a trainer that was made anew go on from a checkpoint, which is returned: it has the cursors of other sources
    than the trainer's own."""
    loaded = load(path, engine=engines or trainer.engine, group=data_group())
    trainer.hooks.load_state_dict(loaded.hooks)
    trainer.state.step = loaded.step
    getattr(trainer.source, "own", trainer.source).cursor = loaded.cursors["train"]
    return loaded
