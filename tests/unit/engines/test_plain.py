"""A step's response to its gradient, against differences of steps that the engine really takes, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_images import image_config
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import Shards
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.mae.model import MaskedAutoencoder

LR = 1e-3
DONE = 1_000_000
"""Steps before the one that is looked at: with beta2 next to 1 the second moment hardly moves in one."""


def engine_with_moments(**optimizer: Any) -> PlainEngine:
    """A plain engine in float64 after DONE steps, with first moments and large second ones."""
    config = image_config(Layout(), optimizer={"clipping": 0.0, **optimizer})
    engine = PlainEngine(MaskedAutoencoder(config).double(), config, device=torch.device("cpu"))
    engine.create_optimizer_state()
    generator = torch.Generator().manual_seed(5)
    for piece in engine.pieces():
        for kind in piece.tensors.keys() - {"weight"}:
            drawn = torch.rand(piece.region.size, generator=generator, dtype=torch.float64)
            piece.tensors[kind].copy_(0.1 + drawn)
    engine.after_load(DONE)
    return engine


def vector(engine: PlainEngine, seed: int) -> Shards:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in engine.weights().parts]
    return Shards(parts=parts, owned=[True] * len(parts), group=engine.data_group)


def stepped(gradient: Shards, factor: float, **optimizer: Any) -> tuple[list[Tensor], PlainEngine]:
    """Weights after a real step with `gradient`, clipped to `factor` of its length, and the engine."""
    norm = float(gradient.norm())
    clipping = factor * (norm + 1e-6) if factor < 1 else 0.0
    engine = engine_with_moments(clipping=clipping, **optimizer)
    for (_, parameter), part in zip(engine.named_parameters(), gradient.parts, strict=True):
        parameter.grad = part.clone().view(parameter.shape)
    assert float(engine.check_gradients()) == pytest.approx(norm)
    engine.step(LR)
    return engine.weights().parts, engine


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_it_is_the_difference_of_two_real_steps(kind: str, factor: float) -> None:
    optimizer: dict[str, Any] = {"kind": kind, "beta1": 0.9, "beta2": 1 - 1e-9, "eps": 1e-2, "weight_decay": 0.1}
    start = engine_with_moments(**optimizer)
    gradient, direction = vector(start, 1), vector(start, 2)
    # Across the gradient: its length, and so the clipping, stays the same to first order.
    along = sum(float(mine @ theirs) for mine, theirs in zip(direction.parts, gradient.parts, strict=True))
    direction = direction.plus(gradient, -along / float(gradient.norm()) ** 2)
    _, engine = stepped(gradient, factor, **optimizer)
    response = engine.step_response(direction, lr=LR, grad_norm=float(gradient.norm()))
    step = 1e-4
    ahead, _ = stepped(gradient.plus(direction, step), factor, **optimizer)
    behind, _ = stepped(gradient.plus(direction, -step), factor, **optimizer)
    for before, after, expected in zip(behind, ahead, response.parts, strict=True):
        difference = -(after - before) / (2 * step)  # a step descends
        assert float((difference - expected).norm() / expected.norm()) < 1e-4


def test_before_the_first_step_there_is_none() -> None:
    config = image_config(Layout())
    engine = PlainEngine(MaskedAutoencoder(config), config, device=torch.device("cpu"))
    with pytest.raises(EngineError, match="no step has been made"):
        engine.step_response(engine.weights(), lr=LR, grad_norm=1.0)
