"""Words are those of NLTK, with exact positions in the text."""

from __future__ import annotations

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

from trp_scale.sharding.text.splitting import ABBREVIATIONS, SentenceSplitter, key_text, split_keys, unit_keys

PARTS = re.findall(
    r"\S+",
    "the cannot gonna don't it's I'll 'tis 'twas dogs' U.S. e.g. Mr. 3.88 1,000 $ % -- - ... .. . ? ! , ; : "
    "\" '' ` `` ' “ ” ‘ ’ « » ( ) [ ] { } < > @ # & * well-known naïve İstanbul 東京 x=1 — – "  # noqa: RUF001
    "http://a.b/c?d=e n't 's 'll ''tis",
)
"""Pieces of text that NLTK's rules treat specially."""

sentences = st.lists(
    st.one_of(st.sampled_from(PARTS), st.sampled_from([" ", " ", "  ", "\n"]), st.text(max_size=3)),
    min_size=1,
    max_size=14,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(sentences)
@example('He said. "')
@example("cannot-the")
@example("it's'")
@example("we-gonna, (lemme-go)")
@example('"" a')
@example("''tis'' \"(\" .")
@example('("a" `b\'\' "c".)')
def test_words_are_those_of_nltk_on_the_whole_sentence(sentence: str) -> None:
    keys = unit_keys(sentence)
    words = split_keys(keys)
    forms = [form for unit in words for form in unit.forms]
    assert forms == NLTKWordTokenizer().tokenize(" ".join(sentence.split()))


@settings(max_examples=100, deadline=None)
@given(sentences)
def test_places_cover_the_text_but_for_white_space(sentence: str) -> None:
    keys = unit_keys(sentence)
    assert " ".join(map(key_text, keys)).split() == sentence.split()
    for key, words in zip(keys, split_keys(keys), strict=True):
        text = key_text(key)
        covered = [place for start, end in zip(words.starts, words.ends, strict=True) for place in range(start, end)]
        assert covered == [place for place, character in enumerate(text) if not character.isspace()]
        for form, start, end in zip(words.forms, words.starts, words.ends, strict=True):
            assert form == text[start:end] or (form in ("``", "''") and text[start:end] in ('"', "``", "''"))


endings = st.lists(
    st.sampled_from(
        [
            " ",
            " A",
            "Mr. ",
            *["word", "Mr", "e.g", "J", "3", "Ünal", "end", ".", ".", "!", "?", "...", '"', "'", ")", "“", ",", "a"],
        ]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(endings)
def test_the_shortcut_splits_as_punkt_does(text: str) -> None:
    """On one line: a blank line ends a sentence here, not in Punkt."""
    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    reference = PunktSentenceTokenizer(parameters)
    expected = [text[start:end].strip() for start, end in reference.span_tokenize(text)]
    assert list(SentenceSplitter().split(text)) == [sentence for sentence in expected if sentence]


def test_blank_lines_end_sentences_and_abbreviations_do_not() -> None:
    text = 'Heading\n\nMr. Smith (who lives in the U.S.) left. "Why?" I ask. See ch. 3.'
    assert list(SentenceSplitter().split(text)) == [
        "Heading",
        "Mr. Smith (who lives in the U.S.) left.",
        '"Why?"',
        "I ask.",
        "See ch. 3.",
    ]
