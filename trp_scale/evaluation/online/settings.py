"""Settings of the hooks that probe the encoder and draw pictures during training; `--help` reads them without torch.
The settings stand here, where `--help` reads them without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trp_scale.config.registry import MetricPlot, component, describe_metrics
from trp_scale.config.settings import Settings, setting


@component("hook", "probes", "trp_scale.evaluation.online.probes:OnlineProbes")
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


@component("hook", "pictures", "trp_scale.evaluation.online.pictures:OnlinePictures")
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
