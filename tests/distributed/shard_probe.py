"""The small masked autoencoder in an engine, with two kinds of losses, and its double in float64 without any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.distributed.engine_probe import copy_pieces
from tests.synthetic import Layout, data_group
from tests.synthetic_images import CROPS, PATCH, PATCHES, VISIBLE, SyntheticImages, image_config, make_image_engine
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.pieces import Shards
from trp_scale.distributed.groups import ALONE
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction

LR = 1e-2
OPTIMIZER = {"clipping": 0.5, "eps": 1e-3}
"""Clipping that acts (norms are about 1), and an eps that lets a step's response to noise be compared."""

Forward = Callable[..., Any]
Named = dict[str, Tensor]


class Losses:
    """Two losses of a micro-batch, each its share of that of the global batch."""

    def __init__(self, config: Config) -> None:
        self.rows = config.batch.global_size * CROPS
        self.objective = MaskedPatchReconstruction(config.objective, PATCH)

    def reconstruction(self, forward: Forward, micro: Batch) -> Tensor:
        """Every parameter takes part."""
        return self.objective(forward, micro).sums.sum() / (self.rows * (PATCHES - VISIBLE))

    def recognition(self, forward: Forward, micro: Batch) -> Tensor:
        """The decoder, the mask token and the prediction take no part."""
        patches = self.objective.patches(micro)
        tokens = self.objective.run(forward, micro, patches, output="features")  # [B, 1 + V, D]
        return (tokens[:, 1:].mean(1).double().cos() ** 2).sum() / self.rows

    def share(self, kind: str, forward: Forward, micro: Batch) -> Tensor:
        return self.reconstruction(forward, micro) if kind == "reconstruction" else self.recognition(forward, micro)


class ShardProbe:
    """One engine on this rank. Call every method on all ranks together."""

    def __init__(self, layout: Layout, **changes: Any) -> None:
        self.config = image_config(layout, **{"optimizer": OPTIMIZER, **changes})
        self.group = ALONE if layout.engine == "plain" else data_group()
        self.engine = make_image_engine(layout, self.config, self.group)
        self.engine.train(True)
        self.engine.watch_micro_batches()
        self.losses = Losses(self.config)
        self.grad_norm = self.squares = 0.0

    def window(self, number: int) -> list[Batch]:
        return SyntheticImages(self.config, self.group, cursor=number * self.config.batch.global_size).next_window()

    def shares(self, number: int, *kinds: str) -> list[Callable[[], Tensor]]:
        """For compute_gradient: global batch `number`, its rank's micro-batches by turns with a loss of each kind."""

        def share(kind: str, micro: Batch) -> Callable[[], Tensor]:
            return lambda: self.losses.share(kind, self.engine, micro)

        return [share(kinds[place % len(kinds)], micro) for place, micro in enumerate(self.window(number))]

    def step(self, number: int, *kinds: str) -> None:
        shares = self.shares(number, *(kinds or ("reconstruction",)))
        for place, share in enumerate(shares):
            self.engine.backward(share(), last=place == len(shares) - 1)
        self.grad_norm = float(self.engine.check_gradients())
        self.squares = float(self.engine.micro_batch_squares())
        self.engine.step(LR)

    @torch.no_grad()
    def look(self, number: int, kind: str = "reconstruction") -> float:
        """Loss of a global batch from a pass without gradients."""
        total = sum(float(share()) for share in self.shares(number, kind))
        return float(self.group.sum(torch.tensor(total, dtype=torch.float64)))

    def state(self) -> Named:
        return copy_pieces(self.engine)

    def whole(self, vector: Shards) -> Named:
        """A vector's parts of all ranks, joined by parameter, on every rank."""
        shapes = {piece.name: piece.shape for piece in self.engine.pieces()}
        return self._joined([part.cpu() for part in vector.parts], shapes)

    def moment(self, kind: str) -> Named:
        """One moment, joined by parameter, on every rank."""
        shapes = {piece.name: piece.shape for piece in self.engine.pieces()}
        return self._joined([piece.tensors[kind].detach().clone() for piece in self.engine.pieces()], shapes)

    def _joined(self, parts: list[Tensor], shapes: dict[str, tuple[int, ...]]) -> Named:
        own = [
            (piece.name, piece.region, part)
            for piece, part in zip(self.engine.pieces(), parts, strict=True)
            if piece.owner
        ]
        found: Named = {}
        for everyone in self.group.gather_objects(shapes):  # a rank may hold no part of a small parameter
            found |= {name: torch.full(shape, torch.nan).double() for name, shape in everyone.items()}
        for name, region, part in (each for rank in self.group.gather_objects(own) for each in rank):
            region.of(found[name]).copy_(part)
        return found


class Double:
    """The same model in float64 in one piece, at given weights, on whole global batches."""

    def __init__(self, weights: Named) -> None:
        self.config = image_config(Layout(micro_size=8), optimizer=OPTIMIZER)
        self.module = MaskedAutoencoder(self.config).double()
        self.module.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
        self.losses = Losses(self.config)

    def loss(self, number: int, *kinds: str) -> Tensor:
        """Loss of a global batch, its pairs of images by turns with a loss of each kind."""
        size = self.config.batch.global_size
        (whole,) = SyntheticImages(self.config, ALONE, cursor=number * size).next_window()
        shares = []
        for place, kind in enumerate(kinds):
            chosen = torch.arange(size) // 2 % len(kinds) == place
            fields = {name: field[chosen] for name, field in whole.fields.items()}
            shares.append(self.losses.share(kind, self.module, Batch(fields=fields, keys=whole.keys[chosen], start=0)))
        return torch.stack(shares).sum()

    @torch.no_grad()
    def look(self, number: int, kind: str = "reconstruction") -> float:
        return float(self.loss(number, kind))

    def gradient(self, number: int, *kinds: str) -> Named:
        """Of that loss; zero for parameters that take no part."""
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        found = torch.autograd.grad(self.loss(number, *kinds), parameters, materialize_grads=True)
        return dict(zip(names, found, strict=True))

    def micro_batch_squares(self, number: int) -> float:
        """Sum over the global batch's pairs of images of the squared norm of each one's gradient."""
        size = self.config.batch.global_size
        (whole,) = SyntheticImages(self.config, ALONE, cursor=number * size).next_window()
        total = 0.0
        for start in range(0, size, 2):
            fields = {name: field[start : start + 2] for name, field in whole.fields.items()}
            batch = Batch(fields=fields, keys=whole.keys[start : start + 2], start=0)
            loss = self.losses.reconstruction(self.module, batch)
            found = torch.autograd.grad(loss, list(self.module.parameters()))
            total += sum(float(each.square().sum()) for each in found)
        return total

    def moved(self, direction: Named, scale: float) -> Double:
        return Double({name: value + scale * direction[name] for name, value in self.module.state_dict().items()})


def largest_difference(found: Named, expected: Named) -> float:
    """Largest norm of a tensor's difference, over the norm of all expected tensors."""
    assert found.keys() == expected.keys()
    total = torch.stack([value.double().norm() for value in expected.values()]).norm()
    return float(max((found[name].double() - value.double()).norm() for name, value in expected.items()) / total)
