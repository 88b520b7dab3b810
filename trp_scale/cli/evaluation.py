"""Commands that read trained runs: `report`, `reference`, `watch`, `evaluate`, `probe`, `represent`, `compare`,
`export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.cli.main import command, work_and_show
from trp_scale.config.flags import ReadsRuns, read
from trp_scale.evaluation.arguments import (
    CompareArguments,
    ExportArguments,
    ReportArguments,
    RepresentArguments,
    parse_evaluate,
    parse_probe,
)

report = command("report", ReportArguments, "trp_scale.evaluation.reports:report")
compare = command("compare", CompareArguments, "trp_scale.evaluation.reports:compare")
export = command("export", ExportArguments, "trp_scale.evaluation.reports:export")


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
    return work_and_show("trp_scale.evaluation.evaluate:evaluate", parse_evaluate(argv))


def probe(argv: Sequence[str]) -> int:
    """`trp-scale probe`."""
    return work_and_show("trp_scale.evaluation.probe.command:probe", parse_probe(argv))


def represent(argv: Sequence[str]) -> int:
    """`trp-scale represent`."""
    arguments = read(RepresentArguments, argv, prog="trp-scale represent", first=("from_", "data", "output", "run"))
    from trp_scale.evaluation.figures.represent import represent as draw

    return draw(arguments)
