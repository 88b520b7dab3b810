"""Settings of a run as nested, typed, keyword-only dataclasses; this module has the sections that every run has.

The string under a field is its help text on the command line (`--section.field value`). A field whose name is a Python
keyword ends in an underscore in the class only (`crops.from`). `loader.py` reads and checks settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import tyro.conf

from trp_scale.config.registry import (
    Component,
    Section,
    default_settings,
    find,
    listed_roles,
    names,
    near_divisors,
    setting,
    unknown_component,
)
from trp_scale.errors import RefusedError as RefusedError

Weights = Literal["last", "average"]
"""Weights of a run to load: those after its last step, or the average that the hook weight_average kept."""

AVERAGE = "@average"
"""Suffix of a path to a run or checkpoint in `model.weights`; selects the average of its weights."""

MOST_STEPS, LR_ROWS = 1_000_000_000, 256
"""Maximum of `training.steps`; global batch that `optimizer.base_lr` refers to."""


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The encoder. Defaults are BERT-base (TRP 001, Table 4)."""

    layers: int = setting(12, at_least=1)
    """Number of transformer blocks."""
    hidden_size: int = setting(768, at_least=1)
    """Width of the residual stream."""
    heads: int = setting(12, at_least=1)
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = setting(3072, at_least=1)
    """Width of the feed-forward layer."""
    initializer_range: float = setting(0.02, above=0)
    """Standard deviation of the normal initialisation."""
    layer_norm_eps: float = setting(1e-12, above=0)
    """Epsilon of the layer norms."""
    weights: str = ""
    """Start from existing weights: a .safetensors or .pth file, or a directory with one. Allowed: transformers' BERT,
    ModernBERT or ViTMAE, timm's ViT, MAE, MultiMAE; sizes that no flag sets are theirs, and the log names what differs.
    A run directory of trp-scale pretrain gives its last weights; with @average appended, their average. Empty = random,
    from the seed."""
    weights_names: bool = False
    """If the weights do not fit the model, list every tensor that is missing, unexpected or of another shape."""

    @property
    def block_parameters(self) -> int:
        """Number of parameters in the blocks' matrices: 4 d^2 for attention and 2 d f for the feed-forward layer of
        each block. They are nearly all parameters of a large encoder."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    def problems(self, config: Any) -> Iterator[str]:
        if self.heads > 0 and self.hidden_size % self.heads:
            yield (
                f"--model.heads is {self.heads} and does not divide --model.hidden_size {self.hidden_size}; "
                f"allowed, for example: {near_divisors(self.hidden_size, self.heads)}"
            )


@dataclass(kw_only=True)
class TextModelConfig(ModelConfig):
    """Text encoder."""

    max_positions: int = setting(512, at_least=8)
    """Maximum sequence length, special tokens included."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout probability of hidden states and attention probabilities. modern: 0; finetune --from sets it."""
    kind: Literal["bert", "modern"] = "bert"
    """bert: learned positions, a norm after each branch. modern: ModernBERT (Warner et al. 2024) with rotary positions,
    GeGLU, a norm before each branch and local attention; without biases, segments and next-sentence prediction."""
    global_every: int = setting(3, at_least=1)
    """modern: every N-th layer, from the first on, attends to all positions; the others to a window."""
    local_attention: int = setting(128, at_least=2)
    """modern: width of the window; half of it on each side."""
    global_rotary_base: float = setting(160_000.0, above=0)
    """modern: base of the rotary positions of global layers."""
    local_rotary_base: float = setting(10_000.0, above=0)
    """modern: base of the rotary positions of local layers."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.kind != "modern":
            return
        if self.dropout:
            yield f"--model.dropout is {self.dropout}; allowed with --model.kind modern: 0"
        if self.heads > 0 and self.hidden_size % (2 * self.heads):
            yield (
                f"--model.hidden_size is {self.hidden_size}; allowed with --model.kind modern: a multiple of twice "
                f"--model.heads {self.heads}"
            )


@dataclass(kw_only=True)
class DataConfig(Section):
    """Data set, loader workers, and order of the rows."""

    path: str = ""
    """Directory with dataset.json, or several with weights: 'books:0.7=/a,wiki:0.3=/b', or a .txt file of this."""
    workers: int = setting(1, at_least=0)
    """Loader processes per rank, at most the number of its CPUs; 0 = load in the training process. The three sources of
    learned masks share them; each has at least one."""
    prefetch: int = setting(4, at_least=1)
    """Micro-batches that each worker prefetches."""
    blocks_per_group: int = setting(16, at_least=1)
    """Blocks whose rows are shuffled together. It is part of the order, so a resumed run cannot change it."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the blocks held out for validation, chosen by a hash of their keys."""
    max_corrupt_blocks: int = setting(0, at_least=0)
    """Maximum number of unreadable blocks (text) or images that are skipped and reported. One more stops the run on all
    ranks."""
    verify: bool = True
    """Verify the checksum of each block when it is first read, and of each image. Depth and segmentation maps are
    always verified."""

    def problems(self, config: Any) -> Iterator[str]:
        if not self.path:
            yield (
                "--data.path is empty; allowed: the directory with dataset.json that trp-scale shard-text or "
                "trp-scale shard-images wrote"
            )


