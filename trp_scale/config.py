"""Every setting of a run: nested, typed, keyword-only dataclasses.

The string under a field is its help text on the command line (`--section.field value`).
This file imports nothing of the package; reading and checking live in `trp_scale/recipes/`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


class RefusedError(ValueError):
    """A setting, file or environment that a run cannot start with.

    The message is for the user: where, what was found, what is allowed. The command line shows it without a traceback
    and exits with status 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """The words "; did you mean X?" for the known name most like `name`, or nothing when none is like it."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


@dataclass(kw_only=True)
class ModelConfig:
    """The encoder. Defaults are BERT-base (TRP 001, Table 4)."""

    kind: Literal["bert"] = "bert"
    """Architecture family."""
    layers: int = 12
    """Number of transformer blocks."""
    hidden_size: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    max_positions: int = 512
    """Longest sequence the position table can hold, special tokens included."""
    dropout: float = 0.1
    """Dropout of hidden states and attention probabilities."""
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation."""
    layer_norm_eps: float = 1e-12
    """Epsilon of the layer norms."""


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What is predicted, and which of it takes part in the maximum (algorithms.md, PoS-BERT)."""

    kind: Literal["pos_mlm"] = "pos_mlm"
    """pos_mlm: masked words in nine part-of-speech groups, and next-sentence prediction."""
    other: Literal["outside", "exclude", "unmasked", "task"] = "outside"
    """Words outside the nine groups: outside = added with their natural share n_other / n, exclude = no loss,
    unmasked = never chosen for masking, task = a tenth task in the maximum."""
    next_sentence: Literal["outside", "inside", "off"] = "outside"
    """Next-sentence prediction: outside the maximum with next_sentence_weight, inside it, or off."""
    next_sentence_weight: float = 1.0
    """Weight of next-sentence prediction when it is outside the maximum."""


@dataclass(kw_only=True)
class DataConfig:
    """Where rows come from and in which order."""

    path: str = ""
    """Directory with dataset.json, or several with weights: 'books:0.7=/a,wiki:0.3=/b'."""
    workers: int = 1
    """Loader processes per rank; 0 fetches in the training process."""
    prefetch: int = 4
    """Micro-batches each worker prepares ahead."""
    blocks_per_group: int = 16
    """Blocks whose rows are shuffled together. Part of the order: a resumed run cannot change it."""
    validation_fraction: float = 0.01
    """Share of the blocks held out for validation, chosen by a hash of their keys."""
    max_corrupt_blocks: int = 0
    """Unreadable blocks that are left out and reported before the run stops on all ranks."""
    verify: bool = False
    """Check the checksum of each block the first time it is read."""


@dataclass(kw_only=True)
class MaskingConfig:
    """Which positions are predicted."""

    ratio: float = 0.15
    """Share of the pieces of a row that are predicted (TRP 4.1.1)."""
    limit: int = 0
    """Masked positions a row is padded to; 0 = round(ratio x sequence length)."""
    maskings: int = 10
    """Different maskings per row, used in turn by epoch (TRP 001, D.1: ten); 0 = a fresh one each epoch."""
    unit: Literal["piece", "word"] = "piece"
    """Draw single word pieces, or whole words."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """stratified: positions are drawn systematically over the groups; each group's count then varies less."""


@dataclass(kw_only=True)
class BatchConfig:
    """Sizes in rows. Accumulation is derived: global_size / (micro_size x ranks)."""

    global_size: int = 256
    """Rows per optimizer step over all ranks."""
    micro_size: int = 32
    """Rows per forward pass on one rank."""


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, precision and stopping of a run."""

    steps: int = 1_000_000
    """Optimizer steps in all."""
    seed: int = 0
    """The only source of randomness: order, masks, pairs, initial weights and dropout follow from it."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; master weights stay fp32. fp16 needs a GPU and DeepSpeed."""
    max_hours: float = 0.0
    """Stop with a checkpoint after this many hours of this process; 0 = no limit."""
    max_skipped_steps: int = 10
    """Stop with a checkpoint when more steps than this were skipped for a loss or gradient that is not finite."""
    deterministic: bool = False
    """Deterministic kernels on the GPU (slower); needed for a bit-exact resume there."""
    compile: bool = False
    """torch.compile on the model (shapes are static)."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule (TRP 001, Table 4)."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw, or plain gradient descent (for checks that must not divide by a gradient's size)."""
    lr: float = 2e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; biases and norms are never decayed."""
    warmup_steps: int = 10_000
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Shape after warm-up, down to min_lr at the last step."""
    min_lr: float = 0.0
    """Learning rate at the last step."""
    clipping: float = 0.0
    """Largest gradient norm; 0 = no clipping."""


@dataclass(kw_only=True)
class BalancerConfig:
    """How the losses of the tasks become one loss (algorithms.md, section 1)."""

    kind: Literal["uniform", "proportional", "minimax"] = "minimax"
    """uniform: 1/T each. proportional: by number of elements (plain BERT). minimax: softmax of alpha x loss (eq. 7)."""
    alpha: float = 1.0
    """Sharpness of the softmax over task losses."""
    alpha_schedule: Literal["constant", "theorem", "hard"] = "constant"
    """constant, theorem = the growing alpha of TRP Theorem 3.1 (radius, lipschitz, bound), hard = the worst alone."""
    radius: float = 1.0
    """R0 of Theorem 3.1: distance from the start to the optimum."""
    lipschitz: float = 1.0
    """L' of Theorem 3.1: Lipschitz constant of the task losses."""
    bound: float = 1.0
    """B of Theorem 3.1: bound of the task losses."""
    estimate: Literal["exact", "lagged", "micro"] = "exact"
    """exact: losses of this global batch (one more forward pass if there is accumulation). lagged: of the last step,
    free. micro: of each micro-batch alone; wrong, kept as a labelled baseline."""
    scale: Literal["none", "initial", "reference"] = "none"
    """Losses enter the softmax as they are (paper), as L / L at the first step, or as L - reference."""
    reference: dict[str, float] = field(default_factory=dict)
    """Loss subtracted from each task's for scale = reference, by task name."""
    total: Literal["1", "paper"] = "1"
    """Sum of the balanced weights: 1, or each method's own."""
    loss_ema: float = 0.0
    """Smoothing of the losses that enter the softmax; 0 = none (paper)."""
    min_count: int = 0
    """A task with fewer elements than this in the global batch takes no part in the maximum of this step."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Losses on the held-out rows."""

    every: int = 0
    """Validate each N steps and after the last; 0 = never."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written. The last step always writes one."""

    every: int = 0
    """Write one each N steps; 0 = only at the end."""
    keep: int = 2
    """Newest checkpoints that are kept; 0 = all."""


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported while the run goes on."""

    every: int = 10
    """Write a line of metrics each N steps."""
    progress: bool = True
    """Live display on the terminal of rank 0."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`; WANDB_MODE=offline works)."""
    wandb_project: str = "trp-scale"
    """Project name on Weights & Biases."""
    tensorboard: bool = False
    """Log to TensorBoard (needs the extra `tensorboard`)."""


@dataclass(kw_only=True)
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
