"""Tagging and tokenization of sentences: each piece gets the tag of the word that contains its first character. Taggers
map the words of a sentence to group numbers of `trp_scale.data.text.dataset`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trp_scale.data.text.dataset import GROUPS, WORD_START, penn_group
from trp_scale.data.text.tokenizer import is_bert_word_piece
from trp_scale.sharding.text.splitting import TaggerError, UnitWords, key_text, split_keys, text_library, unit_keys

NLTK_DATA = "averaged_perceptron_tagger_eng"
NLTK_INSTALL = f"python -m nltk.downloader {NLTK_DATA}"

MAX_TAGGED_WORDS = 500_000
"""Words cached by the pattern tagger before the cache is cleared."""


_WORD = re.compile(r"[^\W\d_]+")

FEWEST_WORDS = 20
"""Minimum words for a meaningful share of unknown words."""

NOT_ENGLISH_SHARE = 0.25
"""Minimum share of unknown words in text that is probably not English. Measured: English books 2 %, docstrings 7 %,
Wikipedia 9 %; French 34 %, German 67 %, Chinese 100 %."""


def unknown_words(text: str) -> tuple[float, list[str]]:
    """Return the share of words that TextBlob's English lexicon lacks (0 below FEWEST_WORDS words), and examples."""
    words = _WORD.findall(text)
    lexicon = text_library("textblob.en").parser.lexicon
    unknown = [word for word in words if word not in lexicon and word.lower() not in lexicon]
    return (len(unknown) / len(words) if len(words) >= FEWEST_WORDS else 0.0), list(dict.fromkeys(unknown))[:5]


class NltkTagger:
    """NLTK's averaged perceptron (TRP 4.1.1).

    Raises:
        TaggerError: the NLTK data is not installed.
    """

    def __init__(self) -> None:
        if not nltk_data_present():
            raise TaggerError(
                f"tagger nltk: the data {NLTK_DATA} is not installed; run `{NLTK_INSTALL}` or use --tagger textblob"
            )
        self._tagger = text_library("nltk.tag.perceptron").PerceptronTagger()
        self.name = f"nltk {version('nltk')} {NLTK_DATA}"

    def prepare(self, words: list[str]) -> None:
        """Do nothing: the tags depend on context."""

    def groups(self, words: list[str]) -> list[int]:
        """Return the group number of each word of one sentence."""
        return [penn_group(tag) for _, tag in self._tagger.tag(words)]


class TextBlobTagger:
    """TextBlob's PatternTagger: a lexicon and suffix rules, without downloaded data.

    A tag depends only on the word and on whether it is the first of its sentence, so tags are cached by word. A test
    compares the results with PatternTagger.
    """

    def __init__(self) -> None:
        self._parser = text_library("textblob.en").parser
        self._first: dict[str, int] = {}
        self._later: dict[str, int] = {}
        self.name = f"textblob {version('textblob')} PatternTagger"

    def prepare(self, words: list[str]) -> None:
        """Cache the groups of words of the next sentences."""
        if len(self._later) > MAX_TAGGED_WORDS:
            self._later.clear()
            self._first.clear()
        unknown = [word for word in dict.fromkeys(words) if word not in self._later]
        # The "." is the first word of the sentence, which the lexicon treats differently.
        tagged = self._parser.find_tags([".", *unknown])[1:]
        if [word for word, _ in tagged] != unknown:
            raise TaggerError(f"tagger textblob: words {unknown!r} became {[word for word, _ in tagged]!r}")
        self._later.update((word, penn_group(tag)) for word, tag in tagged)

    def groups(self, words: list[str]) -> list[int]:
        """Return the group number of each word of one sentence."""
        if not words:
            return []
        later = self._later
        try:
            groups = [later[word] for word in words]
        except KeyError:
            self.prepare(words)
            groups = [later[word] for word in words]
        first = self._first.get(words[0])
        if first is None:
            first = self._first[words[0]] = penn_group(self._parser.find_tags(words[:1])[0][1])
        groups[0] = first
        return groups


Tagger = NltkTagger | TextBlobTagger
"""Part-of-speech tagger. `name`, with the version of the library, is stored in dataset.json."""


def nltk_data_present() -> bool:
    """Whether the data of NLTK's English perceptron tagger is installed."""
    try:
        text_library("nltk").data.find(f"taggers/{NLTK_DATA}/")
    except LookupError:
        return False
    return True


def resolve_tagger(kind: str) -> str:
    """Resolve `auto`: nltk if its data is installed, else textblob."""
    if kind != "auto":
        return kind
    return "nltk" if nltk_data_present() else "textblob"


def make_tagger(kind: str) -> Tagger:
    """Return the tagger nltk or textblob.

    Raises:
        TaggerError: data is missing.
    """
    return NltkTagger() if kind == "nltk" else TextBlobTagger()


