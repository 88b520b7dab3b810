"""Cost of a method over the same step without it: the whole training step, on one process.

    python benchmarks/method_cost.py --method balancers|minimax|adversaries|crops|masks [--rows 16] [--rounds 15]

balancers: MM-MAE ViT-Ti (three tasks) and PoS-BERT (ten tasks) with each balancer, beside what TRP's Table 3 states, T
being a step without balancing. minimax: PoS-BERT with one and with four micro-batches; `exact` with several adds a
forward pass without gradients. adversaries: each over MAE+ with the same positions (the paper says less than 1.015,
AdPE 4.1.1), and relative positions over absolute ones. crops: MAE+ with k crops over MAE, ViT-B, per image. masks:
learned masks over MAE, whole cycles divided by their steps, with ViT-Ti and a decoder of ViT-B's proportions.
Operations are those that launch work; D_tr and D_val have the images of a step.
FLOPs are those of the package's counter, for masks also of ViT-B/16 on 224 px with a decoder of 8 x 512.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import Measured, alternate, print_ratios
from benchmarks.steps import StepOptions, Workload, endless, model_flops, recorded_flops, whole_step
from benchmarks.workloads import (
    MM_MAE,
    EncoderSize,
    build_workload,
    cycle,
    cycle_steps,
    image_recipe,
    masks_trainer,
    plain_engines,
    resized,
    small_bert,
)
from trp_scale.config.registry import Settings, make_settings
from trp_scale.core import pieces
from trp_scale.models.counting import RecordsOperations
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig

BALANCING: dict[str, tuple[Settings, str]] = {
    "uniform": (make_settings("balancer", "uniform"), "T"),
    "minimax": (make_settings("balancer", "minimax"), "2T"),
    "uncertainty": (make_settings("balancer", "uncertainty"), "2T"),
    "dwa": (make_settings("balancer", "dwa", interval_steps=2), "3T"),
    "gradnorm": (make_settings("balancer", "gradnorm"), "4T"),
    "gradnorm, representation": (make_settings("balancer", "gradnorm", at="representation"), ""),
    "group_dro": (make_settings("balancer", "group_dro"), ""),
    "famo": (make_settings("balancer", "famo"), ""),
    "stch": (make_settings("balancer", "stch"), ""),
    "jd upgrad": (make_settings("balancer", "jd"), ""),
    "jd mgda": (make_settings("balancer", "jd", method="mgda"), ""),
}
"""Settings, and the FLOPs that TRP's Table 3 states."""
MINIMAX = {
    "uniform": make_settings("balancer", "uniform"),
    "minimax lagged": make_settings("balancer", "minimax", estimate="lagged"),
    "minimax exact": make_settings("balancer", "minimax", estimate="exact"),
}
BASES: dict[str, tuple[Literal["absolute", "relative"], Literal["rounded", "relaxed"]]] = {
    "MAE+ absolute": ("absolute", "rounded"),
    "MAE+ relative, rounded": ("relative", "rounded"),
    "MAE+ relative, relaxed": ("relative", "relaxed"),
}
"""vision.positions and vision.index."""
ADVERSARIES = {
    "absolute_embedding": "MAE+ absolute",
    "absolute_coordinate": "MAE+ absolute",
    "relative_embedding": "MAE+ relative, rounded",
    "relative_coordinate": "MAE+ relative, relaxed",
}
"""Baseline of each: the same arithmetic without the adversary."""

PLAIN_MAE = "plain MAE"
MASKS: dict[str, tuple[int, int, int]] = {
    "unroll 2, every 1": (2, 1, 1),
    "unroll 2, every 5": (2, 5, 1),
    "unroll 1, every 1": (1, 1, 1),
    "unroll 2, every 1, two micro-batches": (2, 1, 2),
}
"""Steps of the encoder, updates of the head, and micro-batches of D_tr and of D_val."""
ON_A_GPU = pieces.foreach_chunk_bytes(torch.device("cuda"))


