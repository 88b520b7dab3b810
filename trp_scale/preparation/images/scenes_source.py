"""Rendered scenes as a source of images: made when they are read."""

from __future__ import annotations

import hashlib

import numpy as np
from PIL import Image

from trp_scale.data.images.members import CLASS, IMAGE, ordered_suffixes
from trp_scale.data.images.png import write_png
from trp_scale.modalities import modalities
from trp_scale.modalities.base import MapFiles, Modality
from trp_scale.preparation.images.samples import Listing, Loaded, Sample
from trp_scale.preparation.images.scenes import SCENE_CLASSES, render_scene


class SceneSource:
    """Synthetic scenes by number.

    Args:
        maps: modalities by the suffix of their maps.
    """

    def __init__(self, seed: int, size: int, maps: dict[str, type[Modality]]) -> None:
        self._seed = seed
        self._size = size
        self._maps = maps

    def read(self, sample: Sample) -> Loaded:
        scene = render_scene(self._seed, sample.row, self._size)
        found = {suffix: kind.of_scene(scene) for suffix, kind in self._maps.items()}
        maps = {suffix: write_png(one.numbers) for suffix, one in found.items() if one is not None}
        return Loaded(image=Image.fromarray(scene.image), label=scene.label, maps=maps)


def list_scenes(seed: int, count: int, size: int) -> Listing:
    """`count` scenes of size x size pixels, as many of each class, with the maps of every modality that has some."""
    scene = render_scene(seed, 0, size)
    kinds: dict[str, type[Modality]] = {}
    maps: dict[str, MapFiles] = {}
    for name, kind in modalities().items():
        found = kind.of_scene(scene)
        if found is not None and kind.format is not None:
            kinds[kind.format.suffix] = kind
            maps[name] = MapFiles(name=name, format=kind.format, description={**found.description, "exact": True})
    source = SceneSource(seed, size, kinds)
    samples = [Sample(f"scene-{number:08d}", f"scene {number}", None, number) for number in range(count)]
    # Another renderer, or another numpy that rounds otherwise, is another input, and so is one with other maps.
    first = source.read(samples[0])
    digest = hashlib.sha256(np.asarray(first.image).tobytes())
    for suffix, content in first.maps.items():
        digest.update(suffix.encode() + content)
    return Listing(
        source=source,
        samples=samples,
        suffixes=ordered_suffixes({IMAGE, CLASS, *kinds}),
        classes=list(SCENE_CLASSES),
        fingerprint=digest.hexdigest(),
        maps=maps,
    )
