"""Commands that read trained runs: `report`, `reference`, `watch`, `evaluate`, `probe`, `represent`, `compare`,
`export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config import Weights
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.errors import RefusedError


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


def report(argv: Sequence[str]) -> int:
    """`trp-scale report`."""
    arguments = read(ReportArguments, argv, prog="trp-scale report")
    if arguments.images and arguments.pictures is None:
        raise RefusedError(f"--images {arguments.images[0]} needs --pictures DIR, the directory to draw into")
    from trp_scale.reporting.record import read_run
    from trp_scale.reporting.run import write_page
    from trp_scale.training.metrics import newest_run
    from trp_scale.training.report import report as table
    from trp_scale.training.sinks import list_pictures

    run_dir = arguments.run or newest_run(Path("runs"))
    run = read_run(run_dir)
    drawn: list[str] = []
    if arguments.pictures is not None:
        from trp_scale.checkpoint.export import while_training
        from trp_scale.evaluation.figures.pictures import draw_pictures

        pictures = arguments.pictures
        drawn = while_training(lambda: draw_pictures(run_dir, pictures, data=arguments.data, images=arguments.images))
    print(table(run_dir, run.history), end="")
    print("".join(f"{line}\n" for line in drawn), end="")
    print(write_page(run, [] if arguments.pictures is None else list_pictures(arguments.pictures)))
    return 0


@dataclass(kw_only=True)
class ReferenceArguments:
    """Write the losses of a run's tasks to a file for --balancer.reference_file, and the mean weights. If the tasks are
    sources, also write FILE with the suffix .txt, for --data.path: the mixture whose shares are these weights, for a
    second run with --balancer.kind proportional (DoReMi)."""

    run: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Run directory with metrics.jsonl."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """JSON file to write."""


def reference(argv: Sequence[str]) -> int:
    """`trp-scale reference`."""
    arguments = read(ReferenceArguments, argv, prog="trp-scale reference")
    from trp_scale.reporting.reference import write_reference

    print("\n".join(write_reference(arguments.run, arguments.output)))
    return 0


@dataclass(kw_only=True)
class WatchArguments(ReadsRuns):
    """Serve the page of a run (see trp-scale report) to browsers on this machine; it is updated while the run trains,
    and reloads itself. Ctrl-C ends it. Nothing is written."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Run directory."""
    port: int = 8123
    """Port of 127.0.0.1; 0 = a free one. From another machine: ssh -L 8123:127.0.0.1:8123 HOST."""


def watch(argv: Sequence[str]) -> int:
    """`trp-scale watch`."""
    arguments = read(WatchArguments, argv, prog="trp-scale watch")
    from trp_scale.reporting.watch import watch as serve

    serve(arguments.run, arguments.port)
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """`trp-scale evaluate`."""
    from trp_scale.evaluation.arguments import parse_evaluate

    arguments = parse_evaluate(argv)
    from trp_scale.checkpoint.export import while_training
    from trp_scale.evaluation.evaluate import evaluate as measure

    return while_training(lambda: measure(arguments))


def probe(argv: Sequence[str]) -> int:
    """`trp-scale probe`."""
    from trp_scale.evaluation.arguments import parse_probe

    arguments = parse_probe(argv)
    from trp_scale.checkpoint.export import while_training
    from trp_scale.evaluation.probe.command import probe as measure

    return while_training(lambda: measure(arguments))


def represent(argv: Sequence[str]) -> int:
    """`trp-scale represent`."""
    from trp_scale.evaluation.arguments import RepresentArguments

    arguments = read(RepresentArguments, argv, prog="trp-scale represent", first=("from_", "data", "output", "run"))
    from trp_scale.checkpoint.export import while_training
    from trp_scale.evaluation.figures.represent import represent as draw

    return while_training(lambda: draw(arguments))


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


def compare(argv: Sequence[str]) -> int:
    """`trp-scale compare`."""
    arguments = read(CompareArguments, argv, prog="trp-scale compare")
    if arguments.html is not None:
        from trp_scale.reporting.comparison_page import compare_as_page

        compare_as_page(arguments.runs, arguments.html, markdown_file=arguments.markdown, csv_file=arguments.csv)
        return 0
    from trp_scale.reporting.comparison import compare as put_side_by_side

    put_side_by_side(arguments.runs, markdown_file=arguments.markdown, csv_file=arguments.csv)
    return 0


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


def export(argv: Sequence[str]) -> int:
    """`trp-scale export`."""
    arguments = read(ExportArguments, argv, prog="trp-scale export")
    from trp_scale.checkpoint.export import export as write
    from trp_scale.checkpoint.export import loading_call

    checkpoint = write(
        arguments.run,
        arguments.output,
        to=arguments.to,
        image_size=arguments.image_size,
        weights=arguments.weights,
    )
    call = loading_call(arguments.output)
    print(f"{checkpoint} -> {arguments.output}\nloaded by: {call}")
    if call.startswith("timm."):
        print("without pretrained=True timm silently makes random weights")
    return 0
