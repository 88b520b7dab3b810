"""Text -> a data set of shards, in parallel, resumable, the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from trp_scale.data.groups import GROUPS
from trp_scale.data.index import DataError, index_path, read_index, read_json, write_json
from trp_scale.data.text.corpus import Corpus, Portion, plan_corpus
from trp_scale.data.text.documents import SKIP_REASONS, Document, ReadSettings, read_portion
from trp_scale.data.text.embedded import embedded_documents
from trp_scale.data.text.portion import MAX_LISTED, PortionReport, RowSettings, report_path, shard_stem
from trp_scale.data.text.settings import ShardTextConfig
from trp_scale.data.text.taggers import make_tagger, resolve_tagger
from trp_scale.data.text.tokenizer import (
    load_for_sharding,
    save_given,
    save_trained,
    special_tokens,
    train_word_piece,
    vocabulary_size,
)
from trp_scale.data.text.workers import run_portions

__all__ = ["ShardTextConfig", "shard_text"]

DATASET_FORMAT = 1

SAMPLED_PORTIONS = 64
"""Portions, evenly spread, that a tokenizer is trained on: each is read three times."""

log = logging.getLogger(__name__)


def shard_text(config: ShardTextConfig) -> Path:
    """Make a data set and return its directory. A finished one of the same settings and input is left as it is.

    Raises:
        DataError: a setting or the input cannot be used, the directory holds something else, or too many documents
            had to be skipped (finished shards stay, dataset.json is not written).
        TaggerError: the tagger's data is missing.
    """
    config.check()
    output = config.output
    tagger_kind = resolve_tagger(config.tagger)
    tagger_name = make_tagger(tagger_kind).name
    log.info("tagger: %s", tagger_name)
    identity = {"tagger": tagger_name, "tokenizer": _given_tokenizer(config), **config.identity()}
    _refuse_other_content(output, identity)
    (output / "progress").mkdir(parents=True, exist_ok=True)
    (output / "shards").mkdir(exist_ok=True)
    corpus = _plan(config)
    identity["input"] = corpus.fingerprint
    if _finished(output, identity):
        log.info("%s is finished: nothing to do", output)
        shutil.rmtree(output / "progress")
        return output
    write_json(output / "progress" / "settings.json", identity)
    read = ReadSettings(
        text_field="text" if config.embedded else config.text_field,
        split=config.split,
        one_document_per_file=config.documents == "file",
        max_line_bytes=config.max_line_bytes,
    )
    _make_tokenizer(config, corpus, read)
    rows = _row_settings(config)
    reports = {portion.number: report for portion in corpus.portions if (report := _done(output, portion))}
    waiting = [portion for portion in corpus.portions if portion.number not in reports]
    if reports:
        log.info("%d of %d shards are there already", len(reports), len(corpus.portions))
    reports |= run_portions(config, waiting, tagger_kind, read, rows)
    total = PortionReport()
    for number in sorted(reports):
        total.add(reports[number])
    _check_skipped(config, total)
    _write_dataset(config, corpus, identity, total, rows)
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


def _refuse_other_content(output: Path, identity: dict[str, object]) -> None:
    """Refuse a directory that holds something else than a data set of these settings."""
    if not output.exists():
        return
    for path in (output / "dataset.json", output / "progress" / "settings.json"):
        if path.exists():
            found = read_json(path)
            _refuse_differences(path, found.get("settings", found), identity)
            return
    if any(entry.name not in ("progress", "shards") for entry in output.iterdir()):
        raise DataError(f"--output {output}: the directory is not empty and holds no data set; choose another one")


def _refuse_differences(path: Path, found: dict[str, object], wanted: dict[str, object]) -> None:
    differences = [
        f"{name} {found.get(name)!r} there, {value!r} asked for"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise DataError(
            f"{path}: a data set with other settings or input: {'; '.join(differences)}. "
            "Ask for the same, choose another --output, or remove the directory"
        )


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


def _finished(output: Path, identity: dict[str, object]) -> bool:
    """Whether dataset.json is there, of this input, and all its shards too."""
    path = output / "dataset.json"
    if not path.exists():
        settings = output / "progress" / "settings.json"
        if settings.exists():
            _refuse_differences(settings, read_json(settings), identity)
        return False
    document = read_json(path)
    _refuse_differences(path, document["settings"], identity)
    for name in document["shards"]:
        shard = output / "shards" / name
        if not shard.exists() or shard.stat().st_size != read_index(shard).size:
            raise DataError(f"{shard}: missing or of another size than its index says; remove {path} to make it again")
    return True


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


def _done(output: Path, portion: Portion) -> PortionReport | None:
    """The report of a portion whose shard is finished; the index is written last, so it is the mark of that."""
    shard = output / "shards" / f"{shard_stem(portion.number)}.tar"
    try:
        if shard.stat().st_size != read_index(shard).size:
            return None
        return PortionReport(**read_json(report_path(output, portion.number)))
    except (OSError, DataError, TypeError):
        return None


def _check_skipped(config: ShardTextConfig, total: PortionReport) -> None:
    skipped = sum(total.skipped.values())
    found = total.documents + skipped
    reasons = "; ".join(f"{count} {reason} ({SKIP_REASONS[reason]})" for reason, count in sorted(total.skipped.items()))
    if skipped:
        log.warning("%d of %d documents were skipped: %s", skipped, found, reasons)
    if skipped > config.max_skipped * found:
        places = "\n".join(f"  {place}: {reason}" for reason, place in total.skipped_places[:20])
        raise DataError(
            f"{skipped} of {found} documents were skipped, more than --max_skipped {config.max_skipped} allows: "
            f"{reasons}. The first ones:\n{places}"
        )
    if total.rows == 0:
        raise DataError("the input holds no text: no row could be made")


def _finish_shards(output: Path, corpus: Corpus) -> tuple[list[str], int]:
    """Names of the shards that hold rows, and the number of their blocks; the others and half-written ones go."""
    shards, blocks = [], 0
    for portion in corpus.portions:
        shard = output / "shards" / f"{shard_stem(portion.number)}.tar"
        index = read_index(shard)
        if index.blocks:
            shards.append(shard.name)
            blocks += len(index.blocks)
        else:  # nothing of the portion could be used
            index_path(shard).unlink()
            shard.unlink()
    for leftover in (output / "shards").glob(".text-*.tmp"):
        leftover.unlink()
    return shards, blocks


def _write_dataset(
    config: ShardTextConfig, corpus: Corpus, identity: dict[str, object], total: PortionReport, rows: RowSettings
) -> None:
    """Write dataset.json, the mark of a finished data set, and clear what only an unfinished one needs."""
    output = config.output
    shards, blocks = _finish_shards(output, corpus)
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
