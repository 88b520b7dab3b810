"""How a run goes: batch, length, precision, optimizer, validation, checkpoints, logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trp_scale.config.settings import setting


@dataclass(kw_only=True)
class BatchConfig:
    """Sizes in rows. Accumulation is derived: global_size / (micro_size x ranks)."""

    global_size: int = setting(256, at_least=1)
    """Rows per optimizer step over all ranks."""
    micro_size: int = setting(32, at_least=1)
    """Rows per forward pass on one rank."""


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, precision and stopping of a run."""

    steps: int = setting(1_000_000, at_least=1)
    """Optimizer steps in all."""
    seed: int = setting(0, at_least=0)
    """The only source of randomness: order, masks, pairs, initial weights and dropout follow from it."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; master weights stay fp32. fp16 needs a GPU and DeepSpeed."""
    max_hours: float = setting(0.0, at_least=0)
    """Stop with a checkpoint after this many hours of this process; 0 = no limit."""
    max_skipped_steps: int = setting(10, at_least=0)
    """Stop with a checkpoint after more skipped steps than this. A step is skipped when its loss or gradient is not
    finite."""
    deterministic: bool = False
    """Deterministic kernels on the GPU (slower); needed for a bit-exact resume there."""
    compile: bool = False
    """torch.compile on the model (shapes are static)."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule (TRP 001, Table 4)."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw, or plain gradient descent (for checks that must not divide by a gradient's size)."""
    lr: float = setting(2e-4, above=0)
    """Peak learning rate."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """Decay of the first moment."""
    beta2: float = setting(0.999, at_least=0, below=1)
    """Decay of the second moment."""
    eps: float = setting(1e-6, above=0)
    """Added to the root of the second moment. 1e-6 is BERT's; the image recipes take AdamW's usual 1e-8."""
    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled decay of matrices. Vectors are never decayed: biases, norms, and class and mask tokens, which MAE's and
    AdPE's code does decay."""
    warmup_steps: int = setting(10_000, at_least=0)
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Shape after warm-up, down to min_lr at the last step."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the last step."""
    clipping: float = setting(0.0, at_least=0)
    """Largest gradient norm; 0 = no clipping."""
    layer_decay: float = setting(1.0, above=0, at_most=1)
    """Fine-tuning: each block's learning rate is this times that of the block after it, and the embeddings' this times
    the first block's. The head learns at lr (Clark et al. 2020; MAE: 0.75 for ViT-L, 0.65 for ViT-B). 1 = all at lr."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Losses on the held-out rows."""

    every: int = setting(0, at_least=0)
    """Validate each N steps and after the last; 0 = never."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written. The last step always writes one."""

    every: int = setting(0, at_least=0)
    """Write one each N steps; 0 = only at the end."""
    keep: int = setting(2, at_least=0)
    """Newest checkpoints that are kept; 0 = all."""


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported while the run goes on."""

    every: int = setting(10, at_least=1)
    """Write a line of metrics each N steps."""
    progress: bool = True
    """Live display on the terminal of rank 0."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`; WANDB_MODE=offline works)."""
    wandb_project: str = "trp-scale"
    """Project name on Weights & Biases."""
    tensorboard: bool = False
    """Log to TensorBoard (needs the extra `tensorboard`)."""
