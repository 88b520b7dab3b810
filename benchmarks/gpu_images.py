"""Section of benchmarks/gpu.py on images, of MAE, MAE+ and AdPE: agreement, waits, the adversary's cost, speed, memory.

An adversary here ascends by `sgd` where runs are compared: the other rules divide by a gradient's size, and so make of
rounding near zero a whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from benchmarks.gpu_image_speed import best_speed
from benchmarks.gpu_items import Figures, Item
from benchmarks.gpu_parity import EXPECTED_WAITS, FEW_STEPS, STEPS, Trained, apart, waits_of
from benchmarks.gpu_setting import Notes, Precision, Setting, engine_with, lacking, loop_over
from benchmarks.gpu_speed import SAME_LOSS
from benchmarks.image_steps import EncoderSize, random_images, resized
from benchmarks.mae_step_time import our_step, peer_step
from benchmarks.minimax_overhead import rows_of
from benchmarks.rounds import alternate, pair_ratio
from trp_scale.config import Config
from trp_scale.config.components import settings_of
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import built
from trp_scale.core.run import RunContext
from trp_scale.observe.throughput import mae_step_flops
from trp_scale.recipes.loader import load_recipe
from trp_scale.training.loop import Trainer
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.objective import MaskedPatchReconstruction

MODELS: dict[str, tuple[str, EncoderSize, tuple[int, ...]]] = {
    "MAE ViT-B/16": ("mae_vit_b", "base", (128, 256, 512)),
    "MAE ViT-L/16": ("mae_vit_l", "large", (64, 128, 256)),
    "MAE+ ViT-B/16": ("mae_plus_vit_b", "base", (64, 128, 256)),
}
"""Recipe, encoder, and images of a micro-batch that are tried."""
PAIRS = 50
"""Steps of each, with and without the adversary."""
ADVERSARIES = {"absolute_coordinate": "absolute", "relative_coordinate": "relative"}
"""vision.positions of each."""
COMPARED = ("fsdp", "zero1", "zero2", "zero3")


def image_config(
    setting: Setting,
    recipe: str,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    kind: str = "none",
) -> Config:
    """A recipe without end at a constant learning rate; relative positions have the relaxed index with and without an
    adversary, so that both do the same arithmetic."""
    config = resized(load_recipe(recipe), size)
    if setting.small:
        config.model.layers, config.model.hidden_size, config.model.heads = 2, 32, 2
        config.model.intermediate_size = 64
        config.vision.decoder_layers, config.vision.decoder_hidden_size, config.vision.decoder_heads = 1, 16, 2
        config.crops.size, config.vision.patch_size = (64, 16) if recipe.startswith("mae_vit") else (32, 8)
    config.vision.index, config.adversary = "relaxed", settings_of("adversary", kind)
    config.vision.positions = ADVERSARIES.get(kind, "absolute")  # type: ignore[assignment]
    config.batch.global_size, config.batch.micro_size = rows * accumulation, rows
    config.training.steps, config.training.precision = 10**9, precision
    config.optimizer.warmup_steps, config.optimizer.schedule, config.optimizer.lr = 0, "constant", 1e-4
    return config


def image_trainer(engine: Engine, config: Config) -> Trainer:
    """The real loop over the same random images at every step, pinned where there is a GPU."""
    rows = config.batch.global_size
    whole = random_images(config, rows)
    window: list[Batch] = []
    for first in range(0, rows, config.batch.micro_size):
        part = rows_of(whole, first, first + config.batch.micro_size)
        window.append(part.pin_memory() if engine.device.type == "cuda" else part)
    objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
    adversary = built(RunContext(config=config, objective=objective, engine=engine), "adversary")
    return loop_over(engine, config, objective, window, [] if adversary is None else [adversary])


@contextmanager
def training(setting: Setting, layout: str, config: Config) -> Iterator[Trainer]:
    """A trainer on a layout; the engine is closed at the end."""
    engine = engine_with(setting, layout, MaskedAutoencoder(config), config)
    try:
        yield image_trainer(engine, config)
    finally:
        engine.close()


def speed(setting: Setting, name: str) -> Figures:
    """Images per second of the whole loop, use of the device's peak, and peak memory, at the best size tried.

    `utilisation` counts every block as a whole, as in metrics.jsonl, `computed_utilisation` what is computed: the last
    block at masked tokens only.
    """
    recipe, size, tried = MODELS[name]

    def config(rows: int) -> Config:
        return image_config(setting, recipe, size=size, rows=rows)

    def flops(rows: int, computed: bool) -> float:
        return mae_step_flops(config(rows), rows=rows * config(rows).crops.count, computed=computed)

    figures = best_speed(setting, tried, lambda rows: training(setting, "plain", config(rows)), flops)
    return {**figures, "crops_per_image": config(1).crops.count}


def beside_transformers(setting: Setting) -> Figures:
    """MAE ViT-B/16 of ours and transformers' ViTMAE on the same weights, images and masks."""
    rows = 2 if setting.small else 128
    config = image_config(setting, "mae_vit_b", size="base", rows=rows)
    batch = random_images(config, rows)
    ours, engine = our_step(config, batch, setting.device)
    peer, module = peer_step(config, batch, setting.device, engine.full_weights())
    engine.train(True), module.train()
    losses = [float(ours()), float(peer())]
    measured = alternate({"ours": ours, "transformers": peer}, rounds=setting.rounds, warmup=3)
    gap = abs(losses[0] - losses[1]) / abs(losses[1])
    return {
        "images": rows,
        "ours_step_ms": measured["ours"].wall * 1e3,
        "transformers_step_ms": measured["transformers"].wall * 1e3,
        "step_ours_over_transformers": measured["ours"].wall / measured["transformers"].wall,
        "first_losses": losses,
        "first_loss_gap": gap,
        "same_work": gap < SAME_LOSS,
    }


