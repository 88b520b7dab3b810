"""Where benchmarks/gpu.py measures, on which models, and the engines and training loops it measures there."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.method_cost import BALANCING
from benchmarks.steps import Notes, Precision, Workload, endless, trainer_of
from benchmarks.workloads import MM_MAE, EncoderSize, build_workload, image_recipe, small_bert, text_config
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.registry import engine_rules, make_settings
from trp_scale.core.engine import Engine
from trp_scale.distributed.environment import Environment
from trp_scale.engines.captured import RECORDERS
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertModelConfig
from trp_scale.training.loop import Trainer
from trp_scale.training.observer import peak_flops

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
ADVERSARIES: dict[str, Literal["absolute", "relative"]] = {
    "absolute_coordinate": "absolute",
    "relative_coordinate": "relative",
}
"""vision.positions of each."""
NEEDS_GPU = "needs a GPU, this machine shows none"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Attributes:
    environment: device and process group.
    small: tiny models and few repetitions, to try the script itself.
    data: directory of the data of sections `ranks` and `curves`.
    steps: of a run of section `curves`.
    ranks: processes of a run of section `ranks`, two or one.
    nccl: library that is preloaded for two ranks; `None`: torch's.
    """

    environment: Environment
    small: bool
    data: Path = ROOT / "build" / "gpu_data"
    steps: int = 1000
    ranks: int = 2
    nccl: Path | None = None

    @property
    def device(self) -> torch.device:
        return self.environment.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def no_gpu(self) -> str:
        return "" if self.on_gpu else NEEDS_GPU

    @property
    def cannot_capture(self) -> str:
        return "" if self.device.type in RECORDERS else NEEDS_GPU

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @property
    def base(self) -> PosBertModelConfig:
        """BERT-base; the model whose speed and memory are measured."""
        if self.small:
            return PosBertModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64, max_positions=64)
        return PosBertModelConfig()

    @property
    def checked(self) -> PosBertModelConfig:
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
        return 2 if self.small else 15


def lacking(layout: str) -> str:
    """Why a layout cannot run here, or ""."""
    if ENGINES[layout] is not None and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""


def text(setting: Setting, model: PosBertModelConfig, length: int = 0, **settings: Any) -> Workload:
    """PoS-BERT over sequences of one of the setting's lengths, the shortest if it is 0; `settings` of `text_config`."""
    length = length or min(setting.lengths)
    return build_workload(text_config(model, **settings), length, setting.lengths[length])


def shrink(setting: Setting, config: ImagePretrainConfig) -> None:
    """A small setting's model in place of the recipe's."""
    if setting.small:
        model, vision = config.model, config.vision
        model.layers, model.hidden_size, model.heads, model.intermediate_size = 2, 32, 2, 64
        vision.decoder_layers, vision.decoder_hidden_size, vision.decoder_heads = 1, 16, 2


def image_config(
    setting: Setting,
    recipe: str,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    kind: str = "none",
) -> MaeConfig:
    """A recipe without end; relative positions have the relaxed index with and without an adversary, so that both do
    the same arithmetic."""
    config = image_recipe(recipe, MaeConfig, size)
    shrink(setting, config)
    if setting.small:
        config.crops.size, config.vision.patch_size = (64, 16) if recipe.startswith("mae_vit") else (32, 8)
    config.vision.index, config.adversary = "relaxed", make_settings("adversary", kind)
    config.vision.positions = ADVERSARIES.get(kind, "absolute")
    config.optimizer.lr = 1e-4
    return endless(config, rows, accumulation=accumulation, precision=precision)


def modality_config(
    setting: Setting,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    balancer: str = "minimax",
) -> MmMaeConfig:
    """MM-MAE's recipe without end."""
    config = image_recipe(MM_MAE, MmMaeConfig, size)
    shrink(setting, config)
    if setting.small:
        config.crops.size, config.modalities.visible_tokens = 64, 8
    config.balancer, config.optimizer.lr = replace(BALANCING[balancer][0]), 1e-4
    return endless(config, rows, accumulation=accumulation, precision=precision)