@dataclass(kw_only=True)
class Options(StepOptions):
    """Method and size of the steps."""

    method: Literal["balancers", "minimax", "adversaries", "crops", "masks"]
    """Method to measure."""
    rows: int = 16
    """Images of a step; twice as many sequences for balancers."""
    rounds: int = 15
    """Measured steps of each."""
    model: EncoderSize = "tiny"
    """Encoder of images: ViT-Ti, S, B or L."""
    kinds: tuple[str, ...] = tuple(ADVERSARIES)
    """Adversaries to measure."""
    crops: tuple[int, ...] = (1,)
    """Crops of MAE+ per image."""
    decoder_layers: int = 8
    """masks: blocks of the measured model's decoder."""
    size: int = 224
    """masks: side of the measured model's images in pixels."""
    network: Literal["flattened", "patchwise"] = "flattened"
    """masks: the masking network."""


@dataclass(frozen=True)
class Comparison:
    """Workloads by name, the first of which is the base, and a further column for the table."""

    title: str
    workloads: dict[str, Workload]
    columns: dict[str, dict[str, str]]


def compare_balancers(options: Options) -> Iterator[Comparison]:
    """Compare all balancers on MM-MAE and on PoS-BERT with `other` as a tenth task."""
    stated = {"stated": {name: flops for name, (_, flops) in BALANCING.items()}}
    images, texts = {}, {}
    for name, (balancer, _) in BALANCING.items():
        config = image_recipe(MM_MAE, MmMaeConfig, options.model)
        config.balancer = replace(balancer)
        images[name] = build_workload(endless(config, options.rows, precision=options.precision))
        objective = PosBertObjectiveConfig(other="task")
        bert = PosBertConfig(model=small_bert(), objective=objective, balancer=replace(balancer))
        texts[name] = build_workload(endless(bert, 2 * options.rows, precision=options.precision))
    yield Comparison("MM-MAE", images, stated)
    yield Comparison("PoS-BERT", texts, stated)


