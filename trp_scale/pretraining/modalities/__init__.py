"""Modalities by name. settings.py registers the package's, one file holds each whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trp_scale.config.registry import find, names

if TYPE_CHECKING:
    from trp_scale.pretraining.modalities.base import Modality


def modalities() -> dict[str, type[Modality]]:
    """Every modality by its name, in the order of a sample's members."""
    return {name: find("modality", name).load() for name in names("modality")}


def modality(name: str) -> type[Modality]:
    """The modality of this name.

    Raises:
        RefusedError: there is none.
    """
    kind: type[Modality] = find("modality", name).load()
    return kind
