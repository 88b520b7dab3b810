"""Level I's masks: chosen by the masking network, for a window at a time; and how the network is taught."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.objective import PatchObjective
from trp_scale.masks.selection import Selection, choice_of, patch_weights, select, split_at


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one micro-batch teaches the masking network: it is to lower sum(weights x of_weights) + sum(gate x of_gate).

    Attributes:
        of_weights: [B, M], for the masked patches' weights.
        of_gate: [B, V], for the visible patches' gates; None for a hard choice.
    """

    of_weights: Tensor
    of_gate: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """What there is of it."""
        return [self.of_weights] if self.of_gate is None else [self.of_weights, self.of_gate]

    def plus(self, other: Lesson, factor: float | Tensor) -> Lesson:
        """self + factor x other."""
        gate = None
        if self.of_gate is not None and other.of_gate is not None:
            gate = self.of_gate + factor * other.of_gate
        return Lesson(of_weights=self.of_weights + factor * other.of_weights, of_gate=gate)

    def times(self, factor: float | Tensor) -> Lesson:
        """factor x self."""
        gate = None if self.of_gate is None else factor * self.of_gate
        return Lesson(of_weights=factor * self.of_weights, of_gate=gate)


@dataclass(frozen=True, kw_only=True)
class MaskedWindow:
    """Masks of one window.

    Attributes:
        micros: the window's micro-batches, with the loader's masks.
        selections: one for each.
        counts: [T] float64, elements of each task in the global batch with these masks.
        factor: 0-dimensional, by which every weight is multiplied: 1, or what makes them 1 on average.
        total: 0-dimensional, sum of the masked patches' probabilities over the global batch.
    """

    micros: Sequence[Batch]
    selections: list[Selection]
    counts: Tensor
    factor: Tensor
    total: Tensor

    def batch(self, micro: Batch) -> Batch:
        """The micro-batch with these masks."""
        place = next(n for n, each in enumerate(self.micros) if each.start == micro.start)
        return self.weighted(place, self.selections[place].weights() * self.factor)

    def weighted(self, place: int, weights: Tensor, gate: Tensor | None = None) -> Batch:
        """Micro-batch number `place` with its masks, these weights [B, M] and gates [B, V]."""
        micro, selection = self.micros[place], self.selections[place]
        extras = {**micro.extras, "patch_weights": by_row(weights, micro)}
        if gate is not None:
            extras["gate"] = by_row(gate, micro)
        return masked_with(replace(micro, extras=extras), selection)


def masked_with(micro: Batch, selection: Selection) -> Batch:
    """The micro-batch with these masks in place of the loader's."""
    chosen = {"visible": by_row(selection.visible, micro), "masked": by_row(selection.masked, micro)}
    return replace(micro, fields={**micro.fields, **chosen})


def by_row(values: Tensor, micro: Batch) -> Tensor:
    """[R k, ...] -> [R, k, ...]."""
    return values.reshape(*micro["masked"].shape[:2], *values.shape[1:])


