"""Part-of-speech taggers: words of a sentence -> group numbers of `trp_scale.data.text.dataset`."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

from trp_scale.data.text.dataset import penn_group
from trp_scale.errors import RefusedError

NLTK_DATA = "averaged_perceptron_tagger_eng"
NLTK_INSTALL = f"python -m nltk.downloader {NLTK_DATA}"

MAX_REMEMBERED = 500_000
"""Words whose group the pattern tagger remembers before it starts again."""


class TaggerError(RefusedError):
    """A tagger that was asked for cannot be used; the message says what to install."""


def text_library(name: str) -> Any:
    """A module of NLTK or TextBlob, which only the sharding of text needs.

    Raises:
        TaggerError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise TaggerError(
            f"sharding text needs {package}, which cannot be imported ({error}): pip install 'trp-scale[text]'"
        ) from error


_WORD = re.compile(r"[^\W\d_]+")

FEWEST_WORDS = 20
"""Of which the share of unknown ones says something."""

ANOTHER_LANGUAGE = 0.25
"""Share of unknown words from which text is taken to be in another language than the taggers'. Of English books 2 %
are unknown, of docstrings 7 %, of Wikipedia 9 %; of a page of French 34 %, of German 67 %, of Chinese all."""


def unknown_words(text: str) -> tuple[float, list[str]]:
    """Share of the words that TextBlob's English lexicon does not have, and some of them; 0 of next to no words."""
    words = _WORD.findall(text)
    lexicon = text_library("textblob.en").parser.lexicon
    unknown = [word for word in words if word not in lexicon and word.lower() not in lexicon]
    return (len(unknown) / len(words) if len(words) >= FEWEST_WORDS else 0.0), list(dict.fromkeys(unknown))[:5]


class Tagger(Protocol):
    """Tags one sentence at a time. `name` goes into dataset.json, with the library's version."""

    name: str

    def prepare(self, words: list[str]) -> None:
        """Learn the words that may come, so that what does not depend on their neighbours is worked out once."""
        ...

    def groups(self, words: list[str]) -> list[int]:
        """Group number of each word of one sentence."""
        ...


class NltkTagger:
    """NLTK's averaged perceptron (TRP 4.1.1).

    Raises:
        TaggerError: its data is not installed.
    """

    def __init__(self) -> None:
        if not nltk_data_present():
            raise TaggerError(
                f"tagger nltk: the data {NLTK_DATA} is not installed; run `{NLTK_INSTALL}` or use --tagger textblob"
            )
        self._tagger = text_library("nltk.tag.perceptron").PerceptronTagger()
        self.name = f"nltk {version('nltk')} {NLTK_DATA}"

    def prepare(self, words: list[str]) -> None:
        """Do nothing: tags depend on neighbouring words."""

    def groups(self, words: list[str]) -> list[int]:
        return [penn_group(tag) for _, tag in self._tagger.tag(words)]


class TextBlobTagger:
    """TextBlob's PatternTagger: a lexicon and suffix rules, no data to download.

    It uses no context: a word's tag depends on the word and on whether it is the first of its sentence. So tags are
    remembered by word, which makes it as fast as a dictionary. A test compares it with PatternTagger itself.
    """

    def __init__(self) -> None:
        self._parser = text_library("textblob.en").parser
        self._first: dict[str, int] = {}
        self._later: dict[str, int] = {}
        self.name = f"textblob {version('textblob')} PatternTagger"

    def prepare(self, words: list[str]) -> None:
        """Remember the groups of these words."""
        if len(self._later) > MAX_REMEMBERED:
            self._later.clear()
            self._first.clear()
        unknown = [word for word in dict.fromkeys(words) if word not in self._later]
        # The leading word takes the place of the sentence's first one, which the lexicon treats differently.
        tagged = self._parser.find_tags([".", *unknown])[1:]
        if [word for word, _ in tagged] != unknown:
            raise TaggerError(f"tagger textblob: it changed the words {unknown!r} to {[word for word, _ in tagged]!r}")
        self._later.update((word, penn_group(tag)) for word, tag in tagged)

    def groups(self, words: list[str]) -> list[int]:
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


def nltk_data_present() -> bool:
    """Whether NLTK finds the data of its English perceptron tagger."""
    try:
        text_library("nltk").data.find(f"taggers/{NLTK_DATA}/")
    except LookupError:
        return False
    return True


def resolve_tagger(kind: str) -> str:
    """`auto` -> nltk if its data is there, else textblob; other names unchanged."""
    if kind != "auto":
        return kind
    return "nltk" if nltk_data_present() else "textblob"


def make_tagger(kind: str) -> Tagger:
    """A tagger by its name.

    Raises:
        TaggerError: unknown name, or data missing.
    """
    makers: dict[str, type[NltkTagger] | type[TextBlobTagger]] = {"nltk": NltkTagger, "textblob": TextBlobTagger}
    if kind not in makers:
        raise TaggerError(f"--tagger {kind!r}: nltk, textblob or auto is allowed")
    return makers[kind]()
