"""Settings of text sharding, and the part of them that the bytes of a data set depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trp_scale.data.index import DataError


@dataclass(kw_only=True)
class ShardTextConfig:
    """Tag, tokenize and shard English text for pre-training."""

    output: Path
    """Directory of the data set. A run that was stopped goes on there; one with other settings is refused."""
    inputs: list[str] = field(default_factory=list)
    """Text files, JSON lines (.jsonl, .ndjson, .json), folders of them, globs, or directories written by
    datasets.save_to_disk."""
    embedded: bool = False
    """Use the English text that every CPython carries (language reference and docstrings, about 2 MB)."""
    format: Literal["auto", "text", "jsonl", "dataset"] = "auto"
    """What the inputs are; auto goes by their suffix."""
    documents: Literal["file", "blank_lines"] = "file"
    """Text files: one document per file (one larger than a shard goes on as a new document at a blank line), or one
    after each blank line."""
    text_field: str = "text"
    """Field of JSON lines, or column of a dataset, that holds the text."""
    split: str = "train"
    """Split of a dataset directory that has several."""
    tagger: Literal["auto", "nltk", "textblob"] = "auto"
    """nltk: averaged perceptron, needs its data. textblob: PatternTagger, needs none. auto: nltk if its data is
    there."""
    tokenizer: str = ""
    """Hugging Face tokenizer directory; empty = train WordPiece on the input."""
    vocab_size: int = 30_522
    """Size of a vocabulary that is trained."""
    lowercase: bool = True
    """Lower-case and strip accents in a tokenizer that is trained."""
    tokenizer_sample_bytes: int = 256_000_000
    """Bytes of text, spread over the whole input, that a tokenizer is trained on at most."""
    length: int = 512
    """Sequence length of training, special tokens included; a row holds length - 3 pieces."""
    rows_per_block: int = 2048
    """Rows stored together, the unit of reading: aim at 1 to 8 MB (2048 rows of 512 are 3 MB); less for little text."""
    shard_bytes: int = 0
    """Bytes of input per shard; 0 = a sixteenth of the input, at least 256 KiB, at most 64 MiB."""
    processes: int = 0
    """Processes at work; 0 = one for each core. The output does not depend on it."""
    max_skipped: float = 0.01
    """Largest share of documents that may be skipped."""
    max_line_bytes: int = 8_000_000
    """A document with a longer line is skipped."""
    progress: bool = True
    """Show a progress bar."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        if bool(self.inputs) == self.embedded:
            raise DataError("give --inputs FILES or --embedded, one of the two")
        if not 8 <= self.length <= 65_535:
            raise DataError(f"--length {self.length}: 8 to 65535 is allowed (offsets are stored in 16 bits)")
        for name, smallest in (
            ("rows_per_block", 1),
            ("shard_bytes", 0),
            ("processes", 0),
            ("max_line_bytes", 1),
            ("vocab_size", 100),
            ("tokenizer_sample_bytes", 1),
        ):
            if getattr(self, name) < smallest:
                raise DataError(f"--{name} {getattr(self, name)}: at least {smallest} is allowed")
        if not 0 <= self.max_skipped <= 1:
            raise DataError(f"--max_skipped {self.max_skipped}: a share from 0 to 1 is allowed")

    def identity(self) -> dict[str, object]:
        """The settings that change the bytes of the output; where files lie and how the work is shared do not."""
        names = [
            "embedded",
            "format",
            "documents",
            "text_field",
            "split",
            "length",
            "rows_per_block",
            "shard_bytes",
            "max_line_bytes",
        ]
        if not self.tokenizer:
            names += ["vocab_size", "lowercase", "tokenizer_sample_bytes"]
        return {name: getattr(self, name) for name in names}
