"""Text -> a data set of shards, in parallel, resumable, the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from trp_scale.data.index import DataError, write_json
from trp_scale.data.text.groups import GROUPS
from trp_scale.data.text.tokenizer import (
    load_for_sharding,
    save_given,
    save_trained,
    special_tokens,
    train_word_piece,
    vocabulary_size,
)
from trp_scale.preparation.sharding.directory import (
    DATASET_FORMAT,
    MAX_LISTED,
    check_skipped,
    finish_shards,
    finished_report,
    is_finished,
    refuse_other_content,
)
from trp_scale.preparation.sharding.lock import only_run
from trp_scale.preparation.text.corpus import Corpus, Portion, plan_corpus
from trp_scale.preparation.text.documents import SKIP_REASONS, Document, ReadSettings, read_portion
from trp_scale.preparation.text.embedded import embedded_documents
from trp_scale.preparation.text.portion import PortionReport, RowSettings, shard_stem
from trp_scale.preparation.text.settings import ShardTextConfig
from trp_scale.preparation.text.taggers import make_tagger, resolve_tagger
from trp_scale.preparation.text.workers import shard_portions

__all__ = ["ShardTextConfig", "shard_text"]

SAMPLED_PORTIONS = 64
"""Portions, evenly spread, that a tokenizer is trained on: each is read three times."""

log = logging.getLogger(__name__)


def shard_text(config: ShardTextConfig) -> Path:
    """Make a data set and return its directory. A finished one of the same settings and input is left as it is.

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
    refuse_other_content(output, identity)
    with only_run(output):
        _make(config, identity, tagger_kind)
    return output


def _make(config: ShardTextConfig, identity: dict[str, object], tagger_kind: str) -> None:
    """Make the data set, or what is missing of it."""
    output = config.output
    (output / "shards").mkdir(exist_ok=True)
    corpus = _plan(config)
    identity["input"] = corpus.fingerprint
    if is_finished(output, identity):
        log.info("%s is finished: nothing to do", output)
        shutil.rmtree(output / "progress")
        return
    write_json(output / "progress" / "settings.json", identity)
    read = ReadSettings(
        text_field="text" if config.embedded else config.text_field,
        split=config.split,
        one_document_per_file=config.documents == "file",
        max_line_bytes=config.max_line_bytes,
    )
    _make_tokenizer(config, corpus, read)
    rows = _row_settings(config)
    reports = {
        portion.number: report
        for portion in corpus.portions
        if (report := finished_report(output, shard_stem(portion.number), PortionReport))
    }
    waiting = [portion for portion in corpus.portions if portion.number not in reports]
    if reports:
        log.info("%d of %d shards are there already", len(reports), len(corpus.portions))
    reports |= shard_portions(config, waiting, tagger_kind, read, rows)
    total = PortionReport()
    for number in sorted(reports):
        total.add(reports[number])
    check_skipped("documents", total.documents, total.skipped, total.skipped_places, SKIP_REASONS, config.max_skipped)
    if total.rows == 0:
        raise DataError("the input holds no text: no row could be made")
    _write_dataset(config, corpus, identity, total, rows)


def _given_tokenizer(config: ShardTextConfig) -> str:
    """Fingerprint of a given tokenizer directory; empty if one is trained."""
    if not config.tokenizer:
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(config.tokenizer).glob("*")):
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plan(config: ShardTextConfig) -> Corpus:
    """Find the input; the embedded corpus is written down first, so that it is read like any other."""
    inputs, kind = config.inputs, config.format
    if config.embedded:
        path = config.output / "progress" / "embedded.jsonl"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8", newline="\n") as stream:
            for name, text in embedded_documents():
                stream.write(json.dumps({"id": name, "text": text}) + "\n")
        temporary.replace(path)
        inputs, kind = [str(path)], "jsonl"
    return plan_corpus(inputs, kind, config.split, config.documents == "file", config.shard_bytes)


def _make_tokenizer(config: ShardTextConfig, corpus: Corpus, read: ReadSettings) -> None:
    directory = config.output / "tokenizer"
    if directory.exists():
        return
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


def _sample(portion: Portion, read: ReadSettings, limit: int) -> Iterator[str]:
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


def _write_dataset(
    config: ShardTextConfig, corpus: Corpus, identity: dict[str, object], total: PortionReport, rows: RowSettings
) -> None:
    """Write dataset.json, the mark of a finished data set, and clear what only an unfinished one needs."""
    output = config.output
    shards, blocks = finish_shards(output, (shard_stem(portion.number) for portion in corpus.portions))
    roles, special = special_tokens(output / "tokenizer")
    tokenizer = load_for_sharding(output / "tokenizer")
    counts = dict(vars(total))
    counts["words_per_group"] = dict(zip(GROUPS, total.words_per_group, strict=True))
    counts["pieces_per_group"] = dict(zip(GROUPS, total.pieces_per_group, strict=True))
    counts["skipped_places"] = [{"reason": reason, "place": place} for reason, place in total.skipped_places]
    write_json(
        output / "dataset.json",
        {
            "format": DATASET_FORMAT,
            "kind": "text",
            "length": config.length,
            "row_length": rows.row_length,
            "token_dtype": rows.token_dtype,
            "vocab_size": vocabulary_size(tokenizer),
            "special_tokens": roles,
            "special_token_ids": special,
            "groups": list(GROUPS),
            "tagger": identity["tagger"],
            "tokenizer": {
                "directory": "tokenizer",
                "trained": not config.tokenizer,
                "model": type(tokenizer.model).__name__,
            },
            "shards": shards,
            "blocks": blocks,
            **counts,
            "skipped_places_limit": MAX_LISTED,
            "settings": identity,
        },
    )
    shutil.rmtree(output / "progress")
    log.info(
        "%s: %d documents, %d words, %d rows, %d shards", output, total.documents, total.words, total.rows, len(shards)
    )
