"""Command lines of `trp-scale evaluate`, `probe` and `represent`, and settings of the hooks that probe the encoder and
draw pictures during training; all are read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trp_scale.config import AVERAGE, RefusedError, Weights
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.config.registry import MetricPlot, component, describe_metrics
from trp_scale.config.settings import Section, Settings, check_settings, find_problems, setting
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


@dataclass(kw_only=True)
class RepresentArguments(ReadsRuns):
    """Look at what an encoder has learned: how much more alike images of one class are than images of two, the
    representations in a plane, attention maps; of a run of ours its reconstructions and masks; of fine-tuned runs what
    they decide by. Writes PNG files, representation.json and one page, index.html."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")]
    """The encoder: a run directory of trp-scale pretrain or finetune, an export, a directory of transformers (ViTMAE)
    or of timm (ViT, such as DINO's); scratch: weights drawn at random, in the sizes of --recipe, for comparison."""
    weights: Weights = "last"
    """Of a run with the hook weight_average, in --from: average takes the average of its weights in place of the last
    ones."""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Sharded images to look at. Figures about classes need images with classes."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; made if it is not there."""
    run: Annotated[list[Path], tyro.conf.arg(metavar="DIR")] = field(default_factory=list)
    """Fine-tuned runs of one kind of task, each the run directory of a seed (DIR/TASK/seed_N): what their task draws of
    them, side by side. Classifiers have Grad-CAM; segmentation and depth predicted maps."""
    images: int = 1024
    """Largest number of images that figures, plane and averaged attention are made of; 0 = all."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """For --from scratch: a recipe of images with the encoder's sizes; a run's config.yaml is one too."""
    image_size: int = 0
    """Side of the images in pixels, a multiple of the patches'; 0 = that of the pre-training."""
    encoder_positions: FrozenPositions = "recomputed"
    """Fixed positions on images of another size than in pre-training. recomputed: sine and cosine of their own
    coordinates. interpolated: the pre-training grid, stretched (bicubic), as in MAE's code."""
    seen: Literal["centre", "whole"] = "centre"
    """Part of an image that the encoder sees. centre: the central square, image_size of image_size / 0.875 pixels.
    whole: the whole image, squashed to a square."""
    shown: int = 6
    """Images in the pictures that show images."""
    pooling: Pooling = "mean"
    """The representation of an image: the mean of its patch tokens, or the class token, after the last norm."""
    plane: Literal["pca", "tsne"] = "pca"
    """How representations are laid out in a plane: principal components, or t-SNE."""
    block: int = 0
    """Block whose attention is shown, from 0; negative ones count from the last."""
    positions: Annotated[list[str], tyro.conf.arg(metavar="ROW,COLUMN")] = field(default_factory=list)
    """Patches whose attention is shown, such as 3,3 3,10; empty = three by three over the image."""


ROBUSTNESS_TITLES = {
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "sketch": "ImageNet-Sketch",
    "c": "ImageNet-C",
}
"""By the word before the equals sign. A: Hendrycks et al. 2021, natural adversarial examples; R: Hendrycks et al.
2021, renditions; Sketch: Wang et al. 2019; C: Hendrycks and Dietterich 2019."""


@dataclass(frozen=True, kw_only=True)
class RobustnessSet:
    """Attributes: name: a, r, sketch or c; directory: its shards."""

    name: str
    directory: Path

    @property
    def title(self) -> str:
        """Published name."""
        return ROBUSTNESS_TITLES[self.name]


def parse_robustness_sets(words: Sequence[str]) -> list[RobustnessSet]:
    """["a=DIR", "c=DIR"] -> the sets, in that order.

    Raises:
        RefusedError: an unknown set, one given twice, or a directory that is not there.
    """
    sets: list[RobustnessSet] = []
    allowed = ", ".join(f"{name}=DIR ({title})" for name, title in ROBUSTNESS_TITLES.items())
    for word in words:
        name, equals, directory = word.partition("=")
        name = name.strip().lower()
        if name == "b":
            raise RefusedError(
                f"--robustness {word}: there is no ImageNet-B. MLO-MAE's Table 15 names one without saying what it is, "
                f"and no data set of that name was published; allowed: {allowed}"
            )
        if name not in ROBUSTNESS_TITLES or not equals or not directory:
            raise RefusedError(f"--robustness {word}: allowed: {allowed}")
        if name in {chosen.name for chosen in sets}:
            raise RefusedError(f"--robustness {word}: {ROBUSTNESS_TITLES[name]} is given twice; give each set once")
        if not Path(directory).is_dir():
            raise RefusedError(f"--robustness {word}: there is no such directory")
        sets.append(RobustnessSet(name=name, directory=Path(directory)))
    return sets


