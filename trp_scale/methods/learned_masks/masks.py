"""Masks of Stage I, and the step of the masking network down the hypergradient (MLO-MAE eq. 8).

The network gives each patch a probability, and the N r most probable patches are masked (3.2, A.4). The selection
itself is always hard; `multilevel.selection` chooses its derivative by the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trp_scale.config.images import MaskedAutoencoderConfig, PatchSplit
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.pieces import Shards, foreach_chunks
from trp_scale.core.run import GATE, PATCH_WEIGHTS, PatchObjective, RunContext
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings
from trp_scale.models.initialise import set_all, xavier_uniform_tensor
from trp_scale.models.positions import sine_cosine


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Masks of one micro-batch.

    Attributes:
        visible, masked: ascending patch numbers, [B, V] and [B, M] int64.
        probabilities: [B, N], without a graph.
        embeddings: input of the masking network, [B, N, D], if an outer step needs it again.
    """

    visible: Tensor
    masked: Tensor
    probabilities: Tensor
    embeddings: Tensor | None = None

    def weights(self) -> Tensor:
        """Return the probabilities of the masked patches, [B, M]."""
        return self.probabilities.gather(1, self.masked)


def masked_config(run: RunContext) -> MaskedAutoencoderConfig:
    """Return the settings of a run with learned masks, which is always a masked autoencoder."""
    assert isinstance(run.config, MaskedAutoencoderConfig)
    return run.config


def scheduled_split(step: int, config: MaskedAutoencoderConfig) -> PatchSplit:
    """Return the number of visible patches in this step; with a curriculum the ratio grows linearly (D.4)."""
    ratio, final, steps = config.masking.ratio, config.multilevel.final_ratio, config.training.steps
    patches = (config.crops.size // config.vision.patch_size) ** 2
    if final > 0.0 and steps > 1:
        ratio += (final - ratio) * step / (steps - 1)
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))


def select(probabilities: Tensor, split: PatchSplit, embeddings: Tensor | None = None) -> Selection:
    """Mask the most probable patches of each image; among equal ones, those with the lowest numbers."""
    order = probabilities.argsort(dim=1, descending=True, stable=True)  # [B, N]
    return Selection(
        masked=order[:, : split.masked].sort(dim=1).values,
        visible=order[:, split.masked :].sort(dim=1).values,
        probabilities=probabilities,
        embeddings=embeddings,
    )


def soft_mask(settings: LearnedMasksSettings, probabilities: Tensor, selection: Selection) -> Tensor | None:
    """Return the differentiable mask whose derivative replaces that of the selection, [B, N]; `None` if constant.

    hard: constant, so probabilities act only through the weights of eq. 1. straight_through: derivative of the identity
    (A.4). softsort: sum of the masked rows of SoftSort's relaxed permutation (Prillo and Eisenschlos 2020, with the
    absolute difference).
    """
    if settings.selection == "hard":
        return None
    if settings.selection == "straight_through":
        return probabilities
    ranked = probabilities.sort(dim=1, descending=True).values[:, : selection.masked.shape[1]]  # [B, M]
    distance = (ranked.unsqueeze(2) - probabilities.unsqueeze(1)).abs()  # [B, M, N]
    return (-distance / settings.temperature).softmax(dim=2).sum(1)  # [B, N]


