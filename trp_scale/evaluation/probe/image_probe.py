"""The probe of an encoder of images, and MLO-MAE's own figure: the accuracy on a test set of the head that masks were
learned with (its stage II). That is no probe: head and encoder have learned together, and the masks were chosen for
this very task."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document, read_hooks_state
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config.loader import from_dict
from trp_scale.data.hashing import Integers
from trp_scale.data.images.leakage import check_test
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import on_rank_zero
from trp_scale.errors import DataError, RefusedError
from trp_scale.evaluation.encoders import FrozenEncoder, encoder_config
from trp_scale.evaluation.probe.arguments import ProbeArguments
from trp_scale.evaluation.probe.classifiers import accuracy, accuracy_by_class, classify, fit_fresh
from trp_scale.evaluation.probe.features import LabelledFeatures, all_features
from trp_scale.evaluation.probe.images import ProbedImages, open_probed
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.methods.learned_masks.fine_tuning import FINE_TUNED
from trp_scale.methods.learned_masks.settings import FineTuningSettings
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import is_encoder
from trp_scale.reporting.results import SeedResult, TaskResult, join

logger = logging.getLogger(__name__)


def probe_images(arguments: ProbeArguments, environment: Environment) -> tuple[list[TaskResult], str]:
    """The results of an encoder of images, and what was measured in a few words. Collective."""
    probe = Probe(arguments, environment)
    tasks = [join([probe.measure(arguments.seed + number) for number in range(arguments.seeds)])]
    if (second_stage := probe.stage_two()) is not None:
        tasks.append(join([second_stage]))
    return tasks, probe.description


@dataclass(frozen=True, kw_only=True)
class ProbeFeatures:
    """Features and labels, on rank 0 alone.

    Attributes:
        train, test: features; train is None where no classifier learns from it.
        cached: whether all were kept from before.
    """

    train: LabelledFeatures | None
    test: LabelledFeatures
    cached: bool


class Probe:
    """One encoder on one pair of data sets.

    Args:
        arguments: the command line.
        environment: ranks and device.

    Raises:
        DataError, RefusedError: no such encoder or data, or two data sets that do not belong together.
    """

    def __init__(self, arguments: ProbeArguments, environment: Environment) -> None:
        self.arguments, self.environment, self.world = arguments, environment, environment.world
        self.config = self.settings(arguments.image_size)
        self.train = open_probed(self.config, arguments.data)
        self.test: ProbedImages | None = None
        if arguments.test is not None:
            check_test(self.config, arguments.test)
            self.test = open_probed(self.config, str(arguments.test))
        self.split = arguments.split or ("dev" if arguments.test is None else "test")
        self.name = (arguments.test or Path(arguments.data)).resolve().name

    def settings(self, size: int) -> ClassificationTaskConfig:
        """Settings of the encoder and of the images that it is shown, `size` pixels wide."""
        arguments = self.arguments
        config = encoder_config(
            arguments.from_,
            recipe=arguments.recipe,
            size=size,
            batch=arguments.batch_size,
            positions=arguments.encoder_positions,
        )
        config.data.path, config.data.workers = arguments.data, arguments.workers
        config.augmentation.measured, config.augmentation.centre_share = arguments.seen, arguments.centre_share
        return config

    @property
    def fresh(self) -> bool:
        """Whether the encoder runs in every epoch."""
        return self.arguments.method == "linear" and self.arguments.linear.crops == "fresh"

    @property
    def fraction(self) -> float:
        """Share of the training images that is held out and measured."""
        return 0.0 if self.test is not None else self.arguments.validation_fraction

    @property
    def description(self) -> str:
        """The settings in a few words, for the table's title."""
        pooled = "mean of the patch tokens" if self.arguments.pooling == "mean" else "class token"
        crops = ", fresh crops" if self.fresh else ""
        seen = "centre" if self.arguments.seen == "centre" else "whole image"
        return f"{self.arguments.method} probe, {self.config.crops.size} pixels, {seen}, {pooled}{crops}"

    def measure(self, seed: int) -> SeedResult:
        """The probe of one seed, on every rank. Collective."""
        encoder = self.encoder(self.config, self.arguments.pooling, seed=seed)
        measured = self.features(encoder)
        predicted = self.learn_fresh(encoder, measured, seed) if self.fresh else None

        few = f", {self.arguments.per_class} a class" if self.arguments.per_class else ""

        def judge() -> SeedResult:
            assert measured is not None, "rank 0 has the features"
            answers = predicted
            if answers is None:
                assert measured.train is not None
                train = measured.train
                if self.arguments.per_class:
                    train = train.take(draw_of_each_class(train.labels, self.arguments.per_class, seed))
                answers = classify(train, measured.test.features, self.arguments, seed)
            return SeedResult(
                task=f"{self.name} ({self.arguments.method} probe{few})",
                metric="accuracy",
                split=self.split,
                lower_is_better=False,
                seed=seed,
                metrics={"accuracy": accuracy(answers, measured.test.labels)},
                detail={
                    "accuracy_by_class": accuracy_by_class(answers, measured.test.labels, self.train.classes),
                    "images": len(measured.test.labels),
                    "features_from_cache": measured.cached,
                },
            )

        return on_rank_zero(self.world, "fitting the probe", judge)

    def encoder(self, config: ClassificationTaskConfig, pooling: str, **weights: object) -> FrozenEncoder:
        """A frozen encoder on this rank's device; `weights` as for FrozenEncoder."""
        return FrozenEncoder(
            config,
            pooling=pooling,
            device=self.environment.device,
            precision=self.arguments.precision,
            **weights,  # type: ignore[arg-type]
        )

    def features(self, encoder: FrozenEncoder) -> ProbeFeatures | None:
        """Features of training images and of measured ones, on rank 0 alone. Collective."""
        cache, cached = self.arguments.cache, True
        train: LabelledFeatures | None = None
        if self.test is None or not self.fresh:
            train, cached = all_features(encoder, self.train, self.world, cache)
        if self.test is not None:
            test, test_cached = all_features(encoder, self.test, self.world, cache)
            return None if test is None else ProbeFeatures(train=train, test=test, cached=cached and test_cached)
        held = self.train.held_out(self.fraction)
        return None if train is None else ProbeFeatures(train=train.take(~held), test=train.take(held), cached=cached)

    def learn_fresh(self, encoder: FrozenEncoder, measured: ProbeFeatures | None, seed: int) -> Integers | None:
        """Answers of a linear probe that learns from random crops, on rank 0 alone. Collective."""
        return fit_fresh(
            encoder,
            self.train,
            np.zeros((0, encoder.width), np.float32) if measured is None else measured.test.features,
            self.arguments.linear,
            fraction=self.fraction,
            seed=seed,
            group=self.world,
        )

    def stage_two(self) -> SeedResult | None:
        """MLO-MAE's own figure, where --from has one and there is a test set to measure it on. Collective."""
        second_stage = None if self.arguments.from_ == SCRATCH else stage_two(self.arguments.from_)
        if second_stage is None:
            return None
        test = self.arguments.test
        reason = (
            "it is measured on a test set; give --test DIR" if test is None else check_stage_two(second_stage, test)
        )
        if reason is not None:
            logger.warning("%s is left out: %s", NAME, reason)
            return None
        return self.own_result(second_stage)

    def own_result(self, second_stage: StageTwo) -> SeedResult:
        """The accuracy of the head on all images of the test set, at the size it has learned on. Collective."""
        config = self.settings(second_stage.size)
        encoder = self.encoder(config, second_stage.pooling, weights=second_stage.encoder_weights())
        images = open_probed(config, str(self.arguments.test))
        test, _ = all_features(encoder, images, self.world, self.arguments.cache)

        def judge() -> SeedResult:
            assert test is not None, "rank 0 has the features"
            return SeedResult(
                task=f"{self.name} ({NAME})",
                metric="accuracy",
                split=self.split,
                lower_is_better=False,
                seed=second_stage.config.training.seed,
                metrics={"accuracy": second_stage.accuracy(test)},
                judged=False,  # the probe's test set again: two measurements of one task are not two tasks
            )

        return on_rank_zero(self.world, "measuring the head of stage II", judge)


