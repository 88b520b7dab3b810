"""Where benchmarks/gpu.py measures, on which models, and the engines and training loops it measures there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import Notes, Precision, Workload, endless, trainer_of
from benchmarks.text_steps import small_bert, text_workload
from trp_scale.config import TextModelConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.registry import make_settings
from trp_scale.config.settings import Settings
from trp_scale.core.engine import Engine
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.loop import Trainer

ROOT = Path(__file__).resolve().parent.parent
ENGINES: dict[str, int | None] = {
    "plain": None,
    "ddp": None,
    "fsdp": None,
    "zero0": 0,
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
}
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
        return small_bert(dropout=0.0)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of a row -> masked positions (15 %)."""
        return {8: 2, 32: 5} if self.small else {128: 19, 512: 77}

    @property
    def rounds(self) -> int:
        """Measured steps of each of several candidates."""
        return 2 if self.small else 15


def lacking(layout: str) -> str:
    """Why a layout cannot run here, or ""."""
    if ENGINES[layout] is not None and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""


def text_config(
    model: TextModelConfig,
    *,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    balancer: Settings | None = None,
    lr: float = 1e-4,
) -> PosBertConfig:
    """Settings of PoS-BERT without end."""
    config = PosBertConfig(model=model, balancer=balancer or make_settings("balancer", "uniform"))
    config.optimizer.lr = lr
    return endless(config, rows, accumulation=accumulation, precision=precision)


def text(setting: Setting, model: TextModelConfig, length: int = 0, **settings: Any) -> Workload:
    """PoS-BERT over sequences of one of the setting's lengths, the shortest if it is 0; `settings` of `text_config`."""
    length = length or min(setting.lengths)
    return text_workload(text_config(model, **settings), length, setting.lengths[length])


def shrink(setting: Setting, config: ImagePretrainConfig) -> None:
    """A small setting's model in place of the recipe's."""
    if setting.small:
        model, vision = config.model, config.vision
        model.layers, model.hidden_size, model.heads, model.intermediate_size = 2, 32, 2, 64
        vision.decoder_layers, vision.decoder_hidden_size, vision.decoder_heads = 1, 16, 2


def engine_of(setting: Setting, layout: str, work: Workload, device: torch.device | None = None) -> Engine:
    """The engine of a layout on one rank, the model in it."""
    stage = ENGINES[layout]
    if layout != "plain":
        setting.environment.ensure_process_group()
    document = None
    if stage is not None:
        shipped = ROOT / "ds_configs" / f"zero{stage}.json"
        document = json.loads(shipped.read_text()) if shipped.exists() else {"zero_optimization": {"stage": stage}}
    return build_engine(
        layout if stage is None else "deepspeed",
        work.module,
        work.config,
        device=device or setting.device,
        data_group=setting.environment.data,
        ds_document=document,
        ds_path=layout,
    )


@contextmanager
def training(setting: Setting, layout: str, work: Workload, device: torch.device | None = None) -> Iterator[Trainer]:
    """A trainer on a layout that keeps its losses; the engine is closed at the end."""
    engine = engine_of(setting, layout, work, device)
    try:
        yield trainer_of(engine, work, Notes())
    finally:
        engine.close()


def step_of(setting: Setting, work: Workload) -> Callable[[], object]:
    """A step of the real loop on the plain engine."""
    return trainer_of(engine_of(setting, "plain", work), work).train_step
