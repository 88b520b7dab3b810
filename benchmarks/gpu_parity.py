"""Sections of benchmarks/gpu.py on correctness: the engines agree, and a step waits for the GPU once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_items import Figures, Item
from benchmarks.gpu_setting import ENGINES, Notes, Precision, Setting, lacking, run_config, training
from trp_scale.config.components import settings_of

STEPS, FEW_STEPS, LR = 5, 2, 1e-3
EXACT = settings_of("balancer", "minimax", estimate="exact")
WAITED = "called a synchronizing CUDA operation"
EXPECTED_WAITS = 1
"""The .tolist() of Trainer.finish, which reads gradient norm, loss and weights together."""
OWN_WAITS = ("plain", "fsdp")
"""Layouts that are expected to wait no more than that; DeepSpeed's own waits are counted and shown."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of the steps, and the weights before and after."""

    losses: list[float]
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(setting: Setting, layout: str, precision: Precision, device: torch.device | None = None) -> Trained:
    """STEPS steps of minimax `exact` with two micro-batches, so that the pre-pass is taken too; no dropout."""
    rows = 2 if setting.small else 16
    config = run_config(setting.checked, rows=rows, accumulation=2, precision=precision, balancer=EXACT, lr=LR)
    with training(setting, layout, config, length=min(setting.lengths), device=device) as trainer:
        initial = trainer.engine.full_weights()
        for _ in range(FEW_STEPS if setting.small else STEPS):
            trainer.train_step()
        assert isinstance(trainer.observer, Notes)
        return Trained(losses=trainer.observer.losses, initial=initial, weights=trainer.engine.full_weights())


def apart(ours: Trained, reference: Trained) -> dict[str, float]:
    """How far two runs are apart, over all tensors.

    Key biases are left out: attention does not see them, their gradient is rounding, which AdamW scales up to the
    learning rate.
    """
    names = [name for name in reference.weights if not name.endswith("attention.self.key.bias")]

    def norm(of: Callable[[str], Tensor]) -> float:
        return float(torch.stack([of(name).double().norm() for name in names]).norm())

    difference = norm(lambda name: ours.weights[name] - reference.weights[name])
    travelled = norm(lambda name: reference.weights[name] - reference.initial[name])
    gaps = [abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    return {
        "largest_relative_loss_gap": max(gaps),
        "distance_over_weights": difference / norm(lambda name: reference.weights[name]),
        "distance_over_travelled": difference / travelled,
    }


def parity(setting: Setting) -> Iterator[Item]:
    """Every engine against plain, on one rank. fp32 first: deepspeed 0.19 keeps a note of autocast in the process.

    "plain, again" repeats the reference: what is left there is the order of the GPU's additions. In bf16 DeepSpeed's
    autocast reduces the gradients of linear layers in bf16 (stages 1 to 3), the others keep them in fp32.
    """
    references: dict[str, Trained] = {}

    def reference(precision: Precision) -> Figures:
        references[precision] = trained = train(setting, "plain", precision)
        return {"losses": trained.losses}

    def compare(layout: str, precision: Precision, device: torch.device | None = None) -> Figures:
        if precision not in references:
            raise RuntimeError(f"plain did not train in {precision}: nothing to compare with")
        trained = train(setting, layout, precision, device)
        return {"losses": trained.losses, **apart(trained, references[precision])}

    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        yield Item(name=f"{precision}, plain", measure=partial(reference, precision), seconds=10)
        yield Item(name=f"{precision}, plain, again", measure=partial(compare, "plain", precision), seconds=4)
        for layout in list(ENGINES)[1:]:
            yield Item(
                name=f"{precision}, {layout}",
                measure=partial(compare, layout, precision),
                seconds=8,
                lacking=lacking(layout),
            )
    on_cpu = partial(compare, "plain", "fp32", torch.device("cpu"))
    yield Item(name="fp32, plain, on the CPU", measure=on_cpu, seconds=15, lacking=setting.no_gpu)


def waits_of(step: Callable[[], object]) -> list[str]:
    """Where the host waited for the GPU in a call: "file:line" of each wait that torch warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if WAITED in str(one.message)]


def waits(setting: Setting) -> Iterator[Item]:
    """How often a step waits for the GPU; expected: EXPECTED_WAITS on plain and FSDP2, with accumulation or without."""

    def count(layout: str, accumulation: int) -> Figures:
        rows = 2 if setting.small else 16
        config = run_config(setting.checked, rows=rows, accumulation=accumulation, balancer=EXACT)
        with training(setting, layout, config, length=min(setting.lengths)) as trainer:
            for _ in range(3):
                trainer.train_step()
            places = waits_of(trainer.train_step)
        figures: Figures = {"waits": len(places), "places": places}
        if layout in OWN_WAITS:
            figures = {**figures, "expected": EXPECTED_WAITS, "as_expected": len(places) == EXPECTED_WAITS}
        return figures

    for layout in ENGINES:
        for accumulation in (1, 2):
            yield Item(
                name=f"{layout}, accumulation {accumulation}",
                measure=partial(count, layout, accumulation),
                seconds=8,
                lacking=setting.no_gpu or lacking(layout),
            )
