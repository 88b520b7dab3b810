"""Settings of every fine-tuning run, and of image tasks. A task's own settings are in its room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trp_scale.config import Config, OptimizerConfig, TrainingConfig
from trp_scale.config.images import CropsConfig, RelativeVisionConfig
from trp_scale.config.settings import Settings, setting
from trp_scale.errors import RefusedError


@dataclass(kw_only=True)
class DownstreamConfig(Settings):
    """The task, and the length of the run."""

    task: str = ""
    """The name in tables; empty = the kind."""
    split: Literal["dev", "test", "held_out"] = "dev"
    """What tables call the measured samples: dev or held_out (a part of the training set), or test."""
    epochs: float = setting(3.0, at_least=0)
    """Passes over the training rows. They set training.steps; 0 = training.steps as given."""
    rows: int = setting(0, at_least=0)
    """Training rows that are learned from, drawn by training.seed, each label's share as in all of them; 0 = all. With
    ten balanced classes 10 is one image a class."""
    warmup_share: float = setting(0.0, at_least=0, below=1)
    """Share of the steps that warm up. It sets optimizer.warmup_steps; 0 = optimizer.warmup_steps as given."""
    classes: int = 0
    """Set by the data: width of the head's output."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.task in (".", "..") or "/" in self.task:
            yield f"--downstream.task is {self.task!r}, allowed: the name of a directory in --run_dir, without /"


@dataclass(kw_only=True)
class FinetuneConfig(Config):
    """One fine-tuning run; a task has a class derived from this, whose `downstream` has its name as `kind`. `model`
    describes the encoder: where --from gives one, it is its own."""

    downstream: DownstreamConfig = field(default_factory=DownstreamConfig)

    def tasks(self, named: str) -> list[str]:
        """Names of the tasks that one command trains, each a run of its own.

        Args:
            named: by --task; empty = the recipe's.

        Raises:
            RefusedError: there is no such task, or there is only one.
        """
        downstream = self.downstream
        if named:
            raise RefusedError(f"--task {named} is for GLUE; --downstream.kind is {downstream.kind}")
        return [downstream.task or downstream.kind]

    def against_compiling(self) -> Iterator[str]:
        yield "a fine-tuning run is short, and none was measured compiled"

    @property
    def length_flag(self) -> str:
        return "--downstream.epochs" if self.downstream.epochs > 0 else super().length_flag

    def refuse_overwritten(self) -> None:
        """Refuse a length or a warm-up that is given and would be set by the data all the same.

        Raises:
            RefusedError: naming both settings.
        """
        downstream, steps, warmup = self.downstream, self.training.steps, self.optimizer.warmup_steps
        if downstream.epochs > 0 and steps != TrainingConfig().steps:
            raise RefusedError(
                f"--training.steps {steps} is set by --downstream.epochs {downstream.epochs:g}; allowed: "
                "--downstream.epochs 0 beside it, or other epochs alone"
            )
        if downstream.warmup_share > 0 and warmup not in (0, OptimizerConfig().warmup_steps):
            raise RefusedError(
                f"--optimizer.warmup_steps {warmup} is set by --downstream.warmup_share {downstream.warmup_share:g}; "
                "allowed: --downstream.warmup_share 0 beside it, or another share alone"
            )

    def require_data(self, tasks: Sequence[str]) -> None:
        """Refuse data that is missing, of all tasks before the first is trained for hours."""


@dataclass(kw_only=True)
class ImageDownstreamConfig(DownstreamConfig):
    """The task, the length of the run and the measured images."""

    test_path: str = ""
    """A data set to measure on, all of it. Empty: the rows of --data.path that --data.validation_fraction holds out."""
    drop_path: float = setting(0.0, at_least=0, below=1)
    """Probability that the last block's branch is left out for an image. It grows linearly from 0 at the first block
    (Huang et al. 2016)."""
    positions: Literal["recomputed", "interpolated", "learned"] = "recomputed"
    """Sine-cosine positions of an encoder, on a grid that may be larger than in pre-training. recomputed: sine and
    cosine of the grid's own coordinates, fixed. interpolated: the pre-training grid, stretched (bicubic), fixed.
    learned: the stretched grid is where they begin, and they are trained, as in the fine-tuning code of MAE and AdPE.
    Positions that are weights already are always stretched and trained."""
    learned_positions: bool = False
    """Set by --from: the encoder's positions are weights (a supervised ViT's), not fixed sines and cosines."""
    pretraining_grid: int = 0
    """Set by --from: patches along each side of the images that the encoder was pre-trained on."""


@dataclass(kw_only=True)
class ImageTaskConfig(FinetuneConfig):
    """One fine-tuning run on images; `vision` describes the encoder, as `model` does.

    Attributes:
        cuts_crops: the task cuts its training images as `crops` says, not only to its size.
    """

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
        """Patches along each side of an image."""
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
            yield f"--crops.scaled_decoding is on, allowed for {self.downstream.kind}: off; its images are read whole"
        if not self.separate_test and not self.data.validation_fraction:
            yield (
                "--data.validation_fraction is 0 and --downstream.test_path is empty: nothing is left to measure on; "
                "give one of them"
            )
