"""Every setting of a run: nested, typed, keyword-only dataclasses; here those that every run has.

The string under a field is its help text on the command line (`--section.field value`). A field whose name is a Python
keyword ends in an underscore here and nowhere else (`crops.from`). This package imports nothing of ours; reading and
checking are in `loader.py` and `checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import tyro.conf

from trp_scale.config.registry import Component, default_settings, find, listed_roles, names, unknown_component
from trp_scale.config.settings import Section, near_divisors, setting
from trp_scale.errors import RefusedError as RefusedError

Weights = Literal["last", "average"]
"""Which weights of a run: as its last step left them, or the average that its hook weight_average kept of them."""

AVERAGE = "@average"
"""Behind the path of a run or a checkpoint: the average, where `model.weights` names its weights."""


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
    """Start from another library's weights: a safetensors file, or a directory with model.safetensors. Allowed:
    transformers' BertForPreTraining or ViTMAEForPreTraining, timm's ViT (its encoder), MultiMAE. A run directory of
    trp-scale pretrain gives its last weights, with @average behind it their average. Empty = from the seed."""
    weights_names: bool = False
    """Where those weights are another model's: name every tensor that is missing, unexpected or of another shape."""

    @property
    def block_parameters(self) -> int:
        """Parameters of the blocks' matrices, which are nearly all of a large encoder: 4 d^2 of attention and 2 d f of
        the feed-forward layer in each."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    def problems(self, config: Any) -> Iterator[str]:
        if self.heads > 0 and self.hidden_size % self.heads:
            yield (
                f"--model.heads is {self.heads} and does not divide --model.hidden_size {self.hidden_size}; "
                f"allowed, for example: {near_divisors(self.hidden_size, self.heads)}"
            )


@dataclass(kw_only=True)
class TextModelConfig(ModelConfig):
    """The encoder of text."""

    max_positions: int = setting(512, at_least=8)
    """Longest sequence the position table can hold, special tokens included."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of hidden states and attention probabilities."""


@dataclass(kw_only=True)
class DataConfig(Section):
    """Where rows come from and in which order."""

    path: str = ""
    """Directory with dataset.json, or several with weights: 'books:0.7=/a,wiki:0.3=/b'."""
    workers: int = setting(1, at_least=0)
    """Loader processes per rank, at most as many as it has CPUs; 0 fetches in the training process. The three sources
    of learned masks share them; each has at least one."""
    prefetch: int = setting(4, at_least=1)
    """Micro-batches each worker prepares ahead."""
    blocks_per_group: int = setting(16, at_least=1)
    """Blocks whose rows are shuffled together. Part of the order: a resumed run cannot change it."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the blocks held out for validation, chosen by a hash of their keys."""
    max_corrupt_blocks: int = setting(0, at_least=0)
    """Most unreadable blocks (text) or images that are left out and reported. One more stops the run on all ranks."""
    verify: bool = True
    """Compare the checksum of each block at its first reading, and of each image. Those of depth and segmentation maps
    are always compared."""

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
    """Different maskings per row, used in turn by epoch; 0 = a fresh one each epoch."""