@dataclass(kw_only=True)
class MaskingConfig:
    """Selection of the predicted positions."""

    maskings: int = setting(0, at_least=0)
    """Number of different maskings per row, used in turn over epochs; 0 = a new one each epoch."""


@dataclass(kw_only=True)
class BatchConfig(Section):
    """Batch sizes in rows. Gradient accumulation is derived: global_size / (micro_size x ranks)."""

    global_size: int = setting(256, at_least=1)
    """Rows per optimizer step over all ranks."""
    micro_size: int | Literal["auto"] = setting("auto", at_least=1)
    """Rows per forward pass on one rank; the result does not depend on it. auto: the largest size that divides the
    rank's share of the global batch and fits into memory; on a CPU a size that keeps the cores busy
    (training/micro_size.py)."""

    @property
    def micro_rows(self) -> int:
        """`micro_size` after "auto" was resolved."""
        if self.micro_size == "auto":
            raise ValueError("batch.micro_size is auto; a run must resolve it first")
        return self.micro_size

    def problems(self, config: Any) -> Iterator[str]:
        if self.micro_size != "auto" and self.micro_size > 0 and self.global_size % self.micro_size:
            yield (
                f"--batch.micro_size is {self.micro_size} and does not divide --batch.global_size {self.global_size}; "
                f"allowed, for example: {near_divisors(self.global_size, self.micro_size)}"
            )


