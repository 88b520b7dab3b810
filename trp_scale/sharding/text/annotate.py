"""Sentences -> word pieces, each with the tag of the word in which its first character lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trp_scale.data.text.dataset import GROUPS, WORD_START
from trp_scale.data.text.tokenizer import is_bert_word_piece
from trp_scale.sharding.text.splitting import UnitWords, key_text, split_keys, unit_keys
from trp_scale.sharding.text.taggers import Tagger

MAX_REMEMBERED = 4_000_000
"""Characters of units whose words and pieces are remembered before the table starts again (about 300 MB)."""


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """Pieces of some sentences, one after another.

    Attributes:
        tokens: [P] uint32 piece numbers.
        tags: [P] uint8, group in the low four bits, WORD_START on the first piece of each word.
        lengths: pieces of each sentence; 0 where no piece is left of it.
        words_per_group: [groups] words of the tagger, those in whose characters no piece begins too.
    """

    tokens: NDArray[np.uint32]
    tags: NDArray[np.uint8]
    lengths: list[int]
    words_per_group: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Cached annotation of a unit or tail; `pieces` and `pieces_per_word` only if pieces are made by unit."""

    words: UnitWords
    pieces: list[int]
    pieces_per_word: list[int]


class Annotator:
    """Tags and tokenizes sentences.

    A BERT word-piece tokenizer never looks beyond white space, so words, pieces and their alignment are worked out
    once for each different unit; tokenizing whole sentences gives the same and takes four times as long (a property
    test compares both). Any other tokenizer is given whole sentences.
    """

    def __init__(self, tokenizer: Tokenizer, tagger: Tagger) -> None:
        self._tokenizer = tokenizer
        self._tagger = tagger
        self._by_unit = is_bert_word_piece(tokenizer)
        self._units: dict[str, _Unit] = {}
        self._characters = 0

    def annotate(self, sentences: list[str]) -> Annotated:
        """Pieces and tags of `sentences`, in order."""
        keys = [unit_keys(sentence) for sentence in sentences]
        self._learn(keys)
        remembered = self._units
        groups: list[int] = []
        pieces: list[int] = []
        pieces_per_word: list[int] = []
        lengths: list[int] = []
        for sentence, sentence_keys in zip(sentences, keys, strict=True):
            units = [remembered[key] for key in sentence_keys]
            forms: list[str] = []
            before = len(pieces)
            for unit in units:
                forms += unit.words.forms
                pieces += unit.pieces
                pieces_per_word += unit.pieces_per_word
            groups += self._tagger.groups(forms)
            if not self._by_unit:
                encoding = self._tokenizer.encode(sentence, add_special_tokens=False)
                pieces += encoding.ids
                ends = _word_ends(sentence, [unit.words for unit in units])
                pieces_per_word += count_by_word([start for start, _ in encoding.offsets], ends)
            lengths.append(len(pieces) - before)
        return _assemble(pieces, groups, pieces_per_word, lengths)

    def _learn(self, keys: list[list[str]]) -> None:
        """Work out the units that are met for the first time."""
        if self._characters > MAX_REMEMBERED:
            self._units.clear()
            self._characters = 0
        new = list(dict.fromkeys(key for sentence_keys in keys for key in sentence_keys if key not in self._units))
        if not new:
            return
        words = split_keys(new)
        self._tagger.prepare([form for unit in words for form in unit.forms])
        self._characters += sum(map(len, new))
        if not self._by_unit:
            self._units.update((key, _Unit(unit, [], [])) for key, unit in zip(new, words, strict=True))
            return
        encodings = self._tokenizer.encode_batch([key_text(key) for key in new], add_special_tokens=False)
        for key, unit, encoding in zip(new, words, encodings, strict=True):
            starts = [start for start, _ in encoding.offsets]
            self._units[key] = _Unit(unit, encoding.ids, count_by_word(starts, unit.ends))


def count_by_word(piece_starts: list[int], word_ends: list[int] | tuple[int, ...]) -> list[int]:
    """Count the pieces that begin in each word.

    Args:
        piece_starts: first character of each piece, ascending.
        word_ends: end (exclusive) of each word. A piece that begins in white space belongs to the word after it, and
            one that begins behind the last word to that one.
    """
    counts = [0] * len(word_ends)
    word, last = 0, len(word_ends) - 1
    for start in piece_starts:
        while word < last and start >= word_ends[word]:
            word += 1
        counts[word] += 1
    return counts


def _word_ends(sentence: str, units: list[UnitWords]) -> list[int]:
    """End of each word in the raw sentence: words cover everything but white space."""
    ends = []
    position = 0
    for unit in units:
        for start, end in zip(unit.starts, unit.ends, strict=True):
            while sentence[position].isspace():
                position += 1
            position += end - start
            ends.append(position)
    return ends


def _assemble(pieces: list[int], groups: list[int], pieces_per_word: list[int], lengths: list[int]) -> Annotated:
    """Spread the words' groups over their pieces."""
    if len(pieces_per_word) != len(groups):
        raise AssertionError(f"annotate.py: {len(pieces_per_word)} words, but tags for {len(groups)}")
    word_groups = np.asarray(groups, dtype=np.uint8)  # [W]
    counts = np.asarray(pieces_per_word, dtype=np.int64)  # [W]
    tags = np.repeat(word_groups, counts)  # [P]
    first = (np.cumsum(counts) - counts)[counts > 0]
    tags[first] |= WORD_START
    return Annotated(
        tokens=np.asarray(pieces, dtype=np.uint32),
        tags=tags,
        lengths=lengths,
        words_per_group=np.bincount(word_groups, minlength=len(GROUPS)),
    )
