"""Step time beside transformers' model of the same weights, rows and precision; of MM-MAE beside a matrix product.

    python benchmarks/step_time.py [--model bert|mae|mm_mae] [--precision bf16] [--rows 32] [--compile]

bert: 4 layers x 256, 128 tokens, vocabulary 30522, dropout 0.1, beside BertForPreTraining, which computes logits at all
positions. mae: ViT-Ti/16 with MAE's decoder (8 x 512, 16 heads), 224 px, beside ViTMAEForPreTraining, which gets masks
as noise and images as normalised floats. Fused AdamW and SDPA on both sides; the first losses are checked to be equal.

mm_mae: a whole step of the loop, ViT-Ti/16 on 224 px with 98 visible patches of three modalities, 133 classes. Its rate
by its model FLOPs is a share of the rate of a large matrix product.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from transformers import BertForPreTraining, ViTMAEForPreTraining

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, pair_ratio, print_ratios
from benchmarks.steps import Precision, StepOptions, Workload, endless, model_flops, whole_step
from benchmarks.workloads import CLASSES, MM_MAE, VOCABULARY, build_workload, image_recipe, small_bert
from trp_scale.config import Config
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.engines.optimizer import build_optimizer
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.patches import unpatchify
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.mae.image_weights import published_name
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mae.weights import to_vitmae, vitmae_config
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.model import bert_config
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.weights import to_transformers

SAME_LOSS = 1e-3
"""Relative gap of the first losses up to which two sides do the same work."""
SIDE, PRODUCTS = 2048, 10
"""Side of the product's square matrices, and products in a measurement."""


@dataclass(kw_only=True)
class Options(StepOptions):
    """Model and size of the steps."""

    model: Literal["bert", "mae", "mm_mae"] = "bert"
    """Model to measure."""
    precision: Precision = "bf16"
    """Of forward and backward, on both sides."""
    compile: bool = False
    """torch.compile on both sides."""


def our_step(work: Workload, device: torch.device) -> tuple[Callable[[], Tensor], PlainEngine]:
    """Return a step as in the loop with proportional weights (the loss of the peer), and its engine."""
    engine, objective, batch = work.plain(device), work.objective, work.rows.to(device)
    counts = objective.count(batch)
    weights = counts / counts[:-1].sum()
    weights[-1] = 1.0

    def step() -> Tensor:
        value = (weights / counts.clamp(min=1) * objective(engine, batch).sums).sum()
        engine.backward(value, last=True)
        engine.check_gradients()
        engine.step(work.config.optimizer.lr)
        return value.detach()

    return step, engine


