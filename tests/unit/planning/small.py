"""Models small enough to count by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config
from trp_scale.recipes.loader import load_recipe
from trp_scale.training.micro_size import Need


class Blocks(nn.Module):
    """An embedding of 10 x 4, and `count` blocks of a matrix 4 x 4 with its bias: 40 + 20 numbers a block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, device="meta")
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(count))


def counted(blocks: int = 3, *, tasks: int = 2, network: int = 0) -> Any:
    """What layouts ask of Counted: 1,000 bytes saved, and 10 for each row."""
    model = Blocks(blocks)
    config: Config = load_recipe("pos_bert_tiny")
    return SimpleNamespace(
        config=config,
        model=model,
        parameters=40 + 20 * blocks,
        blocks=[20] * blocks,
        rest=40,
        network=network,
        outline=SimpleNamespace(objective=SimpleNamespace(tasks=("task",) * tasks)),
        saved=lambda how, rounded: Need(fixed=1000, row=10),
    )


ZERO = {
    "reduce_bucket_size": 36,
    "stage3_param_persistence_threshold": 4,
    "stage3_max_live_parameters": 100,
}
"""DeepSpeed's sizes, in numbers."""

CPU = torch.device("cpu")