@dataclass(kw_only=True)
class BatchConfig(Section):
    """Sizes in rows. Accumulation is derived: global_size / (micro_size x ranks)."""

    global_size: int = setting(256, at_least=1)
    """Rows per optimizer step over all ranks."""
    micro_size: int | Literal["auto"] = setting("auto", at_least=1)
    """Rows per forward pass on one rank; the result does not depend on it. auto: the largest that divides a rank's
    share of the global batch and fits; on a CPU one that keeps the cores busy (training/micro_size.py)."""

    @property
    def micro_rows(self) -> int:
        """`micro_size` as the number that a run has made of it."""
        if self.micro_size == "auto":
            raise ValueError("batch.micro_size is auto: no run has chosen a number yet")
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

    steps: int = setting(1_000_000, at_least=1, at_most=1_000_000_000)
    """Optimizer steps in all."""
    seed: int = setting(0, at_least=0)
    """The only source of randomness: order, masks, pairs, initial weights and dropout follow from it."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; master weights stay fp32. fp16 needs a GPU and DeepSpeed."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """What the forward and backward pass read. bf16, with precision bf16: a rounded copy of the master weights, made
    once a step; fewer kernels and bytes than autocast, which keeps layer norms and sums in fp32. FSDP2 gathers it.
    With DeepSpeed its file says it (bf16.enabled)."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """What ranks send each other of the gradients. bf16 halves the bytes and rounds the sum; FSDP2 sums micro-batches
    so too. With DeepSpeed its file says it (communication_data_type)."""
    tf32: bool = False
    """On a GPU, multiply fp32 matrices with factors rounded to TF32's 10 bits: forwards in fp32, and those of learned
    masks, which stay in fp32 whatever the precision. Masks then need --multilevel.difference 0.1."""
    max_hours: float = setting(0.0, at_least=0)
    """Stop with a checkpoint after this many hours of this process; 0 = no limit."""
    max_skipped_steps: int = setting(10, at_least=0)
    """Stop with a checkpoint after more skipped steps than this among the last 1,000. A step is skipped when its loss
    or gradient is not finite, or a spike (reliability.spikes); the host knows of it one step later."""
    deterministic: bool = False
    """Deterministic kernels on the GPU (slower); needed for a bit-exact resume there."""
    compile: Literal["auto", "none", "blocks", "whole"] = "auto"
    """torch.compile, over static shapes. blocks: each block of the model by itself; blocks of one form are compiled
    once, and on several ranks gradients still travel while the backward pass runs. whole: the model as one graph, on
    plain and ddp with its losses. Neither with ZeRO stage 3. auto: blocks where a pre-training run on GPUs can have it,
    else none, and the log why."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What a block keeps for its backward pass. full: its inputs; it is computed twice, a third more arithmetic.
    selective: matrix products and attention too; norms and activations are computed twice. none: all. The result is
    the same."""

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
                "--training.activation_checkpointing is selective and --training.compile blocks, which chooses what a "
                "block keeps by itself; allowed: none or full"
            )

    def against_compiling(self, config: Any) -> Iterator[str]:
        if self.activation_checkpointing == "selective":
            yield "--training.activation_checkpointing selective chooses by operations, which a graph hides"


@dataclass(kw_only=True)
class FsdpConfig(Section):
    """Where --engine fsdp keeps weights, gradients and moments; the result is the same."""

    shard_ranks: int = setting(0, at_least=0)
    """Ranks that share one copy, neighbours by number; the others hold copies of it, and only gradients travel between
    copies. The ranks of a node: what is gathered stays inside it. 0 = all ranks, one copy."""
    offload: bool = False
    """Keep weights, gradients and moments in host memory, where the optimizer then runs; a block's weights come to the
    GPU when it computes. Slower, for models that would not fit."""
    offload_directory: str = ""
    """With offload: a directory on a local disk, such as an NVMe drive. Weights and moments are files there, 12 bytes a
    parameter over all ranks, that are gone with their process; host memory has those in use. Empty = host memory."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.offload_directory and not self.offload:
            yield f"--fsdp.offload_directory {self.offload_directory}: goes with --fsdp.offload"


@dataclass(kw_only=True)
class MegatronConfig(Section):
    """How --engine megatron cuts matrices over ranks; the result is the same."""

    tensor_parallel: int = setting(1, at_least=1)
    """Ranks that share each large matrix, neighbours by number on one node; must divide the ranks of a node, the heads
    and the width of the feed-forward layers. The batch is split over the groups of so many ranks."""
    shard_moments: bool = True
    """Each of the ranks that split the batch has the optimizer's moments of some rows of each matrix, updates these
    rows, and sends them to the others (ZeRO stage 1). False: all have all moments, and make the same update."""
    sequence_parallel: bool = False
    """Between attention and feed-forward each of the ranks that share matrices has some of the tokens: norms, dropout
    and sums take a part of the memory, and about 30 % more bytes travel between these ranks. Tokens need not divide."""