@dataclass(kw_only=True)
class EvaluateArguments(ReadsRuns):
    """Measure what `trp-scale finetune` or `pretrain` has trained, without training it further: results.json and a
    table.

    Of a run of pre-training, finished or not, these are the mean losses of its tasks, and which is worst: on the rows
    that it holds out, or on all of --data, with the masks that a row always has. Of a fine-tuned run they are the
    figures of its downstream tasks.

    Classifiers can also be measured on sets that ask how robust they are, each sharded first from its folders:

        trp-scale shard-images --inputs imagenet-a --output shards/a --split test
        for level in imagenet-c/*/*; do
            trp-scale shard-images --inputs $level --output shards/c/${level#imagenet-c/} --split test
        done
        trp-scale evaluate --run RUN --robustness a=shards/a --robustness c=shards/c

    a, r and sketch (ImageNet-A, -R, -Sketch): accuracy among the classes that the set has, matched by the names of
    their folders. c (ImageNet-C, DIR/CORRUPTION/SEVERITY): mean corruption error over 15 corruptions of 5 severities,
    on the images as they are.
    """

    run: Annotated[Path, tyro.conf.arg(metavar="DIR", aliases=["--finetuned"])] = Path()
    """A run directory of trp-scale pretrain or a checkpoint in it; or a directory of trp-scale finetune, with all its
    tasks and seeds, or one of its seeds. Under torchrun say --finetuned: it takes --run for one of its own flags,
    wherever it stands."""
    weights: Weights = "last"
    """Of runs with the hook weight_average: average measures the average of the weights in place of the last ones."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Data to measure on, all of it: shards, or for GLUE its directory; empty = what the run was measured on, of a run
    of pre-training what it holds out."""
    rows: int = setting(0, at_least=0)
    """Of a run of pre-training: rows that are measured at most, the first as they are stored; 0 = all."""
    background: Annotated[str, tyro.conf.arg(metavar="CLASS,CLASS")] = ""
    """Of a run of a masked autoencoder, with --data of images with segmentation maps: measure in place of losses where
    the masks lie, as the share of what is masked that shows an object, which is every class but these."""
    images: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Detection: folder of the images of --data."""
    split: Literal["dev", "test"] | None = None
    """What the measured rows are called; for GLUE, which of its files are read. None = as in the run; test for images
    of --data and for all that is given to a run of pre-training."""
    robustness: Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="a|r|sketch|c=DIR")] = field(
        default_factory=list
    )
    """A set of another kind of images, in place of --data. May be given several times."""
    classes: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """For --robustness: a data set with the names of the model's classes, if the run's checkpoint does not have
    them."""
    partial: bool = False
    """For --robustness c: take the mean over the corruptions and severities that are there, and call it partial,
    instead of refusing."""
    predictions: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Save what a fine-tuned run predicts there, with several seeds in DIR/seed_N. GLUE: the files that its server
    takes, such as CoLA.tsv and MNLI-mm.tsv; the test sets without labels by --split test. Classification: TASK.csv.
    Segmentation: TASK/KEY.png, the number of each pixel's class. Depth: TASK/KEY.png of 16 bits, in the unit of the
    data's maps. Detection: TASK.json in COCO's form of results."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for results.json; None = RUN/evaluations/NAME, after what is measured."""
    micro_size: int = setting(0, at_least=0)
    """Rows of one forward pass on one rank; 0 = the run's batch.micro_size."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory with another results.json: the table gives differences to it."""
    local_rank: int = -1
    """Passed by the deepspeed launcher; ranks are read from the environment."""


