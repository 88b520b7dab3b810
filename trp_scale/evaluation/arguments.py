"""Command lines of `trp-scale evaluate`, `probe`, `represent`, `report`, `compare` and `export`, and settings of the
hooks `probes` and `pictures`. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trp_scale.config import AVERAGE, RefusedError, Weights
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.config.registry import (
    MetricPlot,
    Section,
    Settings,
    check_settings,
    component,
    describe_metrics,
    find_problems,
    setting,
)
from trp_scale.finetuning.arguments import SCRATCH

Method = Literal["logistic", "linear", "knn"]
Pooling = Literal["mean", "class"]
FrozenPositions = Literal["recomputed", "interpolated"]


@dataclass(kw_only=True)
class LinearSettings(Section):
    """Linear layer after a batch norm without affine parameters, trained by LARS without weight decay. Defaults are
    MAE's (He et al. 2022, A.1, Table 10)."""

    epochs: int = setting(90, at_least=1)
    """Epochs over the training images."""
    warmup_epochs: int = setting(10, at_least=0)
    """Linear warm-up epochs; then the learning rate decays to 0 by a cosine."""
    batch_size: int = setting(16384, at_least=2)
    """Images per step; all images if there are fewer."""
    base_lr: float = setting(0.1, above=0)
    """Peak learning rate for 256 images per step; scaled linearly with the batch size."""
    crops: Literal["auto", "cached", "fresh"] = "auto"
    """cached: features of each whole image, computed once. fresh: features of a new random crop in each epoch, with
    horizontal flips; the encoder then runs over all images in every epoch. auto: fresh with --protocol mae."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.warmup_epochs >= self.epochs:
            yield (
                f"--linear.warmup_epochs is {self.warmup_epochs}; allowed: less than --linear.epochs {self.epochs}, or "
                "the learning rate never reaches its peak"
            )


@dataclass(kw_only=True)
class LogisticSettings(Section):
    """Logistic regression of scikit-learn on standardised features. Fast."""

    inverse_penalty: float = setting(1.0, above=0)
    """C of the logistic regression. Larger values regularise less."""
    iterations: int = setting(1000, at_least=1)
    """Maximum number of solver iterations."""


@dataclass(kw_only=True)
class KnnSettings(Section):
    """Weighted nearest neighbours: each neighbour votes with exp(cosine / temperature) (Wu et al. 2018; defaults of
    DINO, Caron et al. 2021)."""

    k: int = setting(20, at_least=1)
    """Number of neighbours."""
    temperature: float = setting(0.07, above=0)
    """Temperature of the votes. Lower values favour nearer images."""


@dataclass(kw_only=True)
class ReadsEncoder(ReadsRuns):
    """Base of commands that read a frozen encoder."""

    weights: Weights = "last"
    """For a run with the hook weight_average: average uses the averaged weights instead of the last ones."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """For --from scratch: an image recipe with the encoder's sizes, or the config.yaml of a run."""
    image_size: int = 0
    """Image side in pixels, a multiple of the patch size; 0 = as in pre-training."""
    encoder_positions: FrozenPositions = "recomputed"
    """Fixed positions for image sizes other than in pre-training. recomputed: sine-cosine positions of the new
    grid. interpolated: bicubic interpolation of the pre-training grid, as in MAE's code."""