MAX_REMEMBERED = 4_000_000
"""Characters of cached units before the cache is cleared (about 300 MB)."""


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """Concatenated pieces of sentences.

    Attributes:
        tokens: [P] uint32 token ids.
        tags: [P] uint8: group in the low four bits, WORD_START on the first piece of each word.
        lengths: number of pieces of each sentence or document, may be 0.
        words_per_group: [groups] counts of words, including words without a piece.
    """

    tokens: NDArray[np.uint32]
    tags: NDArray[np.uint8]
    lengths: list[int]
    words_per_group: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Cached annotation of a unit or tail; without pieces if the tokenizer needs whole sentences."""

    words: UnitWords
    pieces: list[int]
    pieces_per_word: list[int]


class Annotator:
    """Tagger and tokenizer of sentences.

    A BERT word-piece tokenizer never looks beyond white space, so words, pieces and alignment are computed once per
    distinct unit. Tokenizing whole sentences gives the same result and takes four times as long (a property test
    compares both). Other tokenizers get whole sentences, or whole documents.
    """

    def __init__(self, tokenizer: Tokenizer, tagger: Tagger) -> None:
        self._tokenizer = tokenizer
        self._tagger = tagger
        self.by_unit = is_bert_word_piece(tokenizer)
        self._units: dict[str, _Unit] = {}
        self._characters = 0

    def annotate(self, sentences: list[str], documents: list[tuple[int, str]] | None = None) -> Annotated:
        """Return pieces and tags of the sentences.

        Args:
            documents: end in `sentences`, and text, of each document, if pieces are to be those of whole documents;
                for tokenizers that look beyond white space.
        """
        keys = [unit_keys(sentence) for sentence in sentences]
        self._cache_units(keys)
        cached = self._units
        groups: list[int] = []
        pieces: list[int] = []
        pieces_per_word: list[int] = []
        lengths: list[int] = []
        texts = iter(enumerate(sentences, 1) if documents is None else documents)
        end, text = next(texts, (0, ""))
        words: list[UnitWords] = []  # of the text so far
        before = 0
        for number, sentence_keys in enumerate(keys, 1):
            units = [cached[key] for key in sentence_keys]
            forms: list[str] = []
            for unit in units:
                forms += unit.words.forms
                pieces += unit.pieces
                pieces_per_word += unit.pieces_per_word
            groups += self._tagger.groups(forms)
            words += [unit.words for unit in units]
            while number == end:
                if not self.by_unit and words:
                    encoding = self._tokenizer.encode(text, add_special_tokens=False)
                    pieces += encoding.ids
                    starts = [start for start, _ in encoding.offsets]
                    pieces_per_word += count_by_word(starts, _word_ends(text, words))
                lengths.append(len(pieces) - before)
                before, words = len(pieces), []
                end, text = next(texts, (0, ""))
        return _assemble(pieces, groups, pieces_per_word, lengths)

    def _cache_units(self, keys: list[list[str]]) -> None:
        """Annotate and cache new units."""
        if self._characters > MAX_REMEMBERED:
            self._units.clear()
            self._characters = 0
        new = list(dict.fromkeys(key for sentence_keys in keys for key in sentence_keys if key not in self._units))
        if not new:
            return
        words = split_keys(new)
        self._tagger.prepare([form for unit in words for form in unit.forms])
        self._characters += sum(map(len, new))
        if not self.by_unit:
            self._units.update((key, _Unit(unit, [], [])) for key, unit in zip(new, words, strict=True))
            return
        encodings = self._tokenizer.encode_batch([key_text(key) for key in new], add_special_tokens=False)
        for key, unit, encoding in zip(new, words, encodings, strict=True):
            starts = [start for start, _ in encoding.offsets]
            self._units[key] = _Unit(unit, encoding.ids, count_by_word(starts, unit.ends))


def count_by_word(piece_starts: list[int], word_ends: list[int] | tuple[int, ...]) -> list[int]:
    """Count the pieces that start in each word.

    Args:
        piece_starts: first character of each piece, ascending.
        word_ends: end (exclusive) of each word. A piece that starts in white space belongs to the next word; a piece
            after the last word belongs to the last word.
    """
    counts = [0] * len(word_ends)
    word, last = 0, len(word_ends) - 1
    for start in piece_starts:
        while word < last and start >= word_ends[word]:
            word += 1
        counts[word] += 1
    return counts


def _word_ends(text: str, units: list[UnitWords]) -> list[int]:
    """Return the end of each word in the raw text. Words cover all characters except white space."""
    ends = []
    position = 0
    for unit in units:
        for start, end in zip(unit.starts, unit.ends, strict=True):
            while text[position].isspace():
                position += 1
            position += end - start
            ends.append(position)
    return ends


def _assemble(pieces: list[int], groups: list[int], pieces_per_word: list[int], lengths: list[int]) -> Annotated:
    """Assign the group of each word to its pieces."""
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
