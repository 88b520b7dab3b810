"""GLUE: classification of sentences and pairs of sentences (TRP 001, Tables 1 and 5).

scikit-learn and scipy (extra `evaluation`) compute the metrics of TRP's Table 1. A metric that is undefined, because
all predictions or all labels are equal, is 0, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import naming_tensors
from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError
from trp_scale.config.registry import import_name
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.data.fetch import start_worker_server
from trp_scale.data.mixture import MemberPath
from trp_scale.data.sources import Rows
from trp_scale.data.text.tokenizer import copy_tokenizer_directory
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.finetuning.encoders import WORDS, EncoderSource, open_encoder
from trp_scale.finetuning.glue.batch import GlueBatchBuilder, PairTokenizer, TokenTable, load_tokenizer, tokenize
from trp_scale.finetuning.glue.folders import FORMATS, Examples, read_glue
from trp_scale.finetuning.glue.model import CLASSIFIERS, INPUTS
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.groups import Groups
from trp_scale.finetuning.measurement import GatheredRows, Metrics, require_scikit_learn, write_table
from trp_scale.finetuning.task import DownstreamTask, TaskObjective, open_task_sources
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops
from trp_scale.pretraining.pos_bert.model import padded_vocabulary
from trp_scale.reporting.results import CONSTANT


def glue_step_flops(config: GlueTaskConfig, length: int) -> float:
    """Return the model FLOPs of a training step on sequences of one row of `length` tokens."""
    pieces = torch.empty(1, length, dtype=torch.int64, device="meta")
    inputs = (pieces, pieces, pieces, pieces, pieces[:, :1], pieces[0, :1])
    kind = CLASSIFIERS[config.model.kind]
    make_model = partial(kind, config, vocabulary=64)  # lookups have no FLOPs
    of_row = count_flops(make_model, lambda model: model(*inputs)) - kind.spared_flops(config, length)
    return TRAINING_OVER_FORWARD * config.batch.global_size * of_row


class GlueTask(DownstreamTask[GlueTaskConfig]):
    """One task of GLUE; see `DownstreamTask`."""

    objective: SentenceClassification

    def __init__(self, config: GlueTaskConfig, environment: Environment) -> None:
        require_scikit_learn()  # before the run is trained
        if config.data.workers > 0:
            start_worker_server(GlueBatchBuilder.__module__)
        downstream, root = config.downstream, Path(config.data.path)
        self.name = downstream.task
        form = FORMATS[self.name]
        downstream.classes = form.outputs
        self._encoder = open_encoder(config.model.weights) if config.model.weights else None
        self._tokenizer_directory = tokenizer_directory(config, self._encoder)
        has_types = config.model.kind == "bert"
        self._tokenizer = load_tokenizer(self._tokenizer_directory, length=downstream.max_length, has_types=has_types)
        apart = config.separate_test
        split = downstream.split if apart else "dev"
        column = downstream.groups
        data = read_glue(
            root, self.name, split=split, max_bad_lines=config.data.max_corrupt_blocks, group_column=column
        )
        train = tokenize(data.train, self._tokenizer)
        self._measured, self._learned = data.measured if apart else {"": data.train}, train.labels
        self._sets, self.unlabelled = list(self._measured), data.unlabelled if apart else ""
        measured = [tokenize(examples, self._tokenizer) for examples in self._measured.values()] if apart else [train]
        self.metric = figure_name(next(iter(FIGURES[self.name])), self._sets[0])
        groups, rows = None, glue_rows(config, self._tokenizer, [train])
        measured_rows = glue_rows(config, self._tokenizer, measured)
        if column and not self.unlabelled:
            names = [examples.groups for examples in self._measured.values()]
            groups = Groups.from_names(column, downstream.least_group, data.train.groups, *names)
            rows, measured_rows = groups.attach(rows, [data.train.groups]), groups.attach(measured_rows, names)
        super().__init__(
            config,
            open_task_sources(
                config,
                environment,
                rows,
                measured_rows,
                train_paths=[MemberPath(name="", weight=Fraction(1), path=root)],
                measured_paths=[MemberPath(name=name, weight=Fraction(1), path=root) for name in self._sets]
                if apart
                else None,
                groups=groups,
            ),
        )
        self.sources.notices += data.notices
        self.objective = SentenceClassification(self.name, form.outputs)
        self.use_groups(groups, self.objective)
        # Packed sequences have little padding: count the mean number of tokens.
        length = downstream.max_length if downstream.padding == "length" else round(float(train.lengths.mean()))
        self.positions_per_step = config.batch.global_size * length

    @cached_property
    def step_flops(self) -> float:
        return glue_step_flops(self.config, self.positions_per_step // self.config.batch.global_size)

    def model(self) -> nn.Module:
        """Build the model; the seed initialises the head, or its last layer if the encoder has the rest."""
        kind = CLASSIFIERS[self.config.model.kind]
        if self._encoder is None:
            return kind(self.config, vocabulary=padded_vocabulary(self._tokenizer.vocabulary))
        weights = self._encoder.read()
        rows = len(weights[WORDS[self.config.model.kind]])
        if rows < self._tokenizer.vocabulary:
            raise RefusedError(
                f"--from {self._encoder.path} has embeddings of {rows} tokens, but the tokenizer "
                f"{self._tokenizer_directory} has {self._tokenizer.vocabulary}; use the encoder's tokenizer"
            )
        model = kind(self.config, vocabulary=rows)
        with naming_tensors(self.config.model):
            model.load_encoder(weights, f"--from {self._encoder.path}")
        return model

    def save_assets(self, run_dir: Path, world: Group) -> None:
        """Copy the tokenizer, so the run can be fine-tuned on another task."""
        if world.rank == 0 and not (run_dir / TOKENIZER).exists():
            copy_tokenizer_directory(self._tokenizer_directory, run_dir / TOKENIZER)

    @classmethod
    def measure_on(cls, config: GlueTaskConfig, checkpoint: Path, data: str, images: str) -> None:
        """Use the tokenizer stored with the run's checkpoint."""
        super().measure_on(config, checkpoint, data, images)
        config.model.weights, config.downstream.tokenizer = str(checkpoint), ""

    def predict(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C] logits, or one score for each row."""
        return self.objective.logits(forward, batch)

    def metrics(self) -> Metrics:
        return self.report_groups(GlueMetrics(self.name, self._sets, self._learned))

    def predictions(self, directory: Path, group: Group) -> GlueSubmission:
        return GlueSubmission(self.name, self._measured, directory, group)


def glue_rows(config: GlueTaskConfig, tokenizer: PairTokenizer, tables: list[TokenTable]) -> Rows:
    """Return the rows of tables with a batch builder."""
    downstream = config.downstream
    builder = GlueBatchBuilder(
        tables,
        tokenizer,
        length=downstream.max_length,
        padding=downstream.padding,
        scores=downstream.classes == 1,
    )
    return Rows(
        blocks=tables,
        meta=None,
        limit=0,
        builder=builder,
        digests=[table.digest() for table in tables],
        labels=None if downstream.classes == 1 else [table.labels.astype(np.int64) for table in tables],
    )


def tokenizer_directory(config: GlueTaskConfig, encoder: EncoderSource | None) -> Path:
    """Return --downstream.tokenizer, or the encoder's tokenizer."""
    if config.downstream.tokenizer:
        return Path(config.downstream.tokenizer)
    if encoder is None or encoder.tokenizer is None:
        raise RefusedError(
            "--from scratch has no tokenizer; set --downstream.tokenizer DIR, for example that of a sharded data set "
            "(DATASET/tokenizer)"
        )
    return encoder.tokenizer


