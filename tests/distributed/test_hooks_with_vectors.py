"""The average of the weights and the gradient noise scale through a run that changes its engine at each checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import LAYOUTS, fp16_layout, fp16_on_a_cpu, on_each_rank
from tests.distributed.test_checkpoint_engines import distance
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, RecordingTrainer, load_trainer, save_trainer, small_config, trainer_for
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import EngineGroup
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.core.hooks import Hooks
from trp_scale.core.pieces import WEIGHT_AVERAGE
from trp_scale.methods.gradient_noise_scale import GradientNoiseScale
from trp_scale.methods.settings import GradientNoiseScaleSettings, WeightAverageSettings
from trp_scale.methods.weight_average import WeightAverage

STEPS = 2
"""On each engine."""
DECAY = 0.6
Named = dict[str, Tensor]


def hooked(layout: Layout, **changes: Any) -> tuple[RecordingTrainer, EngineGroup]:
    """A trainer with both hooks, and what its checkpoints hold."""
    trainer = trainer_for(layout, small_config(layout, **changes))
    average = WeightAverage(WeightAverageSettings(decay=DECAY, warmup=False, validate=True), trainer.run_context)
    noise = GradientNoiseScale(GradientNoiseScaleSettings(smoothing=0.5), trainer.run_context)
    trainer.hooks = Hooks(trainer.hooks.balancer, [average, noise])
    trainer.engine.train(True)
    return trainer, EngineGroup(trainer.engine, trainer.hooks.engines(), trainer.hooks.sharded_state)


def part(layout: Layout, checkpoint: Path | None, run_dir: Path, echo_dir: Path) -> tuple[list[Named], Named, Any]:
    """Load, save at once into echo_dir, train STEPS, save into run_dir.

    Returns: the weights after each step and what a validation reads, both on rank 0, and the noise's metrics.
    """
    trainer, engines = hooked(layout)
    if checkpoint is not None:
        load_trainer(trainer, checkpoint, engines)
        save_trainer(trainer, echo_dir, engines)
    weights = []
    for _ in range(STEPS):
        trainer.train_step()
        weights.append(trainer.engine.full_weights())
    with trainer.hooks.validation():
        validated = trainer.engine.full_weights()
    save_trainer(trainer, run_dir, engines)
    noise = trainer.hooks.metrics()["gradient_noise_scale"]
    trainer.engine.close()
    return weights, validated, noise


@pytest.mark.exhaustive
def test_a_run_that_changes_its_engine_at_every_checkpoint(tmp_path: Path, two_ranks: Ranks) -> None:
    start, _ = hooked(LAYOUTS["plain"])
    average = {name: tensor.double() for name, tensor in start.engine.full_weights().items()}
    reference, _ = hooked(LAYOUTS["plain"])
    checkpoint: Path | None = None
    for number, name in enumerate(LAYOUTS):
        for _ in range(STEPS):
            reference.train_step()
        arguments = (checkpoint, tmp_path / "run", tmp_path / f"echo{number}")
        answers = on_each_rank(two_ranks, name, part, *arguments)
        weights, validated, _ = answers[0]
        for after in weights:
            average = {key: DECAY * value + (1 - DECAY) * after[key].double() for key, value in average.items()}
        if checkpoint is not None:
            echo = checkpoint_path(tmp_path / f"echo{number}", number * STEPS)
            stored, again = (read_full_state(path, WEIGHT_AVERAGE) for path in (checkpoint, echo))
            assert stored.keys() == average.keys() and unequal(again, stored) == [], name
        checkpoint = checkpoint_path(tmp_path / "run", (number + 1) * STEPS)
        stored = read_full_state(checkpoint, WEIGHT_AVERAGE)
        assert distance(stored, average) < 1e-6, name
        assert distance(stored, weights[-1]) > 1e-3, "too near to tell"
        assert unequal(validated, stored) == [], name
        assert distance(stored, whole_average(reference)) < 1e-5, name
        for _, _, noise in answers:
            expected = reference.hooks.metrics()["gradient_noise_scale"]
            assert noise == pytest.approx(expected, rel=1e-3), name  # differences of norms that are near each other
            assert noise == answers[0][2]


def whole_average(trainer: RecordingTrainer) -> Named:
    """Of a plain engine."""
    parts = trainer.hooks.sharded_state()[WEIGHT_AVERAGE].parts
    pieces = trainer.engine.pieces()
    return {piece.name: value.reshape(piece.shape) for piece, value in zip(pieces, parts, strict=True)}


def fp16_squares(layout: Layout) -> tuple[float, float]:
    """The noise's raw reading in the first step, and the gradient's squared norm."""
    with fp16_on_a_cpu():
        trainer, _ = hooked(layout, training={"precision": "fp16"})
        trainer.train_step()
        (stats,) = trainer.history
        noise = trainer.hooks.metrics()["gradient_noise_scale"]
        trainer.engine.close()
        return noise["trace"], stats.grad_norm


@pytest.mark.parametrize("stage", always([0, 2, 3], 2))
def test_a_loss_scale_is_divided_out(two_ranks: Ranks, stage: int) -> None:
    reference, _ = hooked(Layout())
    reference.train_step()
    expected = reference.hooks.metrics()["gradient_noise_scale"]["trace"]
    for trace, norm in two_ranks(fp16_squares, fp16_layout(stage, initial_scale_power=8)):
        assert norm == pytest.approx(reference.history[0].grad_norm, rel=1e-2)
        assert trace == pytest.approx(expected, rel=5e-2)
