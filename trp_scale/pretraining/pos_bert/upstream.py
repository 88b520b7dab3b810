"""Pre-training on text: PoS-BERT and BERT (TRP 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.checkpoint.format import named_weights
from trp_scale.checkpoint.initial_weights import GivenWeights
from trp_scale.checkpoint.run_directory import TOKENIZER, copy_tokenizer
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, Extra, TaskLosses, membership
from trp_scale.core.run import Tap, TappedObjective, TapPlace
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Rows
from trp_scale.data.text.dataset import GROUPS, TextMeta, tokenizer_digest
from trp_scale.data.text.tokenizer import open_tokenizer
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.pretraining.base import DataFacts, Outline, Upstream
from trp_scale.pretraining.pos_bert.batch import keep_all_positions, kept_lengths, open_rows
from trp_scale.pretraining.pos_bert.model import BertOutput
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.weights import MODELS, load_transformers, sizes_from_weights
from trp_scale.pretraining.tasks import SOURCE, blank_batch, join_names, source_names

TAPS: dict[TapPlace, Extra] = {"weights": Extra("transform_tap"), "representation": Extra("representation_tap")}
"""Argument of the model for each tap."""

NEXT_SENTENCE = "next_sentence"


class PosMaskedLanguageModelling(TappedObjective):
    """T tasks of words, then next-sentence prediction.

    The tasks of words are the groups in their stored order (the last is `other`, 12-14 % of English words), the
    sources, or the groups of each source.

    Args:
        hidden_size: D, the width of the encoder.
        sources: names of the sources that are separate tasks.
    """

    def __init__(
        self, config: PosBertObjectiveConfig, groups: Sequence[str], hidden_size: int, sources: tuple[str, ...] = ()
    ) -> None:
        self.config = config
        self.hidden_size = hidden_size
        self.groups = len(groups)
        self.by = config.tasks if sources else "parts_of_speech"
        words = {
            "parts_of_speech": tuple(groups),
            "sources": sources,
            "parts_of_speech_by_sources": join_names(sources, tuple(groups)),
        }[self.by]
        self.tasks: tuple[str, ...] = (*words, NEXT_SENTENCE)
        self.next_sentence = len(words)
        # The tasks of words outside the nine groups
        self.other = slice(0) if self.by == "sources" else slice(self.groups - 1, self.next_sentence, self.groups)
        self.regression: tuple[int, ...] = ()
        outside = () if config.other == "task" else range(*self.other.indices(self.next_sentence))
        self.balanced: tuple[int, ...] = tuple(task for task in range(self.next_sentence) if task not in outside)
        if config.next_sentence == "inside":
            self.balanced += (self.next_sentence,)

    def count(self, batch: Batch) -> Tensor:
        """[T] float64; words without loss count too; without next-sentence prediction its count is 0."""
        words = batch["label_weights"].flatten().double() @ self._membership(batch)  # [tasks of words]
        rows = batch["row_weights"].double().sum().reshape(1)
        if self.config.next_sentence == "off":
            rows = torch.zeros_like(rows)
        return torch.cat([words, rows])  # [T]

    def _membership(self, batch: Batch) -> Tensor:
        """Return [R * M, tasks of words] float64, 1 where a masked position belongs to a task."""
        task = batch["label_groups"]  # [R, M]
        if self.by == "sources":
            task = batch[SOURCE].unsqueeze(-1).expand_as(task)
        elif self.by == "parts_of_speech_by_sources":
            task = batch[SOURCE].unsqueeze(-1) * self.groups + task
        return membership(task.flatten(), self.next_sentence)

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
        """Return the sums of the cross-entropies of each task, in nats and float64, and their counts."""
        packed = {"segment_ends": batch["segment_ends"]} if "segment_ends" in batch.fields else {}
        output = forward(
            batch["tokens"],
            batch["token_types"],
            batch.fields.get("attention_mask"),
            batch["masked_positions"],
            kept=batch.fields.get("kept"),
            **packed,
            **{name: batch.extras[name] for name in TAPS.values() if name in batch.extras},
        )
        cross_entropies = output.word_losses or partial(F.cross_entropy, reduction="none")
        words = cross_entropies(output.prediction_logits.flatten(0, 1).float(), batch["labels"].flatten())  # [R * M]
        weighted = words.double() * batch["label_weights"].flatten().double()
        rows = F.cross_entropy(output.next_sentence_logits.float(), batch["next_sentence"], reduction="none")  # [R]
        if self.config.next_sentence == "off":
            # The head stays in the graph: ZeRO-3 keeps the last gradient of a parameter outside it.
            rows = rows * 0.0
        rows_sum = (rows.double() * batch["row_weights"].double()).sum().reshape(1)
        shared = output.shared_inputs
        if shared is not None:  # [R, M, D]; under autocast the layer casts its input to the precision of its output
            shared = shared.flatten(0, 1).to(output.prediction_logits.dtype)  # [R * M, D]
        return TaskLosses(
            sums=torch.cat([weighted @ self._membership(batch), rows_sum]),
            counts=self.count(batch),
            shared_inputs=shared,
            hits=None if output.training or output.word_losses else self._hits(output, batch),
        )

    def _hits(self, output: BertOutput, batch: Batch) -> Tensor:
        """Return the number of correct predictions of each task, [T] float64."""
        named = output.prediction_logits.flatten(0, 1).argmax(-1) == batch["labels"].flatten()  # [R * M]
        words = named.double() * batch["label_weights"].flatten().double()
        pairs = (output.next_sentence_logits.argmax(-1) == batch["next_sentence"]).double()  # [R]
        weights = batch["row_weights"].double() if self.config.next_sentence != "off" else torch.zeros_like(pairs)
        return torch.cat([words @ self._membership(batch), (pairs @ weights).reshape(1)])

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """At "weights", the head's transform, which next-sentence prediction does not use; at "representation", the
        heads' input, whose first row belongs to next-sentence prediction."""
        words = tuple(range(self.next_sentence))
        return words if at == "weights" else (*words, self.next_sentence)

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """Return the tap on the transform's output [R, M, D], or on the heads' input [R, 1 + M, D]."""
        rows, masked = batch["masked_positions"].shape
        return Tap(TAPS[at], (rows, masked if at == "weights" else 1 + masked, self.hidden_size))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """Return the gradient at the rows of each task, 0 elsewhere."""
        rows = gradient if at == "weights" else gradient[:, 1:]  # [R, M, D]
        words = rows.flatten(0, 1)  # [R * M, D]
        members = self._membership(batch).to(words.dtype)  # [R * M, tasks of words]
        parts = {task: words * members[:, task, None] for task in range(self.next_sentence)}
        if at == "weights":
            return parts
        count, masked, _ = rows.shape
        padded = {task: F.pad(part.view(count, masked, -1), (0, 0, 1, 0)) for task, part in parts.items()}
        return padded | {self.next_sentence: F.pad(gradient[:, :1], (0, 0, 0, masked))}  # [R, 1 + M, D]


