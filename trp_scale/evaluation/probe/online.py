"""Probes of the encoder during training.

At a measurement the weights are gathered as for an export, a separate encoder reads labelled rows, and rank 0 fits
nearest neighbours (Wu et al. 2018) and a logistic regression, as in `trp-scale probe`. The run's model is not used, so
training does not change, on any engine. RankMe (Garrido et al. 2023, eq. 1) needs no labels:

    RankMe = exp(-sum_k p_k log p_k),     p_k = sigma_k / sum_j sigma_j + 1e-7

with the singular values sigma of the features: the number of directions they use, from 1 to their width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.data.images.leakage import check_test
from trp_scale.data.mixture import parse_paths
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.distributed.groups import on_every_rank, on_rank_zero
from trp_scale.evaluation.arguments import KnnSettings, LogisticSettings, ProbesSettings
from trp_scale.evaluation.encoders import BATCH, FrozenEncoder, TextEncoder, set_shown_images
from trp_scale.evaluation.probe.classifiers import (
    Features,
    LabelledFeatures,
    accuracy,
    extract,
    logistic_regression,
    nearest_neighbours,
)
from trp_scale.evaluation.probe.sentences import BAD_LINES, draw_rows_alike, pair_vectors
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoders import encoder_from_run
from trp_scale.finetuning.glue.folders import Examples, read_glue
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.measurement import all_blocks, require_scikit_learn

if TYPE_CHECKING:
    from trp_scale.data.sources import Chosen
    from trp_scale.finetuning.classification.task import LabelledImages

SHARE = 0.01
"""Share of the run's time for measurements if `every` is 0."""

FIRST = 0.1
"""Share of the run's steps before the first measurement if `every` is 0."""


def rank_me(features: Features) -> float:
    """Return the effective rank of features [n, D], from 1 to min(n, D)."""
    sigma = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    p = sigma / sigma.sum() + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


class OnlineProbes(Hook):
    """Measure the encoder at intervals (see the module).

    Attributes:
        next: step of the next measurement, if `every` is 0.
        latest: latest figures; empty before the first measurement.
        logged: step of the figures that were logged last, on rank 0.

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
        self._steps, self._paced = 0, 0.0  # steps after the first, which may compile, and the time of the first

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
        """Measure the weights after `step`. Collective."""
        start = time.monotonic()
        features = self.rows.features(self.run.engine.full_weights())

        def judge() -> tuple[dict[str, Any], int]:
            assert features is not None, "rank 0 has the features"
            return self._judge(features, step, start)

        self.latest, self.next = on_rank_zero(self.run.world, "fitting the probes", judge)

    def _judge(self, features: Pair, step: int, start: float) -> tuple[dict[str, Any], int]:
        """Return the figures and the step of the next measurement."""
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
        seconds = now - start
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


NAME = "this run"
"""Name of the encoder in messages."""

Weights = dict[str, Tensor]
"""Weights of the run's model by name; on rank 0 only."""

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of training rows and of measured rows."""


def require_two_classes(labels: npt.NDArray[Any], where: str) -> None:
    """Raise RefusedError if all labels are equal."""
    if len(np.unique(labels)) < 2:
        raise RefusedError(
            f"--probes.data: the {len(labels):,} training rows of {where} have the same class; "
            "give other data, or more --probes.rows"
        )


def open_rows(settings: ProbesSettings, run: RunContext) -> ImageRows | SentenceRows:
    """Open the rows for the probes of a run."""
    return SentenceRows(settings, run) if run.config.reads == "text" else ImageRows(settings, run)


class ImageRows:
    """Images with classes, whole and at the pre-training size; all ranks share the work.

    Raises:
        DataError, RefusedError: the data is missing or damaged, has no classes, or two sets do not match.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        from trp_scale.finetuning.classification.task import open_labelled  # with timm, which text goes without

        self.settings, self.run = settings, run
        config = ClassificationTaskConfig()
        encoder_from_run(run.config, NAME, dict).adopt(config)
        config.model.weights = ""  # passed at each measurement
        self.config = set_shown_images(config, size=0, batch=BATCH)
        config.augmentation.measured = settings.seen
        path = config.data.path = settings.data or run.config.data.path
        self.train = self.test = open_labelled(config, path)
        fraction = run.config.data.validation_fraction if path == run.config.data.path else 0.0
        if settings.test:
            check_test(config, Path(settings.test))
            self.test = open_labelled(config, settings.test)
            measured = all_blocks([dataset.blocks for dataset in self.test.datasets])
        else:
            fraction = fraction or 0.1  # a tenth of labelled images without held-out ones
            measured = self.train.held_blocks(fraction)
        self.measured = first_blocks(self.test, measured, settings.measured)
        self.learned = first_blocks(self.train, [~held for held in self.train.held_blocks(fraction)], settings.rows)
        require_two_classes(self.train.labels(self.learned)[: settings.rows], path)

    def features(self, weights: Weights) -> Pair | None:
        """Compute features with the current weights; `None` except on rank 0. Collective."""
        world = self.run.world

        def make() -> FrozenEncoder:
            weighted = None
            if world.rank == 0:
                source = encoder_from_run(self.run.config, NAME, lambda: weights)
                weighted = source.image_weights(self.config)
            return FrozenEncoder(self.config, pooling="mean", device=self.run.device, weights=weighted)

        encoder = on_every_rank(world, "making the probed encoder", make)
        for parameter in encoder.module.parameters():  # only rank 0 has the weights
            parameter.copy_(world.sum(parameter if world.rank == 0 else torch.zeros_like(parameter)))
        learned = self._extract(encoder, self.train, self.learned, self.settings.rows)
        measured = self._extract(encoder, self.test, self.measured, self.settings.measured)
        return (learned, measured) if world.rank == 0 else None

    def _extract(
        self, encoder: FrozenEncoder, images: LabelledImages, blocks: Sequence[Chosen], rows: int
    ) -> LabelledFeatures:
        read = extract(encoder, images.batches(self.run.world, blocks), self.run.world)
        return LabelledFeatures(features=read.features[:rows], labels=read.labels[:rows])


