"""One update of the masking network on any engine, and what exact differentiation makes of the same update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Masked, Rule, Weights, hypergradient, joined
from trp_scale.config import Config
from trp_scale.core.engine import Engine
from trp_scale.core.pieces import whole_tensors
from trp_scale.methods.learned_masks.head import HeadLevel, LossGradients
from trp_scale.methods.learned_masks.masks import NETWORKS, MaskedWindow
from trp_scale.pretraining.mae.model import MaskedAutoencoder

Path = Literal["encoder", "head", "both"]
"""How the encoder acts on L_val: encoder = through the validation images' features, head = through the head's step."""


@dataclass(kw_only=True)
class Update:
    """One update of the masking network, on one rank; vectors over weights are whole.

    Attributes:
        config: settings of the run.
        number: cycles done, this one included; each was unroll steps long and had one update of the head.
        gradient: what reached the network's optimizer, reduced; network: the network's weights.
        weights, mean: the encoder's and decoder's weights and first moments before the last step; square: second
            moments after it.
        head, head_mean, head_square: the same of the head.
        lower: this rank's part of the last step's global batch, with its masks.
        lr, head_lr: of the last step.
    """

    config: Config
    number: int
    gradient: Weights
    network: Weights
    weights: Weights
    mean: Weights
    square: Weights
    head: Weights
    head_mean: Weights
    head_square: Weights
    lower: Masked
    lr: float
    head_lr: float


def whole(engine: Engine, values: list[Tensor]) -> Weights:
    """Tensors from what each rank holds of each of the engine's pieces."""
    return whole_tensors(engine.pieces(), values, engine.data_group)


def state(engine: Engine, key: str) -> Weights:
    """All parameters' weight, exp_avg or exp_avg_sq; moments that are not there yet are 0."""
    pieces = list(engine.pieces())
    return whole(engine, [piece.tensors.get(key, torch.zeros_like(piece.tensors["weight"])) for piece in pieces])


def leave_one(level: HeadLevel, path: Path) -> None:
    """Make the direction that of one path alone; nothing else of the update changes."""
    gradients = level.gradients

    def without_features(*arguments: Any) -> LossGradients:
        found = gradients(*arguments)
        return LossGradients(by_features=torch.zeros_like(found.by_features), by_head=found.by_head, loss=found.loss)

    if path == "encoder":
        level.through_head = lambda part, step, by_head: torch.zeros_like(part.features)  # type: ignore[method-assign]
    if path == "head":
        level.gradients = without_features  # type: ignore[method-assign]


class Watched:
    """What the last outer step of a run learned from.

    Attributes:
        gradient: what reached the network's optimizer, reduced; network: the network's weights before the step.
        windows: masks of each differentiated inner step.
    """

    def __init__(self, run: MasksRun) -> None:
        masker = run.hook.masker
        self.gradient: Weights = {}
        self.network: Weights = {}
        self.windows: list[MaskedWindow] = []
        check, outer_step = masker.network.check_gradients, masker.outer_step

        def check_gradients() -> Tensor:
            self.gradient = whole(masker.network, masker.network.piece_gradients())  # type: ignore[attr-defined]
            return check()

        def noted(windows: Any, scale: float) -> bool:
            self.windows = [window for window, _ in windows]
            self.network = state(masker.network, "weight")
            return outer_step(windows, scale)

        masker.network.check_gradients = check_gradients  # type: ignore[method-assign]
        masker.outer_step = noted  # type: ignore[method-assign]

    def lower(self, number: int = 0) -> Masked:
        """This rank's part of an inner step's global batch, with its masks."""
        window = self.windows[number]
        return Masked(
            batch=joined(list(window.micros)),
            visible=torch.cat([chosen.visible for chosen in window.selections]),
            masked=torch.cat([chosen.masked for chosen in window.selections]),
            embeddings=torch.cat([chosen.embeddings for chosen in window.selections if chosen.embeddings is not None]),
        )


