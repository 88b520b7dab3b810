"""The members that an image sample may have. Nothing else is ever opened."""

from __future__ import annotations

from collections.abc import Collection

from trp_scale.data.images.maps import map_formats

IMAGE, CLASS = "jpg", "cls"
"""The image, and its class as an ASCII integer."""

OWN_MODALITY = "; --module registers a modality of your own"
"""Ends the refusal of a member that no modality has."""


def known_suffixes() -> tuple[str, ...]:
    """Members that a sample may have, in their order; every sample of a data set has the same ones."""
    return (IMAGE, CLASS, *(form.suffix for form in map_formats().values()))


def ordered_suffixes(found: Collection[str]) -> tuple[str, ...]:
    """The suffixes in the order of `known_suffixes`."""
    return tuple(suffix for suffix in known_suffixes() if suffix in found)