def make_objective(config: PosBertConfig, groups: Sequence[str]) -> PosMaskedLanguageModelling:
    """Return the objective of a run. Raises RefusedError as `source_names`."""
    return PosMaskedLanguageModelling(config.objective, groups, config.model.hidden_size, source_names(config))


COUNTED_ROWS = 2048
"""Rows for counting pieces: a quarter of a million pieces with 128 per row."""


def piece_counts(batch: Batch, meta: TextMeta) -> Tensor:
    """Count each piece in the unmasked rows of a batch, [V] float64; special tokens have count 0."""
    tokens = batch["tokens"].clone()  # [R, L]
    used = batch["label_weights"] > 0  # [R, M]
    row = torch.arange(len(tokens))[:, None].expand_as(used)
    tokens[row[used], batch["masked_positions"][used]] = batch["labels"][used]
    counts = torch.bincount(tokens.flatten(), minlength=meta.vocab_size).double()
    counts[[meta.special_tokens[name] for name in ("pad", "cls", "sep", "mask")]] = 0.0
    return counts


def blank_rows(config: PosBertConfig, length: int, segments: int, rows: int) -> Batch:
    """Return a batch of empty rows of `length` pieces, without padding; with `segments`, packed rows of one segment."""
    predicted = config.masking.limit or round(config.masking.ratio * length)
    fields = {
        **dict.fromkeys(("tokens", "token_types"), torch.zeros(rows, length, dtype=torch.int64)),
        **dict.fromkeys(
            ("masked_positions", "labels", "label_groups"), torch.zeros(rows, predicted, dtype=torch.int64)
        ),
        "label_weights": torch.ones(rows, predicted),
        "next_sentence": torch.zeros(rows, dtype=torch.int64),
        **({"segment_ends": torch.full((rows, segments), length)} if segments else {}),
    }
    return blank_batch(config, rows, fields)


def require_same_pieces(weights: str, tokenizer: Path) -> None:
    """Refuse weights whose tokenizer has other pieces than that of the data; it is unknown for a single file.

    Args:
        weights: value of --model.weights: a run, a checkpoint, or a directory of transformers.
    """
    directory = Path(named_weights(weights)[0])
    places = (directory / TOKENIZER, directory.resolve().parent.parent / TOKENIZER, directory)
    theirs = next((path for path in places if tokenizer_digest(path)), None)
    if theirs is None or tokenizer_digest(theirs) == tokenizer_digest(tokenizer):
        return
    vocabularies = [open_tokenizer(path, flag="--model.weights").get_vocab() for path in (theirs, tokenizer)]
    if vocabularies[0] != vocabularies[1]:
        raise RefusedError(
            f"--model.weights {weights}: its tokenizer has other pieces than that of the data, {tokenizer}; shard the "
            f"text with --tokenizer {theirs}"
        )


