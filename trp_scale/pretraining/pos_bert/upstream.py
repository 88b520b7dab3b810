"""Pre-training on text: PoS-BERT and BERT (TRP 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.checkpoint.run_directory import TOKENIZER, copy_tokenizer
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Rows
from trp_scale.data.text.dataset import GROUPS, TextMeta, tokenizer_digest
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.pretraining.base import DataFacts, Outline, UpstreamParts
from trp_scale.pretraining.pos_bert.batch import keeping_all, open_rows
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.weights import load_bert

COUNTED_ROWS = 2048
"""Rows in which pieces are counted: a quarter of a million pieces at 128 to a row."""


def piece_counts(batch: Batch, meta: TextMeta) -> Tensor:
    """[V] float64, how often each piece occurs in the batch's rows as they are stored; special tokens do not count."""
    tokens = batch["tokens"].clone()  # [R, L]
    used = batch["label_weights"] > 0  # [R, M]
    row = torch.arange(len(tokens))[:, None].expand_as(used)
    tokens[row[used], batch["masked_positions"][used]] = batch["labels"][used]
    counts = torch.bincount(tokens.flatten(), minlength=meta.vocab_size).double()
    counts[[meta.special_tokens[name] for name in ("pad", "cls", "sep", "mask")]] = 0.0
    return counts


def blank_rows(length: int, predicted: int, rows: int) -> Batch:
    """Rows in which nothing is written and nothing left out as padding, with `predicted` masked positions each."""
    fields = {
        **dict.fromkeys(("tokens", "token_types"), torch.zeros(rows, length, dtype=torch.int64)),
        **dict.fromkeys(
            ("masked_positions", "labels", "label_groups"), torch.zeros(rows, predicted, dtype=torch.int64)
        ),
        "label_weights": torch.ones(rows, predicted),
        "next_sentence": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


class TextUpstream(UpstreamParts):
    """Sentence pairs with masked words; see `Upstream`."""

    exports: ClassVar[Mapping[str, str]] = {"hf": "trp_scale.pretraining.pos_bert.weights:write_bert"}
    open_rows = staticmethod(open_rows)

    def __init__(self, config: PosBertConfig, environment: Environment) -> None:
        data = environment.data
        self.config = config
        self._group = data
        self.sources = self.open_rank_sources(config, environment)
        self.source = self.sources.train
        self.meta = self.sources.meta
        self.objective = PosMaskedLanguageModelling(config.objective, self.meta.groups, config.model.hidden_size)
        self.positions_per_step = config.batch.global_size * self.meta.length

    @classmethod
    def facts(cls, config: PosBertConfig) -> DataFacts:
        meta = open_rows(config, parse_paths(config.data.path)).meta
        assert isinstance(meta, TextMeta)
        return DataFacts(length=meta.length, vocabulary=meta.vocab_size)

    @classmethod
    def outline(cls, config: PosBertConfig, facts: DataFacts) -> Outline:
        """Sequences without padding."""
        model, length = config.model, facts.length or config.model.max_positions
        if length > model.max_positions:
            raise RefusedError(f"--length is {length}, allowed: up to --model.max_positions {model.max_positions}")
        predicted = config.masking.limit or round(config.masking.ratio * length)
        return Outline(
            model=partial(BertForMaskedPositions, model, vocab_size=facts.vocabulary, seed=config.training.seed),
            objective=PosMaskedLanguageModelling(config.objective, GROUPS, model.hidden_size),
            rows=partial(blank_rows, length, predicted),
            step_rows=config.batch.global_size,
            positions=length,
        )

    @cached_property
    def step_flops(self) -> float:
        """Return the FLOPs of a step with as much padding left out as in the first rows of the training order."""
        facts = DataFacts(length=self.meta.length, vocabulary=self.meta.vocab_size)
        outline = self.outline(self.config, facts)
        return replace(outline, rows=lambda count: self._first_rows()).step_flops(self._group.size)

    def _first_rows(self) -> Batch:
        return self.source.first_rows(min(COUNTED_ROWS, self.source.rows))

    def worst_case_batch(self, batch: Batch) -> Batch:
        """Return the batch with all padding kept."""
        return keeping_all(batch)

    def model(self) -> nn.Module:
        settings, vocab_size = self.config.model, self.meta.vocab_size
        model = BertForMaskedPositions(settings, vocab_size=vocab_size, seed=self.config.training.seed)
        if self.config.objective.output_bias == "frequency":
            model.set_output_bias(self._log_frequencies())
        if settings.weights:
            give_weights(model, settings, load_bert)
        return model

    def _log_frequencies(self) -> Tensor:
        """[V] of each piece, from the first rows of the training order."""
        batch = self._first_rows()
        counts = piece_counts(batch, self.meta)
        digest = hashlib.blake2b(counts.numpy().tobytes(), digest_size=16).hexdigest()
        self._group.require_equal(digest, f"what the first {batch.rows} rows of {self.config.data.path} hold")
        return ((counts + 1.0) / (counts + 1.0).sum()).log()

    def save_assets(self, run_dir: Path, world: Group) -> None:
        copy_tokenizer(run_dir, Path(self.meta.tokenizer_directories[0]), world)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"vocab_size": self.meta.vocab_size, "data_tokenizer": TOKENIZER}

    @classmethod
    def inference_config(cls, config: PosBertConfig) -> PosBertConfig:
        """No pieces are counted for a first output bias."""
        config = copy(config)
        config.objective = replace(config.objective, output_bias="zero")
        return config

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Rows of the run's own tokenizer."""
        meta = rows.meta
        assert isinstance(meta, TextMeta)
        digest, vocabulary = tokenizer_digest(run_dir / TOKENIZER), extra["vocab_size"]
        if meta.vocab_size != vocabulary:
            raise RefusedError(
                f"{path}: a vocabulary of {meta.vocab_size} pieces found, the run's has {vocabulary}; shard the text "
                f"with the run's tokenizer: --tokenizer {run_dir / TOKENIZER}"
            )
        if digest != meta.tokenizer_digest and "" not in (digest, meta.tokenizer_digest):
            raise RefusedError(
                f"{path}: another tokenizer found than the run's, of as many pieces; shard the text with the run's: "
                f"--tokenizer {run_dir / TOKENIZER}"
            )
