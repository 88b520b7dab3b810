"""Sentences of a task of GLUE that online probes learn from and are measured on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trp_scale.checkpoint.agreement import on_rank_zero
from trp_scale.core.run import RunContext
from trp_scale.data.mixture import parse_paths
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.evaluation.loaded_encoder import TextEncoder
from trp_scale.evaluation.online.labelled_rows import NAME, Pair, Weights, require_two_classes
from trp_scale.evaluation.online.settings import ProbesSettings
from trp_scale.evaluation.probe.features import LabelledFeatures
from trp_scale.evaluation.probe.sentences import BAD_LINES, few_of_all, pair_vectors
from trp_scale.finetuning.encoder_source import encoder_from_run
from trp_scale.finetuning.glue.folders import Examples, read_glue
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.glue.task import require_libraries


class LabelledSentences:
    """A task of GLUE: sentences are means over pieces, pairs [u, v, |u - v|, u * v], as `trp-scale probe` has them.
    Rank 0 alone reads them.

    Args:
        settings: of the probes.
        run: whose encoder it is.

    Raises:
        DataError, RefusedError: files that are missing or cannot be read.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        require_libraries()
        self.settings, self.run = settings, run
        self.config = GlueTaskConfig()
        encoder_from_run(run.config, NAME, dict).adopt(self.config)
        self.length = self.config.downstream.max_length
        on_rank_zero(run.world, f"reading {settings.data}", self._read)

    def _read(self) -> None:
        settings = self.settings
        self.tokenizer = open_text_dataset(parse_paths(self.run.config.data.path)[0].path).meta.tokenizer_directories[0]
        data = read_glue(Path(settings.data), settings.task, split="dev", allowed_bad=BAD_LINES)
        self.train, self.test = data.train, next(iter(data.measured.values()))
        self.learned, self.measured = drawn(self.train, settings.rows), drawn(self.test, settings.measured)
        assert self.train.labels is not None
        require_two_classes(self.train.labels[self.learned], settings.data)

    def features(self, weights: Weights) -> Pair | None:
        pairs: list[Pair] = []

        def read() -> None:
            source = encoder_from_run(self.run.config, NAME, lambda: weights, tokenizer=self.tokenizer)
            encoder = TextEncoder(source, self.config).eval().to(self.run.device)
            learned, measured = self._of(encoder, self.train, self.learned), self._of(encoder, self.test, self.measured)
            pairs.append((learned, measured))

        on_rank_zero(self.run.world, "reading labelled sentences", read)
        return pairs[0] if pairs else None

    def _of(self, encoder: TextEncoder, examples: Examples, rows: npt.NDArray[np.int64]) -> LabelledFeatures:
        assert examples.labels is not None
        vectors = pair_vectors(encoder, examples, rows, self.length)
        return LabelledFeatures(features=vectors, labels=examples.labels[rows].astype(np.int64))


def drawn(examples: Examples, rows: int) -> npt.NDArray[np.int64]:
    """Places of at most `rows` examples, each label's share as in all of them; always the same."""
    assert examples.labels is not None
    return few_of_all(examples.labels, rows if rows < len(examples.labels) else 0, seed=0, alike=True)
