"""Text -> a data set of shards: tagged, tokenized, in rows."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trp_scale.config.settings import check_settings, setting
from trp_scale.data.text.dataset import GROUPS
from trp_scale.data.text.tokenizer import (
    load_for_sharding,
    save_given,
    save_trained,
    special_tokens,
    train_word_piece,
    vocabulary_size,
)
from trp_scale.errors import DataError, shorten
from trp_scale.sharding.job.job import DataKind, ShardingJob, ShardingSettings
from trp_scale.sharding.job.workers import Advance, Progressed
from trp_scale.sharding.job.writing import ShardWriter
from trp_scale.sharding.text.annotate import ANOTHER_LANGUAGE, Annotator, make_tagger, resolve_tagger, unknown_words
from trp_scale.sharding.text.corpus import Corpus, TextPortion, embedded_documents, plan_corpus
from trp_scale.sharding.text.documents import SKIP_REASONS, Document, ReadSettings, read_portion
from trp_scale.sharding.text.portion import RowSettings, TextReport, write_portion
from trp_scale.storage.files import write_text
from trp_scale.storage.locks import only_run

SAMPLED_PORTIONS = 64
"""Portions, evenly spread, that a tokenizer is trained on: each is read three times."""

LOOKED_AT, LOOKED_AT_CHARACTERS = 4, 40_000
"""Portions, and characters of each, whose words tell the language."""

TOKENIZER_PATIENCE = 3600.0
"""Seconds to wait for another part that trains the tokenizer; 256 MB of text take some minutes."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ShardTextConfig(ShardingSettings):
    """Tag, tokenize and shard English text for pre-training."""

    inputs: list[str] = field(default_factory=list)
    """Text files, JSON lines (.jsonl, .ndjson, .json), both gzipped (.gz) or not, parquet, folders of them, globs, or
    directories written by datasets.save_to_disk. A gzipped file becomes one shard."""
    embedded: bool = False
    """Use the English text that every CPython carries (language reference and docstrings, about 2 MB)."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    """What the inputs are; auto goes by their suffix."""
    documents: Literal["file", "blank_lines"] = "file"
    """Text files: one document per file (one larger than a shard goes on as a new document at a blank line), or one
    after each blank line."""
    text_field: str = "text"
    """Field of JSON lines, or column of parquet or a dataset, that holds the text."""
    split: str = "train"
    """Split of a dataset directory that has several."""
    tagger: Literal["auto", "nltk", "textblob"] = "auto"
    """nltk: averaged perceptron, needs its data. textblob: PatternTagger, needs none. auto: nltk if its data is
    there."""
    tokenizer: str = ""
    """Hugging Face tokenizer directory; empty = train WordPiece on the input."""
    vocab_size: int = setting(30_522, at_least=100, at_most=1 << 31)
    """Size of a vocabulary that is trained."""
    lowercase: bool = True
    """Lower-case and strip accents in a tokenizer that is trained."""
    tokenizer_sample_bytes: int = setting(256_000_000, at_least=1, at_most=1 << 40)
    """Bytes of text, spread over the whole input, that a tokenizer is trained on at most."""
    length: int = setting(512, at_least=8, at_most=65_535)
    """Sequence length of training, special tokens included; a row holds length - 3 pieces."""
    rows_per_block: int = setting(2048, at_least=1, at_most=1 << 20)
    """Rows stored together, the unit of reading: aim at 1 to 8 MB (2048 rows of 512 are 3 MB); less for little text."""
    shard_bytes: int = setting(0, at_least=0, at_most=1 << 40)
    """Bytes of input per shard; 0 = a sixteenth of the input, at least 256 KiB, at most 64 MiB."""
    max_line_bytes: int = setting(8_000_000, at_least=1, at_most=1 << 40)
    """A document with a longer line is skipped."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        if bool(self.inputs) == self.embedded:
            raise DataError("give --inputs FILES or --embedded, one of the two")
        check_settings(self, DataError)

    def identity(self) -> dict[str, object]:
        """The settings that change the bytes of the output; where files lie and how the work is shared do not."""
        names = ["embedded", "format", "documents", "text_field", "split"]
        names += ["length", "rows_per_block", "shard_bytes", "max_line_bytes"]
        names += [] if self.tokenizer else ["vocab_size", "lowercase", "tokenizer_sample_bytes"]
        return {name: getattr(self, name) for name in names}


