"""Step time of ours against transformers' BertForPreTraining: same weights, same batch, same precision.

    python benchmarks/step_time.py [--precision bf16] [--rows 32] [--compile]

4 layers x 256, 128 tokens, vocabulary 30522, dropout 0.1, fused AdamW on both sides, SDPA on both sides. The peer
computes logits at all positions, as its forward pass does; its loss is checked to equal ours on the same batch without
dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import BertForPreTraining

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer import peer_step_of, print_same_work, set_training
from benchmarks.rounds import alternate, print_ratios
from benchmarks.steps import Precision, StepOptions, Workload, endless
from benchmarks.text_steps import LENGTH, VOCABULARY, small_bert, text_workload
from trp_scale.core.batch import Batch
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.model import bert_config, to_transformers
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    precision: Precision = "bf16"
    """Of forward and backward, on both sides."""
    compile: bool = False
    """torch.compile on both sides."""


def our_step(work: Workload, device: torch.device) -> tuple[Callable[[], torch.Tensor], PlainEngine]:
    """Proportional weights: the very loss of the peer."""
    engine, objective, batch = work.plain(device), work.objective, work.rows.to(device)
    counts = objective.count(batch)
    weights = counts / counts[:-1].sum()
    weights[-1] = 1.0

    def loss() -> torch.Tensor:
        return (weights / counts.clamp(min=1) * objective(engine, batch).sums).sum()

    def step() -> torch.Tensor:
        value = loss()
        engine.backward(value, last=True)
        engine.check_gradients()
        engine.step(work.config.optimizer.lr)
        return value.detach()

    return step, engine


def peer_step(
    config: PosBertConfig, batch: Batch, device: torch.device, weights: dict[str, torch.Tensor]
) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """transformers' model as its documentation has it: labels at all positions, -100 where nothing is masked."""
    peer = BertForPreTraining(bert_config(config.model, VOCABULARY, attn_implementation="sdpa"))
    peer.load_state_dict(to_transformers(weights, VOCABULARY))
    labels = torch.full_like(batch["tokens"], -100).scatter(1, batch["masked_positions"], batch["labels"])
    inputs = {
        "input_ids": batch["tokens"],
        "token_type_ids": batch["token_types"],
        "labels": labels,
        "next_sentence_label": batch["next_sentence"],
    }
    return peer_step_of(peer, inputs, config, device), peer


def main(options: Options) -> None:
    device = options.device()
    config = PosBertConfig(model=small_bert(), objective=PosBertObjectiveConfig(other="task"))
    config.training.compile, config.optimizer.lr = "whole" if options.compile else "none", 1e-4
    work = text_workload(endless(config, options.rows, precision=options.precision))
    ours, engine = our_step(work, device)
    peer, module = peer_step(config, work.rows, device, engine.full_weights())
    set_training(False, engine, module)
    first = [float(ours()), float(peer())]
    set_training(True, engine, module)
    print(f"{options.rows} x {LENGTH} tokens, {options.precision}, {device.type}, {torch.get_num_threads()} threads; ")
    print_same_work(*first)
    measured = alternate({"trp_scale": ours, "transformers": peer}, rounds=options.rounds)
    print_ratios(measured, "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
