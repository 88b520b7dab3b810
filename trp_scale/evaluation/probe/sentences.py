"""Classifier on frozen sentence vectors (protocol of SentEval: Conneau and Kiela 2018).

A sentence vector is the mean over its tokens, including [CLS] and [SEP]. A pair is encoded separately and combined as
[u, v, |u - v|, u * v]. On standardised vectors a logistic regression predicts labels, a ridge regression scores.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.evaluation.arguments import ProbeArguments
from trp_scale.evaluation.encoders import TextEncoder, load_encoder
from trp_scale.evaluation.probe.classifiers import Features, LabelledFeatures, logistic_regression
from trp_scale.finetuning.glue.folders import FORMATS, Examples, read_glue, require_folders
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.glue.task import FIGURES, figure_name
from trp_scale.finetuning.groups import Groups
from trp_scale.finetuning.measurement import require_scikit_learn
from trp_scale.finetuning.task import label_counts
from trp_scale.reporting.results import SeedResult, TaskResult, join

logger = logging.getLogger(__name__)

AT_ONCE = 256
"""Sentences per forward pass."""

BAD_LINES = 10
"""Bad lines per file that are skipped, as in the recipe glue: the published QQP has some."""

Values = npt.NDArray[np.float64]


def probe_sentences(arguments: ProbeArguments) -> list[TaskResult]:
    """Probe the tasks of --task, in one process.

    Raises:
        RefusedError: an image encoder, flags for images, a missing task, or fewer rows than --rows.
        DataError: files that cannot be read.
    """
    require_scikit_learn()
    encoder, root = load_encoder(arguments.from_), Path(arguments.data)
    if not isinstance(encoder, TextEncoder):
        raise RefusedError(
            f"--task {arguments.task} is for text encoders, but --from {arguments.from_} is an image encoder"
        )
    config: FinetuneConfig = GlueTaskConfig()
    tasks = config.tasks(arguments.task)
    require_folders(root, tasks)
    return [_probe(encoder, root, task, arguments) for task in tasks]


def _probe(encoder: TextEncoder, root: Path, task: str, arguments: ProbeArguments) -> TaskResult:
    data = read_glue(root, task, split="dev", max_bad_lines=BAD_LINES, group_column=arguments.groups)
    for notice in data.notices:
        logger.warning("%s", notice)
    assert data.train.labels is not None
    if arguments.rows > len(data.train.labels):
        raise RefusedError(f"--rows is {arguments.rows}, but {task} has {len(data.train.labels)} training rows")
    scores = FORMATS[task].outputs == 1
    rows_by_seed = {
        seed: draw_rows_alike(data.train.labels, arguments.rows, seed, alike=not scores)
        for seed in range(arguments.seed, arguments.seed + arguments.seeds)
    }
    needed = np.unique(np.concatenate(list(rows_by_seed.values())))  # the encoder reads only these rows
    needed_vectors = pair_vectors(encoder, data.train, needed, arguments.max_length)
    vectors = np.zeros((len(data.train.labels), needed_vectors.shape[1]), np.float32)
    vectors[needed] = needed_vectors
    measured = {
        name: (
            pair_vectors(encoder, examples, np.arange(len(examples.line_numbers)), arguments.max_length),
            examples.labels,
        )
        for name, examples in data.measured.items()
    }
    first = figure_name(next(iter(FIGURES[task])), next(iter(measured)))
    results = []
    for seed, rows in rows_by_seed.items():
        metrics, right = {}, []
        for name, (unseen, labels) in measured.items():
            assert labels is not None
            answers = fit(vectors[rows], data.train.labels[rows], unseen, scores=scores, arguments=arguments)
            right.append(answers == labels)
            for figure, compute in FIGURES[task].items():
                metrics[figure_name(figure, name)] = compute(answers, labels)
        detail: dict[str, Any] = {"rows": sum(map(len, right)), "training_rows": len(rows)}
        if arguments.groups:
            names = [group for examples in data.measured.values() for group in examples.groups]
            groups = Groups.from_names(arguments.groups, arguments.least_group, names)
            summary = groups.summarise(groups.number(names), np.concatenate(right))
            detail |= summary.pop("detail")
            metrics |= summary
        results.append(
            SeedResult(
                task=task,
                metric=first,
                split="dev",
                lower_is_better=False,
                seed=seed,
                metrics=metrics,
                detail=detail,
            )
        )
    return join(results)


def draw_rows_alike(labels: Values, count: int, seed: int, *, alike: bool) -> npt.NDArray[np.int64]:
    """Draw the indices of `count` rows by the seed; all rows for 0.

    Args:
        alike: stratify by label.
    """
    if not count:
        return np.arange(len(labels))
    order = np.random.default_rng(seed).permutation(len(labels))
    if not alike:
        return np.sort(order[:count])
    names, sizes = np.unique(labels, return_counts=True)
    chosen = [
        order[labels[order] == name][:share] for name, share in zip(names, label_counts(sizes, count), strict=True)
    ]
    return np.sort(np.concatenate(chosen))


def pair_vectors(encoder: TextEncoder, examples: Examples, rows: npt.NDArray[np.int64], length: int) -> Features:
    """Return [n, D] for single sentences, [n, 4 D] for pairs.

    Args:
        rows: [n] indices of the examples.
        length: maximum tokens per sentence.
    """
    parts = [sentence_vectors(encoder, [texts[row] for row in rows], length) for texts in examples.sentences]
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return np.concatenate([first, second, np.abs(first - second), first * second], axis=1)


@torch.no_grad()
def sentence_vectors(encoder: TextEncoder, texts: Sequence[str], length: int) -> Features:
    """Return means over tokens [n, D]. Sentences are batched by length to reduce padding."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    model = encoder.settings.model
    assert isinstance(model, TextModelConfig)
    device = next(encoder.parameters()).device
    vectors, length = np.zeros((len(texts), model.hidden_size), np.float32), min(length, model.max_positions)
    for first in range(0, len(order), AT_ONCE):
        places = order[first : first + AT_ONCE]
        read = encoder.tokenizer(
            [texts[number] for number in places], padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        pieces, mask = (read[name].to(device) for name in ("input_ids", "attention_mask"))  # [B, L]
        present = mask[..., None].float()  # [B, L, 1]
        vectors[places] = ((encoder(pieces, mask) * present).sum(1) / present.sum(1)).cpu().numpy()
    return vectors


def fit(train: Features, labels: Values, unseen: Features, *, scores: bool, arguments: ProbeArguments) -> Values:
    """Return the labels or scores of unseen vectors."""
    penalty = arguments.logistic.inverse_penalty
    if not scores:
        learned = LabelledFeatures(features=train, labels=labels.astype(np.int64))
        return logistic_regression(learned, unseen, arguments.logistic).astype(np.float64)
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # The same penalty relative to half the squared error as to the cross-entropy.
    ridge = make_pipeline(StandardScaler(), Ridge(alpha=1 / penalty)).fit(train, labels)
    return np.asarray(ridge.predict(unseen), dtype=np.float64)
