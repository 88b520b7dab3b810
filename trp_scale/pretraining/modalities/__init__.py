"""Modalities by name, one file each. settings.py registers those of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trp_scale.config.registry import find, names

if TYPE_CHECKING:
    from trp_scale.pretraining.modalities.base import Modality


def modalities() -> dict[str, type[Modality]]:
    """Return all modalities by name, in the order of a sample's members."""
    return {name: find("modality", name).load() for name in names("modality")}


def modality(name: str) -> type[Modality]:
    """Return the modality of this name; raise RefusedError if it does not exist."""
    kind: type[Modality] = find("modality", name).load()
    return kind
