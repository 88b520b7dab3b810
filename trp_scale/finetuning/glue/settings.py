"""Settings of fine-tuning on GLUE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig, GroupDownstreamConfig
from trp_scale.config.registry import component, setting

GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""Tasks of --task all, in the order of TRP's Table 1, which omits wnli."""


@dataclass(kw_only=True)
class GlueDownstreamConfig(GroupDownstreamConfig):
    """Task, length of the run, rows and head."""

    kind: Literal["glue"] = "glue"
    """Classification of sentences or pairs of sentences."""
    task: str = ""
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli; a comma-separated list, or all."""
    split: Literal["dev", "test", "held_out"] = "dev"
    """Measured files, and their name in tables. held_out: the share data.validation_fraction of the training file,
    which is not trained on; use it to choose settings without the dev file."""
    max_length: int = setting(128, at_least=8)
    """Largest number of tokens of a row, with special tokens. Of a pair, the longer sentence is truncated first."""
    padding: Literal["none", "length"] = "none"
    """none: short rows are packed into shared sequences. length: each row is padded to max_length, for constant shapes,
    as --training.compile needs."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of the head's input."""
    pooling: Literal["class", "mean"] = "class"
    """The head reads [CLS], as BERT's, or the mean of a row's tokens. An encoder that was pre-trained without next
    sentence prediction (--objective.next_sentence off) has not learned [CLS]."""
    tokenizer: str = ""
    """Tokenizer directory; empty = that of the encoder. --from scratch needs one."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.max_length > config.model.max_positions:
            yield (
                f"--downstream.max_length is {self.max_length}, allowed: from 8 to the encoder's "
                f"{config.model.max_positions} positions"
            )


@component("task", "glue", "trp_scale.finetuning.glue.task:GlueTask")
@dataclass(kw_only=True)
class GlueTaskConfig(FinetuneConfig):
    """Classification of sentences and pairs of sentences (TRP 001, Tables 1 and 5)."""

    model: TextModelConfig = field(default_factory=TextModelConfig)
    downstream: GlueDownstreamConfig = field(default_factory=GlueDownstreamConfig)

    @property
    def reads(self) -> str:
        return "text"

    @property
    def separate_test(self) -> bool:
        return self.downstream.split != "held_out"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.separate_test and not self.data.validation_fraction:
            yield "--downstream.split is held_out, but --data.validation_fraction is 0; allowed: more than 0 (0.2)"

    def tasks(self, named: str) -> list[str]:
        named = named or self.downstream.task
        tasks = [name.strip().lower().replace("-", "") for name in named.split(",") if name.strip()]
        if tasks == ["all"]:
            return list(GLUE_TASKS)
        wrong = [name for name in tasks if name not in (*GLUE_TASKS, "wnli")]
        if wrong or not tasks:
            raise RefusedError(
                f"--task {named!r}: allowed: all, or a comma-separated list of {', '.join(GLUE_TASKS)}, wnli"
            )
        if len(set(tasks)) < len(tasks):
            raise RefusedError(f"--task {named!r}: a task is repeated; allowed: unique tasks")
        return tasks

    def datasets(self) -> dict[str, str]:
        return {}  # GLUE's folders are not data sets of trp-scale

    def require_data(self, tasks: Sequence[str]) -> None:
        from trp_scale.finetuning.glue.folders import require_folders

        require_folders(Path(self.data.path), tasks)