@dataclass(kw_only=True)
class TrainingConfig(Section):
    """Length, precision and stopping of a run."""

    steps: int = setting(1_000_000, at_least=1, at_most=MOST_STEPS)
    """Total number of optimizer steps."""
    seed: int = setting(0, at_least=0)
    """Seed of all randomness: data order, masks, pairs, initial weights and dropout."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; master weights stay fp32. fp16 needs a GPU and DeepSpeed."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Weights that forward and backward passes read. bf16 (with precision bf16): a copy of the master weights, rounded
    once per step; it needs fewer kernels and bytes than autocast, which keeps layer norms and sums in fp32. FSDP2
    gathers the copy. With DeepSpeed its JSON file decides (bf16.enabled)."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Data type in which gradients are communicated. bf16 halves the bytes and rounds the sum; FSDP2 then also
    accumulates micro-batches in bf16. With DeepSpeed its JSON file decides (communication_data_type)."""
    tf32: bool = False
    """On a GPU, multiply fp32 matrices in TF32 (10-bit mantissa). It applies to fp32 forward passes and to learned
    masks, which always compute in fp32. Learned masks then need --multilevel.difference 0.1."""
    max_hours: float = setting(0.0, at_least=0)
    """Stop with a checkpoint after this many hours of this process; 0 = no limit."""
    max_skipped_steps: int = setting(10, at_least=0)
    """Stop with a checkpoint if more than this many of the last 1,000 steps were skipped. A step is skipped if its loss
    or gradient is not finite, or if it is a spike (reliability.spikes). The host learns of it one step later."""
    deterministic: bool = False
    """Use deterministic GPU kernels (slower); required for a bit-exact resume on GPUs."""
    compile: Literal["auto", "none", "blocks", "whole"] = "auto"
    """torch.compile with static shapes. blocks: compile each block; identical blocks compile once, and gradient
    communication still overlaps the backward pass. whole: compile the model as one graph; on plain and ddp it includes
    the losses. Neither works with ZeRO stage 3. auto: blocks for pre-training on GPUs if possible, otherwise none; the
    log says why."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Capture the forward and the backward pass of a micro-batch as CUDA graphs: the host launches two graphs in place
    of a thousand kernels. The result is the same. For pre-training on a GPU with plain, ddp and FSDP2. auto: off, since
    it was not run on a GPU yet."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that a block keeps for its backward pass. full: only its inputs; the block is recomputed, a third
    more arithmetic. selective: also matrix products and attention; norms and activation functions are recomputed. none:
    all. The result is the same."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.weights == "bf16" and self.precision != "bf16":
            yield (
                f"--training.weights is bf16 and --training.precision {self.precision}; allowed: --training.precision "
                "bf16, or --training.weights fp32"
            )
        if self.activation_checkpointing != "none" and self.compile == "whole":
            yield (
                f"--training.activation_checkpointing is {self.activation_checkpointing} and --training.compile whole; "
                "allowed: --training.compile blocks"
            )
        if self.activation_checkpointing == "selective" and self.compile == "blocks":
            yield (
                "--training.activation_checkpointing is selective and --training.compile blocks, which selects the "
                "saved activations itself; allowed: none or full"
            )

    def against_compiling(self, config: Any) -> Iterator[str]:
        if self.activation_checkpointing == "selective":
            yield "--training.activation_checkpointing selective selects operations, which a compiled graph hides"

    def against_capturing(self, config: Any) -> Iterator[str]:
        if self.activation_checkpointing != "none":
            way = self.activation_checkpointing
            yield f"--training.activation_checkpointing {way} restores the random numbers of dropout on the host"


@dataclass(kw_only=True)
class PretrainTrainingConfig(TrainingConfig):
    """Length, precision and stopping of a pre-training run."""

    epochs: float = setting(0.0, at_least=0)
    """Passes over the training rows, also fractions; sets `steps` when the data is opened: epochs x rows /
    batch.global_size, rounded up. 0 = use `steps`. A flag --training.steps overrides it in a recipe."""


def count_steps(epochs: float, rows: int, global_size: int) -> int:
    """Return the steps of `epochs` passes over `rows` training rows. Epochs have no short last batch: a batch continues
    with rows of the next epoch."""
    return max(1, math.ceil(epochs * rows / global_size))


@dataclass(kw_only=True)
class FsdpConfig(Section):
    """Sharding by --engine fsdp; the result does not depend on it."""

    shard_ranks: int = setting(0, at_least=0)
    """Number of consecutive ranks that shard one copy of the model; other groups hold replicas, and only gradients are
    reduced between groups. Set it to the ranks of a node to keep gathers inside a node. 0 = shard over all ranks."""
    offload: bool = False
    """Keep weights, gradients and moments in host memory and run the optimizer there; a block's weights are copied to
    the GPU when it computes. Slower; for models that would not fit."""
    offload_directory: str = ""
    """With offload: a directory on a local disk, such as an NVMe drive, for weights and moments. It needs 12 bytes per
    parameter over all ranks; the files disappear with their process. Host memory holds those in use. Empty = host
    memory."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.offload_directory and not self.offload:
            yield f"--fsdp.offload_directory {self.offload_directory} needs --fsdp.offload"


@dataclass(kw_only=True)
class MegatronConfig(Section):
    """Tensor parallelism by --engine megatron; the result does not depend on it."""

    tensor_parallel: int = setting(1, at_least=1)
    """Number of consecutive ranks of one node that share each large matrix. It must divide the ranks of a node, the
    heads and the width of the feed-forward layers. The batch is split over groups of this size."""
    shard_moments: bool = True
    """Shard the optimizer's moments over the ranks that split the batch (ZeRO stage 1): each rank updates some rows of
    each matrix and sends them to the others. False: every rank stores all moments and makes the same update."""
    sequence_parallel: bool = False
    """Between attention and feed-forward layers, split the tokens over the ranks that share matrices. Norms, dropout
    and sums need less memory; about 30 % more bytes are communicated. The number of tokens need not be divisible."""


