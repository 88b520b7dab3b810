"""Sentence splitting by NLTK's Punkt and word tokenization by NLTK's word tokenizer, without downloaded data.

Shortcuts handle common cases with the same result; tests compare with NLTK.

A *unit* is a run of characters between white space. NLTK's rules look beyond a unit only at the end of a sentence, for
a final period or apostrophe. So the words of a sentence are the words of its units, where the units from the last one
with a period on are one key (the tail). A property test compares this with the tokenizer run on whole sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate, chain
from typing import Any

from trp_scale.errors import RefusedError


class TaggerError(RefusedError):
    """The selected tagger cannot be used; the message says what to install."""


def text_library(name: str) -> Any:
    """Import a module of NLTK or TextBlob, which only text sharding needs.

    Raises:
        TaggerError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise TaggerError(
            f"sharding text needs {package}, which cannot be imported ({error}): pip install 'trp-scale[text]'"
        ) from error


ABBREVIATIONS = frozenset(
    word
    for words in (
        "adj adm al apr art assn assoc asst aug ave bldg blvd brig bros capt cf ch chap cmdr co col corp cpl dec dept",
        "dist dr e.g ed eds esq est et etc ex feb fig figs ft gen gov hon i.e inc jan jr jul jun lat lb lieut lt ltd",
        "maj mar messrs mlle mm mme mr mrs ms mt nov oct op oz p.m a.m pg pl pp prof pvt ref rep rev sec sen sep sept",
        "sgt sr st ste supt u.k u.n u.s v viz vol vols vs w.r.t",
    )
    for word in words.split()
)
"""Words with a final period that does not end a sentence, in lower case and without the period."""

MAX_PARAGRAPH = 50_000
"""Characters. Longer paragraphs are first split at a space, so that no regular expression runs over megabytes."""

_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_MARK = re.compile(r"[.!?]")
# A candidate of Punkt: the word with its final mark, and the punctuation or word after it.
_CERTAIN_END = re.compile(r"(?:\S*[!?]|[\"'(\[]*([A-Za-z]{2,})\.)(?:\s+\S+|[^\w\s])", re.ASCII)


@cache
def _shortcut_punkt() -> Any:
    """Return a Punkt class that decides unambiguous cases without annotating tokens.

    Untrained Punkt has no collocations, sentence starters or letter-case statistics. Then `!`, `?` and the period of an
    alphabetic word that is neither an abbreviation nor an initial always end a sentence. On novels this covers 95 % of
    the candidates and halves the time.
    """

    class ShortcutPunkt(text_library("nltk.tokenize.punkt").PunktSentenceTokenizer):  # type: ignore[misc]
        def text_contains_sentbreak(self, text: str) -> bool:
            match = _CERTAIN_END.fullmatch(text)
            if match is not None and (match[1] is None or match[1].lower() not in ABBREVIATIONS):
                return True
            return bool(super().text_contains_sentbreak(text))

    return ShortcutPunkt


class SentenceSplitter:
    """Splitter of documents into sentences. Blank lines always end a sentence (headings have no period)."""

    def __init__(self) -> None:
        parameters = text_library("nltk.tokenize.punkt").PunktParameters()
        parameters.abbrev_types = set(ABBREVIATIONS)
        self._punkt = _shortcut_punkt()(parameters)

    def split(self, document: str) -> Iterator[str]:
        """Yield the raw text of each non-empty sentence, without surrounding white space."""
        start = 0
        for match in chain(_PARAGRAPH_END.finditer(document), (None,)):  # a list would take 20 times the memory
            paragraph = document[start:] if match is None else document[start : match.start()]
            start = len(document) if match is None else match.end()
            for part in _split_paragraph(paragraph):
                if _MARK.search(part) is None:
                    if sentence := part.strip():
                        yield sentence
                    continue
                for first, last in self._punkt.span_tokenize(part):
                    if sentence := part[first:last].strip():
                        yield sentence


