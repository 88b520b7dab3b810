"""Sections of benchmarks/gpu.py on engines: they agree, and no step waits for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_setting import ENGINES, Figures, Item, Setting, lacking, text, training
from benchmarks.steps import Notes, Precision, Workload
from trp_scale.config.registry import make_settings
from trp_scale.methods.adversary.positions import PositionAdversary

STEPS, FEW_STEPS, LR = 5, 2, 1e-3
EXACT = make_settings("balancer", "minimax", estimate="exact")
WAITED = "called a synchronizing CUDA operation"
EXPECTED_WAITS = 0
"""A step's numbers are copied behind its work and read a step later, by an event that torch does not warn about."""
OWN_WAITS = ("plain", "ddp", "fsdp")
"""Layouts that are expected to wait no more than that; DeepSpeed's own waits are counted and shown."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of the steps, the weights before and after, and the adversary's vector if there is one."""

    losses: list[float]
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    adversary: Tensor | None


def checked(setting: Setting, precision: Precision = "bf16", accumulation: int = 2) -> Workload:
    """PoS-BERT with minimax `exact`; with two micro-batches the pre-pass is taken too. No dropout."""
    rows = 2 if setting.small else 16
    return text(
        setting, setting.checked, rows=rows, accumulation=accumulation, precision=precision, balancer=EXACT, lr=LR
    )


def train(setting: Setting, layout: str, work: Workload, device: torch.device | None = None) -> Trained:
    """STEPS steps."""
    with training(setting, layout, work, device) as trainer:
        initial = without_key_biases(trainer.engine.full_weights())
        for _ in range(FEW_STEPS if setting.small else STEPS):
            trainer.train_step()
        trainer.read_stats()
        assert isinstance(trainer.observer, Notes)
        adversaries = [each for each in trainer.hooks.all if isinstance(each, PositionAdversary)]
        return Trained(
            losses=trainer.observer.losses,
            initial=initial,
            weights=without_key_biases(trainer.engine.full_weights()),
            adversary=adversaries[0].vector.detach().double().cpu() if adversaries else None,
        )


def without_key_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that attention sees: the gradient of a key's bias is rounding, which AdamW scales up to the learning
    rate. Of a bias of queries, keys and values it is the middle third."""
    found = {name: weight for name, weight in weights.items() if not name.endswith("attention.self.key.bias")}
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        queries, _, values = found.pop(name).chunk(3)
        found |= {f"{name}.queries": queries, f"{name}.values": values}
    return found


def apart(ours: Trained, reference: Trained) -> dict[str, float]:
    """How far two runs are apart, over all tensors."""

    def norm(of: Callable[[str], Tensor]) -> float:
        return float(torch.stack([of(name).double().norm() for name in reference.weights]).norm())

    difference = norm(lambda name: ours.weights[name] - reference.weights[name])
    travelled = norm(lambda name: reference.weights[name] - reference.initial[name])
    gaps = [abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    found = {
        "largest_relative_loss_gap": max(gaps),
        "distance_over_weights": difference / norm(lambda name: reference.weights[name]),
        "distance_over_travelled": difference / travelled,
    }
    if ours.adversary is not None and reference.adversary is not None:
        moved = ours.adversary - reference.adversary
        found["adversary_distance"] = float(moved.norm() / reference.adversary.norm())
    return found


class Comparison:
    """Runs on other layouts against one on plain, on one rank.

    Args:
        workload: makes what is trained, anew for each run.
    """

    def __init__(self, setting: Setting, workload: Callable[[Precision], Workload]) -> None:
        self.setting, self.workload = setting, workload
        self.references: dict[Precision, Trained] = {}

    def items(self, name: str, layouts: Mapping[str, str], *, seconds: float) -> Iterator[Item]:
        """fp32 first: deepspeed 0.19 keeps a note of autocast in the process.

        Args:
            name: before the names of the items.
            layouts: what is compared with plain, by name.
            seconds: of a run.
        """
        precisions: tuple[Precision, ...] = ("fp32", "bf16")
        for precision in precisions:
            yield Item(name=f"{name}{precision}, plain", measure=partial(self.refer, precision), seconds=seconds)
            for title, layout in layouts.items():
                yield Item(
                    name=f"{name}{precision}, {title}",
                    measure=partial(self.compare, layout, precision),
                    seconds=seconds,
                    lacking=lacking(layout),
                )

    def refer(self, precision: Precision) -> Figures:
        """Train on plain."""
        found = self.references[precision] = train(self.setting, "plain", self.workload(precision))
        figures: Figures = {"losses": found.losses}
        return figures if found.adversary is None else {**figures, "adversary_norm": float(found.adversary.norm())}

    def compare(self, layout: str, precision: Precision, device: torch.device | None = None) -> Figures:
        """Train on another layout, or on another device."""
        if precision not in self.references:
            raise RuntimeError(f"plain did not train in {precision}: nothing to compare with")
        found = train(self.setting, layout, self.workload(precision), device)
        return {"losses": found.losses, **apart(found, self.references[precision])}


def parity(setting: Setting) -> Iterator[Item]:
    """Every engine against plain, on one rank.

    "plain, again" repeats the reference: what is left there is the order of the GPU's additions. In bf16 DeepSpeed's
    autocast reduces the gradients of linear layers in bf16 (stages 1 to 3), the others keep them in fp32.
    """
    comparison = Comparison(setting, partial(checked, setting))
    layouts = {"plain, again": "plain"} | {layout: layout for layout in list(ENGINES)[1:]}
    yield from comparison.items("", layouts, seconds=8)
    on_cpu = partial(comparison.compare, "plain", "fp32", torch.device("cpu"))
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


def waited(setting: Setting, layout: str, workload: Callable[[], Workload]) -> Figures:
    """How often a step waits for the GPU; expected: EXPECTED_WAITS on plain and FSDP2."""
    with training(setting, layout, workload()) as trainer:
        for _ in range(3):
            trainer.train_step()
        places = waits_of(trainer.train_step)
    figures: Figures = {"waits": len(places), "places": places}
    if layout not in OWN_WAITS:
        return figures
    return {**figures, "expected": EXPECTED_WAITS, "as_expected": len(places) == EXPECTED_WAITS}


def waits_item(setting: Setting, name: str, layout: str, workload: Callable[[], Workload]) -> Item:
    measure = partial(waited, setting, layout, workload)
    return Item(name=name, measure=measure, seconds=8, lacking=setting.no_gpu or lacking(layout))


def waits(setting: Setting) -> Iterator[Item]:
    """How often a step waits, with accumulation and without."""
    for layout in ENGINES:
        for accumulation in (1, 2):
            workload = partial(checked, setting, accumulation=accumulation)
            yield waits_item(setting, f"{layout}, accumulation {accumulation}", layout, workload)