WITHOUT_END = ("constant", "inverse_sqrt", "multistep")
"""Schedules that do not depend on the number of steps."""


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule (TRP 001, Table 4)."""

    kind: Literal["adamw", "lamb", "muon", "sgd"] = "adamw"
    """adamw; lamb for batches of many thousand rows: the update of each matrix is scaled to lr times the matrix's norm
    (You et al. 2020); muon: orthogonal updates of the blocks' matrices, AdamW for the rest (Jordan et al. 2024),
    with one lr for both (Liu et al. 2025); sgd: plain gradient descent, for checks that must not divide by the size of
    a gradient."""
    lr: float = setting(2e-4, above=0)
    """Peak learning rate."""
    base_lr: float = setting(0.0, at_least=0)
    """Peak learning rate for a global batch of 256 rows, the `blr` of MAE; sets `lr` to base_lr x batch.global_size /
    256 (Goyal et al. 2017). 0 = use `lr`. A flag --optimizer.lr overrides it in a recipe."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """Decay rate of the first moment."""
    beta2: float = setting(0.999, at_least=0, below=1)
    """Decay rate of the second moment."""
    momentum: float = setting(0.95, at_least=0, below=1)
    """muon: decay rate of the momentum of the blocks' matrices."""
    eps: float = setting(1e-6, above=0)
    """Added to the square root of the second moment. 1e-6 is BERT's value; the image recipes use AdamW's usual 1e-8."""
    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay of matrices. Vectors are not decayed: biases, norms, class and mask tokens. (The code of
    MAE and AdPE decays class and mask tokens.)"""
    warmup_steps: int = setting(10_000, at_least=0)
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "wsd", "constant", "inverse_sqrt", "multistep"] = "linear"
    """Schedule after warm-up. linear and cosine decay to min_lr; wsd is constant and decays in the last decay_steps, by
    1 - the square root of their share (Haegele et al. 2024; ModernBERT). constant, inverse_sqrt (Vaswani et al. 2017,
    eq. 3) and multistep do not depend on the last step, so a run can be extended; --from starts a decay phase.
    multistep multiplies the rate at milestones."""
    milestones: list[int] = field(default_factory=list)
    """multistep: ascending steps, from 0, at which the rate is multiplied by milestone_factor."""
    milestone_factor: float = setting(0.1, above=0, below=1)
    """multistep: factor of the rate at each milestone."""
    decay_steps: int = setting(0, at_least=0)
    """wsd: steps of the decay."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of the decay; for inverse_sqrt and multistep the minimum."""
    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Step at which linear, cosine and wsd reach min_lr. after_last_step: one step after the run, as in transformers
    and MAE, so that the last step still learns. last_step: the last step, as in runs without this setting."""
    clipping: float = setting(0.0, at_least=0)
    """Maximum gradient norm; 0 = no clipping."""
    layer_decay: float = setting(1.0, above=0, at_most=1)
    """Fine-tuning: the learning rate of each block is this factor times that of the next block; the embeddings' rate is
    this factor times the first block's. The head learns at lr (Clark et al. 2020; MAE: 0.75 for ViT-L, 0.65 for ViT-B).
    1 = one rate for all."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.min_lr > self.lr > 0:
            yield f"--optimizer.min_lr is {self.min_lr}, allowed: at most --optimizer.lr {self.lr}"
        left = config.training.steps - self.warmup_steps
        if self.schedule == "wsd" and not 0 < self.decay_steps <= left:
            yield f"--optimizer.decay_steps is {self.decay_steps}; allowed: 1 to {left}, the steps after warm-up"
        if self.schedule == "multistep":
            bounds = [max(0, self.warmup_steps - 1), *self.milestones, config.training.steps]
            if not self.milestones or any(late <= early for early, late in pairwise(bounds)):
                yield (
                    f"--optimizer.milestones is {' '.join(map(str, self.milestones)) or 'empty'}; allowed for the "
                    f"schedule multistep: ascending steps, each once, from {bounds[0] + 1}, after warm-up, to "
                    f"{bounds[-1] - 1}, the last step"
                )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.warmup_steps >= config.training.steps and self.schedule not in WITHOUT_END:
            yield (
                f"--optimizer.warmup_steps {self.warmup_steps} is not below --training.steps {config.training.steps}: "
                f"the learning rate never reaches --optimizer.lr {self.lr:g}"
            )


