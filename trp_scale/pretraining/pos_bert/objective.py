"""PoS-BERT's objective: masked words in nine part-of-speech groups, and next-sentence prediction (TRP 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.objective import Tap, TapPlace
from trp_scale.pretraining.pos_bert.model import BertOutput
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig

TAPS: dict[TapPlace, Extra] = {"weights": Extra("transform_tap"), "representation": Extra("representation_tap")}
"""Argument of the model that takes a tap."""

NEXT_SENTENCE = "next_sentence"


class PosMaskedLanguageModelling:
    """Losses of T tasks: the groups in their stored order (the last is `other`), then next-sentence prediction.

    `other` words (12-14 % of English words) follow `objective.other`: outside the balance with their natural share
    n_other / n of the masked words, without loss, never masked (then their count is 0), or a tenth balanced task.
    Next-sentence prediction follows `objective.next_sentence`.

    Args:
        config: settings.
        groups: names of the groups as numbered in the shards; the last one is `other`.
        hidden_size: D, the encoder's width.
    """

    in_a_graph = True

    def __init__(self, config: PosBertObjectiveConfig, groups: Sequence[str], hidden_size: int) -> None:
        self.config = config
        self.hidden_size = hidden_size
        self.tasks: tuple[str, ...] = (*groups, NEXT_SENTENCE)
        self.other = len(groups) - 1
        self.next_sentence = len(groups)
        self.regression: tuple[int, ...] = ()
        self.balanced: tuple[int, ...] = tuple(range(self.other))
        if config.other == "task":
            self.balanced += (self.other,)
        if config.next_sentence == "inside":
            self.balanced += (self.next_sentence,)

    def count(self, batch: Batch) -> Tensor:
        """[T] float64; excluded words count too, they only get no weight; with next sentences off there are none."""
        words = batch["label_weights"].flatten().double() @ self._membership(batch)  # [groups]
        rows = batch["row_weights"].double().sum().reshape(1)
        if self.config.next_sentence == "off":
            rows = torch.zeros_like(rows)
        return torch.cat([words, rows])  # [T]

    def _membership(self, batch: Batch) -> Tensor:
        """[R * M, groups] float64, 1 where a masked position belongs to a group; compared rather than counted with
        bincount, which would wait for the GPU."""
        groups = batch["label_groups"].flatten()
        return (groups.unsqueeze(-1) == torch.arange(self.other + 1, device=groups.device)).double()

    def outside_weights(self, counts: Tensor) -> Tensor:
        """[T] float64: n_other / n for `other: outside`, next_sentence_weight for `next_sentence: outside`, else 0."""
        weights = torch.zeros_like(counts)
        if self.config.other == "outside":
            words = counts[: self.next_sentence].sum()
            weights[self.other] = counts[self.other] / words.clamp(min=1)
        if self.config.next_sentence == "outside":
            weights[self.next_sentence].fill_(self.config.next_sentence_weight)
        return weights

    def __call__(self, forward: Callable[..., BertOutput], batch: Batch) -> TaskLosses:
        """Sums of the cross-entropies of each task, in nats, and their counts.

        The sums are taken in float64: they are compared and divided across ranks, and T numbers cost nothing.
        """
        output = forward(
            batch["tokens"],
            batch["token_types"],
            batch.fields.get("attention_mask"),
            batch["masked_positions"],
            kept=batch.fields.get("kept"),
            **{name: batch.extras[name] for name in TAPS.values() if name in batch.extras},
        )
        cross_entropies = output.word_losses or partial(F.cross_entropy, reduction="none")
        words = cross_entropies(output.prediction_logits.flatten(0, 1).float(), batch["labels"].flatten())  # [R * M]
        weighted = words.double() * batch["label_weights"].flatten().double()
        rows = F.cross_entropy(output.next_sentence_logits.float(), batch["next_sentence"], reduction="none")  # [R]
        if self.config.next_sentence == "off":
            # The head still takes part in the graph: ZeRO-3 keeps the last gradient of a parameter that does not.
            rows = rows * 0.0
        rows_sum = (rows.double() * batch["row_weights"].double()).sum().reshape(1)
        shared = output.shared_inputs
        if shared is not None:  # [R, M, D]; under autocast the layer itself reads it in the precision of its output
            shared = shared.flatten(0, 1).to(output.prediction_logits.dtype)  # [R * M, D]
        return TaskLosses(
            sums=torch.cat([weighted @ self._membership(batch), rows_sum]),
            counts=self.count(batch),
            shared_inputs=shared,
            hits=None if output.training or output.word_losses else self._hits(output, batch),
        )

    def _hits(self, output: BertOutput, batch: Batch) -> Tensor:
        """[T] float64, words of each group, and pairs of sentences, that the model would have named."""
        named = output.prediction_logits.flatten(0, 1).argmax(-1) == batch["labels"].flatten()  # [R * M]
        words = named.double() * batch["label_weights"].flatten().double()
        pairs = (output.next_sentence_logits.argmax(-1) == batch["next_sentence"]).double()  # [R]
        weights = batch["row_weights"].double() if self.config.next_sentence != "off" else torch.zeros_like(pairs)
        return torch.cat([words @ self._membership(batch), (pairs @ weights).reshape(1)])

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """The last layer with weights that masked words share is the head's transform, which next-sentence prediction
        does not pass; at the head's input each row belongs to one task, the first to next-sentence prediction."""
        words = tuple(range(self.next_sentence))
        return words if at == "weights" else (*words, self.next_sentence)

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """Return the tap at the transform's output [R, M, D], or at the heads' input [R, 1 + M, D]."""
        rows, masked = batch["masked_positions"].shape
        return Tap(TAPS[at], (rows, masked if at == "weights" else 1 + masked, self.hidden_size))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """The rows of a group's words, the others 0."""
        rows = gradient if at == "weights" else gradient[:, 1:]  # [R, M, D]
        words = rows.flatten(0, 1)  # [R * M, D]
        members = self._membership(batch).to(words.dtype)  # [R * M, groups]
        parts = {group: words * members[:, group, None] for group in range(self.next_sentence)}
        if at == "representation":
            parts[self.next_sentence] = gradient[:, 0]  # [R, D]
        return parts