def deepspeed_document(stage: int) -> dict[str, Any]:
    """Return the shipped file of a ZeRO stage, or a minimal one where none is shipped."""
    shipped = ROOT / "ds_configs" / f"zero{stage}.json"
    return json.loads(shipped.read_text()) if shipped.exists() else {"zero_optimization": {"stage": stage}}


def engine_of(setting: Setting, layout: str, work: Workload, device: torch.device | None = None) -> Engine:
    """The engine of a layout on one rank, the model in it."""
    stage = ENGINES[layout]
    if layout != "plain":
        setting.environment.ensure_process_group()
    engine: Engine = engine_rules(layout if stage is None else "deepspeed").build(
        work.module,
        work.config,
        device=device or setting.device,
        data_group=setting.environment.data,
        ds_document=None if stage is None else deepspeed_document(stage),
        ds_path=layout,
    )
    return engine


@contextmanager
def training(setting: Setting, layout: str, work: Workload, device: torch.device | None = None) -> Iterator[Trainer]:
    """A trainer on a layout that keeps its losses; the engine is closed at the end."""
    engine = engine_of(setting, layout, work, device)
    try:
        yield trainer_of(engine, work, Notes())
    finally:
        engine.close()


MEGABYTE = 2**20
SHOWN = 20
"""Longest list that is printed; the JSON file has longer ones."""


Value: TypeAlias = "float | int | bool | str | list[float] | list[str] | None"


Figures: TypeAlias = "dict[str, Value]"
"""Figures by name with the unit in the name; None where a figure cannot be measured here."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure.

    Attributes:
        name: unique in its section.
        measure: returns the figures by name, units in the names.
        seconds: how long it is expected to take on one H200; an item that does not fit into what is left is skipped.
        lacking: why it cannot be measured here ("deepspeed is not installed"); empty when it can.
        timed: its figures are times, which anything beside it on the GPU would change.
    """

    name: str
    measure: Callable[[], Figures]
    seconds: float
    lacking: str = ""
    timed: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What became of an item.

    Attributes:
        figures: by name; empty when nothing was measured.
        reason: why nothing was measured, or "".
        failed: it raised, or its figure `as_expected` is False; a lacking GPU or library is no failure.
        seconds: how long it took.
    """

    section: str
    name: str
    figures: dict[str, Value] = field(default_factory=dict)
    reason: str = ""
    failed: bool = False
    seconds: float = 0.0

    def line(self) -> str:
        """One plain line."""
        start = f"{self.section}: {self.name}: "
        if self.reason:
            return f"{start}not measured: {self.reason}"
        return start + ", ".join(f"{name} {_shown(value)}" for name, value in self.figures.items())


def measured(section: str, item: Item, seconds_left: float) -> Outcome:
    """Measure an item; an error is reported and does not stop the others: time on a GPU is not had twice."""
    outcome = Outcome(section=section, name=item.name, reason=item.lacking)
    if not item.lacking and item.seconds > seconds_left:
        outcome.reason = f"skipped: takes about {item.seconds:.0f} s, {max(seconds_left, 0):.0f} s left of --seconds"
    if outcome.reason:
        return outcome
    began = time.perf_counter()
    try:
        for name, value in item.measure().items():
            outcome.figures[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        outcome.failed = outcome.figures.get("as_expected") is False
    except Exception as error:
        traceback.print_exc()
        outcome.failed, outcome.reason = True, f"{type(error).__name__}: {error}".partition("\n")[0]
    outcome.seconds = time.perf_counter() - began
    release_memory()
    return outcome


def release_memory() -> None:
    """Give back what nobody refers to any more, so that the next measurement finds the GPU empty."""
    if torch.cuda.is_available():  # nothing is short elsewhere, and looking for cycles takes 0.2 s each time
        gc.collect()
        torch.cuda.empty_cache()


def _shown(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list) and len(value) > SHOWN:
        return f"{len(value)} values"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(one) for one in value) + "]"
    return str(value)


def use_of_peak(setting: Setting, seconds: float, **flops: float) -> Figures:
    """Each of these numbers of FLOPs in so many seconds, as a share of what the device can do in bf16."""
    peak = peak_flops(setting.device_name, "bf16")
    return {name: count / seconds / peak if peak else None for name, count in flops.items()}