@dataclass(kw_only=True)
class ValidationConfig(Section):
    """Losses on held-out rows."""

    every: int = setting(0, at_least=0)
    """Validate every N steps and after the last; 0 = never."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.every and not config.data.validation_fraction and not config.separate_test:
            yield (
                f"--validation.every is {self.every} but --data.validation_fraction is 0: nothing is held out; "
                "allowed: --validation.every 0, or a fraction such as 0.01"
            )


@dataclass(kw_only=True)
class ReliabilityConfig(Section):
    """Detection of hangs, loss spikes and hardware failures."""

    hang_minutes: float = setting(10.0, at_least=0)
    """Time without a step after which a run counts as hung; at least 20 times the median step, and three times as long
    at the start. Each rank then writes its stacks to RUN_DIR/hangs, the late rank is named, and all exit with status 4.
    0 = never."""
    collective_minutes: float = setting(30.0, above=0)
    """Timeout of the start and of one collective."""
    worker_seconds: float = setting(300.0, above=0)
    """Time without a micro-batch from the loader's workers after which they are killed and restarted; the new workers
    make the same micro-batches. Must be less than hang_minutes."""
    max_corrupt_steps: int = setting(10, at_least=1)
    """Maximum number of consecutive steps that each find a new unreadable block. Then the run stops: the storage is at
    fault."""
    spikes: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """Reaction to a spike: a step whose loss, loss of one task, or gradient norm is far above those of the last 128
    steps. warn: log it in incidents.jsonl. skip: also skip the update. rollback: also resume from the newest earlier
    checkpoint of a multiple of checkpoint.every, with the rows after the spike."""
    spike_score: float = setting(10.0, above=0)
    """Robust z-score of the logarithm above which a step is a spike; the value must also be at least twice the
    median."""
    max_rollbacks: int = setting(3, at_least=0)
    """Maximum number of rollbacks per start; at the next spike the run stops with status 3."""

    restarts: int = setting(0, at_least=0)
    """Maximum number of in-place restarts of all ranks per start after a fault of any rank. They resume from the newest
    checkpoint; the launcher does not notice. 0 = never. Needs --run_dir."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.hang_minutes > self.collective_minutes:
            yield (
                f"--reliability.hang_minutes is {self.hang_minutes:g}: a collective fails before the late rank is "
                f"named; allowed: at most --reliability.collective_minutes {self.collective_minutes:g}"
            )


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints. The last step always writes one."""

    every: int = setting(0, at_least=0)
    """Write a checkpoint every N steps; 0 = only at the end."""
    keep: int = setting(2, at_least=0)
    """Number of newest checkpoints to keep; only checkpoints that were read back and verified count. 0 = all."""
    keep_every: int = setting(0, at_least=0)
    """Also keep checkpoints whose step is a multiple of N; 0 = none."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy in host memory of the size of a rank's weights and moments.
    False: steps wait, and no copy is made."""
    max_failures: int = setting(3, at_least=1)
    """If a checkpoint cannot be written, for example on a full disk, the run retries at the next due step. After this
    many consecutive failures it stops with status 5."""
    best: str = ""
    """Metric whose best weights are kept as a checkpoint, written when they are measured: validation.loss,
    validation.worst (worst balanced task), validation.TASK, or with --hooks probes: probes.linear, probes.knn or
    probes.rank_me. Empty = none."""
    patience: int = setting(0, at_least=0)
    """Stop after this many measurements of `best` without an improvement; 0 = never."""
    mirror: str = ""
    """URL to upload finished checkpoints to in the background, such as s3://BUCKET/RUN; nothing is removed there. Empty
    = none."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.best.startswith("validation.") and not config.validation.every:
            yield f"--checkpoint.best is {self.best} and --validation.every 0; allowed: --validation.every N"
        if self.patience and not self.best:
            yield f"--checkpoint.patience is {self.patience} and --checkpoint.best empty; set --checkpoint.best METRIC"


@dataclass(kw_only=True)
class LoggingConfig(Section):
    """Logs and metrics during training."""

    every: int = setting(10, at_least=1)
    """Write metrics every N steps."""
    progress: bool = True
    """Show a live display on the terminal of rank 0."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`; WANDB_MODE=offline works)."""
    wandb_project: str = "trp-scale"
    """Project name on Weights & Biases."""
    wandb_entity: str = ""
    """User or team that owns the project; empty = the default of the account."""
    wandb_name: str = ""
    """Name of the run; empty = that of the run directory."""
    wandb_group: str = ""
    """Group of the run, for example its sweep; empty = none."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    tensorboard: bool = False
    """Log to TensorBoard (needs the extra `tensorboard`)."""
    profile: Annotated[str, tyro.conf.arg(metavar="START:STOP")] = ""
    """Profile steps START to STOP of rank 0; the first step is 1. A Chrome trace and a table of the ten most expensive
    operations are written to RUN_DIR/profile. Empty = none."""
    memory_snapshot: bool = False
    """Also record the GPU's memory allocations, for pytorch.org/memory_viz."""

    def profiled_steps(self) -> range:
        """Return the steps to profile; empty if there are none. Raises ValueError: `profile` is not START:STOP with 1
        <= START <= STOP."""
        if not self.profile:
            return range(0)
        first, last = (int(part) for part in self.profile.split(":"))
        if not 1 <= first <= last:
            raise ValueError(self.profile)
        return range(first, last + 1)

    def problems(self, config: Any) -> Iterator[str]:
        try:
            steps = self.profiled_steps()
        except ValueError:
            yield f"--logging.profile is {self.profile}, allowed: START:STOP, such as 20:22; the first step is 1"
            return
        if steps and steps.start > config.training.steps:
            yield f"--logging.profile is {self.profile}, allowed: up to --training.steps {config.training.steps}"
        if self.memory_snapshot and not steps:
            yield "--logging.memory_snapshot records profiled steps; allowed: with --logging.profile 20:22"