def parse_evaluate(argv: Sequence[str]) -> EvaluateArguments:
    """Read and check the command line.

    Raises:
        RefusedError: flags that cannot be, or contradict each other.
        SystemExit: 2 for an unknown flag, 0 after --help.
    """
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
    if not arguments.run.is_dir():
        raise RefusedError(f"--run {arguments.run}: there is no such directory")
    if arguments.robustness and (arguments.data or arguments.split):
        raise RefusedError("--robustness names its own data, which is of the split test; leave out --data and --split")
    if arguments.robustness and arguments.predictions:
        raise RefusedError("--predictions is not for --robustness; give one of its sets as --data, of the same classes")
    if arguments.background and not arguments.data:
        raise RefusedError(
            "--background is for images with segmentation maps, which --data names; allowed: --data DIR with it"
        )
    check_settings(arguments)
    parse_robustness_sets(arguments.robustness)
    return arguments


@component("hook", "probes", "trp_scale.evaluation.probe.online:OnlineProbes")
@dataclass(kw_only=True)
class ProbesSettings(Settings):
    """Measure the encoder while it trains: nearest neighbours and a linear probe on some labelled rows, and RankMe."""

    every: int = setting(0, at_least=0)
    """Steps from one measurement to the next; the last step has one too. 0 = a tenth through the run the first, from
    then on as many as keep them at 1 % of the run's time."""
    data: str = ""
    """Labelled rows to learn from: shards of images with classes, or for an encoder of text the GLUE directory.
    Empty = the run's own images."""
    test: str = ""
    """Shards of images that are measured. Empty = those that the run holds out, or a tenth of other data. Of GLUE it
    is the development set."""
    task: str = "sst2"
    """Of GLUE: cola, sst2, mrpc, qqp, mnli, qnli, rte or wnli."""
    rows: int = setting(1000, at_least=2)
    """Labelled rows that the classifiers learn from; fewer where there are fewer."""
    measured: int = setting(1000, at_least=1)
    """Rows that they are measured on, and RankMe is of."""
    neighbours: int = setting(20, at_least=1)
    """Nearest rows that vote, each by exp(cosine / 0.07) (Wu et al. 2018)."""
    inverse_penalty: float = setting(1.0, above=0)
    """C of the logistic regression on standardised features, which is the linear probe."""
    seen: Literal["centre", "whole"] = "centre"
    """Part of an image that the encoder sees, as --seen of trp-scale probe."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.reads != "text":
            return
        if not self.data:
            yield "--probes.data is empty, allowed for an encoder of text: the GLUE directory"
        if self.test:
            yield f"--probes.test is {self.test}, allowed for an encoder of text: empty, GLUE has development sets"
        if self.task not in (allowed := ("cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli")):
            yield f"--probes.task is {self.task!r}, allowed: {', '.join(allowed)}"


@component("hook", "pictures", "trp_scale.evaluation.figures.pictures:OnlinePictures")
@dataclass(kw_only=True)
class PicturesSettings(Settings):
    """Draw reconstructions, positions and masks of a run on images from its checkpoints, into RUN/pictures."""

    every: int = setting(1, at_least=1)
    """Each Nth checkpoint of a start is drawn, by rank 0 on its CPU, while the others wait at the next step."""
    rows: int = setting(6, at_least=1)
    """Held-out images that are drawn."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.reads == "text":
            yield "--hooks has pictures, which are of images; this run learns from text: leave it out"
        elif hasattr(config, "downstream"):
            yield "--hooks has pictures, which are of pre-training; this run fine-tunes: leave it out"


describe_metrics(
    "probes",
    title="Probes",
    look_for=(
        "Whether the features get better for a task that is not trained, while the loss falls. RankMe that falls is a "
        "sign of collapse."
    ),
    plots=[
        MetricPlot(
            title="Accuracy", names=("knn", "linear"), unit="share", note="Nearest neighbours, and a linear probe."
        ),
        MetricPlot(title="RankMe", names=("rank_me",), note="Directions that the features fill."),
        MetricPlot(title="Cost", names=("share",), unit="share", note="Share of this start's time that probes took."),
    ],
)
