"""Settings of all fine-tuning runs and of image tasks. Each task's own settings are in its room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trp_scale.config import Config, OptimizerConfig, TrainingConfig
from trp_scale.config.images import CropsConfig, RelativeVisionConfig
from trp_scale.config.registry import Settings, setting
from trp_scale.errors import RefusedError


@dataclass(kw_only=True)
class DownstreamConfig(Settings):
    """Downstream task, and length of the run."""

    task: str = ""
    """Name in tables; empty = the kind."""
    split: Literal["dev", "test", "held_out"] = "dev"
    """Name of the measured split in tables: dev or held_out (part of the training set), or test."""
    epochs: float = setting(3.0, at_least=0)
    """Passes over the training rows; sets training.steps. 0 = use training.steps."""
    rows: int = setting(0, at_least=0)
    """Number of training rows to use, sampled by training.seed with the label shares of the whole set; 0 = all. With
    ten balanced classes, 10 is one image per class."""
    warmup_share: float = setting(0.0, at_least=0, below=1)
    """Share of the steps used for warm-up; sets optimizer.warmup_steps. 0 = use optimizer.warmup_steps."""
    classes: int = 0
    """Set by the data: number of outputs of the head."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.task in (".", "..") or "/" in self.task:
            yield f"--downstream.task is {self.task!r}, allowed: the name of a directory in --run_dir, without /"


@dataclass(kw_only=True)
class GroupDownstreamConfig(DownstreamConfig):
    """Classification task with groups of rows. If `groups` is set, each balancer except uniform balances the losses of
    the groups: --balancer.kind group_dro is group DRO (Sagawa et al. 2020)."""

    groups: str = ""
    """Report the accuracy by group, and the worst. Images: a CSV file with columns file, label and group, or the file
    of Waterbirds or CelebA; FILE:COLUMN pairs the label with another column. GLUE: a column of the files."""
    group_sampling: Literal["rows", "balanced"] = "rows"
    """rows: each training row is used once per epoch. balanced: each group gives the same number of rows."""
    least_group: int = setting(10, at_least=1)
    """Smaller groups of measured rows are reported, but are not the worst."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.group_sampling == "balanced" and (not self.groups or self.rows):
            yield (
                f"--downstream.group_sampling is balanced, --downstream.groups {self.groups or 'empty'} and "
                f"--downstream.rows {self.rows}; allowed with it: a file or column of groups, and all rows (0)"
            )


@dataclass(kw_only=True)
class FinetuneConfig(Config):
    """Settings of one fine-tuning run. Each task derives a class whose `downstream.kind` is the task's name. `model`
    describes the encoder; --from replaces it by the encoder's settings."""

    downstream: DownstreamConfig = field(default_factory=DownstreamConfig)

    def tasks(self, named: str) -> list[str]:
        """Return the names of the tasks that one command trains, one run each. `named`: value of --task; empty = the
        recipe's task. Raises RefusedError: no such task, or a kind with only one task."""
        downstream = self.downstream
        if named:
            raise RefusedError(f"--task {named} is for GLUE; --downstream.kind is {downstream.kind}")
        return [downstream.task or downstream.kind]

    def against_compiling(self) -> Iterator[str]:
        yield "a fine-tuning run is short, and none was measured compiled"

    def against_capturing(self) -> Iterator[str]:
        yield "the shapes of fine-tuning batches differ"

    @property
    def length_flag(self) -> str:
        return "--downstream.epochs" if self.downstream.epochs > 0 else super().length_flag

    def refuse_overwritten(self) -> None:
        """Refuse an explicit number of steps or warm-up steps that `downstream` would overwrite. Raises RefusedError:
        naming both settings."""
        downstream, steps, warmup = self.downstream, self.training.steps, self.optimizer.warmup_steps
        if downstream.epochs > 0 and steps != TrainingConfig().steps:
            raise RefusedError(
                f"--training.steps {steps} is set by --downstream.epochs {downstream.epochs:g}; allowed: "
                "--downstream.epochs 0 with it, or another --downstream.epochs without it"
            )
        if downstream.warmup_share > 0 and warmup not in (0, OptimizerConfig().warmup_steps):
            raise RefusedError(
                f"--optimizer.warmup_steps {warmup} is set by --downstream.warmup_share {downstream.warmup_share:g}; "
                "allowed: --downstream.warmup_share 0 with it, or another share without it"
            )

    def require_data(self, tasks: Sequence[str]) -> None:
        """Refuse missing data of any task before the first one trains for hours."""


@dataclass(kw_only=True)
class ImageDownstreamConfig(DownstreamConfig):
    """Image task, length of the run, and measured images."""

    test_path: str = ""
    """Data set to measure on. Empty = the rows of --data.path held out by --data.validation_fraction."""
    drop_path: float = setting(0.0, at_least=0, below=1)
    """Drop-path probability of the last block. It grows linearly from 0 at the first block (Huang et al. 2016)."""
    positions: Literal["recomputed", "interpolated", "learned"] = "recomputed"
    """Sine-cosine positions of an encoder on a grid that may be larger than in pre-training. recomputed: computed for
    the new grid, fixed. interpolated: the pre-training grid, resized (bicubic), fixed. learned: the resized grid, then
    trained, as in the fine-tuning code of MAE and AdPE. Positions that are already weights are always resized and
    trained."""
    learned_positions: bool = False
    """Set by --from: the encoder's positions are weights (supervised ViT), not fixed sines and cosines."""
    pretraining_grid: int = 0
    """Set by --from: patches per side of the pre-training images."""


@dataclass(kw_only=True)
class ImageTaskConfig(FinetuneConfig):
    """Settings of one fine-tuning run on images; `vision` describes the encoder, like `model`. `cuts_crops`: the task
    crops its training images by `crops`; otherwise it uses only `crops.size`."""

    cuts_crops: ClassVar[bool] = False

    vision: RelativeVisionConfig = field(default_factory=RelativeVisionConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    downstream: ImageDownstreamConfig = field(default_factory=ImageDownstreamConfig)

    @property
    def reads(self) -> str:
        return "image"

    def datasets(self) -> dict[str, str]:
        test = self.downstream.test_path
        return super().datasets() | ({"downstream.test_path": test} if test else {})

    @property
    def separate_test(self) -> bool:
        return bool(self.downstream.test_path)

    @property
    def grid(self) -> int:
        """Patches per side of an image."""
        return self.crops.size // self.vision.patch_size

    @property
    def trains_positions(self) -> bool:
        """Whether the encoder's positions are a parameter."""
        return self.downstream.learned_positions or self.downstream.positions == "learned"

    def problems(self) -> Iterator[str]:
        size, patch_size = self.crops.size, self.vision.patch_size
        if size < 1 or size % patch_size:
            yield f"--crops.size is {size}, allowed: multiples of the encoder's patches, {patch_size} pixels"
        if self.crops.scaled_decoding and not self.cuts_crops:
            yield f"--crops.scaled_decoding is on, allowed for {self.downstream.kind}: off; it reads whole images"
        if not self.separate_test and not self.data.validation_fraction:
            yield (
                "--data.validation_fraction is 0 and --downstream.test_path is empty: no rows to measure on; set one "
                "of them"
            )