def update(
    layout: Layout,
    changes: dict[str, Any],
    *,
    path: Path = "both",
    dtype: torch.dtype = torch.float32,
    cycles: int = 2,
) -> Update:
    """Return the last update of a run of some cycles; collective over all ranks."""
    run = masks_run(layout, mask_config(layout, **changes), dtype=dtype)
    level, config, watched = run.hook.outer.level, run.trainer.config, Watched(run)
    for _ in range(cycles * config.multilevel.unroll - 1):
        run.trainer.train_step()
    leave_one(level, path)
    before, head_before = (state(run.engine, "weight"), state(run.engine, "exp_avg")), level.head.state_dict()
    run.trainer.train_step()
    head_after = level.head.state_dict()
    found = Update(
        config=config,
        number=cycles,
        gradient=watched.gradient,
        network=watched.network,
        weights=before[0],
        mean=before[1],
        square=state(run.engine, "exp_avg_sq"),
        head={name: values["value"] for name, values in head_before.items()},
        head_mean={n: values.get("exp_avg", torch.zeros_like(values["value"])) for n, values in head_before.items()},
        head_square={name: values["exp_avg_sq"] for name, values in head_after.items()},
        lower=watched.lower(),
        lr=config.optimizer.lr,
        head_lr=config.multilevel.head_lr,
    )
    for engine in (run.engine, *run.hook.engines().values()):
        engine.close()
    return found


def exact(updates: list[Update], path: Path = "both") -> Weights:
    """The hypergradient by automatic differentiation in float64, from the state of the run itself.

    Args:
        updates: of all ranks.
    """
    first, config = updates[0], updates[0].config
    size, unroll = config.batch.global_size, config.multilevel.unroll
    position = (first.number - 1) * size
    parts = [each.lower for each in updates]
    lower = Masked(
        batch=joined([part.batch for part in parts]),
        visible=torch.cat([part.visible for part in parts]),
        masked=torch.cat([part.masked for part in parts]),
        embeddings=torch.cat([part.embeddings for part in parts]).double(),
    )
    decay = {name: config.optimizer.weight_decay if value.ndim > 1 else 0.0 for name, value in first.weights.items()}
    head_decay = {"weight": config.multilevel.head_weight_decay, "bias": 0.0}
    head = doubled(first.head)
    return hypergradient(
        MaskedAutoencoder(config).double(),
        doubled(first.weights),
        NETWORKS[config.multilevel.network](config).double(),
        doubled(first.network),
        (head["weight"], head["bias"]),
        lower=[lower],
        train=labelled(range(D_TR + position, D_TR + position + size)),
        validation=labelled(range(D_VAL + position, D_VAL + position + size)),
        encoder_rule=held_adamw(first.mean, first.square, first.number * unroll, first.lr, config, decay),
        head_rule=held_adamw(first.head_mean, first.head_square, first.number, first.head_lr, config, head_decay),
        pooling=config.multilevel.pooling,
        normalise=config.multilevel.weights == "normalised",
        through_head=path != "encoder",
        through_encoder=path != "head",
    )


def doubled(weights: Weights) -> Weights:
    return {name: value.double() for name, value in weights.items()}


def held_adamw(mean: Weights, square: Weights, step: int, lr: float, config: Config, decay: dict[str, float]) -> Rule:
    """AdamW's step number `step`, with its second moment held at what it becomes."""
    beta1, beta2, eps = config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps

    def rule(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        present = beta1 * mean[name].double() + (1 - beta1) * gradient
        root = (square[name].double() / (1 - beta2**step)).sqrt() + eps
        return weight * (1 - lr * decay[name]) - lr * present / (1 - beta1**step) / root

    return rule


def flat(weights: Weights) -> Tensor:
    """One float64 vector, in the order of the names."""
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Attributes: cosine: of the angle between two vectors; ratio: of the first's norm to the second's."""

    cosine: float
    ratio: float


def agreement(ours: Weights, theirs: Weights) -> Agreement:
    one, other = flat(ours), flat(theirs)
    sizes = one.norm(), other.norm()
    return Agreement(cosine=float(one @ other / sizes[0] / sizes[1]), ratio=float(sizes[0] / sizes[1]))
