"""Flat ranges and boxes: their runs are the elements that indexing takes."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trp_scale.checkpoint.format import (
    parse_key,
)
from trp_scale.core.pieces import Box, FlatRange, Region

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def cut_at_random(shape: tuple[int, ...], chooser: random.Random) -> list[Region]:
    """The tensor as flat ranges, or as boxes cut again and again along random dimensions."""
    size = prod(shape)
    if chooser.random() < 0.4:
        cuts = sorted({0, size, *(chooser.randint(0, size) for _ in range(chooser.randint(0, 3)))})
        return [FlatRange(start, stop) for start, stop in pairwise(cuts)]
    boxes = [Box(tuple((0, length) for length in shape))]
    for _ in range(chooser.randint(0, 4)):
        bounds = boxes.pop(chooser.randrange(len(boxes))).bounds
        dimension = chooser.randrange(len(shape))
        start, stop = bounds[dimension]
        at = chooser.randint(start, stop)
        halves = [
            (*bounds[:dimension], half, *bounds[dimension + 1 :])
            for half in ((start, at), (at, stop))
            if half[0] < half[1]
        ]
        boxes += [Box(half) for half in halves]
    return list(boxes)


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's elements by torch's own indexing, the reference here."""
    if isinstance(region, FlatRange):
        return tensor.reshape(-1)[region.start : region.stop]
    return tensor[tuple(slice(start, stop) for start, stop in region.bounds)].reshape(-1)


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6))
def test_runs_are_the_elements_that_indexing_takes(shape: tuple[int, ...], seed: int) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    regions = cut_at_random(shape, random.Random(seed))
    for region in regions:
        runs = region.runs(shape)
        elements = [start + offset for start in runs.starts.tolist() for offset in range(runs.length)]
        assert elements == cut(numbers, region).tolist()
        assert region.size == len(elements)
        assert parse_key(f"weight:a@b#c{region}") == ("weight", "a@b#c", region)
        assert region.of(numbers).reshape(-1).tolist() == elements
