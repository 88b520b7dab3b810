"""Settings of learned masks by three-level optimisation (MLO-MAE 3.2, Appendix A).

Inner steps train encoder and decoder on D_u, head steps the classification head on D_tr, outer steps the masking
network on D_val. Defaults are those of Table 11 and section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trp_scale.config.images import MaskedAutoencoderConfig, split_patches
from trp_scale.config.registry import MetricPlot, Settings, component, describe_metrics, near_divisors, setting


@dataclass(kw_only=True)
class MultilevelSettings(Settings):
    """Settings of all kinds.

    Attributes:
        learns: a network chooses the masks.
        reads_labels: it learns from the classes of D_tr and D_val.
        joins_labelled: every inner step also learns from D_tr.
    """

    learns = False
    reads_labels = False
    joins_labelled = False


@component("multilevel", "none", "trp_scale.methods.learned_masks.hook:random_masks")
@dataclass(kw_only=True)
class RandomMasksSettings(MultilevelSettings):
    """Draw masks at random."""


@component("multilevel", "color", "trp_scale.methods.learned_masks.hook:random_masks")
@dataclass(kw_only=True)
class ColorSettings(MultilevelSettings):
    """Draw masks from filtered noise (ColorMAE): no network, no labels, no cost; what a learned mask has to beat."""

    noise: Literal["red", "blue", "green", "purple"] = setting("green")
    """red: low-pass, large masked areas. blue: high-pass, evenly spread. green: band-pass, clusters of one size; the
    best in ColorMAE. purple: band-stop."""
    sigma: float = setting(1.0, above=0, at_most=16)
    """Standard deviation of the blur, in patches."""
    fine_sigma: float = setting(0.5, above=0)
    """green, purple: standard deviation of the finer blur, in patches; smaller than sigma."""

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        if self.noise in ("green", "purple") and self.fine_sigma >= self.sigma:
            yield f"--multilevel.fine_sigma is {self.fine_sigma:g}, allowed: below --multilevel.sigma {self.sigma:g}"


@component("multilevel", "self_guided", "trp_scale.methods.learned_masks.self_guided:SelfGuidedMasks")
@dataclass(kw_only=True)
class SelfGuidedSettings(MultilevelSettings):
    """Mask the object's cluster of patches, by the encoder itself (self-guided masks): no network, no labels, and one
    more pass of the encoder over whole images."""

    start: float = setting(0.125, at_least=0, at_most=1)
    """Share of the steps with random masks before: 50 of the paper's 400 epochs."""
    hints: float = setting(0.1, at_least=0, below=1)
    """Share of the masked patches that are shown as hints, evenly over the ranking; as many others are masked."""

    def first_step(self, config: MaskedAutoencoderConfig) -> int:
        """Return the first step with these masks."""
        return math.ceil(self.start * config.training.steps)

    def against_capturing(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield f"--multilevel.kind {self.kind} encodes whole images before the step"


@dataclass(kw_only=True)
class LearnedMasksSettings(MultilevelSettings):
    """Settings of kinds with a masking network, which gives each patch a probability. The most probable patches are
    masked."""

    learns = True

    network: Literal["flattened", "patchwise"] = setting("flattened")
    """flattened: two linear layers over all patch embeddings at once (paper). patchwise: two layers per patch, which
    see its embedding, its position and the image's mean; under a million weights."""
    hidden_size: int = setting(512, at_least=1)
    """Width between the two layers of the masking network (MLO-MAE, B.2)."""
    weights: Literal["raw", "normalised"] = setting("raw")
    """Weights of the masked patches' errors: their probabilities divided by the number of masked patches (raw, eq. 1),
    or by the sum of their probabilities (normalised), so that scaling all of them has no effect."""
    selection: Literal["hard", "straight_through", "softsort"] = setting("hard")
    """Derivative of the selection: none, the identity, or that of SoftSort (MLO-MAE, A.4)."""
    temperature: float = setting(0.1, above=0)
    """Temperature of SoftSort, in units of the probability."""
    final_ratio: float = setting(0.0)
    """Final mask ratio; masking.ratio grows to it linearly (MLO-MAE, D.4: 0.5 to 0.9). 0 = constant ratio."""
    unroll: int = setting(2, at_least=1)
    """Inner steps per head step (3.3: 2; Table 11: 1; Table 7: 1, 2, 5)."""
    every: int = setting(1, at_least=1)
    """Head steps per outer step (Table 16: 1, 5)."""
    lr: float = setting(4e-5, above=0)
    """Peak learning rate of the masking network, on the schedule of the weights (Table 11)."""
    weight_decay: float = setting(0.05, at_least=0)
    """Weight decay of the masking network's matrices (Table 11)."""
    eps: float = setting(1e-8, above=0)
    """AdamW's eps of the masking network. Like hypergradients, eps is multiplied by optimizer.lr (or look_ahead_lr);
    with fine_tuning also by 2 optimizer.lr proximity; with reconstruction by 1."""

    def network_eps(self, lr: float) -> float:
        """Return AdamW's eps of the masking network, at this peak learning rate of the weights."""
        return self.eps

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        if config.training.precision == "fp16":
            yield (
                f"--training.precision is fp16 but --multilevel.kind is {self.kind}: half-precision weights round the "
                "finite difference away; allowed: bf16, fp32"
            )
        if config.optimizer.kind not in ("adamw", "sgd"):
            yield (
                f"--optimizer.kind is {config.optimizer.kind} but --multilevel.kind is {self.kind}, which can "
                "differentiate only steps of AdamW and of gradient descent; allowed: adamw, sgd"
            )
        if self.final_ratio:
            yield from self._final_ratio(config)

    def _final_ratio(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        vision, crops = config.vision, config.crops
        if not config.masking.ratio < self.final_ratio < 1:
            yield (
                f"--multilevel.final_ratio is {self.final_ratio}, allowed: 0 (constant ratio), or above "
                f"--masking.ratio {config.masking.ratio} and below 1"
            )
            return
        if vision.patch_size < 1 or crops.size < 1 or crops.size % vision.patch_size:
            return  # refused elsewhere
        split = split_patches(crops.size, vision.patch_size, self.final_ratio)
        if split.visible < 1:
            yield (
                f"--multilevel.final_ratio {self.final_ratio} leaves none of {split.patches} patches visible at the "
                f"end; allowed: at most {1 - 1 / split.patches:.6g}"
            )

    def cautions(self, config: MaskedAutoencoderConfig, steps_per_epoch: int) -> Iterator[str]:
        if self.temperature != LearnedMasksSettings.temperature and self.selection != "softsort":
            yield (
                f"--multilevel.temperature {self.temperature} has no effect with --multilevel.selection "
                f"{self.selection}"
            )
        if config.training.compile in ("blocks", "whole") and self.final_ratio:
            yield (
                f"--training.compile with --multilevel.final_ratio {self.final_ratio:g}: the model is recompiled for "
                "each number of visible patches"
            )

    def against_compiling(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        if self.final_ratio:
            yield f"the number of visible patches changes with --multilevel.final_ratio {self.final_ratio:g}"

    def against_capturing(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield f"--multilevel.kind {self.kind} differentiates through training steps"


@dataclass(kw_only=True)
class LabelledSettings(LearnedMasksSettings):
    """Settings of kinds whose masking network minimises the loss of a classification head on D_val."""

    reads_labels = True

    unlabelled: Literal["train", "all"] = "train"
    """D_u: the images of D_tr (B.3), or of D_tr and D_val."""
    validation_share: float = setting(0.2, above=0, below=1)
    """Share of the training blocks in D_val, by a hash of their keys (B.3: 80/20); the rest is D_tr. Both exclude the
    blocks of data.validation_fraction."""
    batch_size: int = setting(0, at_least=0)
    """Images of D_tr per head step, and of D_val per outer step, over all ranks; 0 = batch.global_size."""
    micro_size: int = setting(0, at_least=0)
    """Images of D_tr, and of D_val, per forward pass on one rank; 0 = batch.micro_size, or its largest divisor that
    divides a rank's share of batch_size. An outer step is one seventh cheaper if one pass holds all images."""
    pooling: Literal["mean", "class"] = "mean"
    """Input of the head: mean of the encoder's patch tokens, or the class token, of the unmasked image. The paper does
    not specify it; the authors' code and the paper's recipes use the class token."""
    head_norm: Literal["none", "layer"] = "none"
    """Normalisation of the head's input. none: paper. layer: LayerNorm without learned weights."""
    head_dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout of the head's input during training."""
    head_lr: float = setting(4e-5, above=0)
    """Peak learning rate of the head, on the schedule of the weights (Table 11)."""
    head_weight_decay: float = setting(0.05, at_least=0)
    """Weight decay of the head's matrix (Table 11)."""
    difference: float = setting(1e-2, above=0)
    """Length of the move in each direction of a finite difference (fp32: 1e-2; float64: 1e-4)."""
    exact_every: int = setting(0, at_least=0)
    """Outer steps between comparisons with the exact hypergradient, which uses automatic differentiation in float64 on
    unsharded weights; 0 = never. For small models only."""

    def network_eps(self, lr: float) -> float:
        return self.eps * lr

    def batches(self, config: MaskedAutoencoderConfig, ranks: int = 1) -> tuple[int, int]:
        """Return the images of a window of D_tr or D_val over all ranks, and of a forward pass on one rank."""
        size = self.batch_size or config.batch.global_size
        share, rest = divmod(size, ranks)
        return size, self.micro_size or math.gcd(config.batch.micro_rows, 0 if rest else share)

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield from super().problems(config)
        if not (self.batch_size or self.micro_size):
            return  # equal to the sizes of config.batch, which are checked
        if not self.micro_size and config.batch.micro_size == "auto":
            return  # the chosen size divides both
        size, micro = self.batch_size or config.batch.global_size, self.micro_size or config.batch.micro_rows
        if size > 0 and micro > 0 and size % micro:
            micro_from = "" if self.micro_size else " (that of --batch.micro_size)"
            size_from = "" if self.batch_size else " (that of --batch.global_size)"
            yield (
                f"--multilevel.micro_size is {micro}{micro_from} and does not divide --multilevel.batch_size "
                f"{size}{size_from}; allowed, for example: {near_divisors(size, micro)}"
            )


@component("multilevel", "head", "trp_scale.methods.learned_masks.hook:masks_from_a_head")
@dataclass(kw_only=True)
class HeadSettings(LabelledSettings):
    """Three levels: the head learns on D_tr with a frozen encoder (paper, eq. 2)."""

    mode: Literal["committed", "look_ahead"] = "committed"
    """Inner step that the hypergradient differentiates. committed: the run's step of AdamW, with a constant second
    moment. look_ahead: unrolled steps of gradient descent that are undone, as printed (eq. 6-8)."""
    look_ahead_lr: float = setting(0.0, at_least=0)
    """look_ahead: learning rate eta_E of the unrolled inner steps; 0 = learning rate of the weights in this step."""
    derivative: Literal["last", "full"] = "last"
    """Inner steps that the hypergradient differentiates: the last one, or all unrolled ones (look_ahead only), by
    finite differences of gradients. full is for comparison; it costs four more passes per step."""

    def network_eps(self, lr: float) -> float:
        return super().network_eps((self.look_ahead_lr or lr) if self.mode == "look_ahead" else lr)

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield from super().problems(config)
        if self.mode == "look_ahead":
            yield from self._ahead(config)
        elif self.derivative == "full":
            yield (
                f"--multilevel.derivative is full but --multilevel.mode is {self.mode}; allowed: "
                "--multilevel.derivative last, or --multilevel.mode look_ahead"
            )
        if self.derivative == "full" and self.selection != "hard":
            yield (
                f"--multilevel.derivative is full but --multilevel.selection is {self.selection}; allowed: "
                "--multilevel.derivative last, or --multilevel.selection hard"
            )

    def _ahead(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        """Refuse hooks whose values are not known before the step."""
        if config.adversary.kind == "pixels":
            yield (
                "--multilevel.mode is look_ahead but --adversary.kind is pixels, whose perturbation of the next images "
                "is not known yet; allowed: --multilevel.mode committed, or an adversary on positions"
            )
        if config.balancer.kind == "minimax" and config.balancer.estimate == "micro":
            yield (
                "--multilevel.mode is look_ahead but --balancer.estimate is micro, whose weights differ between "
                "micro-batches; allowed: --multilevel.mode committed, or --balancer.estimate exact or lagged"
            )

    def cautions(self, config: MaskedAutoencoderConfig, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        if config.training.tf32 and self.difference < 0.1:
            yield (
                f"--training.tf32 True with --multilevel.difference {self.difference:g}: rounding errors affect such a "
                "small difference; use --multilevel.difference 0.1 in TF32"
            )
        if self.look_ahead_lr and self.mode != "look_ahead":
            yield f"--multilevel.look_ahead_lr {self.look_ahead_lr} has no effect with --multilevel.mode {self.mode}"
        if self.derivative == "full" and self.unroll == 1:
            yield "--multilevel.derivative full has no effect with --multilevel.unroll 1"


@component("multilevel", "joint", "trp_scale.methods.learned_masks.hook:masks_from_a_joint_step")
@dataclass(kw_only=True)
class JointSettings(LabelledSettings):
    """Two levels: encoder, decoder and head learn in one step on D_u and D_tr (BLO-MAE, eq. 5)."""

    joins_labelled = True

    gamma: float = setting(1.0, at_least=0)
    """Weight of the reconstruction; the classification has weight 1 (eq. 5)."""

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield from super().problems(config)
        if config.balancer.kind != "uniform":
            yield (
                f"--balancer.kind is {config.balancer.kind} but --multilevel.kind joint has no tasks to balance: "
                "--multilevel.gamma weighs them; allowed: --balancer.kind uniform"
            )
        if "gradient_noise_scale" in config.hooks:
            yield (
                "--multilevel.kind joint has two kinds of micro-batches, but the hook gradient_noise_scale supports "
                "one; allowed: head, fine_tuning, or --hooks without it"
            )


@component("multilevel", "fine_tuning", "trp_scale.methods.learned_masks.hook:masks_from_fine_tuning")
@dataclass(kw_only=True)
class FineTuningSettings(LabelledSettings):
    """Three levels: a second encoder, kept near the first by a proximity term, learns with the head (eq. 13)."""

    proximity: float = setting(1.0, above=0)
    """lambda of lambda ||F - E||^2 (eq. 13). A head step moves F by the share 2 x learning rate x lambda towards E."""

    def pull(self, lr: float) -> float:
        """Return 2 eta lambda, the share of the distance to E that F moves in a head step."""
        return 2.0 * lr * self.proximity

    def network_eps(self, lr: float) -> float:
        return super().network_eps(lr) * self.pull(lr)

    def problems(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        yield from super().problems(config)
        lr = config.optimizer.lr
        if 1.0 <= self.pull(lr) < float("inf"):
            yield (
                f"--multilevel.proximity is {self.proximity:g} and --optimizer.lr {lr:g}: a step would move the second "
                f"encoder by {self.pull(lr):g} of the distance to the first, which must be below 1; allowed: a "
                f"proximity below {0.5 / lr:g}"
            )


@component("multilevel", "reconstruction", "trp_scale.methods.learned_masks.hook:masks_that_raise_the_loss")
@dataclass(kw_only=True)
class ReconstructionSettings(LearnedMasksSettings):
    """The masking network raises the reconstruction loss, without labels (ablation without downstream feedback)."""

    def cautions(self, config: MaskedAutoencoderConfig, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        if self.weights == "raw" and self.selection == "hard":
            yield (
                "--multilevel.kind reconstruction with --multilevel.weights raw and --multilevel.selection hard can "
                "only raise probabilities, because a larger weight of any patch raises the loss; use "
                "--multilevel.weights normalised to compare patches"
            )


describe_metrics(
    "multilevel",
    title="Learned masks",
    look_for=(
        "Whether the masking network has learned. An overlap of 1 with the untrained network's masks means that it has "
        "not, whatever the losses are. Entropy near 0 means that its choices are almost fixed."
    ),
    plots=[
        MetricPlot(
            title="Entropy of a patch's masking",
            names=("entropy",),
            unit="nats",
            edge=(math.log(2), "probability 1/2: ln 2"),
        ),
        MetricPlot(
            title="Overlap",
            names=("overlap_untrained", "overlap_last"),
            unit="share",
            note="Share of the masked patches that the untrained network, or that of the step before, also masks.",
        ),
        MetricPlot(title="Mean probability of masking", names=("mean_probability",), unit="share"),
        MetricPlot(
            title="Losses of the head",
            names=("head_loss", "validation_loss"),
            note="On D_tr, from which the head learns, and on D_val, from which the masks are learned.",
        ),
        MetricPlot(
            title="Hypergradient",
            names=("gradient_norm", "direction_norm", "response_norm"),
            log=True,
            note="Norms of the masking network's gradient and of its factors.",
        ),
        MetricPlot(title="Time of each level", names=("time",), unit="share", note="Share of the step time."),
    ],
)