def draw_of_each_class(labels: Integers, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """[n] labels -> [n] which of them are drawn: `count` of each, uniformly.

    Raises:
        RefusedError: a label has fewer.
    """
    generator = np.random.default_rng(seed)
    drawn = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise RefusedError(
                f"--per_class is {count}, but class {label} has {len(places)} training images; allowed: at most that"
            )
        drawn[generator.choice(places, count, replace=False)] = True
    return drawn


logger = logging.getLogger(__name__)

NAME = "stage II head (MLO-MAE's own figure, no probe)"


@dataclass(frozen=True, kw_only=True)
class StageTwo:
    """The head of a run with learned masks.

    Attributes:
        config: of the run.
        checkpoint: where it was read from.
        weight, bias: [K, D] and [K] of the layer.
    """

    config: MaeConfig
    checkpoint: Path
    weight: Tensor
    bias: Tensor

    @property
    def size(self) -> int:
        """Side of the images that it has learned on, in pixels."""
        return self.config.crops.size

    @property
    def pooling(self) -> str:
        """Pooling of the head's input: mean or class."""
        return str(self.config.multilevel.pooling)

    def encoder_weights(self) -> dict[str, Tensor] | None:
        """Weights of Stage II's own encoder; None where it has none and reads the run's."""
        if not isinstance(self.config.multilevel, FineTuningSettings):
            return None
        stored = read_full_state(self.checkpoint, engine=FINE_TUNED)
        return {name: tensor for name, tensor in stored.items() if is_encoder(name)}

    def accuracy(self, test: LabelledFeatures) -> float:
        """Share of the rows whose class has the highest logit; the head as in methods/learned_masks/head.py, without
        dropout."""
        features = torch.from_numpy(test.features)
        if self.config.multilevel.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        predicted: Integers = F.linear(features, self.weight, self.bias).argmax(1).numpy()
        return accuracy(predicted, test.labels)


def stage_two(path: str) -> StageTwo | None:
    """The head of a run with learned masks; None where --from is none, learned them without a head, or names the
    average of its weights, which the head knows nothing of."""
    directory = Path(path)
    if not (directory / "checkpoints").is_dir() and not (directory / DOCUMENT_NAME).is_file():
        return None
    checkpoint = find_checkpoint(directory)
    document = read_document(checkpoint)
    config = from_dict(document.config, source=str(checkpoint))
    if not isinstance(config, MaeConfig) or not config.multilevel.reads_labels:
        return None
    head = read_hooks_state(checkpoint, document)["multilevel"]["outer"]["head"]
    return StageTwo(
        config=config,
        checkpoint=checkpoint,
        weight=head["weight"]["value"].float(),
        bias=head["bias"]["value"].float(),
    )


def check_stage_two(second_stage: StageTwo, test: Path) -> str | None:
    """Explain why the accuracy on this test set is meaningless, or return `None`."""
    try:
        check_test(second_stage.config, test)
    except (DataError, RefusedError) as error:
        if not Path(second_stage.config.data.path).exists():
            logger.warning(
                "%s is not there: it was not checked that none of the test images are among those that the masks were "
                "learned from",
                second_stage.config.data.path,
            )
            return None
        return str(error)
    return None