def peer_training(
    peer: nn.Module, config: Config, device: torch.device, *, mode: str | None = None
) -> Callable[[Mapping[str, Tensor], float], Tensor]:
    """Return a step as in transformers' documentation, with our precision and optimizer; it takes inputs on the device
    and a learning rate, and returns the loss. `mode`: of torch.compile."""
    peer.to(device)
    optimizer = build_optimizer(peer, config.optimizer)
    forward = torch.compile(peer, mode=mode) if config.training.compile == "whole" else peer

    def step(inputs: Mapping[str, Tensor], lr: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(device.type, torch.bfloat16, enabled=config.training.precision == "bf16"):
            loss: Tensor = forward(**inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def peer_step(
    peer: nn.Module, inputs: Mapping[str, Tensor], config: Config, device: torch.device, *, mode: str | None = None
) -> Callable[[], Tensor]:
    """Return `peer_training`'s step on these inputs."""
    step = peer_training(peer, config, device, mode=mode)
    return partial(step, {name: value.to(device) for name, value in inputs.items()}, config.optimizer.lr)


def bert_peer(work: Workload, weights: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return transformers' BERT and its inputs."""
    config = work.config
    assert isinstance(config, PosBertConfig)
    peer = BertForPreTraining(bert_config(config.model, VOCABULARY, attn_implementation="sdpa"))
    peer.load_state_dict(to_transformers(weights, VOCABULARY))
    return peer, bert_inputs(work.rows)


def bert_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of transformers' BERT: labels at all positions, -100 where nothing is predicted."""
    used = batch["label_weights"] > 0  # [R, M]
    lines = torch.arange(len(used), device=used.device)[:, None].expand_as(used)  # [R, M]
    labels = torch.full_like(batch["tokens"], -100)  # [R, L]
    labels[lines[used], batch["masked_positions"][used]] = batch["labels"][used]
    named = {"input_ids": "tokens", "token_type_ids": "token_types", "attention_mask": "attention_mask"}
    inputs = {name: batch[field] for name, field in named.items() if field in batch.fields}
    return {**inputs, "labels": labels, "next_sentence_label": batch["next_sentence"]}


def mae_peer(work: Workload, weights: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return transformers' ViTMAE and its inputs: normalised images [B, 3, S, S], and noise [B, N] whose smallest
    values choose the visible patches."""
    config = work.config
    assert isinstance(config, MaeConfig) and isinstance(work.objective, MaskedPatchReconstruction)
    description = vitmae_config(config)
    description._attn_implementation = "sdpa"
    peer = ViTMAEForPreTraining(description)
    patch_size = config.vision.patch_size
    names = {published_name(name): name for name in peer.state_dict()}
    state = to_vitmae(weights, grid=config.crops.size // patch_size)
    peer.load_state_dict({names[name]: tensor for name, tensor in state.items()})
    patches = work.objective.patches(work.rows)  # [B, N, P]
    visible = work.rows["visible"].flatten(0, 1)  # [B, V]
    steps = torch.arange(patches.shape[1]) / (2 * patches.shape[1])  # no ties
    noise = torch.ones(patches.shape[:2]).scatter(1, visible, 0.0) + steps
    return peer, {"pixel_values": unpatchify(patches, patch_size), "noise": noise}


def set_training(training: bool, engine: Engine, peer: nn.Module) -> None:
    """Switch dropout on or off on both sides."""
    engine.train(training)
    peer.train(training)


def workload(options: Options) -> Workload:
    """Return the model over random rows."""
    config: PosBertConfig | MaeConfig | MmMaeConfig
    if options.model == "bert":
        config = PosBertConfig(model=small_bert(), objective=PosBertObjectiveConfig(other="task"))
    elif options.model == "mae":
        config = image_recipe("mae_vit_b", MaeConfig, "tiny")
    else:
        config = image_recipe(MM_MAE, MmMaeConfig, "tiny")
        config.balancer = make_settings("balancer", "uniform")
    endless(config, options.rows, precision=options.precision)
    config.training.compile, config.optimizer.lr = "whole" if options.compile else "none", 1e-4
    return build_workload(config)


def print_share(options: Options, work: Workload, device: torch.device) -> None:
    """Print the rate of MM-MAE's step over that of a matrix product."""
    assert isinstance(work.config, MmMaeConfig)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    left, right, out = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(3))

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.matmul(left, right, out=out)

    measured = alternate({"step": whole_step(work, device), "product": multiply}, rounds=options.rounds)
    flops = model_flops(work.config, DataFacts(classes=CLASSES))
    expected = 2.0 * SIDE**3 * PRODUCTS
    for clock in ("wall", "cpu"):
        step, product = (getattr(measured[name], f"{clock}s") for name in ("step", "product"))
        share = pair_ratio([flops / expected * seconds for seconds in product], step)
        print(f"{clock}: step {getattr(measured['step'], clock) * 1e3:.0f} ms, {flops / 1e9:.1f} GFLOP, share {share}")


def main(options: Options) -> None:
    device = options.device()
    work = workload(options)
    title = (
        f"{options.model}, {options.rows} rows, {options.precision}, {device.type}, {torch.get_num_threads()} threads"
    )
    if options.model == "mm_mae":
        print(title)
        print_share(options, work, device)
        return
    ours, engine = our_step(work, device)
    build = bert_peer if isinstance(work.config, PosBertConfig) else mae_peer
    module, inputs = build(work, engine.full_weights())
    peer = peer_step(module, inputs, work.config, device)
    set_training(False, engine, module)  # the first losses are without dropout
    losses = [float(ours()), float(peer())]
    set_training(True, engine, module)
    sides = {"ours": ours, "transformers": peer}
    assert math.isclose(*losses, rel_tol=SAME_LOSS), f"the losses differ: {losses}"
    print_ratios(f"{title}; first losses {losses}", alternate(sides, rounds=options.rounds), "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
