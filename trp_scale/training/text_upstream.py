"""Pre-training on text: PoS-BERT and BERT (TRP 4.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trp_scale.config import Config
from trp_scale.data.sources import open_sources
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.engines.base import Engine
from trp_scale.engines.build import MakeEngine
from trp_scale.hooks.base import Hook
from trp_scale.models.bert import BertForMaskedPositions
from trp_scale.objectives.pos_mlm import PosMaskedLanguageModelling
from trp_scale.observe.throughput import bert_step_flops
from trp_scale.training import rundir
from trp_scale.training.initial_weights import give_weights


class TextUpstream:
    """Sentence pairs with masked words; see `Upstream`."""

    def __init__(self, config: Config, environment: Environment) -> None:
        data = environment.data
        self.config = config
        self.sources = open_sources(config, rank=data.rank, world=data.size, device_type=environment.device.type)
        self.source = self.sources.train
        self.meta = self.sources.meta
        self.objective = PosMaskedLanguageModelling(config.objective, self.meta.groups, config.model.hidden_size)
        self.positions_per_step = config.batch.global_size * self.meta.length
        self.step_flops = bert_step_flops(
            config.model,
            rows=config.batch.global_size,
            length=self.meta.length,
            predicted=self.sources.limit,
            vocabulary=self.meta.vocab_size,
            next_sentence=config.objective.next_sentence != "off",
        )

    def model(self) -> nn.Module:
        settings, vocab_size = self.config.model, self.meta.vocab_size
        model = BertForMaskedPositions(settings, vocab_size=vocab_size, seed=self.config.training.seed)
        give_weights(model, settings.weights)
        return model

    def hooks(self, engine: Engine, make_engine: MakeEngine) -> list[Hook]:
        return []

    def leave(self, run_dir: Path, world: Group) -> None:
        rundir.copy_tokenizer(run_dir, Path(self.meta.tokenizer_directories[0]), world)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"vocab_size": self.meta.vocab_size, "data_tokenizer": rundir.TOKENIZER}