def first_blocks(images: LabelledImages, among: Sequence[Chosen], rows: int) -> list[Chosen]:
    """Select the blocks with the lowest key hashes among `among` until they contain `rows` rows."""
    blocks = [dataset.blocks for dataset in images.datasets]
    identities, sizes = (
        np.concatenate(columns) for columns in zip(*((b.identities, b.rows) for b in blocks), strict=True)
    )
    order = np.argsort(identities)
    order = order[np.concatenate(among)[order]]
    enough = 1 + int(np.searchsorted(np.cumsum(sizes[order]), rows))
    chosen = np.zeros(len(identities), dtype=np.bool_)
    chosen[order[:enough]] = True
    return np.split(chosen, np.cumsum([len(b.rows) for b in blocks])[:-1])


class SentenceRows:
    """GLUE task with features as in `trp-scale probe`: means over tokens, pairs as [u, v, |u - v|, u * v]. Rank 0 alone
    reads it.

    Raises:
        DataError, RefusedError: files that are missing or cannot be read.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        self.settings, self.run = settings, run
        self.config = GlueTaskConfig()
        encoder_from_run(run.config, NAME, dict).adopt(self.config)
        self.length = self.config.downstream.max_length
        on_rank_zero(run.world, f"reading {settings.data}", self._read)

    def _read(self) -> None:
        settings = self.settings
        self.tokenizer = open_text_dataset(parse_paths(self.run.config.data.path)[0].path).meta.tokenizer_directories[0]
        data = read_glue(Path(settings.data), settings.task, split="dev", max_bad_lines=BAD_LINES)
        self.train, self.test = data.train, next(iter(data.measured.values()))
        self.learned, self.measured = draw_alike(self.train, settings.rows), draw_alike(self.test, settings.measured)
        assert self.train.labels is not None
        require_two_classes(self.train.labels[self.learned], settings.data)

    def features(self, weights: Weights) -> Pair | None:
        pairs: list[Pair] = []

        def read() -> None:
            source = encoder_from_run(self.run.config, NAME, lambda: weights, tokenizer=self.tokenizer)
            encoder = TextEncoder(source, self.config).eval().to(self.run.device)
            learned = self._extract(encoder, self.train, self.learned)
            pairs.append((learned, self._extract(encoder, self.test, self.measured)))

        on_rank_zero(self.run.world, "reading labelled sentences", read)
        return pairs[0] if pairs else None

    def _extract(self, encoder: TextEncoder, examples: Examples, rows: npt.NDArray[np.int64]) -> LabelledFeatures:
        assert examples.labels is not None
        vectors = pair_vectors(encoder, examples, rows, self.length)
        return LabelledFeatures(features=vectors, labels=examples.labels[rows].astype(np.int64))


def draw_alike(examples: Examples, rows: int) -> npt.NDArray[np.int64]:
    """Return the indices of at most `rows` examples, stratified by label; always the same."""
    assert examples.labels is not None
    return draw_rows_alike(examples.labels, rows if rows < len(examples.labels) else 0, seed=0, alike=True)