def compare_minimax(options: Options) -> Iterator[Comparison]:
    """Compare minimax weights with uniform ones, with one and with four micro-batches."""
    for accumulation in (1, 4):
        works = {}
        for name, balancer in MINIMAX.items():
            config = PosBertConfig(model=small_bert(), balancer=balancer)
            micro = max(1, options.rows // accumulation)
            works[name] = build_workload(endless(config, micro, accumulation=accumulation, precision=options.precision))
        yield Comparison(f"PoS-BERT, {accumulation} micro-batches", works, {})


def compare_adversaries(options: Options) -> Iterator[Comparison]:
    """Compare each adversary with its base, then the bases."""
    bases = {}
    for base, (positions, index) in BASES.items():
        config = image_recipe("mae_plus_vit_b", MaeConfig, options.model)
        config.vision.positions, config.vision.index = positions, index
        bases[base] = endless(config, options.rows, precision=options.precision)
    for kind in options.kinds:
        base = ADVERSARIES[kind]
        config = copy.deepcopy(bases[base])
        config.adversary = make_settings("adversary", kind)
        yield Comparison(kind, {base: build_workload(bases[base]), f"AdPE {kind}": build_workload(config)}, {})
    yield Comparison("positions", {base: build_workload(config) for base, config in bases.items()}, {})


def compare_crops(options: Options) -> Iterator[Comparison]:
    """Compare MAE+ of k crops, and with a linear decoder, with MAE.

    MAE sees 49 of 196 patches of a 224 px image, MAE+ all 49 of a 112 px crop (AdPE 3.2): a crop costs the encoder the
    same and the decoder a quarter.
    """
    configs = {"MAE": image_recipe("mae_vit_b", MaeConfig, options.model)}
    decoders: tuple[Literal["transformer", "linear"], ...] = ("transformer", "linear")
    for count in options.crops:
        for decoder in decoders:
            config = image_recipe("mae_plus_vit_b", MaeConfig, options.model)
            config.crops.count, config.vision.decoder = count, decoder
            configs[f"MAE+ k={count}, {decoder}"] = config
    works = {
        name: build_workload(endless(config, options.rows, precision=options.precision))
        for name, config in configs.items()
    }
    yield Comparison("crops", works, {})


METHODS = {
    "balancers": compare_balancers,
    "minimax": compare_minimax,
    "adversaries": compare_adversaries,
    "crops": compare_crops,
}


def large_mae(options: Options) -> MaeConfig:
    return endless(image_recipe("mae_vit_b", MaeConfig, "base"), options.rows, precision=options.precision)


def measured_model(options: Options) -> MaeConfig:
    """Return the settings of the measured model: those of `large_mae` in small."""
    config = resized(large_mae(options), options.model)
    config.vision.decoder_layers, config.vision.decoder_heads = options.decoder_layers, config.model.heads
    config.vision.decoder_hidden_size = config.model.hidden_size * 2 // 3
    while config.vision.decoder_hidden_size % config.vision.decoder_heads:
        config.vision.decoder_heads -= 1
    config.crops.size = options.size
    return config


def with_masks(config: MaeConfig, options: Options, numbers: tuple[int, int, int]) -> MaeConfig:
    """Return these settings with learned masks."""
    config = copy.deepcopy(config)
    unroll, every, parts = numbers
    settings = {"network": options.network, "unroll": unroll, "every": every, "micro_size": options.rows // parts}
    config.multilevel = make_settings("multilevel", "head", **settings)
    return config


def over_plain(config: MaeConfig, options: Options) -> dict[str, float]:
    """Return the arithmetic of a step of the encoder over a step of plain MAE, both as they are computed."""
    plain = model_flops(config)
    ratios = {PLAIN_MAE: 1.0}
    for name, numbers in MASKS.items():
        ratios[name] = model_flops(with_masks(config, options, numbers)) / plain
    return ratios


def count_operations(run: Callable[[], object]) -> int:
    """Count operations that launch work; an operation over a list of tensors is one, and lists are as on a GPU."""
    run()  # the optimizers' states are made
    with mock.patch.object(pieces, "foreach_chunk_bytes", lambda _: ON_A_GPU), RecordsOperations() as recorder:
        run()
    return len(recorder.recorded)


def measure_masks(options: Options, device: torch.device) -> None:
    """Measure and print steps with learned masks over plain ones."""
    config = measured_model(options)
    configs = {PLAIN_MAE: config, **{name: with_masks(config, options, numbers) for name, numbers in MASKS.items()}}
    steps = {name: cycle_steps(settings) for name, settings in configs.items()}
    engines = plain_engines(device)
    calls = {name: cycle(masks, masks_trainer(masks, options.rows, engines)) for name, masks in configs.items()}
    operations = {name: f"{count_operations(call) / steps[name]:,.0f}" for name, call in calls.items()}
    measured = {
        name: Measured(
            walls=tuple(wall / steps[name] for wall in times.walls), cpus=tuple(cpu / steps[name] for cpu in times.cpus)
        )
        for name, times in alternate(calls, rounds=options.rounds, warmup=1).items()
    }
    columns = {"operations": operations}
    for title, model in (("FLOPs, ViT-B", large_mae(options)), ("FLOPs, measured", config)):
        columns[title] = {name: f"{ratio:.2f}" for name, ratio in over_plain(model, options).items()}
    size = f"{options.rows} images of {options.size} px, {options.precision}, {torch.get_num_threads()} threads"
    print_ratios(f"a step of the encoder, ViT {options.model}, {size}, {device.type}", measured, PLAIN_MAE, columns)


def main(options: Options) -> None:
    device = options.device()
    if options.method == "masks":
        measure_masks(options, device)
        return
    for comparison in METHODS[options.method](options):
        steps = {name: whole_step(work, device) for name, work in comparison.workloads.items()}
        flops = {name: recorded_flops(step) for name, step in steps.items()}
        base = next(iter(steps))
        over = {name: f"{count / flops[base]:.4f}" for name, count in flops.items()}
        size = f"{options.rows} rows, {options.precision}, {device.type}, {torch.get_num_threads()} threads"
        title = f"{comparison.title}: {size}, {options.rounds} rounds, base {flops[base] / 1e9:.1f} GFLOP"
        measured = alternate(steps, rounds=options.rounds)
        print_ratios(title, measured, base, {"FLOPs over base": over, **comparison.columns})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