def shard_text(config: ShardTextConfig) -> Path:
    """Make a data set, or a part of it, and return its directory. A finished one of the same settings and input is left
    as it is.

    Raises:
        DataError: a setting or the input cannot be used, the directory holds something else, or too many documents
            had to be skipped (finished shards stay, dataset.json is not written), or another run is at it.
        TaggerError: the tagger's data is missing.
    """
    config.check()
    output = config.output
    tagger_kind = resolve_tagger(config.tagger)
    tagger_name = make_tagger(tagger_kind).name
    log.info("tagger: %s", tagger_name)
    identity = {"tagger": tagger_name, "tokenizer": _given_tokenizer(config), **config.identity()}
    job = ShardingJob(config, TEXT, identity)
    with job.only_run():
        embedded = job.own_file("embedded", ".jsonl")
        corpus = _plan(config, embedded)
        if not job.begin(corpus.fingerprint, corpus.portions):
            embedded.unlink(missing_ok=True)
            return output
        read = ReadSettings(
            text_field="text" if config.embedded else config.text_field,
            split=config.split,
            one_document_per_file=config.documents == "file",
            max_line_bytes=config.max_line_bytes,
        )
        _look_for_another_language(corpus, read)
        _make_tokenizer(config, corpus, read)
        rows = _row_settings(config)
        progressed = _progress_bar(config, job.mine(corpus.portions))
        job.make(corpus.portions, _TextWriter, (output, tagger_kind, read, rows), progressed)
        finished = job.finish(_description(config, tagger_name, rows))
    if finished is not None:
        total, shards = finished.total, len(finished.shards)
        log.info(
            "%s: %d documents, %d words, %d rows, %d shards", output, total.documents, total.words, total.rows, shards
        )
    return output


def _given_tokenizer(config: ShardTextConfig) -> str:
    """Fingerprint of a given tokenizer directory; empty if one is trained."""
    if not config.tokenizer:
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(config.tokenizer).glob("*")):
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plan(config: ShardTextConfig, path: Path) -> Corpus:
    """Find the input; the embedded corpus is written to `path` first, so that it is read like any other."""
    inputs, kind = config.inputs, config.format
    if config.embedded:
        documents = (json.dumps({"id": name, "text": text}) + "\n" for name, text in embedded_documents())
        write_text(path, "".join(documents))
        inputs, kind = [str(path)], "jsonl"
    return plan_corpus(inputs, kind, config.split, config.documents == "file", config.shard_bytes)


