"""Section of benchmarks/gpu.py on MM-MAE: agreement with GradNorm's taps, waits, cost of each balancer, speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from benchmarks.balancing_cost import BALANCING, CLASSES, random_modalities
from benchmarks.gpu_image_speed import best_speed
from benchmarks.gpu_images import COMPARED, without_key_biases
from benchmarks.gpu_items import Figures, Item
from benchmarks.gpu_parity import EXPECTED_WAITS, FEW_STEPS, STEPS, Trained, apart, waits_of
from benchmarks.gpu_setting import Notes, Precision, Setting, engine_with, lacking, loop_over
from benchmarks.image_steps import EncoderSize, resized
from benchmarks.minimax_overhead import rows_of
from benchmarks.rounds import alternate, pair_ratio
from trp_scale.config import Config
from trp_scale.config.settings import Settings
from trp_scale.core.engine import Engine
from trp_scale.recipes.loader import load_recipe
from trp_scale.training.loop import Trainer
from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.upstreams.mm_mae.objective import MultimodalReconstruction
from trp_scale.upstreams.mm_mae.upstream import mm_mae_step_flops

ROWS = (64, 128, 256)
"""Images of a micro-batch that are tried."""


def modality_config(
    setting: Setting,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    balancer: str = "minimax",
) -> Config:
    """MM-MAE's recipe without end at a constant learning rate."""
    config = resized(load_recipe("mm_mae_vit_b_in1k_400"), size)
    if setting.small:
        config.model.layers, config.model.hidden_size, config.model.heads = 2, 32, 2
        config.model.intermediate_size = 64
        config.vision.decoder_layers, config.vision.decoder_hidden_size, config.vision.decoder_heads = 1, 16, 2
        config.crops.size, config.modalities.visible_tokens = 64, 8
    config.balancer = replace(BALANCING[balancer][0])
    config.batch.global_size, config.batch.micro_size = rows * accumulation, rows
    config.training.steps, config.training.precision = 10**9, precision
    config.optimizer.warmup_steps, config.optimizer.schedule, config.optimizer.lr = 0, "constant", 1e-4
    return config


def modality_trainer(engine: Engine, config: Config) -> Trainer:
    """The real loop over the same random images at every step, pinned where there is a GPU."""
    rows, micro = config.batch.global_size, config.batch.micro_size
    whole = random_modalities(config, rows)
    window = [rows_of(whole, first, first + micro) for first in range(0, rows, micro)]
    if engine.device.type == "cuda":
        window = [part.pin_memory() for part in window]
    return loop_over(engine, config, MultimodalReconstruction(config), window)


@contextmanager
def training(setting: Setting, layout: str, config: Config) -> Iterator[Trainer]:
    """A trainer on a layout; the engine is closed at the end."""
    engine = engine_with(setting, layout, MultimodalMaskedAutoencoder(config, {"semseg": CLASSES}), config)
    try:
        yield modality_trainer(engine, config)
    finally:
        engine.close()


def speed(setting: Setting) -> Figures:
    """Images per second of the whole loop, use of the device's peak, and peak memory, at the best size tried."""

    def config(rows: int) -> Config:
        return modality_config(setting, size="base", rows=rows)

    def flops(rows: int, computed: bool) -> float:
        return mm_mae_step_flops(config(rows), rows=rows, classes={"semseg": CLASSES}, computed=computed)

    return best_speed(setting, ROWS, lambda rows: training(setting, "plain", config(rows)), flops)


def overheads(setting: Setting) -> Figures:
    """Each balancer's step over uniform's, ViT-B, median of ratios within a round."""
    rows = 2 if setting.small else 64
    steps = {}
    for balancer in BALANCING:
        config = modality_config(setting, size="base", rows=rows, balancer=balancer)
        engine = engine_with(setting, "plain", MultimodalMaskedAutoencoder(config, {"semseg": CLASSES}), config)
        steps[balancer] = modality_trainer(engine, config).train_step
    measured = alternate(steps, rounds=2 if setting.small else 20, warmup=3)
    base = measured["uniform"].walls
    ratios = {f"{name}_over_uniform": pair_ratio(one.walls, base).median for name, one in measured.items()}
    return {"images": rows, "uniform_step_ms": measured["uniform"].wall * 1e3, **ratios}


def checked_config(setting: Setting, precision: Precision, balancer: Settings | None = None) -> Config:
    """A small model that is trained many times, two micro-batches a step."""
    rows = 2 if setting.small else 16
    config = modality_config(setting, size="tiny", rows=rows, accumulation=2, precision=precision, balancer="gradnorm")
    config.balancer = balancer or config.balancer
    config.model.layers, config.optimizer.lr = min(config.model.layers, 4), 1e-3
    return config


def waited(setting: Setting, balancer: str) -> Figures:
    """How often a step waits for the GPU."""
    config = checked_config(setting, "bf16", BALANCING[balancer][0])
    with training(setting, "plain", config) as trainer:
        for _ in range(3):
            trainer.train_step()
        places = waits_of(trainer.train_step)
    expected = len(places) == EXPECTED_WAITS
    return {"waits": len(places), "places": places, "expected": EXPECTED_WAITS, "as_expected": expected}


def train(setting: Setting, layout: str, precision: Precision) -> Trained:
    """A few steps with GradNorm; the weights without the key biases, which attention does not see."""
    with training(setting, layout, checked_config(setting, precision)) as trainer:
        initial = without_key_biases(trainer.engine.full_weights())
        for _ in range(FEW_STEPS if setting.small else STEPS):
            trainer.train_step()
        assert isinstance(trainer.observer, Notes)
        weights = without_key_biases(trainer.engine.full_weights())
        return Trained(losses=trainer.observer.losses, initial=initial, weights=weights)


def parity(setting: Setting) -> Iterator[Item]:
    """Weights of the engines against plain on one rank."""
    references: dict[str, Trained] = {}

    def reference(precision: Precision) -> Figures:
        references[precision] = train(setting, "plain", precision)
        return {"losses": references[precision].losses}

    def compare(layout: str, precision: Precision) -> Figures:
        if precision not in references:
            raise RuntimeError(f"plain did not train in {precision}: nothing to compare with")
        trained = train(setting, layout, precision)
        return {"losses": trained.losses, **apart(trained, references[precision])}

    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        yield Item(name=f"gradnorm, {precision}, plain", measure=partial(reference, precision), seconds=6)
        for layout in COMPARED:
            measure = partial(compare, layout, precision)
            name = f"gradnorm, {precision}, {layout}"
            yield Item(name=name, measure=measure, seconds=6, lacking=lacking(layout))


def modalities(setting: Setting) -> Iterator[Item]:
    """Agreement and waits first, then figures."""
    yield from parity(setting)
    for balancer in BALANCING:
        measure = partial(waited, setting, balancer)
        yield Item(name=f"waits, {balancer}", measure=measure, seconds=5, lacking=setting.no_gpu)
    yield Item(name="balancers over uniform", measure=partial(overheads, setting), seconds=30)
    yield Item(name="MM-MAE ViT-B/16", measure=partial(speed, setting), seconds=15)
