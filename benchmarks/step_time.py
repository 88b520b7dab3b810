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
from typing import Literal

import torch
import tyro
from transformers import BertForPreTraining

from trp_scale.config import TextModelConfig
from trp_scale.upstreams.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_ratios
from trp_scale.config import Config, OptimizerConfig, TrainingConfig
from trp_scale.core.batch import Batch
from trp_scale.data.text.groups import GROUPS
from trp_scale.engines.optimizer import build_optimizer
from trp_scale.engines.plain import PlainEngine
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions, bert_config, to_transformers
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling

VOCABULARY, LENGTH, MASKED = 30522, 128, 19


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    rows: int = 32
    """Sequences per step."""
    rounds: int = 7
    """Measured steps of each."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of forward and backward, on both sides."""
    compile: bool = False
    """torch.compile on both sides."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""


def random_batch(rows: int, length: int = LENGTH, masked: int = MASKED) -> Batch:
    """Full-length rows of `length` tokens with `masked` masked positions each, uneven groups."""
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([4.0, 6.0, 1.5, 1.0, 0.5, 0.5, 1.0, 0.3, 0.1, 2.0])
    positions = torch.stack([torch.randperm(length, generator=generator)[:masked].sort().values for _ in range(rows)])
    fields = {
        "tokens": torch.randint(0, VOCABULARY, (rows, length), generator=generator),
        "token_types": (torch.arange(length) >= length // 2).long().expand(rows, -1).contiguous(),
        "attention_mask": torch.ones(rows, length, dtype=torch.bool),
        "masked_positions": positions,
        "labels": torch.randint(0, VOCABULARY, (rows, masked), generator=generator),
        "label_groups": torch.multinomial(share.expand(rows, -1), masked, replacement=True, generator=generator),
        "label_weights": torch.ones(rows, masked),
        "next_sentence": torch.randint(0, 2, (rows,), generator=generator),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def our_step(config: Config, batch: Batch, device: torch.device) -> tuple[Callable[[], torch.Tensor], PlainEngine]:
    """Proportional weights: the very loss of the peer."""
    module = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0)
    engine = PlainEngine(module, config, device=device)
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    batch = batch.to(device)
    counts = objective.count(batch)
    weights = counts / counts[:-1].sum()
    weights[-1] = 1.0

    def loss() -> torch.Tensor:
        return (weights / counts.clamp(min=1) * objective(engine, batch).sums).sum()

    def step() -> torch.Tensor:
        value = loss()
        engine.backward(value, last=True)
        engine.check_gradients()
        engine.step(1e-4)
        return value.detach()

    return step, engine


def peer_step(
    config: Config, batch: Batch, device: torch.device, weights: dict[str, torch.Tensor]
) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """transformers' model as its documentation has it: labels at all positions, -100 where nothing is masked."""
    peer = BertForPreTraining(bert_config(config.model, VOCABULARY, attn_implementation="sdpa")).to(device)
    peer.load_state_dict(to_transformers(weights, VOCABULARY))
    optimizer = build_optimizer(peer, config.optimizer)
    forward = torch.compile(peer) if config.training.compile else peer
    labels = torch.full_like(batch["tokens"], -100).scatter(1, batch["masked_positions"], batch["labels"])
    inputs = {
        "input_ids": batch["tokens"],
        "token_type_ids": batch["token_types"],
        "attention_mask": batch["attention_mask"].long(),
        "labels": labels,
        "next_sentence_label": batch["next_sentence"],
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.training.precision == "bf16"):
            loss = forward(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step, peer


def main(options: Options) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = PosBertConfig(
        model=TextModelConfig(
            layers=4, hidden_size=256, heads=4, intermediate_size=1024, max_positions=LENGTH, dropout=0.1
        ),
        objective=PosBertObjectiveConfig(other="task"),
        training=TrainingConfig(precision=options.precision, compile=options.compile),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=0),
    )
    batch = random_batch(options.rows)
    ours, engine = our_step(config, batch, device)
    peer, module = peer_step(config, batch, device, engine.full_weights())
    engine.train(False), module.eval()
    first = [float(ours()), float(peer())]
    engine.train(True), module.train()
    assert abs(first[0] - first[1]) < 1e-3 * abs(first[1]), f"the losses differ: ours {first[0]}, peer {first[1]}"
    print(f"{options.rows} x {LENGTH} tokens, {options.precision}, {device.type}, {torch.get_num_threads()} threads; ")
    print(f"first loss {first[0]:.5f} and {first[1]:.5f}")
    measured = alternate({"trp_scale": ours, "transformers": peer}, rounds=options.rounds)
    print_ratios(measured, "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
