"""The command line of `trp-scale probe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trp_scale.config import RefusedError
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.config.settings import Section, find_problems, setting
from trp_scale.config.upstream import AVERAGE, Weights
from trp_scale.finetuning.arguments import SCRATCH

Method = Literal["logistic", "linear", "knn"]
Pooling = Literal["mean", "class"]
FrozenPositions = Literal["recomputed", "interpolated"]


@dataclass(kw_only=True)
class LinearSettings(Section):
    """A linear layer behind a batch norm without affine, learned by LARS without weight decay; defaults are MAE's (He
    et al. 2022, A.1, Table 10)."""

    epochs: int = setting(90, at_least=1)
    """Passes over the training images."""
    warmup_epochs: int = setting(10, at_least=0)
    """Epochs in which the learning rate grows to its peak. After them it falls by a cosine to 0."""
    batch_size: int = setting(16384, at_least=2)
    """Images of a step; where there are fewer, all of them."""
    base_lr: float = setting(0.1, above=0)
    """Peak learning rate for 256 images of a step; it grows with the images of a step."""
    crops: Literal["cached", "fresh"] = "cached"
    """cached: features of each whole image, computed once. fresh: features of a random crop, drawn anew in each epoch
    and mirrored half of the time, as in MAE; the encoder then runs over all images in every epoch."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.warmup_epochs >= self.epochs:
            yield (
                f"--linear.warmup_epochs is {self.warmup_epochs}, allowed: below --linear.epochs {self.epochs}, or the "
                "learning rate would never reach its peak"
            )


@dataclass(kw_only=True)
class LogisticSettings(Section):
    """scikit-learn's LogisticRegression on standardised features: the fast one."""

    inverse_penalty: float = setting(1.0, above=0)
    """C of the logistic regression. A larger one penalises weights less."""
    iterations: int = setting(1000, at_least=1)
    """Largest number of iterations of the solver."""


@dataclass(kw_only=True)
class KnnSettings(Section):
    """The nearest training images vote, each by exp(cosine / temperature) (Wu et al. 2018; values of DINO, Caron et al.
    2021)."""

    k: int = setting(20, at_least=1)
    """Nearest neighbours that vote."""
    temperature: float = setting(0.07, above=0)
    """Temperature of the votes. A lower one gives nearer images more weight."""


@dataclass(kw_only=True)
class ProbeArguments(ReadsRuns):
    """Measure how far the features of a frozen encoder tell classes apart: results.json and a table. Of an encoder of
    text, --task names tasks of GLUE, in the directory --data; its classifiers are logistic. Of one of images, features
    are computed once, under torchrun by all ranks together, and kept: the same encoder on the same images is not run
    again. A run that learned its masks also gets MLO-MAE's own figure, of the head that its masks were learned with."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """The encoder: a run directory, an export, a directory of transformers (ViTMAE) or of timm (ViT); scratch: weights
    drawn at random, in the sizes of --recipe, for comparison."""
    weights: Weights = "last"
    """Of a run with the hook weight_average: average takes the average of its weights in place of the last ones."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Shards of training images with classes; with --task the GLUE directory."""
    task: str = ""
    """Encoders of text: a task of GLUE, several with commas between, or all. Development sets are measured."""
    rows: int = setting(0, at_least=0)
    """With --task: training rows that the classifier learns from, drawn by the seed, each label's share as in all of
    them; 0 = all."""
    max_length: int = 128
    """With --task: pieces that are read of a sentence, at most as many as the encoder has positions."""
    test: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Shards of the images that accuracy is measured on: the same classes, other images. None = what
    --validation_fraction holds out of --data."""
    method: Method = "logistic"
    """logistic: fast. linear: as MAE probes with --pooling class and --linear.crops fresh. knn: nothing is learned."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """For --from scratch: a recipe of images with the encoder's sizes; a run's config.yaml is one too."""
    image_size: int = 0
    """Side of the images in pixels, a multiple of the patches'; 0 = that of the pre-training."""
    encoder_positions: FrozenPositions = "recomputed"
    """Fixed positions on images of another size than in pre-training. recomputed: sine and cosine of their own
    coordinates. interpolated: the pre-training grid, stretched (bicubic), as in MAE's code."""
    pooling: Pooling = "mean"
    """mean: of the patch tokens, normalised by the encoder's last norm. class: the class token."""
    per_class: int = setting(0, at_least=0)
    """Training images of each class that the classifier learns from, drawn by the seed; 0 = all. Not with
    --linear.crops fresh."""
    seeds: int = setting(1, at_least=1)
    """Number of probes, with seeds --seed, --seed + 1, ... A seed draws the linear layer, the images of --per_class,
    and the weights of --from scratch."""
    seed: int = setting(0, at_least=0)
    """The first seed."""
    validation_fraction: float = 0.1
    """Without --test: share of the images that are held out, by their blocks' names, as in a run."""
    split: Literal["dev", "test"] | None = None
    """What the measured images are called; None = test with --test, else dev."""
    seen: Literal["centre", "whole"] = "centre"
    """Part of an image that the encoder sees. centre: the shorter side is resized to image_size / centre_share, and the
    central square is taken. whole: the whole image, squashed to a square."""
    centre_share: float = setting(0.875, above=0, at_most=1)
    """Side of the central square over the image's shorter side: 224 of 256 pixels."""
    linear: LinearSettings = field(default_factory=LinearSettings)
    logistic: LogisticSettings = field(default_factory=LogisticSettings)
    knn: KnnSettings = field(default_factory=KnnSettings)
    batch_size: int = setting(64, at_least=1)
    """Images of one forward pass on one rank."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder's forward passes."""
    workers: int = setting(1, at_least=0)
    """Processes that decode images, for each rank; 0 = this process decodes. More than one is used by --linear.crops
    fresh alone."""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/features")
    """Directory where features are kept."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for results.json; None = runs/probe-METHOD-DATE-TIME."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory with another probe's results.json: the table gives differences to it."""
    local_rank: int = -1
    """Passed by the deepspeed launcher; ranks are read from the environment."""

    def recipe_name(self) -> str:
        """Name of the recipe, for the run directory."""
        return f"probe-{self.method}"


