"""Probes of the encoder while it trains.

At a measurement the weights are gathered as for an export, an encoder made of them reads some labelled rows, and rank 0
fits what `trp-scale probe` fits: nearest neighbours (Wu et al. 2018) and a logistic regression. The run's model takes
no part, so that nothing of the training changes, on any engine. RankMe (Garrido et al. 2023, eq. 1) needs no labels:

    RankMe = exp(-sum_k p_k log p_k),     p_k = sigma_k / sum_j sigma_j + 1e-7

with the singular values sigma of the measured rows' features: how many directions they use, from 1 to their width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import on_rank_zero
from trp_scale.evaluation.online.labelled_rows import Pair, open_rows
from trp_scale.evaluation.online.settings import ProbesSettings
from trp_scale.evaluation.probe.arguments import KnnSettings, LogisticSettings
from trp_scale.evaluation.probe.classifiers import (
    accuracy,
    logistic_regression,
    nearest_neighbours,
    require_scikit_learn,
)
from trp_scale.evaluation.probe.features import Features

SHARE = 0.01
"""Of the run's time that measurements take where `every` is 0."""

FIRST = 0.1
"""Share of the run's steps before the first measurement where `every` is 0."""


def rank_me(features: Features) -> float:
    """The effective rank of features [n, D], from 1 to min(n, D)."""
    sigma = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    p = sigma / sigma.sum() + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


class OnlineProbes(Hook):
    """Measures the encoder every so many steps; see the head of this file.

    Args:
        settings: of the probes.
        run: of the run.
    Attributes:
        next: the step after which it is measured next, where `every` is 0.
        latest: what was found last; empty before the first measurement.
        logged: the step of the figures that metrics.jsonl has, on rank 0.

    Raises:
        DataError, RefusedError: labelled rows that are missing or cannot be read.
    """

    name = "probes"
    figures = shown = ("knn", "linear", "rank_me")

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        require_scikit_learn()
        self.settings, self.run = settings, run
        self.rows = open_rows(settings, run)
        self.last = run.config.training.steps
        self.next = max(1, round(FIRST * self.last))
        self.latest: dict[str, Any] = {}
        self.logged = 0
        self._fresh = False
        self._began, self._spent = time.monotonic(), 0.0
        self._steps, self._paced = 0, 0.0  # those after the first, which may have compiled, and when it was made

    def after_step(self, ctx: StepContext) -> None:
        if self._paced:
            self._steps += 1
        else:
            self._paced = time.monotonic()
        step, every = ctx.step + 1, self.settings.every
        self._fresh = step >= self.last or (step % every == 0 if every else step >= self.next)
        if self._fresh:
            self.measure(step)

    def measure(self, step: int) -> None:
        """Measure the weights as they are after `step`. Collective."""
        began = time.monotonic()
        features = self.rows.features(self.run.engine.full_weights())

        def judge() -> tuple[dict[str, Any], int]:
            assert features is not None, "rank 0 has the features"
            return self._judge(features, step, began)

        self.latest, self.next = on_rank_zero(self.run.world, "fitting the probes", judge)

    def _judge(self, features: Pair, step: int, began: float) -> tuple[dict[str, Any], int]:
        """The figures, and the step of the next ones."""
        learned, measured = features
        neighbours = nearest_neighbours(learned, measured.features, KnnSettings(k=self.settings.neighbours))
        linear = logistic_regression(
            learned, measured.features, LogisticSettings(inverse_penalty=self.settings.inverse_penalty)
        )
        figures = {
            "step": step,
            "knn": accuracy(neighbours, measured.labels),
            "linear": accuracy(linear, measured.labels),
            "rank_me": rank_me(measured.features),
            "width": measured.features.shape[1],
            "rows": len(learned.labels),
            "measured": len(measured.labels),
        }
        now = time.monotonic()
        seconds = now - began
        self._spent += seconds
        a_step = max(now - self._paced - self._spent, 1e-9) / max(self._steps, 1)
        figures |= {"seconds": seconds, "share": self._spent / (now - self._began)}
        return figures, step + max(1, ceil(seconds / (SHARE * a_step)))

    def measured(self) -> Mapping[str, float]:
        return {figure: self.latest[figure] for figure in self.figures} if self._fresh else {}

    def metrics(self) -> Mapping[str, Any]:
        """Return the newest measurement, in the first line after it. step: after which it was made; knn, linear:
        accuracies; rank_me: of features as wide as `width`; rows: learned from; measured: rows; seconds: of that
        measurement; share: of all of them in this start's time."""
        latest = self.latest
        if not latest or latest["step"] == self.logged:
            return {}
        self.logged = latest["step"]
        notice = (
            f"after step {latest['step']}: nearest neighbours {latest['knn']:.3f}, linear {latest['linear']:.3f} on "
            f"{latest['measured']:,} rows, RankMe {latest['rank_me']:.1f} of {latest['width']}; "
            f"{latest['share']:.1%} of the time"
        )
        return {**latest, "notice": notice}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "latest": self.latest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.latest = int(state["next"]), dict(state["latest"])