WITHOUT_END = ("constant", "inverse_sqrt")
"""Schedules that the number of steps has no part in."""


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its schedule (TRP 001, Table 4)."""

    kind: Literal["adamw", "lamb", "sgd"] = "adamw"
    """adamw; lamb, for batches of many thousand rows: each matrix moves by lr times its own length (You et al. 2020);
    or plain gradient descent (for checks that must not divide by a gradient's size)."""
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
    schedule: Literal["linear", "cosine", "constant", "inverse_sqrt"] = "linear"
    """Shape after warm-up. linear and cosine decay to min_lr. inverse_sqrt falls with the root of the step and, as
    constant, knows no last step: a run can be made longer (Vaswani et al. 2017, eq. 3)."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of the decay; of inverse_sqrt the least."""
    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Step at which linear and cosine reach min_lr. after_last_step: one step after the run, as in transformers and in
    MAE's code, so that the last step still learns. last_step: the last step, as in runs without this setting."""
    clipping: float = setting(0.0, at_least=0)
    """Largest gradient norm; 0 = no clipping."""
    layer_decay: float = setting(1.0, above=0, at_most=1)
    """Fine-tuning: each block's learning rate is this times that of the block after it, and the embeddings' this times
    the first block's. The head learns at lr (Clark et al. 2020; MAE: 0.75 for ViT-L, 0.65 for ViT-B). 1 = all at lr."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.min_lr > self.lr > 0:
            yield f"--optimizer.min_lr is {self.min_lr}, allowed: at most --optimizer.lr {self.lr}"

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.warmup_steps >= config.training.steps and self.schedule not in WITHOUT_END:
            yield (
                f"--optimizer.warmup_steps {self.warmup_steps} is not below --training.steps {config.training.steps}: "
                f"the learning rate never reaches --optimizer.lr {self.lr:g}"
            )


@dataclass(kw_only=True)
class ValidationConfig(Section):
    """Losses on the held-out rows."""

    every: int = setting(0, at_least=0)
    """Validate each N steps and after the last; 0 = never."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.every and not config.data.validation_fraction and not config.separate_test:
            yield (
                f"--validation.every is {self.every} but --data.validation_fraction is 0: nothing is held out; "
                "allowed: --validation.every 0, or a fraction such as 0.01"
            )


@dataclass(kw_only=True)
class ReliabilityConfig(Section):
    """Handling of failures outside the run itself."""

    hang_minutes: float = setting(10.0, at_least=0)
    """Without a step for so long, or for 20 times the median step if that is longer, a run hangs: each rank writes what
    it does to RUN_DIR/hangs, the late one is named, and all end with status 4. Three times as long at the start. 0 =
    never."""
    collective_minutes: float = setting(30.0, above=0)
    """How long ranks wait for one another at the start, and in one collective, before it fails."""
    worker_seconds: float = setting(300.0, above=0)
    """Where no micro-batch comes from the loader's workers for so long, they are killed, and new ones make the same
    micro-batches. Less than hang_minutes."""
    max_corrupt_steps: int = setting(10, at_least=1)
    """Steps in a row that each meet another unreadable block before the run stops: then it is the storage."""
    spikes: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """What follows on a step whose loss, or a task's, or whose gradient norm is far above those of the last 128 steps:
    warn: a line in incidents.jsonl. skip: the step also moves nothing. rollback: the run also goes back to the newest
    checkpoint of a multiple of checkpoint.every before it, and on with the rows after it."""
    spike_score: float = setting(10.0, above=0)
    """Robust z-score, of logarithms, from which a step is a spike; it also has at least twice the median."""
    max_rollbacks: int = setting(3, at_least=0)
    """Rollbacks of one start; at the next spike the run stops with status 3."""

    restarts: int = setting(0, at_least=0)
    """How often in one start all ranks begin again in their places after a fault of any of them. They go on from the
    newest checkpoint, and the launcher sees nothing of it. 0 = never. Needs --run_dir."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.hang_minutes > self.collective_minutes:
            yield (
                f"--reliability.hang_minutes is {self.hang_minutes:g}: a collective fails before the late rank is "
                f"named; allowed: at most --reliability.collective_minutes {self.collective_minutes:g}"
            )


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """When checkpoints are written. The last step always writes one."""

    every: int = setting(0, at_least=0)
    """Write one each N steps; 0 = only at the end."""
    keep: int = setting(2, at_least=0)
    """Newest checkpoints that are kept, those whose bytes were read back and are whole; 0 = all."""
    keep_every: int = setting(0, at_least=0)
    """Beside those, each checkpoint whose step is a multiple of N stays; 0 = none."""
    asynchronous: bool = True
    """Steps go on while a checkpoint is written from a copy in host memory, of the size of a rank's weights and
    moments. False: they wait, and there is no copy."""
    max_failures: int = setting(3, at_least=1)
    """A checkpoint that cannot be written, as on a full disk, is tried again at the next step that is due. After so
    many in a row the run stops, with status 5."""
    best: str = ""
    """Figure whose best weights stay as a checkpoint, written when they are measured: validation.loss, validation.worst
    (of the balanced tasks), validation.TASK, or with --hooks probes probes.linear, probes.knn or probes.rank_me. Empty
    = none."""
    patience: int = setting(0, at_least=0)
    """Measurements of `best` in a row without a better one after which the run ends; 0 = it does not."""
    mirror: str = ""
    """URL that finished checkpoints are copied to behind the steps, such as s3://BUCKET/RUN; none is removed there.
    Empty = none."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.best.startswith("validation.") and not config.validation.every:
            yield f"--checkpoint.best is {self.best}, allowed with --validation.every N: 0 found"
        if self.patience and not self.best:
            yield f"--checkpoint.patience is {self.patience}, allowed with --checkpoint.best FIGURE: it is empty"


@dataclass(kw_only=True)
class LoggingConfig(Section):
    """Reports while the run is training."""

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
    profile: Annotated[str, tyro.conf.arg(metavar="START:STOP")] = ""
    """Trace steps START to STOP of rank 0; the first step is 1. A Chrome trace and a table of the ten costliest
    operations go to profile/ of the run directory. Empty = none."""
    memory_snapshot: bool = False
    """With the trace, what the GPU's allocator did, for pytorch.org/memory_viz."""

    def profiled_steps(self) -> range:
        """The steps to trace; empty if there are none.

        Raises:
            ValueError: `profile` is not START:STOP with 1 <= START <= STOP.
        """
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
            yield "--logging.memory_snapshot is of the steps that are traced; allowed: with --logging.profile 20:22"


@dataclass(kw_only=True)
class Config:
    """One run. A hook that is listed has a section of its name beside these (`run_type`)."""

    lists: ClassVar[Mapping[str, str]] = {"hooks": "hook"}
    """Settings that list components, and of which role; each of these has a section of its own."""

    modules: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)
    """Set by --module: modules of your own whose components this run may use."""
    hooks: list[str] = field(default_factory=list)
    """Methods that act on each step beside the balancer, in the order in which they are called."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancer: Any = field(default_factory=default_settings("balancer", "minimax"), metadata={"role": "balancer"})
    """Settings of the balancer of this kind."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def length_flag(self) -> str:
        """Flag to raise to continue a finished run."""
        return "--training.steps"

    @property
    def reads(self) -> str:
        """Kind of the rows that the encoder reads, as dataset.json has it: text or image."""
        raise NotImplementedError

    def datasets(self) -> dict[str, str]:
        """The settings that name data sets with dataset.json, each a directory or several with weights; that they are
        there is seen before what trains is imported."""
        return {"data.path": self.data.path}

    @property
    def separate_test(self) -> bool:
        """Whether the measured rows are a data set of their own, rather than held out of the training rows."""
        return False

    def problems(self) -> Iterator[str]:
        """Yield combinations that no run can have, beside ranges and the problems of each section: each line names the
        flag, the value and the allowed values."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        """Yield warnings about allowed but rarely intended settings, beside those of each section."""
        return iter(())

    def against_compiling(self) -> Iterator[str]:
        """Yield reasons not to compile with `training.compile auto`, beside those of each section."""
        return iter(())

    @classmethod
    def parts(cls, document: Mapping[str, Any], problems: list[str]) -> list[Component]:
        """The components that the settings `document` list, as far as there are such; the others are problems."""
        listed = document.get("hooks")
        hooks, known = [str(name) for name in listed] if isinstance(listed, list) else [], names("hook")
        problems += [f"hooks: {unknown_component('hook', name)}" for name in hooks if name not in known]
        return [find("hook", name) for name in hooks if name in known]

    def absent(self, section: str) -> str:
        """Explain why this run lacks the section of a component, and which flag adds it; "" if no list would."""
        for listed, role in self.lists.items():
            if role in listed_roles(section):
                module, _, name = listed.rpartition(".")
                now = getattr(getattr(self, module) if module else self, name)
                return f"this run has no {role} {section}; --{listed} {' '.join([*now, section])} adds it"
        return ""


@dataclass(kw_only=True)
class PretrainConfig(Config):
    """One pre-training run; what the upstream task `upstream` has of its own is in a class derived from this."""

    upstream: str = setting("")
    """What the encoder learns from; a recipe's, or a name that a module of yours registers."""