logger = logging.getLogger(__name__)

Values = npt.NDArray[Any]
Figure = Callable[[Values, Values], float]


def library_figure(location: str, correlation: str = "") -> Figure:
    """Return a function of scikit-learn or scipy, "module:name", as a figure; a `correlation`, by its name, is 0 with a
    warning where it is undefined."""

    def compute(predicted: Values, labels: Values) -> float:
        for name, values in (("predictions", predicted), ("labels", labels)) if correlation else ():
            if not 0 < np.ptp(values) < np.inf:
                message = "%s correlation is undefined: %s are all %g or not finite; 0 is reported"
                logger.warning(message, correlation, name, values[0])
                return 0.0
        value = import_name(location)(labels, predicted)
        return float(getattr(value, "statistic", value))

    return compute


accuracy, f1 = library_figure("sklearn.metrics:accuracy_score"), library_figure("sklearn.metrics:f1_score")
matthews = library_figure("sklearn.metrics:matthews_corrcoef", "Matthews'")
pearson = library_figure("scipy.stats:pearsonr", "Pearson's")
spearman = library_figure("scipy.stats:spearmanr", "Spearman's")


FIGURES: dict[str, dict[str, Figure]] = {
    "cola": {"matthews": matthews, "accuracy": accuracy},
    "sst2": {"accuracy": accuracy},
    "mrpc": {"f1": f1, "accuracy": accuracy},
    "stsb": {"spearman": spearman, "pearson": pearson},
    "qqp": {"f1": f1, "accuracy": accuracy},
    "mnli": {"accuracy": accuracy},
    "qnli": {"accuracy": accuracy},
    "rte": {"accuracy": accuracy},
    "wnli": {"accuracy": accuracy},
}
"""Metrics of each task; the first is the main metric, as in TRP's Table 1."""


