"""Command lines of `trp-scale report`, `compare` and `export`. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config import Weights
from trp_scale.config.flags import ReadsRuns


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