@dataclass(frozen=True, kw_only=True)
class MaskFactors:
    """Factors by which the masks of one micro-batch enter the loss, or the gradient of a loss by these factors.

    Attributes:
        weights: weight of each masked patch's error, [B, M].
        gates: factors of the visible patches' tokens, [B, V]: 1, with the derivative of not being masked; `None` for a
            hard selection.
    """

    weights: Tensor
    gates: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return the tensors that are not `None`."""
        return [self.weights] if self.gates is None else [self.weights, self.gates]

    def plus(self, other: MaskFactors, factor: float | Tensor) -> MaskFactors:
        """Return self + factor x other."""
        return MaskFactors.from_parts(a + factor * b for a, b in zip(self.parts(), other.parts(), strict=True))

    def times(self, factor: float | Tensor) -> MaskFactors:
        """Return factor x self."""
        return MaskFactors.from_parts(factor * part for part in self.parts())

    @classmethod
    def from_parts(cls, parts: Iterable[Tensor]) -> MaskFactors:
        """Return the factors of these `parts`."""
        return cls(**dict(zip(("weights", "gates"), parts, strict=False)))


def mask_factors(settings: LearnedMasksSettings, probabilities: Tensor, selection: Selection) -> MaskFactors:
    """Return weights, without normalisation, and gates as differentiable functions of the probabilities [B, N]."""
    weights = probabilities.gather(1, selection.masked)  # [B, M]
    mask = soft_mask(settings, probabilities, selection)
    if mask is None:
        return MaskFactors(weights=weights)
    slope = mask - mask.detach()  # value 0, derivative of the mask
    return MaskFactors(
        weights=weights * (1.0 + slope.gather(1, selection.masked)), gates=1.0 - slope.gather(1, selection.visible)
    )


@dataclass(frozen=True, kw_only=True)
class MaskedWindow:
    """Masks of one window.

    Attributes:
        micros: micro-batches of the window, with the loader's masks.
        selections: masks of each micro-batch.
        counts: elements of each task in the global batch with these masks, [T] float64.
        factor: factor of all weights, 0-dimensional: 1, or the inverse of their mean.
        total: sum of the masked patches' probabilities over the global batch, 0-dimensional.
    """

    micros: Sequence[Batch]
    selections: list[Selection]
    counts: Tensor
    factor: Tensor
    total: Tensor

    def batch(self, micro: Batch) -> Batch:
        """Return the micro-batch with these masks."""
        position = next(n for n, candidate in enumerate(self.micros) if candidate.start == micro.start)
        return self.with_factors(position, MaskFactors(weights=self.selections[position].weights() * self.factor))

    def with_factors(self, position: int, factors: MaskFactors) -> Batch:
        """Return micro-batch number `position` with its masks and these factors."""
        micro, selection = self.micros[position], self.selections[position]
        extras = dict(zip((PATCH_WEIGHTS, GATE), (by_row(part, micro) for part in factors.parts()), strict=False))
        return apply_selection(micro.adding(extras), selection)


Hypergradient = Sequence[tuple[MaskedWindow, Sequence[MaskFactors]]]
"""Gradient of the outer objective by the masks, per differentiated inner step and micro-batch; empty without an outer
step."""


def apply_selection(micro: Batch, selection: Selection) -> Batch:
    """Replace the loader's masks of a micro-batch by these."""
    chosen = {"visible": by_row(selection.visible, micro), "masked": by_row(selection.masked, micro)}
    return replace(micro, fields={**micro.fields, **chosen})


def by_row(values: Tensor, micro: Batch) -> Tensor:
    """Reshape [R k, ...] to [R, k, ...]."""
    return values.reshape(*micro["masked"].shape[:2], *values.shape[1:])