@dataclass(kw_only=True)
class ProbeArguments(ReadsEncoder):
    """Train a classifier on the features of a frozen encoder, and write results.json and a table. For a text
    encoder, --task names tasks of GLUE in the directory --data; its classifiers are logistic. Image features are
    computed once, by all ranks under torchrun, and cached. A run with learned masks also gets MLO-MAE's figure: the
    accuracy of the head that its masks were learned with."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """The encoder: a run directory, an export, a directory of transformers (ViTMAE) or of timm (ViT); scratch:
    random weights with the sizes of --recipe, as a reference."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Shards of training images with classes; with --task the GLUE directory."""
    task: str = ""
    """Text encoders: a task of GLUE, several separated by commas, or all. Development sets are measured."""
    rows: int = setting(0, at_least=0)
    """With --task: number of training rows, a stratified random subset drawn by the seed; 0 = all."""
    max_length: int = 128
    """With --task: maximum tokens per sentence, limited by the encoder's positions."""
    test: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Shards of test images with the same classes. None = the part of --data that --validation_fraction holds out."""
    method: Method = "logistic"
    """logistic: fast. linear: a layer trained by LARS, see --protocol. knn: nothing is trained."""
    protocol: Literal["own", "mae"] = "own"
    """For --method linear. mae: the protocol of MAE's authors: the class token after the last norm, random crops, the
    defaults of --linear, and the central crop of test images. own: what the other flags set."""
    pooling: Literal["auto", "mean", "class"] = "auto"
    """mean: of the patch tokens after the last norm. class: the class token. auto: class with --protocol mae, else
    mean."""
    per_class: int = setting(0, at_least=0)
    """Training images per class, drawn by the seed; 0 = all. Not with --linear.crops fresh."""
    seeds: int = setting(1, at_least=1)
    """Number of probes, with seeds --seed, --seed + 1, ... The seed sets the linear layer, the images of
    --per_class, and the weights of --from scratch."""
    seed: int = setting(0, at_least=0)
    """First seed."""
    validation_fraction: float = 0.1
    """Without --test: share of the images to hold out, by block names, as in a run."""
    split: Literal["dev", "test"] | None = None
    """Name of the measured split; None = test with --test, else dev."""
    groups: Annotated[str, tyro.conf.arg(metavar="FILE|COLUMN")] = ""
    """Report the accuracy by group, and the worst: a file for images, with --task a column of its files, as
    --downstream.groups of trp-scale finetune."""
    least_group: int = setting(10, at_least=1)
    """Smaller groups are reported, but are not the worst."""
    seen: Literal["centre", "whole"] = "centre"
    """Visible part of an image. centre: the shorter side is resized to image_size / centre_share, then the centre
    is cropped. whole: the whole image, resized to a square."""
    centre_share: float = setting(0.875, above=0, at_most=1)
    """Side of the centre crop over the shorter side of the image: 224 of 256 pixels."""
    linear: LinearSettings = field(default_factory=LinearSettings)
    logistic: LogisticSettings = field(default_factory=LogisticSettings)
    knn: KnnSettings = field(default_factory=KnnSettings)
    batch_size: int = setting(64, at_least=1)
    """Images per forward pass and rank."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the encoder's forward passes."""
    workers: int = setting(1, at_least=0)
    """Processes per rank that decode images; 0 = the main process. Only --linear.crops fresh uses more than one."""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/features")
    """Directory of cached features."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for results.json; None = runs/probe-METHOD-DATE-TIME."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory with the results.json of another probe; the table shows differences from it."""
    local_rank: int = -1
    """Set by the deepspeed launcher; ignored, since ranks come from the environment."""


def parse_probe(argv: Sequence[str]) -> ProbeArguments:
    """Read and check the command line. Raises RefusedError with all invalid flags, and SystemExit."""
    first = (
        "from_",
        "data",
        "test",
        "method",
        "protocol",
        "recipe",
        "task",
        "rows",
        "image_size",
        "pooling",
        "per_class",
        "seeds",
        "run_dir",
    )
    return check_probe(read(ProbeArguments, argv, prog="trp-scale probe", first=first))


