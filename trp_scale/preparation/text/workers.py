"""What a process of text sharding keeps between portions, and what the progress bar says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trp_scale.data.text.tokenizer import load_for_sharding
from trp_scale.preparation.sharding.workers import Advance, Progressed, run_portions
from trp_scale.preparation.text.annotate import Annotator
from trp_scale.preparation.text.corpus import Portion
from trp_scale.preparation.text.documents import ReadSettings
from trp_scale.preparation.text.portion import PortionReport, RowSettings, write_portion
from trp_scale.preparation.text.settings import ShardTextConfig
from trp_scale.preparation.text.taggers import make_tagger


class PortionWorker:
    """What a process keeps between portions: its tokenizer, its tagger and what the annotator remembers."""

    def __init__(self, output: Path, tagger: str, read: ReadSettings, rows: RowSettings, advance: Advance) -> None:
        # One thread: the cores are shared out between processes.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._output = output
        self._annotator = Annotator(load_for_sharding(output / "tokenizer"), make_tagger(tagger))
        self._read = read
        self._rows = rows
        self._advance = advance

    def __call__(self, portion: Portion) -> PortionReport:
        return write_portion(portion, self._output, self._annotator, self._read, self._rows, self._advance)


def shard_portions(
    config: ShardTextConfig, portions: Sequence[Portion], tagger: str, read: ReadSettings, rows: RowSettings
) -> dict[int, PortionReport]:
    """Make the shards of `portions` and return their reports by number.

    Raises:
        DataError: a process died (killed, or out of memory).
    """

    def text(values: Sequence[int], seconds: float) -> str:
        documents, words, _ = values
        return f"{documents:,} documents  {words:,} words  {words / seconds:,.0f} words/s"

    return run_portions(
        portions,
        PortionWorker,
        (config.output, tagger, read, rows),
        processes=config.processes,
        progressed=Progressed(
            counters=3, total=sum(portion.size for portion in portions), text=text, shown=config.progress
        ),
    )