def _look_for_another_language(corpus: Corpus, read: ReadSettings) -> None:
    """Say so if the text seems to be in a language or a script that the taggers do not know."""
    spread = corpus.portions[:: -(-len(corpus.portions) // LOOKED_AT)]
    text = "\n".join(text for portion in spread for text in _sample(portion, read, LOOKED_AT_CHARACTERS))
    share, examples = unknown_words(text)
    if share >= ANOTHER_LANGUAGE:
        log.warning(
            "the taggers are for English, and the text may not be: %.0f%% of its words are unknown, such as %s; their "
            "parts of speech will mean little",
            100 * share,
            ", ".join(map(shorten, examples)),
        )


def _make_tokenizer(config: ShardTextConfig, corpus: Corpus, read: ReadSettings) -> None:
    """Make the tokenizer; the first part makes it and the others wait."""
    directory = config.output / "tokenizer"
    with only_run(config.output, "tokenizer.lock", patience=TOKENIZER_PATIENCE):
        if not directory.exists():
            _write_tokenizer(config, corpus, read, directory)


def _write_tokenizer(config: ShardTextConfig, corpus: Corpus, read: ReadSettings, directory: Path) -> None:
    if config.tokenizer:
        save_given(Path(config.tokenizer), directory)
        return
    sampled = corpus.portions[:: -(-len(corpus.portions) // SAMPLED_PORTIONS)]
    share = max(1, config.tokenizer_sample_bytes // len(sampled))
    log.info("training a tokenizer of %d pieces", config.vocab_size)

    def texts() -> Iterator[str]:
        return (text for portion in sampled for text in _sample(portion, read, share))

    tokenizer = train_word_piece(texts, config.vocab_size, config.lowercase)
    save_trained(tokenizer, directory, config.lowercase, config.length)


def _sample(portion: TextPortion, read: ReadSettings, limit: int) -> Iterator[str]:
    """The first documents of a portion, up to `limit` characters."""
    for document in read_portion(portion, read):
        if isinstance(document, Document):
            yield document.text[:limit]
            limit -= len(document.text)
            if limit <= 0:
                return


def _row_settings(config: ShardTextConfig) -> RowSettings:
    roles, _ = special_tokens(config.output / "tokenizer")
    vocab_size = vocabulary_size(load_for_sharding(config.output / "tokenizer"))
    return RowSettings(
        row_length=config.length - 3,
        rows_per_block=config.rows_per_block,
        pad=roles["pad"],
        unknown=roles["unk"],
        token_dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
    )


class _TextWriter:
    """Fill the shard of a portion when called with it; keeps tokenizer, tagger and annotation cache."""

    def __init__(self, output: Path, tagger: str, read: ReadSettings, rows: RowSettings, advance: Advance) -> None:
        # One thread: the cores are shared out between processes.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._annotator = Annotator(load_for_sharding(output / "tokenizer"), make_tagger(tagger))
        self._read, self._rows, self._advance = read, rows, advance

    def __call__(self, portion: TextPortion, shard: ShardWriter) -> TextReport:
        return write_portion(portion, shard, self._annotator, self._read, self._rows, self._advance)


def _progress_bar(config: ShardTextConfig, portions: Sequence[TextPortion]) -> Progressed:
    def text(values: Sequence[int], seconds: float) -> str:
        documents, words, _ = values
        return f"{documents:,} documents  {words:,} words  {words / seconds:,.0f} words/s"

    return Progressed(counters=3, total=sum(portion.size for portion in portions), text=text, shown=config.progress)


def _description(config: ShardTextConfig, tagger: str, rows: RowSettings) -> dict[str, object]:
    """Return the fields of dataset.json that describe text, without counts."""
    roles, special = special_tokens(config.output / "tokenizer")
    tokenizer = load_for_sharding(config.output / "tokenizer")
    return {
        "length": config.length,
        "row_length": rows.row_length,
        "token_dtype": rows.token_dtype,
        "vocab_size": vocabulary_size(tokenizer),
        "special_tokens": roles,
        "special_token_ids": special,
        "groups": list(GROUPS),
        "tagger": tagger,
        "tokenizer": {
            "directory": "tokenizer",
            "trained": not config.tokenizer,
            "model": type(tokenizer.model).__name__,
        },
    }


def _count_rows(total: TextReport) -> dict[str, object]:
    """Return the counts in dataset.json."""
    counts = ("documents", "sentences", "words", "pieces", "unknown_pieces", "rows")
    per_group = ("words_per_group", "pieces_per_group")
    return {
        **{name: getattr(total, name) for name in counts},
        **{name: dict(zip(GROUPS, getattr(total, name), strict=True)) for name in per_group},
    }


TEXT = DataKind(name="text", report=TextReport, items="documents", reasons=SKIP_REASONS, counted=_count_rows)
