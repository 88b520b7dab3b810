"""Words per CPU second of text sharding (reading to finished tar, one process) against the tagger alone.

    python benchmarks/shard_text.py --tagger textblob --inputs books.jsonl --megabytes 5

The tagger alone tags the same words of the same sentences through its library's public call. Rounds alternate, each
sharding round starts with nothing remembered; training the tokenizer and loading libraries are left out of both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate
from trp_scale.data.text.tokenizer import load_for_sharding, save_trained, train_word_piece
from trp_scale.sharding.parts import new_tar
from trp_scale.sharding.text.annotate import Annotator, make_tagger
from trp_scale.sharding.text.corpus import embedded_documents, plan_corpus
from trp_scale.sharding.text.documents import Document, ReadSettings, read_portion
from trp_scale.sharding.text.rows import RowSettings, TextWriter
from trp_scale.sharding.text.splitting import SentenceSplitter, split_keys, unit_keys

READ = ReadSettings(text_field="text", split="train", one_document_per_file=True, max_line_bytes=8_000_000)


@dataclass
class Options:
    """Measure text sharding against the tagger alone."""

    tagger: Literal["nltk", "textblob"] = "textblob"
    """Tagger to measure."""
    inputs: list[str] = field(default_factory=list)
    """Text files or JSON lines; none = the embedded corpus."""
    megabytes: float = 2.0
    """Text that is used."""
    rounds: int = 5
    """Rounds of each; the medians are compared."""


def documents(options: Options) -> Iterator[str]:
    """The first megabytes of the input."""
    left = options.megabytes * 1e6
    if options.inputs:
        portions = plan_corpus(options.inputs, "auto", "train", True, 0).portions
        found = (
            item.text for portion in portions for item in read_portion(portion, READ) if isinstance(item, Document)
        )
    else:
        found = (text for _, text in embedded_documents())
    for text in found:
        if left <= 0:
            return
        yield text
        left -= len(text)


def tagger_alone(kind: str) -> Callable[[list[list[str]]], object]:
    """The library's own call on the words of each sentence."""
    if kind == "nltk":
        from nltk.tag.perceptron import PerceptronTagger

        perceptron = PerceptronTagger()
        return lambda sentences: [perceptron.tag(words) for words in sentences]
    from textblob.taggers import PatternTagger

    pattern = PatternTagger()
    return lambda sentences: [pattern.tag(" ".join(words), tokenize=False) for words in sentences]


def main() -> None:
    options = tyro.cli(Options, description=__doc__, use_underscores=True)
    texts = list(documents(options))
    sentences = [
        [form for words in split_keys(unit_keys(sentence)) for form in words.forms]
        for text in texts
        for sentence in SentenceSplitter().split(text)
    ]
    total = sum(map(len, sentences))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = directory / "input.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        save_trained(train_word_piece(lambda: texts, 8192, True), directory / "tokenizer", True, 128)
        (portion,) = plan_corpus([str(source)], "jsonl", "train", True, 1 << 40).portions
        tokenizer, tagger = load_for_sharding(directory / "tokenizer"), make_tagger(options.tagger)
        rows = RowSettings(
            row_length=125, rows_per_block=2048, special={"pad": 0, "unk": 1, "cls": 2, "sep": 3}, token_dtype="uint16"
        )
        alone = tagger_alone(options.tagger)
        alone(sentences[:10])  # loads the lexicon

        def shard() -> None:
            fresh = make_tagger("textblob") if options.tagger == "textblob" else tagger
            with new_tar(directory / "text-000000.tar", directory / "report.json") as writer:
                TextWriter(Annotator(tokenizer, fresh), READ, rows, lambda *_: None)(portion, writer)

        sides = {"alone": lambda: alone(sentences), "sharding": shard}
        rates = {side: total / times.cpu for side, times in alternate(sides, rounds=options.rounds, warmup=0).items()}
    print(f"{options.tagger}: {total:,} words, {options.rounds} alternating rounds, medians, one process, CPU seconds")
    print(f"  tagger alone    {rates['alone']:>10,.0f} words/s")
    print(f"  whole sharding  {rates['sharding']:>10,.0f} words/s")
    print(f"  ratio           {rates['sharding'] / rates['alone']:>10.2f}   (wanted: at least 0.60)")


if __name__ == "__main__":
    main()
