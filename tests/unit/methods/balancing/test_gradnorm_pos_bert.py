"""GradNorm's norms on the real loop and a small PoS-BERT, from taps, against a backward pass for each task."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout, RecordingTrainer, small_config, trainer_for
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.core.run import TapPlace
from trp_scale.methods.balancing.gradnorm import GradNorm
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions

TEN_TASKS: dict[str, Any] = {"other": "task"}
WITH_SENTENCES: dict[str, Any] = {"other": "task", "next_sentence": "inside"}


def trainer_with(at: TapPlace, objective: dict[str, Any], **training: Any) -> RecordingTrainer:
    layout = Layout(micro_size=4)  # two micro-batches
    balancer = {"kind": "gradnorm", "at": at, "lr": 0.1}
    model = {"layers": 1 if training else 2}
    sections = {"balancer": balancer, "objective": objective, "training": training, "model": model}
    return trainer_for(layout, small_config(layout, **sections))


def naive_norms(trainer: RecordingTrainer, window: list[Batch], at: TapPlace) -> Tensor:
    """[T] |grad L_t|, each task's mean loss over the window in a backward pass of its own."""
    model = copy.deepcopy(trainer.engine.module)
    assert isinstance(model, BertForMaskedPositions)
    read: list[Tensor] = []
    model.layers[-1].register_forward_hook(lambda module, inputs, output: read.append(output))
    counts = torch.stack([trainer.objective.count(micro) for micro in window]).sum(0)
    sums = torch.stack([trainer.objective(model, micro).sums for micro in window]).sum(0)
    places = [model.cls.predictions.transform.dense.weight] if at == "weights" else read
    norms = torch.zeros(len(counts), dtype=torch.float64)
    for task in trainer.objective.balanced:
        if counts[task]:
            parts = torch.autograd.grad(sums[task] / counts[task], places, retain_graph=True)
            norms[task] = torch.stack([part.double().norm() for part in parts]).norm()
    return norms


@pytest.mark.parametrize(
    ("at", "objective"),
    [("weights", TEN_TASKS), ("representation", TEN_TASKS), ("representation", WITH_SENTENCES)],
    ids=["weights", "representation", "representation with sentences"],
)
def test_norms_from_taps_are_those_of_a_backward_pass_for_each_task(at: TapPlace, objective: dict[str, Any]) -> None:
    trainer = trainer_with(at, objective)
    weigher = trainer.hooks.balancer
    assert isinstance(weigher, GradNorm) and len(trainer.objective.balanced) == (
        11 if "inside" in str(objective) else 10
    )
    trainer.engine.train(True)
    for step in range(3):
        window, before = trainer.source.next_window(), weigher.task_weights.clone()
        trainer.source.cursor -= trainer.config.batch.global_size  # the loop takes the same window
        expected = before * naive_norms(trainer, window, at)
        trainer.train_step()
        names = trainer.objective.tasks
        norms = {names[task]: float(expected[task]) for task in trainer.objective.balanced}
        assert weigher.metrics()["gradient_norms"] == pytest.approx(norms, rel=1e-5, abs=1e-12), step
    present = [norm for norm in norms.values() if norm > 0]
    assert len(present) > 5 and max(present) > 1.5 * min(present)
    assert float((before - 1).abs().max()) > 0.05, "the weights hardly moved from where they start"


def test_next_sentence_prediction_inside_the_balance_does_not_pass_the_transform() -> None:
    with pytest.raises(RefusedError, match=r"(?s)at weights.*next_sentence.*--balancer.at represent"):
        trainer_with("weights", WITH_SENTENCES)


@pytest.mark.exhaustive
def test_a_compiled_model_takes_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by aot_eager; the default backend would add minutes of a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in ("none", "whole", "blocks"):
        trainer = trainer_with("weights", TEN_TASKS, compile=compiled)
        trainer.engine.train(True)
        for _ in range(2):
            trainer.train_step()
        found.append(trainer.hooks.balancer.metrics())
    plain, *others = found
    for traced in others:
        for name in ("gradient_norms", "task_weights"):
            assert traced[name] == pytest.approx(plain[name], rel=1e-5)
