"""Where benchmarks/gpu.py measures, on which models, and the engines and training loops it measures there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from benchmarks.minimax_overhead import SameWindow, rows_of
from benchmarks.step_time import VOCABULARY, random_batch
from trp_scale.config import BatchConfig, Config, OptimizerConfig, TextModelConfig, TrainingConfig
from trp_scale.config.components import settings_of
from trp_scale.config.settings import Settings
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, build_hooks
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.data.text.groups import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.build import build_engine
from trp_scale.observe.records import StepRecord
from trp_scale.training.loop import StepAgreement, Trainer
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

Precision = Literal["fp32", "bf16"]

ROOT = Path(__file__).resolve().parent.parent
ENGINES: dict[str, int | None] = {"plain": None, "fsdp": None, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage of each layout; None: not DeepSpeed's."""
NEEDS_GPU = "needs a GPU, this machine shows none"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Attributes:
    environment: device and process group.
    small: tiny models and few repetitions, to try the script itself.
    """

    environment: Environment
    small: bool

    @property
    def device(self) -> torch.device:
        return self.environment.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def no_gpu(self) -> str:
        """Why what needs a GPU is lacking, or ""."""
        return "" if self.on_gpu else NEEDS_GPU

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @property
    def base(self) -> TextModelConfig:
        """BERT-base; the model whose speed and memory are measured."""
        if self.small:
            return TextModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64, max_positions=64)
        return TextModelConfig()

    @property
    def checked(self) -> TextModelConfig:
        """A model small enough to train many times: its engines are compared, without dropout."""
        if self.small:
            return replace(self.base, dropout=0.0)
        return TextModelConfig(
            layers=4, hidden_size=256, heads=4, intermediate_size=1024, max_positions=128, dropout=0.0
        )

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of a row -> masked positions (15 %)."""
        return {8: 2, 32: 5} if self.small else {128: 19, 512: 77}

    @property
    def rounds(self) -> int:
        """Measured steps of each of several candidates."""
        return 2 if self.small else 15


@dataclass
class Notes:
    """Stands for the observer: keeps the losses of the steps."""

    enabled: bool = True
    losses: list[float] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """No hook is asked for its metrics: some of them would wait for the GPU."""
        return False

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)

    def message(self, text: str) -> None:
        """Nobody listens."""


def lacking(layout: str) -> str:
    """Why a layout cannot run here, or ""."""
    if ENGINES[layout] is not None and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""


def run_config(
    model: TextModelConfig,
    *,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    compiled: bool = False,
    balancer: Settings | None = None,
    lr: float = 1e-4,
) -> Config:
    """Settings of a run without end at a constant learning rate."""
    return PosBertConfig(
        model=model,
        batch=BatchConfig(global_size=rows * accumulation, micro_size=rows),
        training=TrainingConfig(steps=10**9, precision=precision, compile=compiled),
        optimizer=OptimizerConfig(warmup_steps=0, schedule="constant", lr=lr),
        balancer=balancer or settings_of("balancer", "uniform"),
    )


def engine_for(setting: Setting, layout: str, config: Config, device: torch.device | None = None) -> Engine:
    """The engine of a layout on one rank, BERT in it."""
    module = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=config.training.seed)
    return engine_with(setting, layout, module, config, device)


def engine_with(
    setting: Setting, layout: str, module: nn.Module, config: Config, device: torch.device | None = None
) -> Engine:
    """The engine of a layout on one rank with this model, which is on the CPU."""
    stage = ENGINES[layout]
    if layout != "plain":
        setting.environment.ensure_process_group()
    document = None
    if stage is not None:
        shipped = ROOT / "ds_configs" / f"zero{stage}.json"
        document = json.loads(shipped.read_text()) if shipped.exists() else {"zero_optimization": {"stage": stage}}
    return build_engine(
        layout if stage is None else "deepspeed",
        module,
        config,
        device=device or setting.device,
        data_group=setting.environment.data,
        ds_document=document,
        ds_path=layout,
    )


def window_for(config: Config, length: int, masked: int, *, pin: bool) -> list[Batch]:
    """The micro-batches of one step, in host memory as the loader gives them: pinned where there is a GPU."""
    rows = config.batch.global_size
    whole = random_batch(rows, length, masked)
    parts = [
        rows_of(whole, first, first + config.batch.micro_size) for first in range(0, rows, config.batch.micro_size)
    ]
    return [part.pin_memory() for part in parts] if pin else parts


def trainer_for(engine: Engine, config: Config, window: list[Batch]) -> Trainer:
    """The real loop over the same window of text at every step."""
    return loop_over(
        engine, config, PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size), window
    )


def loop_over(
    engine: Engine, config: Config, objective: Objective, window: list[Batch], others: Sequence[Hook] = ()
) -> Trainer:
    """The real loop over the same window at every step, with the balancer and other hooks."""
    engine.train(True)
    run = RunContext(config=config, objective=objective, engine=engine)
    return Trainer(
        run_context=run,
        hooks=build_hooks(run, others),
        source=SameWindow(window),
        observer=Notes(),  # type: ignore[arg-type]
        agreement=StepAgreement(ALONE, 0),
        save=lambda: None,
        validate=lambda: None,
        stop_requested=lambda: None,
    )


@contextmanager
def training(
    setting: Setting, layout: str, config: Config, *, length: int, device: torch.device | None = None
) -> Iterator[Trainer]:
    """A trainer on a layout at one of the setting's lengths; the engine is closed at the end."""
    engine = engine_for(setting, layout, config, device)
    try:
        pin = engine.device.type == "cuda"
        yield trainer_for(engine, config, window_for(config, length, setting.lengths[length], pin=pin))
    finally:
        engine.close()