class Masker:
    """The masking network T in its engine: chooses masks and makes the outer steps.

    Attributes:
        untrained: initial weights of T, sharded like T.
        lesson: metrics of the last outer step, 0-dimensional, over the global batch; empty before the first.
            gradient_norm: of T. below_eps: share of T's elements whose root mean square gradient is below AdamW's eps.
            overlap_untrained, overlap_last: share of the patches masked now that the untrained T masks, or that T
            masked before the step, in the images of the step.
    """

    def __init__(self, config: MaskedAutoencoderConfig, network: Engine, objective: PatchObjective) -> None:
        self.config, self.network, self.objective = config, network, objective
        self.settings: LearnedMasksSettings = config.multilevel
        self.eps = self.settings.network_eps(config.optimizer.lr)
        # Copied before a checkpoint is loaded. (seed, name) determine it, so checkpoints do not store it.
        self.untrained: Shards = network.weights()
        self.lesson: dict[str, Tensor] = {}

    @torch.no_grad()
    def choose(self, engine: Engine, window: Sequence[Batch], step: int, *, keep: bool) -> MaskedWindow:
        """Choose masks for a window with the current network.

        Args:
            engine: of the encoder, whose patch embedding is the network's input.
            step: number of the run's step, for the curriculum.
            keep: keep the network's inputs for an outer step.
        """
        split = scheduled_split(step, self.config)
        selections = []
        for micro in window:
            patches = self.objective.patches(micro)
            every = torch.arange(split.patches, device=patches.device).expand(len(patches), -1)
            embeddings = engine(patches, every, every[:, :0], output="patch_embedding")
            with self.network.exact_forwards():  # cheap; in bf16 many probabilities would be equal
                probabilities = self.network(embeddings)
            selections.append(select(probabilities, split, embeddings if keep else None))
        pairs = list(zip(window, selections, strict=True))
        counts = torch.stack([self.objective.count(apply_selection(*pair)) for pair in pairs]).sum(0)
        present = torch.stack(
            [(chosen.weights().double().sum(1) @ rows(micro).double()) for micro, chosen in pairs]
        ).sum()
        number = torch.stack([rows(micro).double().sum() * split.masked for micro in window]).sum()
        summed = engine.data_group.sum(torch.cat([counts.to(present.device), torch.stack([present, number])]))
        total, number = summed[-2], summed[-1]
        factor = number / total if self.settings.weights == "normalised" else torch.ones_like(total)
        return MaskedWindow(micros=window, selections=selections, counts=summed[:-2], factor=factor, total=total)

    def outer_step(self, hypergradient: Hypergradient, scale: float) -> bool:
        """Make a step of T's AdamW down the hypergradient (eq. 8), and return whether its gradient was finite.

        The backward pass through T multiplies the gradients by the masks with the derivatives of the masks.

        Args:
            scale: share of the peak learning rate.
        """
        centred = [(window, self._centre(window, gradients)) for window, gradients in hypergradient]
        parts = [(window, number, part) for window, gradients in centred for number, part in enumerate(gradients)]
        for position, (window, number, gradient) in enumerate(parts):
            selection, present = window.selections[number], rows(window.micros[number])
            assert selection.embeddings is not None, "masks of an outer step keep the network's inputs"
            with self.network.exact_forwards():
                probabilities = self.network(selection.embeddings)
            factors = mask_factors(self.settings, probabilities, selection)
            loss = (factors.weights * gradient.weights * present[:, None]).sum() * window.factor
            if factors.gates is not None and gradient.gates is not None:
                loss = loss + (factors.gates * gradient.gates * present[:, None]).sum()
            self.network.backward(loss, last=position == len(parts) - 1)
        norm = self.network.check_gradients()
        self.lesson["gradient_norm"] = norm
        # Waits for the device once per outer step.
        if not math.isfinite(float(norm)):
            self.network.skip()
            return False
        self.network.step(self.settings.lr * scale)
        self.lesson["below_eps"] = self._share_below_eps()
        self.lesson |= self._overlaps([window for window, _ in hypergradient])
        return True

    @torch.no_grad()
    def _overlaps(self, windows: Sequence[MaskedWindow]) -> dict[str, Tensor]:
        """Measure the overlap of T's current masks with earlier ones, on the images of the last outer step. (The
        overlap with a random mask is always the mask ratio, so it shows nothing.)"""
        pairs = [pair for window in windows for pair in zip(window.micros, window.selections, strict=True)]
        before = [chosen.masked for _, chosen in pairs]
        now = [self._chosen_again(chosen) for _, chosen in pairs]
        with self.network.exchange_weights(self.untrained):
            untrained = [self._chosen_again(chosen) for _, chosen in pairs]
        sums = torch.zeros(3, dtype=torch.float64, device=self.network.device)
        for (micro, chosen), *masked in zip(pairs, now, untrained, before, strict=True):
            current, *others = (torch.zeros_like(chosen.probabilities).scatter_(1, at, 1.0) for at in masked)  # [B, N]
            shared = torch.stack([current, *(current * other for other in others)]).sum(-1).double()  # [3, B]
            sums += shared @ rows(micro).double()
        number, as_untrained, as_last = self.network.data_group.sum(sums)
        return {"overlap_untrained": as_untrained / number, "overlap_last": as_last / number}

    def _chosen_again(self, selection: Selection) -> Tensor:
        """Return the patches that the current network masks, from its stored inputs, [B, M]."""
        assert selection.embeddings is not None, "masks of an outer step keep the network's inputs"
        with self.network.exact_forwards():
            probabilities = self.network(selection.embeddings)
        patches, visible = probabilities.shape[1], selection.visible.shape[1]
        return select(probabilities, PatchSplit(patches=patches, visible=visible)).masked

    def state_dict(self) -> dict[str, Tensor]:
        """Return `lesson`, so that a resumed run logs it until the next outer step."""
        return {name: value.detach().clone().cpu() for name, value in self.lesson.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        self.lesson = {name: value.clone().to(self.network.device) for name, value in state.items()}

    def _centre(self, window: MaskedWindow, gradients: Sequence[MaskFactors]) -> Sequence[MaskFactors]:
        """Subtract the weighted mean if weights are normalised: scaling all probabilities then has no effect."""
        if self.settings.weights == "raw":
            return gradients
        pairs = zip(window.micros, window.selections, gradients, strict=True)
        local = torch.stack(
            [
                (chosen.weights().double() * gradient.weights).sum(1) @ rows(micro).double()
                for micro, chosen, gradient in pairs
            ]
        ).sum()
        mean = self.network.data_group.sum(local) / window.total
        return [replace(gradient, weights=gradient.weights - mean) for gradient in gradients]

    @torch.no_grad()
    def _share_below_eps(self) -> Tensor:
        share = 1 - self.config.optimizer.beta2 ** self.network.optimizer_steps()
        squares = [piece.tensors["exp_avg_sq"] for piece in self.network.pieces() if piece.owner]
        counts = torch.zeros(2, dtype=torch.float64, device=self.network.device)
        for (bunch,) in foreach_chunks(squares):
            counts[0] += (torch.cat(bunch) < share * self.eps**2).sum()
            counts[1] += sum(square.numel() for square in bunch)
        below, number = self.network.data_group.sum(counts)
        return below / number  # type: ignore[no-any-return]


def rows(micro: Batch) -> Tensor:
    """Return the row weight of each crop, [B]: 1, or 0 for padding."""
    crops: Tensor = micro["row_weights"].repeat_interleave(micro["images"].shape[1])
    return crops


class MaskingNetwork(nn.Module):
    """Patch embeddings [B, N, D] -> masking probabilities [B, N] in (0, 1), at least fp32 (MLO-MAE 3.2, B.2).

    The input is the output of the encoder's patch embedding, without positions and detached. (In the public code the
    patch embedding trains through the network.)
    """

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        self.grid = config.crops.size // config.vision.patch_size
        self.width = config.model.hidden_size
        self.hidden_size: int = config.multilevel.hidden_size

    @property
    def layers(self) -> list[nn.Module]:
        """Return the units of sharding."""
        return [child for child in self.children() if isinstance(child, nn.Linear)]

    def forward(self, embeddings: Tensor) -> Tensor:
        logits = self.logits(embeddings.detach().to(next(self.parameters()).dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()

    def logits(self, embeddings: Tensor) -> Tensor:
        """Return the logits [B, N] of embeddings [B, N, D]."""
        raise NotImplementedError(f"{type(self).__name__} must implement logits")

    def initialise(self, seed: int) -> None:
        """Initialise by Xavier uniform (B.3) from the seed and the names of the tensors; biases are 0."""

        def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
            if parameter.ndim < 2:
                return 0.0
            return xavier_uniform_tensor(seed, f"masking_network.{name}", tuple(parameter.shape))

        set_all(self, rule)


class FlattenedMasking(MaskingNetwork):
    """Network of the paper: two linear layers over all patch embeddings at once, and a ReLU between them (Table 11)."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        patches = self.grid**2
        self.hidden = nn.Linear(patches * self.width, self.hidden_size)
        self.score = nn.Linear(self.hidden_size, patches)
        self.initialise(config.training.seed)

    def logits(self, embeddings: Tensor) -> Tensor:
        return self.score(self.hidden(embeddings.flatten(1)).relu())  # type: ignore[no-any-return]


class PatchwiseMasking(MaskingNetwork):
    """Small network of this project: two shared layers per patch, whose input is the patch embedding with its position,
    and the mean over the image. 787,457 weights at D = 768 and hidden size 512."""

    positions: Tensor

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(self.width, self.hidden_size)
        self.context = nn.Linear(self.width, self.hidden_size, bias=False)
        self.score = nn.Linear(self.hidden_size, 1)
        self.register_buffer("positions", sine_cosine(self.grid, self.width).float(), persistent=False)
        self.initialise(config.training.seed)

    def logits(self, embeddings: Tensor) -> Tensor:
        hidden = self.hidden(embeddings + self.positions.to(embeddings.dtype))  # [B, N, H]
        context = self.context(embeddings.mean(1, keepdim=True))  # [B, 1, H]
        return self.score((hidden + context).relu()).squeeze(-1)  # type: ignore[no-any-return]


NETWORKS: dict[str, type[MaskingNetwork]] = {"flattened": FlattenedMasking, "patchwise": PatchwiseMasking}
"""By multilevel.network."""
