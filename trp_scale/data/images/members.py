"""The members of an image sample: which there may be, and nothing else is ever opened."""

from __future__ import annotations

from collections.abc import Collection

MODALITIES = {"depth": "depth.png", "semseg": "semseg.png"}
"""Suffix of each aligned modality: 16-bit depth; 8 bits, one class a pixel."""

SUFFIXES = ("jpg", "cls", *MODALITIES.values())
"""Members that a sample may have (cls: an ASCII integer); every sample of a data set has the same ones."""


def ordered_suffixes(found: Collection[str]) -> tuple[str, ...]:
    """The suffixes in the order of SUFFIXES."""
    return tuple(suffix for suffix in SUFFIXES if suffix in found)
