"""Models small enough to count by hand."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config, MegatronConfig
from trp_scale.config.loader import load_recipe
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Collective, Counted
from trp_scale.planning.layouts import LayoutChoice
from trp_scale.planning.plan import ClusterPlan, make_plans
from trp_scale.pretraining.base import DataFacts
from trp_scale.training.micro_size import Need


class Blocks(nn.Module):
    """An embedding of 10 x 4, and `count` blocks of a matrix 4 x 4 with its bias: 40 + 20 numbers a block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, device="meta")
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(count))


class Halves(nn.Module):
    """What one of two ranks has of them: 20 + 10 numbers a block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, device="meta")
        self.layers = nn.ModuleList(nn.Linear(4, 2, device="meta") for _ in range(count))


def half(blocks: int) -> Any:
    """The same of one of two ranks: 400 bytes saved, and 6 for each row; a sum of 8 bytes a row in each pass of each
    block."""
    return SimpleNamespace(
        model=Halves(blocks),
        parameters=20 + 10 * blocks,
        moments=2 * (20 + 10 * blocks),
        saved=lambda how, rounded: Need(fixed=400, row=6),
        tensor_sums=lambda rows, rounded: [
            Collective(kind="all-reduce", phase=phase, size=8 * rows)
            for phase in ("forward", "backward")
            for _ in range(blocks)
        ],
    )


def counted(blocks: int = 3, *, tasks: int = 2, network: int = 0) -> Any:
    """What layouts ask of Counted: 1,000 bytes saved, and 10 for each row."""
    model = Blocks(blocks)
    config: Config = load_recipe("pos_bert_tiny")
    found = SimpleNamespace(
        config=config,
        model=model,
        parameters=40 + 20 * blocks,
        moments=2 * (40 + 20 * blocks),
        block_elements=16 * blocks,
        blocks=[20] * blocks,
        rest=40,
        network=network,
        outline=SimpleNamespace(objective=SimpleNamespace(tasks=("task",) * tasks)),
        saved=lambda how, rounded: Need(fixed=1000, row=10),
    )
    found.partial = lambda part: 7
    found.over = lambda ranks, split: {1: found, 2: half(blocks)}[ranks]
    return found


ZERO = {"reduce_bucket_size": 36, "stage3_param_persistence_threshold": 4, "stage3_max_live_parameters": 100}
"""DeepSpeed's sizes, in numbers."""

CPU = torch.device("cpu")

H100 = GPUS["h100"]


def of_four_heads(**megatron: Any) -> Counted:
    config = load_recipe("pos_bert_tiny")
    config.model.layers, config.model.heads, config.model.hidden_size = 2, 4, 128
    config.batch.global_size, config.batch.micro_size, config.data.path = 4096, "auto", "(none)"
    config.megatron = MegatronConfig(**megatron)
    return Counted(config, DataFacts(length=64, vocabulary=8000))


@functools.cache
def counted_for_fsdp(**settings: object) -> Counted:
    """PoS-BERT of two blocks."""
    config = load_recipe("pos_bert_tiny")
    config.model.layers = 2
    for name, value in settings.items():
        setattr(config.fsdp, name, value)
    return Counted(config, DataFacts(length=64))


def fsdp_on(gpus: int, **settings: object) -> list[ClusterPlan]:
    """Plans in the ways that these settings of FSDP2 allow."""
    return make_plans(counted_for_fsdp(**settings), Cluster(gpu=H100, gpus=gpus), LayoutChoice(engine="fsdp"))