def check_probe(arguments: ProbeArguments) -> ProbeArguments:
    """Check the flags, and resolve auto in place. Raises RefusedError with all invalid ones."""
    of_mae = arguments.protocol == "mae"
    if arguments.pooling == "auto":
        arguments.pooling = "class" if of_mae else "mean"
    if arguments.linear.crops == "auto":
        arguments.linear.crops = "fresh" if of_mae else "cached"
    problems = _problems(arguments)
    protocol = (
        ("method", arguments.method, "linear"),
        ("pooling", arguments.pooling, "class"),
        ("linear.crops", arguments.linear.crops, "fresh"),
        ("seen", arguments.seen, "centre"),
        ("centre_share", arguments.centre_share, 0.875),
    )
    for flag, value, allowed in protocol if of_mae else ():
        if value != allowed:
            problems.append(f"--{flag} is {value}; allowed with --protocol mae: {allowed}")
    if problems:
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
            ("--protocol", arguments.protocol != "own"),
            ("--from scratch", scratch),
            ("--test", arguments.test is not None),
            ("--per_class", arguments.per_class > 0),
        ]
        problems += [
            f"--task {arguments.task} is for text encoders; leave out {flag}"
            for flag, is_given in of_images
            if is_given
        ]
    elif arguments.rows:
        problems.append(f"--rows {arguments.rows} is for --task; for images use --per_class")
    if not arguments.from_:
        problems.append(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    if not arguments.data:
        problems.append("--data is missing; expected: a directory of trp-scale shard-images, with classes")
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
            f"--validation_fraction is {arguments.validation_fraction} without --test: no images to measure on; "
            "allowed: more than 0 and less than 1, or --test DIR"
        )
    problems += find_problems(arguments)
    if arguments.per_class and arguments.method == "linear" and arguments.linear.crops == "fresh":
        problems.append(
            f"--per_class {arguments.per_class} is for cached features; leave out --linear.crops fresh, --protocol mae"
        )
    if (
        arguments.seeds > 1
        and not scratch
        and arguments.method != "linear"
        and not (arguments.per_class or arguments.rows)
    ):
        problems.append(
            f"--seeds {arguments.seeds}: --method {arguments.method} is deterministic: all seeds give the same figure; "
            "allowed: 1, or --method linear, --per_class K, or --from scratch; probe runs of several seeds one by one"
        )
    return problems