def constant_figure(figure: str, compute: Figure, learned: Values, labels: Values) -> float:
    """Return a metric of the constant prediction that is best on the training labels `learned`."""
    if figure in ("matthews", "pearson", "spearman"):  # 0 or undefined for constant predictions
        return 0.0
    best = max(np.unique(learned), key=lambda value: compute(np.full(len(learned), value), learned))
    return compute(np.full(len(labels), best), labels)


class GlueMetrics:
    """Metrics of one task on each of its measured sets; see `Metrics`.

    Args:
        sets: names of the measured sets; "" for a single set.
        learned: labels or scores of the training rows, for constant baselines; `None` = no baselines.
    """

    def __init__(self, task: str, sets: list[str], learned: Values | None = None) -> None:
        self._task, self._sets, self._learned = task, sets, learned
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add logits [R, C], or scores [R, 1]."""
        predicted = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)  # [R]
        self._rows.add(batch, predicted=predicted, labels=batch["labels"], measured_set=batch["measured_set"])

    def finish(self, group: Group) -> dict[str, Any]:
        rows = self._rows.gather(group)
        return group.broadcast_object(self._figures(rows) if group.rank == 0 else {})  # only one rank logs warnings

    def _figures(self, rows: dict[str, Values]) -> dict[str, Any]:
        figures: dict[str, Any] = {"detail": {}}
        for number, name in enumerate(self._sets):
            of_set = rows["measured_set"] == number
            predicted, labels = rows["predicted"][of_set], rows["labels"][of_set]
            for figure, compute in FIGURES[self._task].items():
                named = figure_name(figure, name)
                figures[named] = compute(predicted, labels)
                if self._learned is not None:
                    figures[CONSTANT + named] = constant_figure(figure, compute, self._learned, labels)
            of_labels = {
                label: {
                    "rows": int((labels == code).sum()),
                    "predicted": int((predicted == code).sum()),
                    "right": int(((labels == code) & (predicted == code)).sum()),
                }
                for code, label in enumerate(FORMATS[self._task].names)
            }
            figures["detail"][name or "all"] = {"rows": len(labels), **of_labels}
        return figures


def figure_name(figure: str, measured_set: str) -> str:
    """Return accuracy, or accuracy_matched for the set matched."""
    return f"{figure}_{measured_set}" if measured_set else figure


class GlueSubmission:
    """Writes a file for GLUE's server for each measured set; see `Predictions`."""

    def __init__(self, task: str, measured: Mapping[str, Examples], directory: Path, group: Group) -> None:
        self._form, self._measured = FORMATS[task], measured
        self._directory, self._group = directory, group
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add logits [R, C], or scores [R, 1]."""
        predicted = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)  # [R]
        self._rows.add(batch, predicted=predicted, measured_set=batch["measured_set"])

    def finish(self) -> list[Path]:
        """Write CoLA.tsv, or MNLI-m.tsv and MNLI-mm.tsv, for example."""
        rows = self._rows.gather(self._group)

        def write() -> list[Path]:
            paths = []
            for number, (name, examples) in enumerate(self._measured.items()):
                path = self._directory / f"{self._form.submitted.get(name, self._form.folder)}.tsv"
                predictions = [
                    self.format_prediction(value) for value in rows["predicted"][rows["measured_set"] == number]
                ]
                indices = examples.indices or [str(row) for row in range(len(predictions))]
                if examples.left_out:
                    logger.warning("%s lacks %d lines, which were unreadable", path, len(examples.left_out))
                write_table(path, ("index", "prediction"), zip(indices, predictions, strict=True), separator="\t")
                paths.append(path)
            return paths

        return on_rank_zero(self._group, f"writing {self._directory}", write)

    def format_prediction(self, predicted: float) -> str:
        """Convert a label's number to its value in GLUE's files, or clip and format a score."""
        if self._form.values:
            return self._form.values[int(predicted)]
        return f"{np.clip(float(predicted), 0.0, 5.0):.3f}"  # the range of STS-B's scores


class SentenceClassification(TaskObjective):
    """Mean over rows of the cross-entropy of labels, or of the squared error of scores if `classes` is 1."""

    def __init__(self, task: str, classes: int) -> None:
        self.tasks: tuple[str, ...] = (task,)
        self.regression = (0,) if classes == 1 else ()

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Return logits [R, C], or scores [R, 1]."""
        return forward(*(batch[name] for name in INPUTS))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Return the sum of losses over rows, in float64."""
        logits, labels = self.logits(forward, batch).float(), batch["labels"]
        if self.regression:
            errors = (logits.squeeze(1) - labels).square()  # [R]
        else:
            errors = F.cross_entropy(logits, labels, reduction="none")  # [R]
        return self.sum_rows(errors, batch)
