"""Stage I's masks: the masking network gives each patch a probability, and the most probable N r patches are masked
(MLO-MAE 3.2, A.4); and the network's own step, down the hypergradient (eq. 8).

The selection is always hard. `multilevel.selection` says what the loss's derivative by a probability sees of it.
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
from trp_scale.core.objective import GATE, PATCH_WEIGHTS, PatchObjective
from trp_scale.core.pieces import Shards, foreach_chunks
from trp_scale.core.run import RunContext
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings
from trp_scale.models.initialise import write, xavier_uniform_tensor
from trp_scale.models.positions import sine_cosine


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Masks of one micro-batch.

    Attributes:
        visible: [B, V] int64, masked: [B, M] int64; patch numbers, ascending.
        probabilities: [B, N] what they were selected by, without a graph.
        embeddings: [B, N, D] the masking network's input, kept where an outer step needs it again.
    """

    visible: Tensor
    masked: Tensor
    probabilities: Tensor
    embeddings: Tensor | None = None

    def weights(self) -> Tensor:
        """[B, M] the masked patches' probabilities."""
        return self.probabilities.gather(1, self.masked)


def masked_config(run: RunContext) -> MaskedAutoencoderConfig:
    """All settings of a run with learned masks, which masked autoencoders alone have."""
    assert isinstance(run.config, MaskedAutoencoderConfig)
    return run.config


def scheduled_split(step: int, config: MaskedAutoencoderConfig) -> PatchSplit:
    """Number of visible patches in this step: with a curriculum the ratio grows linearly (D.4)."""
    ratio, final, steps = config.masking.ratio, config.multilevel.final_ratio, config.training.steps
    patches = (config.crops.size // config.vision.patch_size) ** 2
    if final > 0.0 and steps > 1:
        ratio += (final - ratio) * step / (steps - 1)
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))


def select(probabilities: Tensor, split: PatchSplit, embeddings: Tensor | None = None) -> Selection:
    """Mask the most probable patches of each image; of equal ones those with the lowest numbers."""
    order = probabilities.argsort(dim=1, descending=True, stable=True)  # [B, N]
    return Selection(
        masked=order[:, : split.masked].sort(dim=1).values,
        visible=order[:, split.masked :].sort(dim=1).values,
        probabilities=probabilities,
        embeddings=embeddings,
    )


def soft_mask(settings: LearnedMasksSettings, probabilities: Tensor, selection: Selection) -> Tensor | None:
    """Return what stands for the mask in derivatives by the probabilities, [B, N]; `None` if the mask is a constant.

    hard: a constant, so that probabilities act through the weights of eq. 1 alone. straight_through: the selection's
    derivative is the identity's (A.4). softsort: that of a soft selection, the rows of SoftSort's relaxed permutation
    that are masked, added up (Prillo and Eisenschlos 2020, with the absolute difference).
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
    """Factors by which the masks of one micro-batch enter the loss, or a loss's gradient by them.

    Attributes:
        weights: [B, M] by which each masked patch's error counts.
        gates: [B, V] by which the visible patches' tokens are multiplied, 1 with the derivative of not being masked;
            None for a hard selection.
    """

    weights: Tensor
    gates: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return the tensors that it has."""
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
    """Weights, before any normalisation, and gates as functions of the probabilities [B, N]; a graph in them is
    kept."""
    weights = probabilities.gather(1, selection.masked)  # [B, M]
    mask = soft_mask(settings, probabilities, selection)
    if mask is None:
        return MaskFactors(weights=weights)
    slope = mask - mask.detach()  # 0, with the derivative of the selection
    return MaskFactors(
        weights=weights * (1.0 + slope.gather(1, selection.masked)), gates=1.0 - slope.gather(1, selection.visible)
    )


