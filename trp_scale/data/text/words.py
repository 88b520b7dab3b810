"""Sentences into words: NLTK's word tokenizer with exact places, reused for every repeated string.

A *unit* is a run of characters between white space. NLTK's rules look beyond a unit in one case only, the final period
of a sentence, so a sentence's words are the words of its units, with the units from the last one that has a period on
taken together (the tail). A property test compares this with the tokenizer run on whole sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nltk.tokenize.destructive import NLTKWordTokenizer

MAX_UNIT = 256
"""Characters. A longer unit (an address, a line of base64) is one word."""

TAIL = "\n"
"""Ends the key of a tail; units hold no white space, so the keys of units and tails differ."""

FIRST = "\t"
"""Begins the key of a first unit that NLTK's rules see differently from the same unit later on."""

_CLOSERS = "])}>\"'»”’"
_QUOTES = ("``", "''", '"')

_CONTRACTED = {"cannot", "gimme", "gonna", "gotta", "lemme", "wanna"}
# Common shapes whose words follow from NLTK's rules one by one; all else is given to NLTK.
_PLAIN = re.compile(
    r"(?P<open>[(\[]?\"?|[“‘])(?P<core>[A-Za-z]+(?:-[A-Za-z]+)*)(?P<clitic>'(?:s|S|m|M|d|D|ll|LL|re|RE|ve|VE)|)"
    r"(?P<mark>[,;:?!]?)(?P<period>\.?)(?P<close>[\"”]?[)\]]?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class UnitWords:
    """Words of a unit or tail: as the tagger should see them, and where each begins and ends in the key's text."""

    forms: tuple[str, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def unit_keys(sentence: str) -> list[str]:
    """The keys of a sentence's units in order; the tail is one key.

    Returns:
        Strings whose text (`key_text`) is the sentence's text, but for the amount of white space.
    """
    units = sentence.split()
    if not units:
        return units
    if units[0].startswith("''"):
        units[0] = FIRST + units[0]
    position = len(units) - 1
    while position > 0 and not units[position].rstrip(_CLOSERS):
        position -= 1
    tail = units[position].rstrip(_CLOSERS)
    if tail.endswith("."):
        units[position:] = [" ".join(units[position:]) + TAIL]
    return units


def key_text(key: str) -> str:
    """The text a key stands for."""
    return key.strip("\t\n")


def split_keys(keys: list[str]) -> list[UnitWords]:
    """Words of many keys; plain shapes directly, the others in one call of NLTK's tokenizer for each 64 of them."""
    found: list[UnitWords | None] = [_plain(key) for key in keys]
    hard = [index for index, words in enumerate(found) if words is None]
    inner = [index for index in hard if not keys[index].endswith(TAIL) and not keys[index].startswith(FIRST)]
    for first in range(0, len(inner), 64):
        group = inner[first : first + 64]
        for index, words in zip(group, _split_units([keys[index] for index in group]), strict=True):
            found[index] = words
    for index in hard:
        if found[index] is None:
            found[index] = _split_edge(keys[index])
    return [words for words in found if words is not None]


def _plain(key: str) -> UnitWords | None:
    """Words of a unit of a common shape, or None."""
    text = key_text(key)
    if len(text) > MAX_UNIT:
        return UnitWords((text,), (0,), (len(text),))
    match = _PLAIN.fullmatch(text)
    if match is None or key.startswith(FIRST):
        return None
    core = match.group("core")
    if core.lower() in _CONTRACTED or (match.group("mark") and match.group("period")):
        return None
    if match.group("period") and not key.endswith(TAIL):
        return None
    forms, starts, ends = [], [], []
    for name, (start, end) in ((name, match.span(name)) for name in match.re.groupindex):
        for single in range(start, end) if name in ("open", "close") else (start,) if end > start else ():
            stop = single + 1 if name in ("open", "close") else end
            word = text[single:stop]
            forms.append(("``" if name == "open" else "''") if word == '"' else word)
            starts.append(single)
            ends.append(stop)
    return UnitWords(tuple(forms), tuple(starts), tuple(ends))


_tokenizer = NLTKWordTokenizer()


def _split_units(units: list[str]) -> list[UnitWords]:
    """Words of units that stand in the middle of a sentence: between letters that no rule joins to them."""
    text = "x " + " x ".join(units) + " x"
    tokens = _tokenizer.tokenize(text)
    words, position = [], 1
    for unit in units:
        count, aligned = _align(tokens, position, unit)
        words.append(aligned)
        position += count + 1
    if position != len(tokens):
        raise AssertionError(f"words.py: NLTK's words do not add up for the units {units!r}")
    return words


def _split_edge(key: str) -> UnitWords:
    """Words of a tail, or of a first unit."""
    text = key_text(key)
    before = [] if key.startswith(FIRST) else ["x"]
    after = [] if key.endswith(TAIL) else ["x"]
    tokens = _tokenizer.tokenize(" ".join([*before, text, *after]))
    count, words = _align(tokens, len(before), text)
    if count != len(tokens) - len(before) - len(after):
        raise AssertionError(f"words.py: NLTK's words do not add up for {text!r}")
    return words


def _align(tokens: list[str], position: int, text: str) -> tuple[int, UnitWords]:
    """Places in `text` of the tokens from `position` on that make it up.

    NLTK's own span_tokenize searches for each token and so fails, or answers wrongly, where quotes were rewritten;
    but its rules only add spaces and rewrite a double quote, so walking through both texts is exact.

    Returns:
        The number of tokens used, and the words.
    """
    forms, starts, ends = [], [], []
    place = 0
    while True:
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text):
            return len(forms), UnitWords(tuple(forms), tuple(starts), tuple(ends))
        form = tokens[position + len(forms)]
        length = len(form) if text.startswith(form, place) else _quote_length(form, text, place)
        forms.append(form)
        starts.append(place)
        place += length
        ends.append(place)


def _quote_length(form: str, text: str, place: int) -> int:
    """Characters of the quote in `text` that NLTK wrote as `form`."""
    if form in _QUOTES:
        for quote in _QUOTES:
            if text.startswith(quote, place):
                return len(quote)
    raise AssertionError(f"words.py: word {form!r} is not in {text!r} at character {place}")