@dataclass(kw_only=True)
class RepresentArguments(ReadsEncoder):
    """Show what an encoder has learned: similarity within and between classes, representations in a plane,
    attention maps; for a pre-training run of trp-scale reconstructions and masks; for fine-tuned runs their
    decisions. Writes PNG files, representation.json and the page index.html."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")]
    """The encoder: a run directory of trp-scale pretrain or finetune, an export, a directory of transformers
    (ViTMAE) or of timm (ViT, such as DINO's); scratch: random weights with the sizes of --recipe, as a reference."""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Sharded images. Class similarity needs images with classes."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Output directory; created if it does not exist."""
    run: Annotated[list[Path], tyro.conf.arg(metavar="DIR")] = field(default_factory=list)
    """Fine-tuned runs of one kind of task, as run directories of a seed (DIR/TASK/seed_N), drawn next to each
    other: classifiers with Grad-CAM, segmentation and depth with predicted maps."""
    images: int = setting(1024, at_least=0)
    """Maximum number of images for figures, plane and average attention; 0 = all."""
    seen: Literal["centre", "whole"] = "centre"
    """Visible part of an image. centre: the shorter side is resized to image_size / 0.875, then the centre is
    cropped. whole: the whole image, resized to a square."""
    shown: int = setting(6, at_least=1)
    """Number of images in pictures."""
    pooling: Pooling = "mean"
    """Representation of an image: mean of the patch tokens after the last norm, or the class token."""
    plane: Literal["pca", "tsne"] = "pca"
    """Projection to the plane: principal components, or t-SNE."""
    block: int = 0
    """Block with the shown attention, from 0; negative numbers count from the last."""
    positions: Annotated[list[str], tyro.conf.arg(metavar="ROW,COLUMN")] = field(default_factory=list)
    """Patches with the shown attention, such as 3,3 3,10; empty = three by three over the image."""


@dataclass(kw_only=True)
class ReportArguments(ReadsRuns):
    """Print a table of a running or finished run: loss of each task at the start and now, and its weight. Also write
    RUN/report.html, a single offline file (needs the extra `pictures`): curves of losses, weights, adversary, masks and
    speed, incidents, settings, and next steps."""

    run: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Run directory with metrics.jsonl; default: the run in runs/ with the newest metrics."""
    pictures: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """For an image run with a checkpoint: draw reconstructions, and positions before and after the adversary's
    perturbation, as PNG files into this directory (needs the extra `pictures`); the page shows them."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """For pictures: present directory of the run's data, if it was moved."""
    images: Annotated[list[Path], tyro.conf.arg(metavar="FILE [FILE ...]")] = field(default_factory=list)
    """For pictures: draw these files (JPEG, PNG or WebP; central squares) instead of held-out images of the run's data.
    With several modalities only the image is used."""


@dataclass(kw_only=True)
class CompareArguments(ReadsRuns):
    """Compare runs on downstream tasks: mean and spread over seeds, the worst task of each run, and whether differences
    to the first run exceed those between seeds. Results of different metrics or splits (dev, test) are never compared.
    Pre-training runs: final loss of each task, the worst one, steps and speed."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(name="run", metavar="RUN [RUN ...]")]
    """Directories with results.json of trp-scale finetune, evaluate or probe; the first is the baseline. Or run
    directories of pretrain; with --html both."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write an offline page to this file (needs the extra `pictures`): results, final figures, overlaid curves, and
    settings that differ."""
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the tables to this file as Markdown."""
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures to this file as CSV, one line per task and run."""


@dataclass(kw_only=True)
class ExportArguments(ReadsRuns):
    """Write a run's weights to a directory that other libraries load."""

    run: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Run directory (its newest complete checkpoint), or a checkpoint in it."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must be empty or not exist."""
    to: Literal["hf", "timm"] = "hf"
    """hf: for transformers' from_pretrained (BertForPreTraining or ViTMAEForPreTraining). timm: encoder of an image
    run, for timm.create_model("local-dir:DIR", pretrained=True); without pretrained=True timm silently makes random
    weights. timm has no relative positions; an encoder with them is exported with a module for torch.hub.load("DIR",
    "encoder", source="local")."""
    weights: Weights = "last"
    """For runs with the hook weight_average: average exports the average of the weights instead of the last weights."""
    image_size: int = 224
    """timm: side of the images in pixels; fixed positions are written for their grid."""


ROBUSTNESS_TITLES = {
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "sketch": "ImageNet-Sketch",
    "c": "ImageNet-C",
}
"""Titles by set name. A: Hendrycks et al. 2021, natural adversarial examples; R: Hendrycks et al. 2021, renditions;
Sketch: Wang et al. 2019; C: Hendrycks and Dietterich 2019."""


def parse_robustness_sets(words: Sequence[str]) -> dict[str, Path]:
    """Parse ["a=DIR", "c=DIR"]: directories of shards by set name. Raises RefusedError for an unknown or repeated set,
    or a missing directory."""
    sets: dict[str, Path] = {}
    allowed = ", ".join(f"{name}=DIR ({title})" for name, title in ROBUSTNESS_TITLES.items())
    for word in words:
        name, equals, directory = word.partition("=")
        name = name.strip().lower()
        if name not in ROBUSTNESS_TITLES or not equals or not directory:
            raise RefusedError(f"--robustness {word}: allowed: {allowed}")
        if name in sets:
            raise RefusedError(f"--robustness {word}: {ROBUSTNESS_TITLES[name]} is given twice; allowed: once")
        if not Path(directory).is_dir():
            raise RefusedError(f"--robustness {word}: no such directory")
        sets[name] = Path(directory)
    return sets


@dataclass(kw_only=True)
class EvaluateArguments(ReadsRuns):
    """Measure a run of `trp-scale finetune` or `pretrain` without training, and write results.json and a table.

    For a pre-training run these are the mean losses of its tasks, and the worst task: on its held-out rows or on all of
    --data, with the fixed validation masks. For a fine-tuned run these are the figures of its downstream tasks.

    Classifiers can also be measured on robustness sets. Shard each from its folders first:

        trp-scale shard-images --inputs imagenet-a --output shards/a --split test
        for level in imagenet-c/*/*; do
            trp-scale shard-images --inputs $level --output shards/c/${level#imagenet-c/} --split test
        done
        trp-scale evaluate --run RUN --robustness a=shards/a --robustness c=shards/c

    a, r and sketch (ImageNet-A, -R, -Sketch): accuracy among the classes of the set, matched by folder names. c
    (ImageNet-C, DIR/CORRUPTION/SEVERITY): mean corruption error over 15 corruptions of 5 severities, on the unchanged
    images.
    """

    run: Annotated[Path, tyro.conf.arg(metavar="DIR", aliases=["--finetuned"])] = Path()
    """A run directory of trp-scale pretrain or a checkpoint in it; or a directory of trp-scale finetune, with all
    tasks and seeds, or one of its seeds. Under torchrun use --finetuned: torchrun takes --run as its own flag."""
    weights: Weights = "last"
    """For runs with the hook weight_average: average uses the averaged weights instead of the last ones."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Data to measure on: shards, or the GLUE directory; empty = the validation data of the run."""
    rows: int = setting(0, at_least=0)
    """For pre-training runs: maximum number of rows, in stored order; 0 = all."""
    background: Annotated[str, tyro.conf.arg(metavar="CLASS,CLASS")] = ""
    """For runs of a masked autoencoder, with --data of images with segmentation maps: measure, instead of losses,
    the share of masked pixels that show an object, which is every class except these."""
    images: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Detection: folder of the images of --data."""
    groups: Annotated[str, tyro.conf.arg(metavar="FILE|COLUMN")] = ""
    """Classifiers: groups of the measured rows, as --downstream.groups of trp-scale finetune; empty = as in the run."""
    least_group: int = setting(0, at_least=0)
    """Smaller groups are reported, but are not the worst; 0 = as in the run."""
    split: Literal["dev", "test"] | None = None
    """Name of the measured split; for GLUE, the files to read. None = as in the run; test for images of --data and
    for --data of a pre-training run."""
    robustness: Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="a|r|sketch|c=DIR")] = field(
        default_factory=list
    )
    """Robustness set, instead of --data. May be repeated."""
    classes: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """For --robustness: a data set with the names of the model's classes, if it was trained on numbered ones."""
    partial: bool = False
    """For --robustness c: accept missing corruptions and severities, and mark the mean as partial."""
    predictions: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for the predictions of a fine-tuned run; with several seeds DIR/seed_N. GLUE: files for its server,
    such as CoLA.tsv and MNLI-mm.tsv; --split test selects the unlabelled test sets. Classification: TASK.csv.
    Segmentation: TASK/KEY.png with class numbers. Depth: TASK/KEY.png, 16 bits, in the unit of the data. Detection:
    TASK.json in COCO's results format."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for results.json; None = RUN/evaluations/NAME, with a name for what is measured."""
    micro_size: int = setting(0, at_least=0)
    """Rows per forward pass and rank; 0 = the run's batch.micro_size."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory with another results.json; the table shows differences from it."""
    local_rank: int = -1
    """Set by the deepspeed launcher; ignored, since ranks come from the environment."""


def parse_evaluate(argv: Sequence[str]) -> EvaluateArguments:
    """Read and check the command line. Raises RefusedError for invalid or contradicting flags, and SystemExit."""
    arguments = read(
        EvaluateArguments,
        argv,
        prog="trp-scale evaluate",
        first=("run", "data", "split", "robustness", "predictions", "output"),
    )
    if not any(word.partition("=")[0] in ("--run", "--finetuned") for word in argv):
        raise RefusedError(
            "--run is missing; allowed: a run of trp-scale pretrain, a directory of trp-scale finetune, or one of its "
            "seeds"
        )
    return check_evaluate(arguments)


def check_evaluate(arguments: EvaluateArguments) -> EvaluateArguments:
    """Check the flags. Raises RefusedError for invalid or contradicting ones."""
    if not arguments.run.is_dir():
        raise RefusedError(f"--run {arguments.run}: no such directory")
    if arguments.robustness and (arguments.data or arguments.split):
        raise RefusedError("--robustness names its own data, with the split test; leave out --data and --split")
    if arguments.robustness and arguments.predictions:
        raise RefusedError("--predictions is not for --robustness; give a set with the same classes as --data")
    if arguments.background and not arguments.data:
        raise RefusedError("--background needs images with segmentation maps; give them with --data DIR")
    check_settings(arguments)
    parse_robustness_sets(arguments.robustness)
    return arguments


@component("hook", "probes", "trp_scale.evaluation.probe.online:OnlineProbes")
@dataclass(kw_only=True)
class ProbesSettings(Settings):
    """Measure the encoder during training: nearest neighbours and a linear probe on labelled rows, and RankMe."""

    every: int = setting(0, at_least=0)
    """Steps between measurements; the last step is always measured. 0 = first after a tenth of the run, then as
    often as 1 % of the run's time allows."""
    data: str = ""
    """Labelled rows to train on: shards of images with classes, or the GLUE directory for a text encoder. Empty =
    the run's images."""
    test: str = ""
    """Shards of test images. Empty = the run's held-out images, or a tenth of other data. GLUE uses the development
    set."""
    task: str = "sst2"
    """For GLUE: cola, sst2, mrpc, qqp, mnli, qnli, rte or wnli."""
    rows: int = setting(1000, at_least=2)
    """Maximum number of labelled training rows."""
    measured: int = setting(1000, at_least=1)
    """Maximum number of rows for accuracy and RankMe."""
    neighbours: int = setting(20, at_least=1)
    """Number of neighbours; each votes with exp(cosine / 0.07) (Wu et al. 2018)."""
    inverse_penalty: float = setting(1.0, above=0)
    """C of the linear probe, a logistic regression on standardised features."""
    seen: Literal["centre", "whole"] = "centre"
    """Visible part of an image, as --seen of trp-scale probe."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.reads != "text":
            return
        if not self.data:
            yield "--probes.data is empty; expected for a text encoder: the GLUE directory"
        if self.test:
            yield f"--probes.test is {self.test}; allowed for a text encoder: empty, GLUE has development sets"
        if self.task not in (allowed := ("cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli")):
            yield f"--probes.task is {self.task!r}, allowed: {', '.join(allowed)}"


@component("hook", "pictures", "trp_scale.evaluation.figures.pictures:OnlinePictures")
@dataclass(kw_only=True)
class PicturesSettings(Settings):
    """Draw reconstructions, positions and masks from checkpoints into RUN/pictures."""

    every: int = setting(1, at_least=1)
    """Draw every Nth checkpoint since the start. Rank 0 draws on its CPU; other ranks wait at the next step."""
    rows: int = setting(6, at_least=1)
    """Number of held-out images."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.reads == "text":
            yield "--hooks has pictures, which is for images; this run trains on text: leave it out"
        elif hasattr(config, "downstream"):
            yield "--hooks has pictures, which is for pre-training; this is fine-tuning: leave it out"


describe_metrics(
    "probes",
    title="Probes",
    look_for=("Whether the features improve for a task that is not trained. A falling RankMe indicates collapse."),
    plots=[
        MetricPlot(
            title="Accuracy", names=("knn", "linear"), unit="share", note="Nearest neighbours and a linear probe."
        ),
        MetricPlot(title="RankMe", names=("rank_me",), note="Effective rank of the features."),
        MetricPlot(title="Cost", names=("share",), unit="share", note="Share of the time since the start."),
    ],
)