class TextUpstream(Upstream):
    """Sentence pairs with masked words; see `Upstream`."""

    exports: ClassVar[Mapping[str, str]] = {"hf": "trp_scale.pretraining.pos_bert.weights:write_transformers"}
    open_rows = staticmethod(open_rows)

    def __init__(self, config: PosBertConfig, environment: Environment) -> None:
        data = environment.data
        self.config = config
        self._group = data
        self.sources = self.open_rank_sources(config, environment)
        self.source = self.sources.train
        self.meta = self.sources.meta
        if config.model.weights:
            require_same_pieces(config.model.weights, Path(self.meta.tokenizer_directories[0]))
        self.objective = make_objective(config, self.meta.groups)
        self.positions_per_step = config.batch.global_size * self.meta.length

    @classmethod
    def sizes_from_weights(cls, config: PosBertConfig, source: GivenWeights) -> dict[tuple[str, str], Any]:
        return sizes_from_weights(source.fields, config.model.kind) if source.fields.document else {}

    @classmethod
    def facts(cls, config: PosBertConfig) -> DataFacts:
        meta = open_rows(config, parse_paths(config.data.path)).meta
        assert isinstance(meta, TextMeta)
        return DataFacts(length=meta.length, segments=meta.segments, vocabulary=meta.vocab_size)

    @classmethod
    def outline(cls, config: PosBertConfig, facts: DataFacts) -> Outline:
        """Describe the run with sequences without padding."""
        model, length = config.model, facts.length or config.model.max_positions
        if length > model.max_positions:
            raise RefusedError(f"--length is {length}, allowed: up to --model.max_positions {model.max_positions}")
        return Outline(
            model=partial(MODELS[model.kind], model, vocab_size=facts.vocabulary, seed=config.training.seed),
            objective=make_objective(config, GROUPS),
            rows=partial(blank_rows, config, length, facts.segments),
            step_rows=config.batch.global_size,
            positions=length,
            spared_flops=partial(MODELS[model.kind].spared_flops, model),
        )

    @cached_property
    def step_flops(self) -> float:
        """Model FLOPs of a step, with the padding of the first rows of the training order left out."""
        facts = DataFacts(length=self.meta.length, vocabulary=self.meta.vocab_size)
        outline = self.outline(self.config, facts)
        return replace(outline, rows=lambda count: self._first_rows()).step_flops(self._group.size)

    def _first_rows(self) -> Batch:
        return self.source.first_rows(min(COUNTED_ROWS, self.source.rows))

    def worst_case_batch(self, batch: Batch) -> Batch:
        """Return the batch with padding computed too."""
        return keep_all_positions(batch)

    def shapes(self, batch: Batch) -> Iterator[Batch]:
        if self.meta.segments:
            yield batch
            return
        whole = keep_all_positions(batch)
        lengths = kept_lengths(whole["kept"].numel()) if self.config.training.capture == "on" else []
        for length in reversed(lengths):
            yield replace(whole, fields={**whole.fields, "kept": whole["kept"][:length]})

    def model(self) -> nn.Module:
        settings, vocab_size = self.config.model, self.meta.vocab_size
        model = MODELS[settings.kind](settings, vocab_size=vocab_size, seed=self.config.training.seed)
        if self.config.objective.output_bias == "frequency":
            batch = self._first_rows()
            counts = piece_counts(batch, self.meta)
            digest = hashlib.blake2b(counts.numpy().tobytes(), digest_size=16).hexdigest()
            self._group.require_equal(digest, f"what the first {batch.rows} rows of {self.config.data.path} hold")
            model.set_output_bias(((counts + 1.0) / (counts + 1.0).sum()).log())
        self.start_from_weights(model, load_transformers)
        return model

    def save_assets(self, run_dir: Path, world: Group) -> None:
        copy_tokenizer(run_dir, Path(self.meta.tokenizer_directories[0]), world)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"vocab_size": self.meta.vocab_size, "data_tokenizer": TOKENIZER}

    @classmethod
    def inference_config(cls, config: PosBertConfig) -> PosBertConfig:
        """Return settings without an initial output bias."""
        config = copy(config)
        config.objective = replace(config.objective, output_bias="zero")
        return config

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Refuse rows of another tokenizer."""
        meta = rows.meta
        assert isinstance(meta, TextMeta)
        digest, vocabulary = tokenizer_digest(run_dir / TOKENIZER), extra["vocab_size"]
        if meta.vocab_size != vocabulary:
            raise RefusedError(
                f"{path}: the vocabulary has {meta.vocab_size} pieces, the run's has {vocabulary}; shard the text "
                f"with the run's tokenizer: --tokenizer {run_dir / TOKENIZER}"
            )
        if digest != meta.tokenizer_digest and "" not in (digest, meta.tokenizer_digest):
            raise RefusedError(
                f"{path}: the tokenizer differs from the run's, which has as many pieces; shard the text with the "
                f"run's: --tokenizer {run_dir / TOKENIZER}"
            )
