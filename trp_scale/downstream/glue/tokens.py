"""Sentences as word pieces, all of a file at once: what rows are cut from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.text.tokenizer import open_given, vocabulary_size
from trp_scale.downstream.glue.examples import Examples

AT_ONCE = 4096
"""Examples that the tokenizer takes at once: its own record of an example is large."""


@dataclass(frozen=True, kw_only=True)
class PairTokenizer:
    """A tokenizer that makes `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]` of at most `length` pieces.

    Attributes:
        backend: of the tokenizers library, with truncation set (the longer sentence first).
        pad: number of the padding piece.
        vocabulary: one more than the largest number.
    """

    backend: Tokenizer
    pad: int
    vocabulary: int


def load_tokenizer(directory: Path, *, length: int) -> PairTokenizer:
    """Open a Hugging Face tokenizer directory (tokenizer.json, or BERT's vocab.txt).

    Raises:
        RefusedError: there is no such directory, transformers cannot load it, or it is not one of BERT's kind.
    """
    found = open_given(directory, flag="--downstream.tokenizer")
    if not getattr(found, "is_fast", False) or None in (found.pad_token_id, found.cls_token_id, found.sep_token_id):
        raise RefusedError(
            f"{directory}: {type(found).__name__} found; allowed: a tokenizer of BERT's kind, with [CLS], [SEP] and "
            "[PAD], in its fast form (tokenizer.json or vocab.txt)"
        )
    backend: Tokenizer = found.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(length, strategy="longest_first")
    backend.encode_special_tokens = True  # text that spells "[MASK]" stays text, as in pre-training
    probe = backend.encode("a", "b")
    ends = (probe.ids[0], probe.ids[-1], probe.type_ids[-1])
    if ends != (found.cls_token_id, found.sep_token_id, 1):
        raise RefusedError(
            f"{directory}: a pair becomes {' '.join(probe.tokens)}; allowed: a tokenizer that makes [CLS] A [SEP] B "
            "[SEP] with types 0 and 1, as BERT's"
        )
    return PairTokenizer(backend=backend, pad=found.pad_token_id, vocabulary=vocabulary_size(backend))


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Examples as pieces; each is a block of one row, so that the order (data/plan.py) shuffles them as a whole.

    Attributes:
        keys, identities, rows: as `plan.Blocks`.
        pieces: [total] all rows one after the other.
        ends: [n + 1] place in `pieces` where each row starts, and the end.
        second: [n] place in the row where its second sentence starts; its length where there is none.
        labels: [n] float64.
    """

    keys: list[str]
    identities: Words
    rows: Integers
    pieces: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    ends: Integers
    second: Integers
    labels: npt.NDArray[np.float64]

    @property
    def lengths(self) -> Integers:
        """[n] pieces of each row."""
        return np.diff(self.ends)

    def digest(self) -> str:
        """Hash of all that is learned from: equal on two ranks if they see the same files and the same tokenizer."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.identities, self.pieces, self.ends, self.second, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()


def tokenize(examples: Examples, tokenizer: PairTokenizer) -> TokenTable:
    """The pieces of all examples, which must have labels."""
    assert examples.labels is not None
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    texts = iter(zip(*examples.sentences, strict=True)) if len(examples.sentences) > 1 else iter(examples.sentences[0])
    pieces, lengths, second = [], [], []
    while part := list(islice(texts, AT_ONCE)):
        encodings = tokenizer.backend.encode_batch_fast(part)
        pieces.append(np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), dtype=dtype))
        lengths += [len(encoding.ids) for encoding in encodings]
        second += [len(encoding.ids) - sum(encoding.type_ids) for encoding in encodings]
    keys = [f"{examples.name}/{place}" for place in examples.places]
    return TokenTable(
        keys=keys,
        identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
        rows=np.ones(len(keys), dtype=np.int64),
        pieces=np.concatenate(pieces),
        ends=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        second=np.array(second, dtype=np.int64),
        labels=examples.labels,
    )