class MaskTeacher:
    """The masking network in its engine.

    Args:
        config: settings of the run.
        network: the engine that holds it.
        objective: cuts images into patches, and counts.
    Attributes:
        gradient_norm: of the last lesson's global gradient; None before the first.
        below_eps: share of the network's elements whose root mean square gradient is below AdamW's eps; None before
            the first lesson.
    """

    def __init__(self, config: Config, network: Engine, objective: PatchObjective) -> None:
        self.config, self.network, self.objective = config, network, objective
        self.choice = choice_of(config.masking)
        self.patches = (config.crops.size // config.vision.patch_size) ** 2
        self.eps = network_eps(config)
        self.gradient_norm: Tensor | None = None
        self.below_eps: Tensor | None = None

    @torch.no_grad()
    def choose(self, engine: Engine, window: Sequence[Batch], step: int, *, keep: bool) -> MaskedWindow:
        """Masks for a window, by the network as it is.

        Args:
            engine: holds the encoder, whose patch embedding the network reads.
            step: number of the run's step, for the curriculum.
            keep: keep the network's inputs, for a lesson.
        """
        split = split_at(step, self.config.training.steps, self.patches, self.config.masking)
        selections = []
        for micro in window:
            patches = self.objective.patches(micro)
            every = torch.arange(self.patches, device=patches.device).expand(len(patches), -1)
            embeddings = engine(patches, every, every[:, :0], give="patch_embedding")
            with self.network.exact_forwards():  # it is small, and in bf16 many patches would be equally probable
                probabilities = self.network(embeddings)
            selections.append(select(probabilities, split, embeddings if keep else None))
        pairs = list(zip(window, selections, strict=True))
        counts = torch.stack([self.objective.count(masked_with(*pair)) for pair in pairs]).sum(0)
        there = torch.stack(
            [(chosen.weights().double().sum(1) @ rows(micro).double()) for micro, chosen in pairs]
        ).sum()
        number = torch.stack([rows(micro).double().sum() * split.masked for micro in window]).sum()
        summed = engine.data_group.sum(torch.cat([counts.to(there.device), torch.stack([there, number])]))
        total, number = summed[-2], summed[-1]
        factor = number / total if self.config.masking.weights == "normalised" else torch.ones_like(total)
        return MaskedWindow(micros=window, selections=selections, counts=summed[:-2], factor=factor, total=total)

    def teach(self, windows: Sequence[tuple[MaskedWindow, Sequence[Lesson]]], scale: float) -> bool:
        """One step of the network's AdamW down the sum of all lessons, unless its gradient is not finite; returns
        whether it was made.

        Args:
            scale: share of the peak learning rate.
        """
        centred = [(window, self._centred(window, lessons)) for window, lessons in windows]
        parts = [(window, number, lesson) for window, lessons in centred for number, lesson in enumerate(lessons)]
        for place, (window, number, lesson) in enumerate(parts):
            selection, present = window.selections[number], rows(window.micros[number])
            assert selection.embeddings is not None, "masks were chosen without keeping what they came from"
            with self.network.exact_forwards():
                probabilities = self.network(selection.embeddings)
            weights = patch_weights(probabilities, selection, self.choice)
            loss = (weights.masked * lesson.of_weights * present[:, None]).sum() * window.factor
            if weights.gate is not None and lesson.of_gate is not None:
                loss = loss + (weights.gate * lesson.of_gate * present[:, None]).sum()
            self.network.backward(loss, last=place == len(parts) - 1)
        norm = self.gradient_norm = self.network.check_gradients()
        # The one place that waits for the device, once in `every` updates of the head.
        if not math.isfinite(float(norm)):
            self.network.skip()
            return False
        self.network.step(self.config.multilevel.lr * scale)
        self.below_eps = self._share_below_eps()
        return True

    def _centred(self, window: MaskedWindow, lessons: Sequence[Lesson]) -> Sequence[Lesson]:
        """With normalised weights, less their weighted mean: scaling all probabilities then changes nothing."""
        if self.config.masking.weights == "raw":
            return lessons
        pairs = zip(window.micros, window.selections, lessons, strict=True)
        local = torch.stack(
            [
                (chosen.weights().double() * lesson.of_weights).sum(1) @ rows(micro).double()
                for micro, chosen, lesson in pairs
            ]
        ).sum()
        mean = self.network.data_group.sum(local) / window.total
        return [replace(lesson, of_weights=lesson.of_weights - mean) for lesson in lessons]

    @torch.no_grad()
    def _share_below_eps(self) -> Tensor:
        settings = self.config.optimizer
        share = 1 - settings.beta2 ** self.network.optimizer_steps()
        squares = [piece.tensors["exp_avg_sq"] for piece in self.network.pieces() if piece.owner]
        found = torch.zeros(2, dtype=torch.float64, device=self.network.device)
        for square in squares:
            found += torch.stack([(square < share * self.eps**2).double().sum(), found.new_tensor(square.numel())])
        below, number = self.network.data_group.sum(found)
        share_below: Tensor = below / number
        return share_below


def network_eps(config: Config) -> float:
    """AdamW's eps of the masking network, in units of its gradients. Hypergradients carry the learning rate of the
    encoder's step, and with a fine-tuned second encoder the share of the way that it follows the first
    (fine_tuning.py)."""
    settings, lr = config.multilevel, config.optimizer.lr
    if settings.feedback == "reconstruction":
        return settings.eps
    if settings.mode == "look_ahead":
        return settings.eps * (settings.look_ahead_lr or lr)
    return settings.eps * lr * (2.0 * lr * settings.proximity if settings.second_level == "fine_tuning" else 1.0)


def rows(micro: Batch) -> Tensor:
    """[B] weight of each crop's row: 1, or 0 where it is not there."""
    crops: Tensor = micro["row_weights"].repeat_interleave(micro["images"].shape[1])
    return crops