@dataclass(kw_only=True)
class Config:
    """Settings of one run. Each listed hook adds a section of its name (`run_type`)."""

    lists: ClassVar[Mapping[str, str]] = {"hooks": "hook"}
    """Settings that list components, and their role; each listed component has its own section."""

    modules: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)
    """Set by --module: user modules that register components of this run."""
    hooks: list[str] = field(default_factory=list)
    """Methods that act on each step in addition to the balancer, in the order in which they are called."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancer: Any = field(default_factory=default_settings("balancer", "minimax"), metadata={"role": "balancer"})
    """Settings of this kind of balancer."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def length_flag(self) -> str:
        """Flag to raise to continue a finished run."""
        return "--training.steps"

    def describe_derived(self, rows: int) -> Iterator[str]:
        """Yield the values that other settings have set, for the log. `rows`: training rows."""
        if self.optimizer.base_lr:
            yield f"--optimizer.base_lr {self.optimizer.base_lr:g}: learning rate {self.optimizer.lr:g}"

    @property
    def reads(self) -> str:
        """Kind of rows that the encoder reads, as in dataset.json: text or image."""
        raise NotImplementedError

    def datasets(self) -> dict[str, str]:
        """Return the settings that name data sets, each a directory or several with weights. A run checks that they
        exist before it imports torch."""
        return {"data.path": self.data.path}

    @property
    def separate_test(self) -> bool:
        """Whether the measured rows are a separate data set; otherwise they are held out of the training rows."""
        return False

    def problems(self) -> Iterator[str]:
        """Yield invalid combinations of settings, in addition to ranges and each section's problems: each line names
        the flag, its value and the allowed values."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        """Yield warnings about allowed but rarely intended settings, in addition to each section's."""
        return iter(())

    def against_compiling(self) -> Iterator[str]:
        """Yield reasons not to compile with `training.compile auto`, in addition to each section's."""
        return iter(())

    def against_capturing(self) -> Iterator[str]:
        """Yield reasons against `training.capture`, in addition to each section's."""
        return iter(())

    @classmethod
    def parts(cls, document: Mapping[str, Any], problems: list[str]) -> list[Component]:
        """Return the known components that the settings `document` list; add unknown names to `problems`."""
        listed = document.get("hooks")
        hooks, known = [str(name) for name in listed] if isinstance(listed, list) else [], names("hook")
        problems += [f"hooks: {unknown_component('hook', name)}" for name in hooks if name not in known]
        return [find("hook", name) for name in hooks if name in known]

    def absent(self, section: str) -> str:
        """Explain why this run lacks the section of a component, and which flag adds it; "" if no flag would."""
        for listed, role in self.lists.items():
            if role in listed_roles(section):
                module, _, name = listed.rpartition(".")
                now = getattr(getattr(self, module) if module else self, name)
                return f"this run has no {role} {section}; --{listed} {' '.join([*now, section])} adds it"
        return ""


@dataclass(kw_only=True)
class PretrainConfig(Config):
    """Settings of one pre-training run; each upstream task derives a class from this."""

    upstream: str = setting("")
    """Pre-training task: one of the package, or one that a module of yours registers."""
    training: PretrainTrainingConfig = field(default_factory=PretrainTrainingConfig)

    @property
    def length_flag(self) -> str:
        return "--training.epochs" if self.training.epochs else super().length_flag

    def describe_derived(self, rows: int) -> Iterator[str]:
        yield from super().describe_derived(rows)
        if self.training.epochs:
            yield f"--training.epochs {self.training.epochs:g} of {rows:,} rows: {self.training.steps:,} steps"