@dataclass(frozen=True, kw_only=True)
class MaskedWindow:
    """Masks of one window.

    Attributes:
        micros: the window's micro-batches, with the loader's masks.
        selections: one for each.
        counts: [T] float64, elements of each task in the global batch with these masks.
        factor: 0-dimensional, by which every weight is multiplied: 1, or what makes them 1 on average.
        total: 0-dimensional, sum of the masked patches' probabilities over the global batch.
    """

    micros: Sequence[Batch]
    selections: list[Selection]
    counts: Tensor
    factor: Tensor
    total: Tensor

    def batch(self, micro: Batch) -> Batch:
        """The micro-batch with these masks."""
        position = next(n for n, candidate in enumerate(self.micros) if candidate.start == micro.start)
        return self.with_factors(position, MaskFactors(weights=self.selections[position].weights() * self.factor))

    def with_factors(self, position: int, factors: MaskFactors) -> Batch:
        """Micro-batch number `position` with its masks and these factors."""
        micro, selection = self.micros[position], self.selections[position]
        extras = dict(zip((PATCH_WEIGHTS, GATE), (by_row(part, micro) for part in factors.parts()), strict=False))
        return apply_selection(micro.adding(extras), selection)


Hypergradient = Sequence[tuple[MaskedWindow, Sequence[MaskFactors]]]
"""Gradient of the outer objective by the masks, micro-batch by micro-batch of each inner step that it goes through.
Empty: no outer step is due."""


def apply_selection(micro: Batch, selection: Selection) -> Batch:
    """The micro-batch with these masks in place of the loader's."""
    chosen = {"visible": by_row(selection.visible, micro), "masked": by_row(selection.masked, micro)}
    return replace(micro, fields={**micro.fields, **chosen})


def by_row(values: Tensor, micro: Batch) -> Tensor:
    """[R k, ...] -> [R, k, ...]."""
    return values.reshape(*micro["masked"].shape[:2], *values.shape[1:])