def _split_paragraph(paragraph: str) -> Iterator[str]:
    """Yield parts of at most MAX_PARAGRAPH characters, split at white space if possible."""
    start = 0
    while len(paragraph) - start > MAX_PARAGRAPH:
        end = start + MAX_PARAGRAPH
        space = max(paragraph.rfind(" ", start + 1, end), paragraph.rfind("\n", start + 1, end))
        end = space if space > start else end
        yield paragraph[start:end]
        start = end
    yield paragraph[start:] if start else paragraph


MAX_UNIT = 256
"""Characters. A longer unit (a URL, a line of base64) is one word."""

TAIL = "\n"
"""Suffix of the key of a tail. Units contain no white space, so keys of units and tails differ."""

FIRST = "\t"
"""Prefix of the key of a first unit that NLTK's rules treat differently from the same unit elsewhere."""

_CLOSERS = "])}>\"'»”’"  # noqa: RUF001
_QUOTES = ("``", "''", '"')
_OPENING, _CLOSING = {'"': "``"}, {'"': "''"}

_CONTRACTED = {"cannot", "gimme", "gonna", "gotta", "lemme", "wanna"}
# Common patterns that are split here as by NLTK's rules; NLTK splits the others.
_PLAIN = re.compile(
    r"([(\[]?\"?|[“‘])([A-Za-z]+(?:-[A-Za-z]+)*)('(?:s|S|m|M|d|D|ll|LL|re|RE|ve|VE)|)([,;:?!]?)([\"”]?[)\]]?)",  # noqa: RUF001
    re.ASCII,
)
_TAIL = re.compile(r"(\S*[^\s.])(\.[\])}>»”’]*\"?[\])}>»”’ ]*)\n")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class UnitWords:
    """Words of a unit or tail: forms for the tagger, and start and end of each in the text of the key."""

    forms: tuple[str, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def unit_keys(sentence: str) -> list[str]:
    """Return the keys of the units of a sentence in order; the tail is one key.

    The joined texts (`key_text`) of the keys are the sentence, except for the amount of white space.
    """
    units = sentence.split()
    if not units:
        return units
    if units[0].startswith(("''", '""', "\"''")):
        units[0] = FIRST + units[0]
    position = len(units) - 1
    while position > 0 and not units[position].rstrip(_CLOSERS):
        position -= 1
    tail = units[position].rstrip(_CLOSERS)
    if tail.endswith("."):
        units[position:] = [" ".join(units[position:]) + TAIL]
    elif units[-1].endswith("'") and len(units[-1]) <= MAX_UNIT:
        units[-1] += TAIL  # NLTK splits off an apostrophe only before a space, not at the end of a sentence
    return units


def key_text(key: str) -> str:
    """Return the text of a key."""
    return key.strip("\t\n")


def split_keys(keys: list[str]) -> list[UnitWords]:
    """Split keys into words: common patterns directly, others by NLTK's tokenizer, 64 keys per call."""
    tails = {index: parts for index, key in enumerate(keys) if (parts := _tail_parts(key)) is not None}
    words_of_units: list[UnitWords | None] = []
    hard: list[int] = []
    units: list[str] = []
    for index, key in enumerate(keys):
        unit = tails[index][0] if index in tails else key
        words = _split_plain(unit) if unit[0] != FIRST and unit[-1] != TAIL else _split_edge(unit)
        if words is None:
            hard.append(index)
            units.append(unit)
        words_of_units.append(words)
    for first in range(0, len(hard), 64):
        for index, words in zip(hard[first : first + 64], _split_units(units[first : first + 64]), strict=True):
            words_of_units[index] = words
    for index, (_, end) in tails.items():
        words_of_units[index] = _append_marks(words_of_units[index], end)
    return [words for words in words_of_units if words is not None]


def _tail_parts(key: str) -> tuple[str, str] | None:
    """Split a tail into a unit and the final period with closing marks; None if the key does not match.

    NLTK splits off the final period and the closing marks before any other rule could join them to the unit.
    """
    if key[-1] != TAIL:
        return None
    match = _TAIL.fullmatch(key)
    return (match[1], match[2]) if match is not None and len(match[1]) <= MAX_UNIT else None


def _append_marks(unit: UnitWords | None, end: str) -> UnitWords | None:
    """Append the final period and the closing marks to the words of a unit; each is a word."""
    if unit is None:
        return None
    position = unit.ends[-1]
    marks = [(position + offset, mark) for offset, mark in enumerate(end) if mark != " "]
    return UnitWords(
        unit.forms + tuple(_CLOSING.get(mark, mark) for _, mark in marks),
        unit.starts + tuple(start for start, _ in marks),
        unit.ends + tuple(start + 1 for start, _ in marks),
    )


def _split_plain(unit: str) -> UnitWords | None:
    """Split a unit of a common pattern, or return None."""
    if (unit.isalpha() and unit.isascii() and unit.lower() not in _CONTRACTED) or len(unit) > MAX_UNIT:
        return UnitWords((unit,), (0,), (len(unit),))
    match = _PLAIN.fullmatch(unit)
    if match is None:
        return None
    opening, core, clitic, mark, close = match.groups()
    if any(part.lower() in _CONTRACTED for part in core.split("-")):
        return None
    forms = [_OPENING.get(character, character) for character in opening]
    forms += [part for part in (core, clitic, mark) if part]
    forms += [_CLOSING.get(character, character) for character in close]
    ends = list(accumulate(1 if form in _QUOTES else len(form) for form in forms))
    return UnitWords(tuple(forms), (0, *ends[:-1]), tuple(ends))


@cache
def _tokenizer() -> Any:
    return text_library("nltk.tokenize.destructive").NLTKWordTokenizer()


def _split_units(units: list[str]) -> list[UnitWords]:
    """Split units as in the middle of a sentence, between letters that no rule joins to them."""
    text = "x " + " x ".join(units) + " x"
    tokens = _tokenizer().tokenize(text)
    words, position = [], 1
    for unit in units:
        count, aligned = _align(tokens, position, unit)
        words.append(aligned)
        position += count + 1
    if position != len(tokens):
        raise AssertionError(f"splitting.py: NLTK's words do not add up for the units {units!r}")
    return words


def _split_edge(key: str) -> UnitWords:
    """Split a tail or a first unit."""
    text = key_text(key)
    before = [] if key.startswith(FIRST) else ["x"]
    after = [] if key.endswith(TAIL) else ["x"]
    tokens = _tokenizer().tokenize(" ".join([*before, text, *after]))
    count, words = _align(tokens, len(before), text)
    if count != len(tokens) - len(before) - len(after):
        raise AssertionError(f"splitting.py: NLTK's words do not add up for {text!r}")
    return words


def _align(tokens: list[str], position: int, text: str) -> tuple[int, UnitWords]:
    """Align the tokens from `position` on with `text`; return the number of used tokens, and the words.

    NLTK's span_tokenize searches for each token and fails if quotes were rewritten. But its rules only add spaces and
    rewrite double quotes, so walking through both texts is exact.
    """
    forms: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    offset = 0
    while True:
        while offset < len(text) and text[offset].isspace():
            offset += 1
        if offset == len(text):
            return len(forms), UnitWords(tuple(forms), tuple(starts), tuple(ends))
        form = tokens[position + len(forms)]
        length = len(form) if text.startswith(form, offset) else _quote_length(form, text, offset)
        forms.append(form)
        starts.append(offset)
        offset += length
        ends.append(offset)


def _quote_length(form: str, text: str, position: int) -> int:
    """Return the length of the quote in `text` that NLTK rewrote as `form`."""
    if form in _QUOTES:
        for quote in _QUOTES:
            if text.startswith(quote, position):
                return len(quote)
    raise AssertionError(f"splitting.py: word {form!r} is not in {text!r} at character {position}")