def overhead(setting: Setting, kind: str) -> Figures:
    """AdPE over MAE+ with the same positions, ViT-B, in pairs that alternate; the paper says less than 1.015."""
    rows = 2 if setting.small else 64
    steps = {}
    for name in ("none", kind):
        config = image_config(setting, "mae_plus_vit_b", size="base", rows=rows, kind=kind)
        config.adversary = settings_of("adversary", name)
        steps[name] = image_trainer(engine_with(setting, "plain", MaskedAutoencoder(config), config), config).train_step
    measured = alternate(steps, rounds=2 if setting.small else PAIRS, warmup=3)
    ratio = pair_ratio(measured[kind].walls, measured["none"].walls)
    return {
        "images": rows,
        "mae_plus_step_ms": measured["none"].wall * 1e3,
        "adpe_step_ms": measured[kind].wall * 1e3,
        "pairs": len(measured[kind].walls),
        "median_of_pair_ratios": ratio.median,
        "interval": [ratio.lower, ratio.upper],
        "ratio_of_medians": measured[kind].wall / measured["none"].wall,
    }


def checked_config(setting: Setting, precision: Precision, kind: str = "relative_coordinate") -> Config:
    """A small model that is trained many times, two micro-batches a step, with an adversary that moves."""
    rows = 2 if setting.small else 16
    config = image_config(
        setting, "mae_plus_vit_b", size="tiny", rows=rows, accumulation=2, precision=precision, kind=kind
    )
    config.crops.count, config.optimizer.lr = 2, 1e-3
    config.model.layers = min(config.model.layers, 4)
    config.vision.decoder_layers = min(config.vision.decoder_layers, 2)
    # The relative tables begin at zero, and so does the adversary's gradient: it takes a large step to get anywhere.
    config.adversary.ascent, config.adversary.lr, config.adversary.eps = "sgd", 1e5, 5.0
    return config


def waited(setting: Setting, layout: str, kind: str) -> Figures:
    """How often a step with an adversary waits for the GPU: no more than one without."""
    with training(setting, layout, checked_config(setting, "bf16", kind)) as trainer:
        for _ in range(3):
            trainer.train_step()
        places = waits_of(trainer.train_step)
    expected = len(places) == EXPECTED_WAITS
    return {"waits": len(places), "places": places, "expected": EXPECTED_WAITS, "as_expected": expected}


def train(setting: Setting, layout: str, precision: Precision) -> tuple[Trained, Tensor]:
    """A few steps; the weights without the key biases, which attention does not see, and the adversary's vector."""
    with training(setting, layout, checked_config(setting, precision)) as trainer:
        initial = without_key_biases(trainer.engine.full_weights())
        for _ in range(FEW_STEPS if setting.small else STEPS):
            trainer.train_step()
        assert isinstance(trainer.observer, Notes)
        trained = Trained(
            losses=trainer.observer.losses,
            initial=initial,
            weights=without_key_biases(trainer.engine.full_weights()),
        )
        adversary, _ = trainer.hooks.all
        vector: Tensor = adversary.vector  # type: ignore[attr-defined]
        return trained, vector.detach().double().cpu()


def without_key_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The middle third of each bias of queries, keys and values is left out."""
    found = dict(weights)
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        queries, _, values = found.pop(name).chunk(3)
        found |= {f"{name}.queries": queries, f"{name}.values": values}
    return found


def parity(setting: Setting) -> Iterator[Item]:
    """Weights and adversary of the engines against plain on one rank. fp32 first, as in gpu_parity.py."""
    references: dict[str, tuple[Trained, Tensor]] = {}

    def reference(precision: Precision) -> Figures:
        references[precision] = trained, vector = train(setting, "plain", precision)
        return {"losses": trained.losses, "adversary_norm": float(vector.norm())}

    def compare(layout: str, precision: Precision) -> Figures:
        if precision not in references:
            raise RuntimeError(f"plain did not train in {precision}: nothing to compare with")
        (expected, direction), (trained, vector) = references[precision], train(setting, layout, precision)
        return {
            "losses": trained.losses,
            **apart(trained, expected),
            "adversary_distance": float((vector - direction).norm() / direction.norm()),
        }

    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        yield Item(name=f"adversary, {precision}, plain", measure=partial(reference, precision), seconds=6)
        for layout in COMPARED:
            yield Item(
                name=f"adversary, {precision}, {layout}",
                measure=partial(compare, layout, precision),
                seconds=6,
                lacking=lacking(layout),
            )


def images(setting: Setting) -> Iterator[Item]:
    """Agreement and waits first, then figures."""
    yield from parity(setting)
    for layout, kind in (
        ("plain", "relative_coordinate"),
        ("plain", "absolute_coordinate"),
        ("fsdp", "relative_coordinate"),
    ):
        measure = partial(waited, setting, layout, kind)
        yield Item(name=f"waits, {layout}, {kind}", measure=measure, seconds=5, lacking=setting.no_gpu)
    for kind in ADVERSARIES:
        yield Item(name=f"AdPE over MAE+, {kind}", measure=partial(overhead, setting, kind), seconds=20)
    for name in MODELS:
        yield Item(name=name, measure=partial(speed, setting, name), seconds=15)
    yield Item(name="MAE beside transformers", measure=partial(beside_transformers, setting), seconds=12)
