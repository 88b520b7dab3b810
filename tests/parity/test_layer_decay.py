"""Fine-tuning with learning rates by depth: the same weights on every engine, each layer by its own rate."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import always
from tests.parity.compare import steps_too_far, too_far
from tests.ranks import Ranks
from tests.settings import changed
from tests.synthetic import TWO_RANKS, Layout, RecordingTrainer, Result, data_group, engine_of, stack_rows
from tests.synthetic_images import SyntheticImages, by_projection
from tests.unit.models.encoder_peers import CLASSES, finetune_config
from trp_scale.config import OptimizerConfig, TrainingConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.core.run import RunContext
from trp_scale.finetuning.classification.task import ImageClassification, ImageClassifier


def batch(positions: range, size: int) -> Batch:
    """Noise of a shade for each class, with soft targets: functions of the position."""
    rows = []
    for position in positions:
        generator = torch.Generator().manual_seed(500 + position)
        share = float(torch.rand((), generator=generator))
        target = torch.zeros(CLASSES)
        target[position % CLASSES] += share
        target[(3 * position + 1) % CLASSES] += 1 - share
        shade = 30 * (target @ torch.arange(float(CLASSES)))
        image = (shade + 60 * torch.rand(3, size, size, generator=generator)).to(torch.uint8)
        rows.append({"images": image, "targets": target, "row_weights": torch.tensor(1.0)})
    return stack_rows(rows, positions)


def tuned(layout: Layout, optimizer: dict[str, Any], **downstream: Any) -> Result:
    """Three steps of the small classifier; call on all ranks."""
    config, group = finetune_config(**downstream), data_group()
    config.batch.micro_size, config.training = layout.micro_size, TrainingConfig(steps=3, seed=3)
    config.optimizer = OptimizerConfig(**{"warmup_steps": 0, "schedule": "constant", "weight_decay": 0.05, **optimizer})
    config.balancer = make_settings("balancer", "uniform")
    config = changed(config, **layout.settings)
    engine = engine_of(layout, ImageClassifier(config), config, group)
    run = RunContext(config=config, objective=ImageClassification(), engine=engine)
    source = SyntheticImages(config, group, make=partial(batch, size=config.crops.size))
    return RecordingTrainer.over(run, source).result(by_projection)


ADAMW = {"lr": 1e-3, "layer_decay": 0.5}
SGD = {"kind": "sgd", "lr": 0.5, "layer_decay": 0.5}


@lru_cache
def reference(kind: str, pooling: str = "mean", learned: bool = False) -> Result:
    settings = ADAMW if kind == "adamw" else SGD
    return tuned(Layout(micro_size=8), settings, pooling=pooling, learned_positions=learned)


def test_each_layer_steps_by_its_rate() -> None:
    """With betas of 0 a step of AdamW is the sign of the gradient times the rate."""
    signs = {**ADAMW, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1e-12}
    found = tuned(Layout(micro_size=8), signs)
    for name, scale in {
        "encoder.patch_embed.bias": 0.5**3,
        "encoder.blocks.0.attn.proj.bias": 0.5**2,
        "encoder.blocks.1.mlp.fc2.bias": 0.5,
        "fc_norm.bias": 1.0,
        "head.bias": 1.0,
    }.items():
        steps = (found.weights[name] - found.initial[name]).abs() / (1e-3 * scale)  # each of three is 1 or -1
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=2e-3)
        assert steps.max() <= 3.001 and steps.max() >= 0.999, name


def test_accumulation_does_not_change_the_weights() -> None:
    assert too_far(tuned(Layout(micro_size=2), ADAMW), reference("adamw")) == []
    assert reference("adamw").moved


@pytest.mark.parametrize(
    ("layout", "pooling"),
    always(product(TWO_RANKS, ["mean", "class"]), ("fsdp", "class"), ("zero2", "mean")),
)
def test_two_ranks_give_the_weights_of_one(two_ranks: Ranks, layout: str, pooling: str) -> None:
    ours = two_ranks(tuned, TWO_RANKS[layout], ADAMW, pooling=pooling, learned_positions=True)[0]
    theirs = reference("adamw", pooling, True)
    assert too_far(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.parametrize("layout", always(["ddp", "fsdp", "zero1", "zero2", "zero3"], "fsdp"))
def test_gradient_descent_agrees_too(two_ranks: Ranks, layout: str) -> None:
    ours = two_ranks(tuned, TWO_RANKS[layout], SGD)[0]
    theirs = reference("sgd")
    assert [far for far in too_far(ours, theirs) if "key.bias" not in far] == []


def test_one_rate_for_all_would_be_seen() -> None:
    wrong = tuned(Layout(micro_size=8), {**ADAMW, "layer_decay": 1.0})
    assert len(too_far(wrong, reference("adamw"))) > 10
