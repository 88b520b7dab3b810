"""A rank that alone leaves moved weights by an exception: nobody waits for it, and the next forward reads what it
should."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.engine_layouts import LAYOUTS, on_each_rank
from tests.ranks import Ranks
from tests.synthetic import Layout, data_group
from tests.synthetic_images import batch, make_image_engine
from tests.synthetic_masks import mask_config
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction


class InterruptionError(Exception):
    """Raised on one rank."""


def interrupt_rank_1(layout: Layout) -> tuple[float, float]:
    """Loss before and after."""
    config, group = mask_config(layout), data_group()
    engine = make_image_engine(layout, config, group)
    objective, images = MaskedPatchReconstruction(config.objective, config.vision.patch_size), batch(range(4))
    direction = engine.weights()

    def loss() -> float:
        with torch.no_grad():
            return float(objective(engine, images).sums)

    before = loss()
    try:
        with engine.perturb_weights(direction, 0.5):
            if group.rank == 1:
                raise InterruptionError
            dist.all_reduce(torch.ones(1))
    except InterruptionError:
        dist.all_reduce(torch.ones(1))  # the collective that the other rank is in
    after = loss()
    engine.close()
    return before, after


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("plain", "zero3_offload")])
def test_no_rank_waits_and_the_weights_are_back(two_ranks: Ranks, name: str) -> None:
    for before, after in on_each_rank(two_ranks, name, interrupt_rank_1):
        assert before == after