def parse_probe(argv: Sequence[str]) -> ProbeArguments:
    """Read and check the command line.

    Raises:
        RefusedError: flags that cannot be; all of them in one message.
        SystemExit: 2 for an unknown flag, 0 after --help.
    """
    first = (
        "from_",
        "data",
        "test",
        "method",
        "recipe",
        "task",
        "rows",
        "image_size",
        "pooling",
        "per_class",
        "seeds",
        "run_dir",
    )
    arguments = read(ProbeArguments, argv, prog="trp-scale probe", first=first)
    if problems := list(_problems(arguments)):
        raise RefusedError("\n".join(problems))
    if arguments.weights == "average":
        arguments.from_ += AVERAGE
    return arguments


def _problems(arguments: ProbeArguments) -> list[str]:
    problems: list[str] = []
    scratch = arguments.from_ == SCRATCH
    if arguments.task:
        of_images = [
            ("--method", arguments.method != "logistic"),
            ("--from scratch", scratch),
            ("--test", arguments.test is not None),
            ("--per_class", arguments.per_class > 0),
        ]
        problems += [
            f"--task {arguments.task} is of text, where {flag} has no meaning"
            for flag, is_given in of_images
            if is_given
        ]
    elif arguments.rows:
        problems.append(f"--rows {arguments.rows} is for --task; of images allowed: --per_class")
    if not arguments.from_:
        problems.append(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    if not arguments.data:
        problems.append("--data is missing; allowed: a directory that trp-scale shard-images wrote, with classes")
    if scratch and not arguments.recipe:
        problems.append(
            "--from scratch needs --recipe, for the encoder's sizes: a name, or a .yaml file such as RUN/config.yaml"
        )
    if arguments.recipe and not scratch:
        problems.append(
            f"--recipe {arguments.recipe} is for --from scratch; --from {arguments.from_} has its own sizes"
        )
    if not arguments.task and arguments.test is None and not 0 < arguments.validation_fraction < 1:
        problems.append(
            f"--validation_fraction is {arguments.validation_fraction} and there is no --test: nothing is left to "
            "measure on; allowed: more than 0 and less than 1, or --test DIR"
        )
    problems += find_problems(arguments)
    if arguments.per_class and arguments.method == "linear" and arguments.linear.crops == "fresh":
        problems.append(f"--per_class {arguments.per_class} is for kept features; allowed: --linear.crops cached")
    if (
        arguments.seeds > 1
        and not scratch
        and arguments.method != "linear"
        and not (arguments.per_class or arguments.rows)
    ):
        problems.append(
            f"--seeds {arguments.seeds}: --method {arguments.method} has nothing random in it, so that every seed "
            "would give the same figure and a spread of 0; allowed: 1, or --method linear, --per_class K, or "
            "--from scratch; probe the runs of several seeds one by one"
        )
    return problems
