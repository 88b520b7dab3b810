"""What a step costs with each balancer: time in alternating rounds, and counted matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.image_steps import counted_flops, resized, same_step
from benchmarks.rounds import Measured, alternate, pair_ratio
from benchmarks.step_time import LENGTH, VOCABULARY, random_batch
from trp_scale.config import BatchConfig, Config, OptimizerConfig, TextModelConfig
from trp_scale.config.components import settings_of
from trp_scale.config.settings import Settings
from trp_scale.core.batch import Batch
from trp_scale.core.objective import Objective
from trp_scale.data.text.groups import GROUPS
from trp_scale.recipes.loader import load_recipe
from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.upstreams.mm_mae.objective import MultimodalReconstruction
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.upstreams.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig

BALANCING: dict[str, tuple[Settings, str]] = {
    "uniform": (settings_of("balancer", "uniform"), "T"),
    "minimax": (settings_of("balancer", "minimax"), "2T"),
    "uncertainty": (settings_of("balancer", "uncertainty"), "2T"),
    "dwa": (settings_of("balancer", "dwa", interval_steps=2), "3T"),
    "gradnorm": (settings_of("balancer", "gradnorm"), "4T"),
    "gradnorm, representation": (settings_of("balancer", "gradnorm", at="representation"), ""),
    "group_dro": (settings_of("balancer", "group_dro"), ""),
}
"""Settings, and the FLOPs that TRP's Table 3 states."""

CLASSES = 133
"""Of segmentation: COCO's panoptic classes, which Mask2Former predicts."""


def print_cost(*, rows: int, rounds: int, precision: Literal["bf16", "fp32"]) -> None:
    """One table for each model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for title, build in (
        (f"MM-MAE ViT-Ti, 3 tasks, {rows} images of 224 px", lambda one: modalities_step(one, rows, precision, device)),
        (
            f"PoS-BERT 4 x 256, 10 tasks, {2 * rows} x {LENGTH} tokens",
            lambda one: text_step(one, rows, precision, device),
        ),
    ):
        steps = {name: build(balancing) for name, (balancing, _) in BALANCING.items()}
        flops = {name: counted_flops(step) for name, step in steps.items()}
        measured = alternate(steps, rounds=rounds)
        where = f"{precision}, {device.type}, {torch.get_num_threads()} threads"
        Console(width=120).print(table_of(f"{title}, {where}, {rounds} rounds", measured, flops))


def table_of(title: str, measured: dict[str, Measured], flops: dict[str, int]) -> Table:
    """A row for each balancer."""
    table = Table(title=title, caption="interval: 95 % of the median ratio, by processor time; stated: TRP, Table 3")
    for name in ("balancer", "ms", "over uniform", "by processor time", "interval", "FLOPs over uniform", "stated"):
        table.add_column(name, justify="left" if name == "balancer" else "right")
    base = measured["uniform"]
    for name, one in measured.items():
        clock, processor = pair_ratio(one.walls, base.walls), pair_ratio(one.cpus, base.cpus)
        table.add_row(
            name,
            f"{one.wall * 1e3:.0f}",
            f"{clock.median:.4f}",
            f"{processor.median:.4f}",
            f"{processor.lower:.3f} to {processor.upper:.3f}",
            f"{flops[name] / flops['uniform']:.4f}",
            BALANCING[name][1],
        )
    return table


def text_step(
    balancing: Settings, rows: int, precision: Literal["bf16", "fp32"], device: torch.device
) -> Callable[[], object]:
    """A whole training step of PoS-BERT with `other` as a tenth task."""
    config = PosBertConfig(
        model=TextModelConfig(layers=4, hidden_size=256, heads=4, intermediate_size=1024, max_positions=LENGTH),
        objective=PosBertObjectiveConfig(other="task"),
        balancer=balancing,
    )
    config.training.precision = precision
    module = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0)
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    return whole_step(config, module, objective, random_batch(2 * rows), device)


def modalities_step(
    balancing: Settings, rows: int, precision: Literal["bf16", "fp32"], device: torch.device
) -> Callable[[], object]:
    """A whole training step of MM-MAE with an encoder of ViT-Ti."""
    config = resized(load_recipe("mm_mae_vit_b_in1k_400"), "tiny")
    config.training.precision, config.balancer = precision, balancing
    module = MultimodalMaskedAutoencoder(config, {"semseg": CLASSES})
    return whole_step(config, module, MultimodalReconstruction(config), random_modalities(config, rows), device)


def random_modalities(config: Config, rows: int) -> Batch:
    """`rows` images of noise with depth and segmentation of noise, and random visible patches."""
    generator = torch.Generator().manual_seed(0)
    side, patch, stride = config.crops.size, config.vision.patch_size, config.semseg.stride
    patches = (side // patch) ** 2
    order = torch.rand(rows, len(config.modalities.inputs) * patches, generator=generator).argsort(-1)
    labels = (rows, side // stride, side // stride)
    fields = {
        "images": torch.randint(0, 256, (rows, 3, side, side), generator=generator, dtype=torch.uint8),
        "depth": torch.randn(rows, side, side, generator=generator),
        "semseg": torch.randint(0, CLASSES, labels, generator=generator).to(torch.uint8),
        "visible": order[:, : config.modalities.visible_tokens].sort(-1).values,
        "depth_counts": torch.full((rows, patches), patch**2, dtype=torch.int32),
        "semseg_counts": torch.full((rows, patches), (patch // stride) ** 2, dtype=torch.int32),
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def whole_step(
    config: Config, module: torch.nn.Module, objective: Objective, batch: Batch, device: torch.device
) -> Callable[[], object]:
    """The loop's step on one process, hooks and optimizer included."""
    config.batch = BatchConfig(global_size=batch.rows, micro_size=batch.rows)
    config.optimizer = OptimizerConfig(warmup_steps=0, schedule="constant", lr=1e-5)
    config.training.steps = 10**9
    return same_step(config, module, objective, batch, device)
