"""The members of an image sample: which there may be, and nothing else is ever opened."""

from __future__ import annotations

MODALITIES = {"depth": "depth.png", "semseg": "semseg.png"}
"""Suffix of each aligned modality: 16-bit depth, 8-bit class numbers."""

SUFFIXES = ("jpg", "cls", *MODALITIES.values())
"""Members that a sample may have, in the order they are stored; every sample of a data set has the same ones."""