class Masker:
    """The masking network T in its engine: it chooses masks, and takes the outer steps.

    Args:
        config: settings of the run.
        network: the engine that holds T.
        objective: cuts images into patches, and counts.
    Attributes:
        untrained: T's weights as the seed made them, laid out like T's own.
        lesson: values of the last outer step, 0-dimensional and of the global batch; empty before the first.
            gradient_norm: of T's gradient. below_eps: share of T's elements whose root mean square gradient is below
            AdamW's eps. overlap_untrained, overlap_last: of the patches that T masks now in the images that it learned
            from, the share that it would mask untrained, and the share that it masked before the step.
    """

    def __init__(self, config: MaskedAutoencoderConfig, network: Engine, objective: PatchObjective) -> None:
        self.config, self.network, self.objective = config, network, objective
        self.settings: LearnedMasksSettings = config.multilevel
        self.eps = self.settings.network_eps(config.optimizer.lr)
        # Taken before a checkpoint is loaded: what (seed, name) give, so that no checkpoint holds it.
        self.untrained: Shards = network.weights()
        self.lesson: dict[str, Tensor] = {}

    @torch.no_grad()
    def choose(self, engine: Engine, window: Sequence[Batch], step: int, *, keep: bool) -> MaskedWindow:
        """Masks for a window, by the network as it is.

        Args:
            engine: holds the encoder, whose patch embedding the network reads.
            step: number of the run's step, for the curriculum.
            keep: keep the network's inputs, for an outer step.
        """
        split = scheduled_split(step, self.config)
        selections = []
        for micro in window:
            patches = self.objective.patches(micro)
            every = torch.arange(split.patches, device=patches.device).expand(len(patches), -1)
            embeddings = engine(patches, every, every[:, :0], give="patch_embedding")
            with self.network.exact_forwards():  # it is small, and in bf16 many patches would be equally probable
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
        """One step of T's AdamW down the hypergradient (eq. 8), unless the gradient is not finite.

        T's gradient is the sum of the masks' gradients, each carried back through T by the chain rule.

        Args:
            scale: share of the peak learning rate.
        Returns:
            Whether the step was made.
        """
        centred = [(window, self._centre(window, gradients)) for window, gradients in hypergradient]
        parts = [(window, number, part) for window, gradients in centred for number, part in enumerate(gradients)]
        for position, (window, number, gradient) in enumerate(parts):
            selection, present = window.selections[number], rows(window.micros[number])
            assert selection.embeddings is not None, "masks were chosen without keeping what they came from"
            with self.network.exact_forwards():
                probabilities = self.network(selection.embeddings)
            factors = mask_factors(self.settings, probabilities, selection)
            loss = (factors.weights * gradient.weights * present[:, None]).sum() * window.factor
            if factors.gates is not None and gradient.gates is not None:
                loss = loss + (factors.gates * gradient.gates * present[:, None]).sum()
            self.network.backward(loss, last=position == len(parts) - 1)
        norm = self.network.check_gradients()
        self.lesson["gradient_norm"] = norm
        # The one place that waits for the device, once in an outer step.
        if not math.isfinite(float(norm)):
            self.network.skip()
            return False
        self.network.step(self.settings.lr * scale)
        self.lesson["below_eps"] = self._share_below_eps()
        self.lesson |= self._overlaps([window for window, _ in hypergradient])
        return True

    @torch.no_grad()
    def _overlaps(self, windows: Sequence[MaskedWindow]) -> dict[str, Tensor]:
        """Measure the overlap of T's current masks with earlier ones, on the images and embeddings of the last update.
        A random mask would share the mask ratio with any other, whatever was learned, so it is not compared with."""
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
        """[B, M] the patches that the network as it is masks, from the inputs that are kept."""
        assert selection.embeddings is not None, "masks were chosen without keeping what they came from"
        with self.network.exact_forwards():
            probabilities = self.network(selection.embeddings)
        patches, visible = probabilities.shape[1], selection.visible.shape[1]
        return select(probabilities, PatchSplit(patches=patches, visible=visible)).masked

    def state_dict(self) -> dict[str, Tensor]:
        """The last lesson's values, so that a run that goes on logs them until the next."""
        return {name: value.detach().clone().cpu() for name, value in self.lesson.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what state_dict gave."""
        self.lesson = {name: value.clone().to(self.network.device) for name, value in state.items()}

    def _centre(self, window: MaskedWindow, gradients: Sequence[MaskFactors]) -> Sequence[MaskFactors]:
        """Subtract the weighted mean if weights are normalised: scaling all probabilities then changes nothing."""
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
        share_below: Tensor = below / number
        return share_below


def rows(micro: Batch) -> Tensor:
    """[B] weight of each crop's row: 1, or 0 where it is not there."""
    crops: Tensor = micro["row_weights"].repeat_interleave(micro["images"].shape[1])
    return crops


class MaskingNetwork(nn.Module):
    """How probable it is that each patch is masked (MLO-MAE 3.2, B.2): patch embeddings [B, N, D] -> probabilities
    [B, N] in (0, 1), fp32 at least.

    Its input is what the encoder's patch embedding gives, without positions and without a graph: the public code lets
    the patch embedding train through it.
    """

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        self.grid = config.crops.size // config.vision.patch_size
        self.width = config.model.hidden_size
        self.hidden_size: int = config.multilevel.hidden_size

    @property
    def layers(self) -> list[nn.Module]:
        """Each a unit of sharding."""
        return [child for child in self.children() if isinstance(child, nn.Linear)]

    def forward(self, embeddings: Tensor) -> Tensor:
        logits = self.logits(embeddings.detach().to(next(self.parameters()).dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()

    def logits(self, embeddings: Tensor) -> Tensor:
        """[B, N, D] -> [B, N]."""
        raise NotImplementedError(f"{type(self).__name__} does not say how patches are scored")

    def initialise(self, seed: int) -> None:
        """Xavier uniform (B.3), biases 0, from the seed and each tensor's name."""

        def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
            if parameter.ndim < 2:
                return 0.0
            return xavier_uniform_tensor(seed, f"masking_network.{name}", tuple(parameter.shape))

        write(self, rule)


class FlattenedMasking(MaskingNetwork):
    """The paper's: two linear layers over the embeddings of all patches at once, a ReLU between them (Table 11)."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        patches = self.grid**2
        self.hidden = nn.Linear(patches * self.width, self.hidden_size)
        self.score = nn.Linear(self.hidden_size, patches)
        self.initialise(config.training.seed)

    def logits(self, embeddings: Tensor) -> Tensor:
        return self.score(self.hidden(embeddings.flatten(1)).relu())  # type: ignore[no-any-return]


class PatchwiseMasking(MaskingNetwork):
    """Ours, small: the same two layers for each patch, which sees its own embedding with its position, and the mean
    over the image. 787,457 weights at D = 768 and 512 between the layers."""

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
