"""Pieces are those of the tokenizer, and each has the tag of the word with its first character."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize.destructive import NLTKWordTokenizer
from textblob.taggers import PatternTagger
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.unit.sharding.text.test_splitting import PARTS
from trp_scale.data.text.dataset import GROUP_BITS, WORD_START, penn_group
from trp_scale.data.text.tokenizer import is_bert_word_piece, train_word_piece
from trp_scale.sharding.text.annotate import Annotator, TextBlobTagger
from trp_scale.sharding.text.corpus import embedded_documents
from trp_scale.sharding.text.splitting import MAX_UNIT


@cache
def texts() -> list[str]:
    return [text for _, text in zip(range(40), (text for _, text in embedded_documents()), strict=False)]


@cache
def word_piece() -> Tokenizer:
    return train_word_piece(texts, 800, lowercase=True)


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=600, show_progress=False))
    return tokenizer


def slow_words(sentence: str) -> list[tuple[int, int, str]]:
    """(start, end, form) of each word, walking through the text one character at a time."""
    words, place = [], 0
    for form in NLTKWordTokenizer().tokenize(" ".join(sentence.split())):
        while sentence[place].isspace():
            place += 1
        lengths = (
            [len(form)]
            if sentence.startswith(form, place)
            else [len(quote) for quote in ("``", "''", '"') if sentence.startswith(quote, place)]
        )
        words.append((place, place + lengths[0], form))
        place += lengths[0]
    return words


def slow_tags(sentence: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tag the words with the library, then look up the first character of each piece."""
    words = slow_words(sentence)
    tagged = PatternTagger().tag(" ".join(form for _, _, form in words), tokenize=False) if words else []
    assert len(tagged) == len(words)
    encoding = tokenizer.encode(sentence, add_special_tokens=False)
    tags, seen = [], set()
    for start, end in encoding.offsets:
        first = next((place for place in range(start, end) if not sentence[place].isspace()), start)
        inside = [index for index, (begin, stop, _) in enumerate(words) if begin <= first < stop]
        after = [index for index, (begin, _, _) in enumerate(words) if begin > first]
        word = inside[0] if inside else after[0] if after else len(words) - 1
        tags.append(penn_group(tagged[word][1]) | (0 if word in seen else WORD_START))
        seen.add(word)
    return encoding.ids, tags


visible = st.characters(exclude_categories=["Cc", "Cs"])
sentences = (
    st.lists(
        st.one_of(
            st.sampled_from(PARTS),
            st.sampled_from([" ", " ", " "]),
            st.sampled_from(["tokens", "Understanding", "unbelievable", "e\u0301", "ﬁ", "한국어", "\u200b", "😀"]),
            st.sampled_from(["ß", "ΣΣΣ", "a" * 120]),
            st.text(visible, max_size=4),
        ),
        min_size=1,
        max_size=12,
    )
    .map(lambda parts: "".join(parts).strip())
    .filter(lambda text: text and all(len(unit) <= MAX_UNIT for unit in text.split()))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(sentences, min_size=1, max_size=4))
def test_alignment_of_word_pieces(batch: list[str]) -> None:
    tokenizer = word_piece()
    check_alignment(batch, tokenizer)


@settings(max_examples=50, deadline=None)
@given(st.lists(sentences, min_size=1, max_size=4))
def test_alignment_of_any_other_tokenizer(batch: list[str]) -> None:
    tokenizer = byte_level()
    assert not is_bert_word_piece(tokenizer)
    check_alignment(batch, tokenizer)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(sentences, min_size=1, max_size=3), min_size=1, max_size=3))
def test_pieces_of_whole_documents(batch: list[list[str]]) -> None:
    """The pieces are those of the text with the white space between its sentences, the tags those of the sentences."""
    tokenizer = byte_level()
    texts = [" ".join(parts) for parts in batch]
    ends = np.cumsum([len(parts) for parts in batch]).tolist()
    flat = [sentence for parts in batch for sentence in parts]
    whole = Annotator(tokenizer, TextBlobTagger()).annotate(flat, list(zip(ends, texts, strict=True)))
    pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert whole.tokens.tolist() == [piece for text in pieces for piece in text]
    assert whole.lengths == [len(text) for text in pieces]
    alone = Annotator(tokenizer, TextBlobTagger()).annotate(flat)
    assert np.array_equal(whole.words_per_group, alone.words_per_group)
    words = [tags[(tags & WORD_START) != 0] for tags in (whole.tags, alone.tags)]
    if len(words[0]) == len(words[1]):  # the tokenizer has no piece for some characters, but one for a space before
        assert np.array_equal(*words)


def check_alignment(batch: list[str], tokenizer: Tokenizer) -> None:
    annotated = Annotator(tokenizer, TextBlobTagger()).annotate(batch)
    assert sum(annotated.lengths) == len(annotated.tokens) == len(annotated.tags)
    start = 0
    for sentence, length in zip(batch, annotated.lengths, strict=True):
        pieces, tags = slow_tags(sentence, tokenizer)
        assert annotated.tokens[start : start + length].tolist() == pieces
        assert annotated.tags[start : start + length].tolist() == tags
        start += length


def test_an_over_long_word_has_one_tag_and_spoils_no_other() -> None:
    tokenizer = word_piece()
    short = Annotator(tokenizer, TextBlobTagger()).annotate(["The end of it."]).tags
    for word in ("x" * 500, "ab-cd." * 100, "日本" * 200):
        tags = Annotator(tokenizer, TextBlobTagger()).annotate([f"The {word} of it."]).tags
        assert tags[0] == short[0]
        assert np.array_equal(tags[-3:], short[-3:])
        assert (tags[1:-3] & WORD_START).astype(bool).tolist() == [True] + [False] * (len(tags) - 5)
        assert len(set((tags[1:-3] & GROUP_BITS).tolist())) == 1


def test_text_that_spells_a_special_token_stays_text() -> None:
    tokenizer = word_piece()
    tokenizer.encode_special_tokens = True
    annotated = Annotator(tokenizer, TextBlobTagger()).annotate(["Write [MASK] or [SEP] here."])
    assert not set(annotated.tokens.tolist()) & {tokenizer.token_to_id(token) for token in ("[MASK]", "[SEP]")}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(st.sampled_from(PARTS), st.sampled_from(["The", "the", "And/or", "Running", "42"])), min_size=1
        ),
        max_size=4,
    )
)
def test_remembered_tags_are_those_of_pattern_tagger(batch: list[list[str]]) -> None:
    tagger = TextBlobTagger()
    for words in batch:
        expected = [penn_group(tag) for _, tag in PatternTagger().tag(" ".join(words), tokenize=False)]
        assert tagger.groups(words) == expected


def test_a_tokenizer_is_trained_to_the_same_numbers() -> None:
    """Hash tables differ between runs and between tokenizers of one run; small counts make many ties."""
    corpus = [text[:4000] for text in texts()]
    first, *others = (train_word_piece(lambda: corpus, 700, lowercase=True).get_vocab() for _ in range(4))
    assert all(other == first for other in others)
    assert len(first) == 700
    assert sorted(first, key=lambda piece: first[piece])[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
