"""Settings of fine-tuning on GLUE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.config.finetuning import DownstreamConfig, FinetuneConfig
from trp_scale.config.registry import component
from trp_scale.config.settings import setting

GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""What --task all runs, in the order of TRP's Table 1; wnli is left out, as there."""


@dataclass(kw_only=True)
class GlueDownstreamConfig(DownstreamConfig):
    """The task, the length of the run, the rows and the head."""

    kind: Literal["glue"] = "glue"
    """Sentences or pairs of sentences."""
    task: str = ""
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli; several with commas between, or all."""
    split: Literal["dev", "test", "held_out"] = "dev"
    """The files that are measured, and what tables call them. held_out: the share data.validation_fraction of the
    training file, which is then not learned from: for choosing settings, apart from the dev file."""
    max_length: int = setting(128, at_least=8)
    """Word pieces of a row, special ones included. Longer sentences are cut, the longer of a pair first."""
    padding: Literal["none", "length"] = "none"
    """none = short rows share sequences, with little padding. length = each row is padded to max_length; all shapes are
    then the same, as --training.compile needs."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of the head's input."""
    pooling: Literal["class", "mean"] = "class"
    """The head reads the pooled [CLS], as BERT's, or the pooled mean of a row's pieces. An encoder that was pre-trained
    without sentence pairs (--objective.next_sentence off) has learned nothing at [CLS]."""
    tokenizer: str = ""
    """Tokenizer directory; empty = the encoder's own. --from scratch needs one."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.max_length > config.model.max_positions:
            yield (
                f"--downstream.max_length is {self.max_length}, allowed: from 8 to the encoder's "
                f"{config.model.max_positions} positions"
            )


@component("task", "glue", "trp_scale.finetuning.glue.task:GlueTask")
@dataclass(kw_only=True)
class GlueTaskConfig(FinetuneConfig):
    """Sentences and pairs of sentences (TRP 001, Tables 1 and 5)."""

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
            yield "--downstream.split is held_out, --data.validation_fraction 0; allowed: more than 0, such as 0.2"

    def tasks(self, named: str) -> list[str]:
        named = named or self.downstream.task
        tasks = [name.strip().lower().replace("-", "") for name in named.split(",") if name.strip()]
        if tasks == ["all"]:
            return list(GLUE_TASKS)
        wrong = [name for name in tasks if name not in (*GLUE_TASKS, "wnli")]
        if wrong or not tasks:
            raise RefusedError(
                f"--task {named!r}: allowed: all, or of {', '.join(GLUE_TASKS)}, wnli, with commas between"
            )
        if len(set(tasks)) < len(tasks):
            raise RefusedError(f"--task {named!r}: a task is given twice; allowed: each once")
        return tasks

    def datasets(self) -> dict[str, str]:
        return {}  # folders of GLUE's

    def require_data(self, tasks: Sequence[str]) -> None:
        from trp_scale.finetuning.glue.folders import require_folders  # with all that reads them

        require_folders(Path(self.data.path), tasks)
