"""An engine under test: the small model, its global batches by number, and single steps without hooks or loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.synthetic import VOCABULARY, Layout, SyntheticSource, data_group, make_engine, small_config
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.data.text.dataset import GROUPS
from trp_scale.distributed.groups import ALONE
from trp_scale.models.initialise import initial_tensor
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

LR = 1e-3


def equal_shares(sums: Tensor, counts: Tensor) -> Tensor:
    """The sum of the tasks' mean losses: this micro-batch's share of it."""
    return (sums / counts.clamp(min=1)).sum()


def copy_pieces(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's weights and moments, copied, by "exp_avg:NAME@START:STOP"."""
    return {
        f"{kind}:{piece.name}{piece.region}": tensor.detach().clone()
        for piece in engine.pieces()
        for kind, tensor in piece.tensors.items()
    }


def written_value(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Other weights of a parameter, or moments that could be."""
    values = initial_tensor(77, f"{kind}/{name}", shape, std=0.05)
    return values.abs() if kind == "exp_avg_sq" else values


def write_pieces(engine: Engine) -> None:
    """Write `written_value` into all pieces, as after seven steps."""
    for piece in engine.pieces():
        for kind, tensor in piece.tensors.items():
            tensor.copy_(piece.region.of(written_value(kind, piece.name, piece.shape)).reshape(-1))
    engine.after_load(7)


class Probe:
    """One engine on this rank. Call every method on all ranks together."""

    def __init__(self, layout: Layout, **changes: Any) -> None:
        self.config = small_config(layout, **changes)
        self.group = data_group()
        self.engine, self.objective = make_engine(layout, self.config, self.group)
        self.engine.train(True)

    def window(self, number: int) -> list[Batch]:
        """This rank's micro-batches of global batch `number`."""
        return SyntheticSource(self.config, self.group, cursor=number * self.config.batch.global_size).next_window()

    def counts(self, window: list[Batch]) -> Tensor:
        """[T] of the global batch."""
        return self.group.sum(torch.stack([self.objective.count(micro) for micro in window]).sum(0))

    def backward(self, number: int, *, factor: float = 1.0) -> float:
        """Loss and gradient of a global batch, both times `factor`; returns this rank's share of the loss."""
        window = self.window(number)
        counts, share = self.counts(window), 0.0
        for place, micro in enumerate(window):
            loss = equal_shares(self.objective(self.engine, micro).sums, counts) * factor
            self.engine.backward(loss, last=place == len(window) - 1)
            share += float(loss.detach())
        return share

    def step(self, number: int) -> float:
        """One update; returns the loss of the global batch."""
        share = self.backward(number)
        self.engine.check_gradients()
        self.engine.step(LR)
        return float(self.group.sum(torch.tensor(share, dtype=torch.float64)))

    def skip(self, number: int, *, factor: float = 1.0) -> float:
        """Everything of a step but the update; returns the gradient's norm."""
        self.backward(number, factor=factor)
        norm = float(self.engine.check_gradients())
        self.engine.skip()
        return norm

    @torch.no_grad()
    def look(self, number: int) -> list[float]:
        """[T] loss sums of a global batch, from a pass without gradients."""
        sums = torch.stack([self.objective(self.engine, micro).sums for micro in self.window(number)]).sum(0)
        return self.group.sum(sums).tolist()

    def state(self) -> dict[str, Tensor]:
        return copy_pieces(self.engine)


class Reference:
    """The same model in one piece without any engine, on whole global batches."""

    def __init__(self, **model: Any) -> None:
        self.config = small_config(Layout(), model=model)
        self.module = BertForMaskedPositions(self.config.model, vocab_size=VOCABULARY, seed=self.config.training.seed)
        self.objective = PosMaskedLanguageModelling(self.config.objective, GROUPS, self.config.model.hidden_size)

    def window(self, number: int) -> list[Batch]:
        config = small_config(Layout(micro_size=self.config.batch.global_size))
        return SyntheticSource(config, ALONE, cursor=number * config.batch.global_size).next_window()

    def gradients(self, number: int) -> dict[str, Tensor]:
        """Gradient of the sum of the tasks' mean losses over a global batch, by parameter."""
        (batch,) = self.window(number)
        losses = self.objective(self.module, batch)
        self.module.zero_grad()
        equal_shares(losses.sums, losses.counts).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}

    def adamw(self, weight_decay: float, *, written: bool = False) -> torch.optim.AdamW:
        """torch's AdamW with the engines' settings, decay on matrices only; `written`: of the model after what
        `write_pieces` does."""
        parameters = dict(self.module.named_parameters())
        groups = [
            {"params": [p for p in parameters.values() if (p.ndim >= 2) is matrix], "weight_decay": decay}
            for matrix, decay in ((True, weight_decay), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-6)
        for name, parameter in parameters.items() if written else ():
            values = {kind: written_value(kind, name, tuple(parameter.shape)) for kind in ("weight", *STATE_NAMES)}
            parameter.data.copy_(values.pop("weight"))
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **values}
        return optimizer

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def gradient_norm(self, number: int) -> float:
        return math.sqrt(sum(float(each.double().square().sum()) for each in self.gradients(number).values()))

    @torch.no_grad()
    def look(self, number: int) -> list[float]:
        return self.objective(self.module, *self.window(number)).sums.tolist()


class CountsReductions(TorchDispatchMode):
    """Counts collectives that reduce, of whatever library."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        space, _, name = function.name().partition("::")
        self.count += "c10d" in space and "reduce" in name
        return function(*arguments, **(named or {}))
