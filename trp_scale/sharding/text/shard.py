"""Sharding of text: settings, tokenizer, and the job that fills one shard for each portion."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from trp_scale.config.registry import check_settings, setting
from trp_scale.data.raw_files import DATASET_FORMAT
from trp_scale.data.text.dataset import GROUPS, PACKED_FORMAT
from trp_scale.data.text.tokenizer import (
    copy_tokenizer_directory,
    load_for_sharding,
    save_trained,
    special_tokens,
    train_word_piece,
    vocabulary_size,
)
from trp_scale.errors import DataError, shorten
from trp_scale.sharding.job import FOLDER, DataKind, ShardingJob, shard_sources, source_folders
from trp_scale.sharding.parts import SpreadSettings
from trp_scale.sharding.text.annotate import (
    NOT_ENGLISH_SHARE,
    Annotator,
    make_tagger,
    resolve_tagger,
    unknown_words,
)
from trp_scale.sharding.text.corpus import Corpus, TextPortion, embedded_documents, plan_corpus
from trp_scale.sharding.text.documents import SKIP_REASONS, Document, ReadSettings, read_portion
from trp_scale.sharding.text.rows import RowSettings, TextReport, TextWriter
from trp_scale.sharding.workers import Advance
from trp_scale.storage.files import only_run, write_text

SAMPLED_PORTIONS = 64
"""Maximum portions, evenly spaced, for tokenizer training. Each is read three times."""

LANGUAGE_PORTIONS, LANGUAGE_CHARACTERS = 4, 40_000
"""Portions, and characters of each, for language detection."""

TOKENIZER = "tokenizer"
"""Directory of the tokenizer in a data set, or beside the data sets of sources."""

TOKENIZER_PATIENCE = 3600.0
"""Seconds to wait while another part trains the tokenizer; 256 MB of text take some minutes."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ShardTextConfig(SpreadSettings):
    """Tag, tokenize and shard English text for pre-training."""

    output: Path
    """Directory of the data set. A stopped run resumes there; other settings or inputs are refused."""
    inputs: list[str] = field(default_factory=list)
    """Text files, JSON lines (.jsonl, .ndjson, .json), both optionally gzipped (.gz), parquet, folders of these, globs,
    or directories written by datasets.save_to_disk. A gzipped file becomes one shard."""
    embedded: bool = False
    """Use the English text included in CPython (language reference and docstrings, about 2 MB)."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    """Format of the inputs; auto = by suffix."""
    documents: Literal["file", "blank_lines"] = "file"
    """Text files: one document per file (files larger than a shard are split at a blank line), or documents separated
    by blank lines."""
    text_field: str = "text"
    """Text field of JSON lines, or text column of parquet or a dataset."""
    source_field: str = ""
    """Make a data set for each source, and a mixture of them: name of the field of JSON lines with the source, or
    folder for the folders directly in the input."""
    split: str = "train"
    """Split of a dataset directory."""
    tagger: Literal["auto", "nltk", "textblob"] = "auto"
    """nltk: averaged perceptron, needs NLTK data. textblob: PatternTagger, needs no data. auto: nltk if its data is
    installed."""
    tokenizer: str = ""
    """Hugging Face tokenizer directory; empty = train WordPiece on the input."""
    vocab_size: int = setting(30_522, at_least=100, at_most=1 << 31)
    """Vocabulary size of a trained tokenizer."""
    lowercase: bool = True
    """Lower-case and strip accents in a trained tokenizer."""
    tokenizer_sample_bytes: int = setting(256_000_000, at_least=1, at_most=1 << 40)
    """Maximum bytes of text, spread over the input, for tokenizer training."""
    length: int = setting(512, at_least=8, at_most=65_535)
    """Sequence length of training, including special tokens; without --pack, a row has length - 3 pieces."""
    pack: bool = False
    """Fill rows with several documents, each as [CLS] ... [SEP], for --model.kind modern. A document that does not fit
    is cut where the row is full. Attention stays inside each part."""
    segments_per_row: int = setting(0, at_least=0, at_most=65_535)
    """--pack: maximum documents or parts of them in a row; 0 = length / 16, at least 8."""
    rows_per_block: int = setting(2048, at_least=1, at_most=1 << 20)
    """Rows stored and read together: aim at 1 to 8 MB (2048 rows of 512 are 3 MB), less for small corpora."""
    shard_bytes: int = setting(0, at_least=0, at_most=1 << 40)
    """Bytes of input per shard; 0 = 1/16 of the input, at least 256 KiB, at most 64 MiB."""
    max_line_bytes: int = setting(8_000_000, at_least=1, at_most=1 << 40)
    """Skip documents with a longer line."""

    def check(self) -> None:
        """Raise DataError with the flag of an invalid setting."""
        if bool(self.inputs) == self.embedded:
            raise DataError("give --inputs FILES or --embedded, one of the two")
        check_settings(self, DataError)
        if self.source_field and self.embedded:
            raise DataError(f"--source_field {self.source_field} needs --inputs; --embedded text has one source")
        if self.segments_per_row and not self.pack:
            raise DataError(f"--segments_per_row {self.segments_per_row} needs --pack")

    @property
    def segments(self) -> int:
        """Maximum segments of a packed row; 0 = not packed."""
        return (self.segments_per_row or max(8, self.length // 16)) if self.pack else 0

    def identity(self) -> dict[str, object]:
        """Return the settings that determine the output bytes."""
        names = ["embedded", "format", "documents", "text_field", "split"]
        names += ["length", "rows_per_block", "shard_bytes", "max_line_bytes"]
        names += [] if self.tokenizer else ["vocab_size", "lowercase", "tokenizer_sample_bytes"]
        names += ["segments"] if self.pack else []
        return {name: getattr(self, name) for name in names}


def shard_text(config: ShardTextConfig) -> Path:
    """Make a data set, or a part of it, and return its directory. A finished data set of the same settings and input
    does not change. With `source_field`, make one for each source.

    Raises:
        DataError: a setting or the input cannot be used, the directory contains something else, too many documents
            were skipped (finished shards stay, dataset.json is not written), or another run writes the directory.
        TaggerError: the data of the tagger is missing.
    """
    config.check()
    return _shard_sources(config) if config.source_field else _shard(config)


def _shard_sources(config: ShardTextConfig) -> Path:
    """Make the data sets of all sources, with one tokenizer."""
    corpus, read = _plan(config, config.output), _read_settings(config)
    sources: Mapping[str, object]
    if config.source_field == FOLDER:
        sources = folders = source_folders(config.inputs)
    else:
        sources = _count_sources(config, corpus, read)
    config.output.mkdir(parents=True, exist_ok=True)
    _make_tokenizer(config, corpus, read)
    shared = replace(config, tokenizer=str(config.output / TOKENIZER), source_field="")

    def shard(source: str, output: Path) -> None:
        if config.source_field == FOLDER:
            _shard(replace(shared, output=output, inputs=[str(folders[source])]))
        else:
            _shard(replace(shared, output=output), (config.source_field, source))

    return shard_sources(config.output, sources, shard)


def _count_sources(config: ShardTextConfig, corpus: Corpus, read: ReadSettings) -> dict[str, int]:
    """Count the documents of each source in JSON lines, by name. Logs the documents without a source.

    Raises:
        DataError: another format, or fewer than two sources.
    """
    field = config.source_field
    if other := next((span for part in corpus.portions for span in part.items if span.kind != "jsonl"), None):
        raise DataError(
            f"--source_field {field}: {other.path} has no JSON lines; give JSON lines, or --source_field {FOLDER} with "
            "a folder for each source"
        )
    counts: dict[str, int] = {}
    missing: list[str] = []
    for portion in corpus.portions:
        for entry in read_portion(portion, replace(read, text_field=field)):
            if isinstance(entry, Document):
                counts[entry.text] = counts.get(entry.text, 0) + 1
            elif entry.reason in ("no_text", "empty"):
                missing.append(entry.location)
    if len(counts) < 2:
        raise DataError(f"--source_field {field}: {len(counts)} sources found, two or more expected")
    if missing:
        log.warning("%d documents without the field %s are left out, the first: %s", len(missing), field, missing[0])
    return dict(sorted(counts.items()))


def _shard(config: ShardTextConfig, source: tuple[str, str] = ("", "")) -> Path:
    """Make a data set of all documents, or of those with a value in a field of JSON lines: (field, value)."""
    output = config.output
    tagger_kind = resolve_tagger(config.tagger)
    tagger_name = make_tagger(tagger_kind).name
    log.info("tagger: %s", tagger_name)
    identity = {"tagger": tagger_name, "tokenizer": _tokenizer_fingerprint(config), **config.identity()}
    if source[0]:
        identity["source"] = list(source)
    job = ShardingJob(config, output, TEXT, identity)
    with job.only_run():
        embedded = job.own_file("embedded", ".jsonl")
        corpus = _plan(config, embedded)
        if not job.begin(corpus.fingerprint, corpus.portions):
            embedded.unlink(missing_ok=True)
            return output
        read = replace(_read_settings(config), source_field=source[0], source=source[1])
        _warn_if_not_english(corpus, read)
        _make_tokenizer(config, corpus, read)
        rows = _row_settings(config)
        counters = ("documents", "words", "bytes")
        job.make(corpus.portions, _open_writer, (output, tagger_kind, read, rows), counters)
        finished = job.finish(_description(config, tagger_name, rows))
    if finished is not None:
        shards, total = len(finished[0]), finished[1]
        log.info(
            "%s: %d documents, %d words, %d rows, %.1f %% padding, %d shards",
            output,
            total.documents,
            total.words,
            total.rows,
            100 * total.padding / max(1, total.rows * rows.row_length),
            shards,
        )
    return output


def _read_settings(config: ShardTextConfig) -> ReadSettings:
    return ReadSettings(
        text_field="text" if config.embedded else config.text_field,
        split=config.split,
        one_document_per_file=config.documents == "file",
        max_line_bytes=config.max_line_bytes,
    )


def _tokenizer_fingerprint(config: ShardTextConfig) -> str:
    """Return the fingerprint of --tokenizer; empty for a trained tokenizer."""
    if not config.tokenizer:
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(config.tokenizer).glob("*")):
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plan(config: ShardTextConfig, path: Path) -> Corpus:
    """Find the input; the embedded corpus is first written to `path` and read like any other input."""
    inputs, kind = config.inputs, config.format
    if config.embedded:
        documents = (json.dumps({"id": name, "text": text}) + "\n" for name, text in embedded_documents())
        write_text(path, "".join(documents))
        inputs, kind = [str(path)], "jsonl"
    return plan_corpus(inputs, kind, config.split, config.documents == "file", config.shard_bytes)


def _warn_if_not_english(corpus: Corpus, read: ReadSettings) -> None:
    """Log a warning if the text is probably not English."""
    spread = corpus.portions[:: -(-len(corpus.portions) // LANGUAGE_PORTIONS)]
    text = "\n".join(text for portion in spread for text in _sample(portion, read, LANGUAGE_CHARACTERS))
    share, examples = unknown_words(text)
    if share >= NOT_ENGLISH_SHARE:
        log.warning(
            "the text may not be English, as the taggers expect: %.0f%% of its words are unknown, such as %s; their "
            "part-of-speech tags will be unreliable",
            100 * share,
            ", ".join(map(shorten, examples)),
        )


def _make_tokenizer(config: ShardTextConfig, corpus: Corpus, read: ReadSettings) -> None:
    """Make the tokenizer in the first part that gets the lock; other parts wait."""
    directory = config.output / TOKENIZER
    with only_run(config.output, "tokenizer.lock", patience=TOKENIZER_PATIENCE):
        if directory.exists():
            return
        if config.tokenizer:
            copy_tokenizer_directory(Path(config.tokenizer), directory)
            return
        sampled = corpus.portions[:: -(-len(corpus.portions) // SAMPLED_PORTIONS)]
        share = max(1, config.tokenizer_sample_bytes // len(sampled))
        log.info("training a tokenizer of %d pieces", config.vocab_size)

        def texts() -> Iterator[str]:
            return (text for portion in sampled for text in _sample(portion, read, share))

        tokenizer = train_word_piece(texts, config.vocab_size, config.lowercase)
        save_trained(tokenizer, directory, config.lowercase, config.length)


def _sample(portion: TextPortion, read: ReadSettings, limit: int) -> Iterator[str]:
    """Yield the first documents of a portion, up to `limit` characters."""
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
        row_length=config.length if config.pack else config.length - 3,
        rows_per_block=config.rows_per_block,
        segments=config.segments,
        special=roles,
        token_dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
    )


def _open_writer(output: Path, tagger: str, read: ReadSettings, rows: RowSettings, advance: Advance) -> TextWriter:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process uses one core
    return TextWriter(Annotator(load_for_sharding(output / "tokenizer"), make_tagger(tagger)), read, rows, advance)


def _description(config: ShardTextConfig, tagger: str, rows: RowSettings) -> dict[str, object]:
    """Return the fields of dataset.json that describe text."""
    roles, special = special_tokens(config.output / "tokenizer")
    tokenizer = load_for_sharding(config.output / "tokenizer")
    return {
        "format": PACKED_FORMAT if config.pack else DATASET_FORMAT,
        "length": config.length,
        "row_length": rows.row_length,
        **({"segments_per_row": rows.segments} if config.pack else {}),
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
        **({"segments": total.segments, "padding": total.padding} if total.segments else {}),
        **{name: dict(zip(GROUPS, getattr(total, name), strict=True)) for name in per_group},
    }


TEXT = DataKind(name="text", report=TextReport, items="documents", reasons=SKIP_REASONS, counted=_count_rows)
