"""Commands that read trained runs: `report`, `reference`, `watch`, `evaluate`, `probe`, `represent`, `compare`,
`export`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trp_scale.config.flags import ReadsRuns, read

if TYPE_CHECKING:
    from trp_scale.reporting.measurement import Measurement


def report(argv: Sequence[str]) -> int:
    """`trp-scale report`."""
    from trp_scale.evaluation.arguments import ReportArguments

    arguments = read(ReportArguments, argv, prog="trp-scale report")
    from trp_scale.evaluation.reports import report as make

    make(arguments).show()
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
    from trp_scale.evaluation.evaluate import evaluate as measure

    return show_measurement(measure(arguments))


def probe(argv: Sequence[str]) -> int:
    """`trp-scale probe`."""
    from trp_scale.evaluation.arguments import parse_probe

    arguments = parse_probe(argv)
    from trp_scale.evaluation.probe.command import probe as measure

    return show_measurement(measure(arguments))


def show_measurement(result: Measurement) -> int:
    """Print a result on rank 0; return its exit status."""
    from trp_scale.distributed.launchers import discover

    if discover(os.environ).rank == 0:
        result.show()
    return result.status


def represent(argv: Sequence[str]) -> int:
    """`trp-scale represent`."""
    from trp_scale.evaluation.arguments import RepresentArguments

    arguments = read(RepresentArguments, argv, prog="trp-scale represent", first=("from_", "data", "output", "run"))
    from trp_scale.checkpoint.export import while_training
    from trp_scale.evaluation.figures.represent import represent as draw

    return while_training(lambda: draw(arguments))


def compare(argv: Sequence[str]) -> int:
    """`trp-scale compare`."""
    from trp_scale.evaluation.arguments import CompareArguments

    arguments = read(CompareArguments, argv, prog="trp-scale compare")
    from trp_scale.evaluation.reports import compare as put_side_by_side

    put_side_by_side(arguments).show()
    return 0


def export(argv: Sequence[str]) -> int:
    """`trp-scale export`."""
    from trp_scale.evaluation.arguments import ExportArguments

    arguments = read(ExportArguments, argv, prog="trp-scale export")
    from trp_scale.evaluation.reports import export as write

    write(arguments).show()
    return 0
