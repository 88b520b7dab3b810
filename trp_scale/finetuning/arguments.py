"""The command lines of `trp-scale finetune` and `trp-scale evaluate`. What they describe is imported with the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config import RefusedError
from trp_scale.config.checks import check
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.config.loader import data_command
from trp_scale.config.run_flags import Arguments, parse_run
from trp_scale.config.settings import check_settings, setting
from trp_scale.config.upstream import AVERAGE, Weights
from trp_scale.data.mixture import require_data, require_made

SCRATCH = "scratch"
"""As --from: no pre-training, the seed's weights in the recipe's sizes."""


@dataclass(kw_only=True)
class FinetuneArguments(Arguments):
    """Fine-tune a pre-trained encoder on a downstream task, over seeds, and measure it: results.json and a table."""

    config: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)
    """The settings: the recipe's, changed by the flags."""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """The encoder: a run directory of trp-scale pretrain, an export, a directory of transformers (BERT, ViTMAE) or of
    timm (ViT); scratch: no pre-training, in the sizes of the recipe. Of a run its newest checkpoint is taken: where
    the run goes on, name the checkpoint itself to repeat the command."""
    weights: Weights = "last"
    """Of a run with the hook weight_average: average takes the average of its weights in place of the last ones."""
    seeds: int = setting(1, at_least=1)
    """Runs of each task, with training.seed, training.seed + 1, ..."""
    task: str = ""
    """GLUE: a task, several with commas between, or all; empty = the recipe's --downstream.task."""
    only: int | None = None
    """Of the runs, each task with each seed in this order, only that with this number, from 0. For job arrays; the same
    command without it makes what is missing and joins all."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of another finetune: the table gives differences to it."""


def parse_finetune(argv: Sequence[str]) -> FinetuneArguments:
    """Read the command line, take the encoder's sizes, and check all settings.

    Raises:
        RefusedError, SystemExit: as recipes.arguments.parse, or no such encoder.
    """
    arguments = parse_run(argv, FinetuneArguments, FinetuneConfig, prog="trp-scale finetune")
    config = arguments.config
    if not arguments.from_:
        raise RefusedError(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    tasks = config.tasks(arguments.task)
    require_made(config.data.path, data_command(arguments.recipe, config.data.path))
    require_data(config.datasets())
    config.require_data(tasks)
    if arguments.weights == "average":
        arguments.from_ += AVERAGE
    if arguments.from_ != SCRATCH:
        from trp_scale.finetuning.encoders import open_encoder

        open_encoder(arguments.from_).adopt(config)
    check_settings(arguments)
    if arguments.resume not in ("auto", "never"):
        raise RefusedError(
            f"--resume {arguments.resume}: allowed: auto or never; repeat --run_dir to go on with its runs"
        )
    if arguments.only is not None:
        runs = len(tasks) * arguments.seeds
        if not 0 <= arguments.only < runs:
            raise RefusedError(
                f"--only is {arguments.only}, allowed: 0 ... {runs - 1} ({len(tasks)} tasks x {arguments.seeds} seeds)"
            )
        if arguments.run_dir is None:
            raise RefusedError("--only needs --run_dir, the same for all runs: each would make a directory of its own")
    check(config)
    return arguments


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
