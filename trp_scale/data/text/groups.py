"""The nine part-of-speech groups of TRP 4.1.1 and the Penn tags that belong to them: the only table."""

from __future__ import annotations

GROUPS: tuple[str, ...] = (
    "verb",
    "noun",
    "adjective",
    "determiner",
    "adverb",
    "pronoun",
    "preposition",
    "conjunction",
    "interjection",
    "other",
)
"""Group names; the position is the number stored in shards. The last one is outside the nine."""

OTHER = GROUPS.index("other")

WORD_START = 0x80
"""Bit set in a stored tag byte on the first piece of each word; the low four bits are the group."""

GROUP_BITS = 0x0F

_TAGS = {
    "verb": "VB VBD VBG VBN VBP VBZ MD",
    "noun": "NN NNS NNP NNPS",
    "adjective": "JJ JJR JJS",
    "determiner": "DT PDT WDT",
    "adverb": "RB RBR RBS WRB RP",
    "pronoun": "PRP PRP$ WP WP$",
    "preposition": "IN TO",
    "conjunction": "CC",
    "interjection": "UH",
}

PENN_TO_GROUP: dict[str, int] = {tag: GROUPS.index(group) for group, tags in _TAGS.items() for tag in tags.split()}


def group_of(penn_tag: str) -> int:
    """Number of the group of a Penn tag; tags outside the nine groups are `other`."""
    return PENN_TO_GROUP.get(penn_tag, OTHER)
