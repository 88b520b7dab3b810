"""`trp-scale probe`: a classifier on the features of a frozen image encoder; sentences.py probes text encoders.

A run with learned masks also gets MLO-MAE's figure: the test accuracy of the head that its masks were learned with
(stage II). This is not a probe: head and encoder were trained together, and the masks were chosen for this task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.checkpoint.document import read_hooks_state
from trp_scale.checkpoint.export import while_training
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.initial_weights import is_run
from trp_scale.data.hashing import Integers
from trp_scale.data.images.leakage import check_test
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import check_shared_directory, on_rank_zero
from trp_scale.errors import DataError, RefusedError
from trp_scale.evaluation.arguments import ProbeArguments
from trp_scale.evaluation.encoders import FrozenEncoder, encoder_config
from trp_scale.evaluation.probe.classifiers import (
    LabelledFeatures,
    accuracy,
    accuracy_by_class,
    all_features,
    classify,
    fit_fresh,
)
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.groups import Groups
from trp_scale.finetuning.measurement import open_run, require_scikit_learn
from trp_scale.methods.learned_masks.second_levels import FINE_TUNED
from trp_scale.methods.learned_masks.settings import FineTuningSettings
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.reporting.comparison import Measurement
from trp_scale.reporting.results import RESULTS_FILE, Results, SeedResult, join, read_results, write_results
from trp_scale.training.rundir import create_run_directory

if TYPE_CHECKING:
    from trp_scale.finetuning.classification.task import LabelledImages

logger = logging.getLogger(__name__)


class ImageProbe:
    """One encoder on one pair of data sets.

    Raises:
        DataError, RefusedError: no such encoder or data, or data sets that do not match.
    """

    def __init__(self, arguments: ProbeArguments, environment: Environment) -> None:
        from trp_scale.finetuning.classification.task import open_labelled  # with timm, which text goes without

        self.arguments, self.environment, self.world = arguments, environment, environment.world
        self.encoder = partial(FrozenEncoder, device=environment.device, precision=arguments.precision)
        self.config = self.settings(arguments.image_size)
        self.train = open_labelled(self.config, arguments.data)
        self.test: LabelledImages | None = None
        if arguments.test is not None:
            check_test(self.config, arguments.test)
            self.test = open_labelled(self.config, str(arguments.test))
        self.split = arguments.split or ("dev" if arguments.test is None else "test")
        self.fresh = arguments.method == "linear" and arguments.linear.crops == "fresh"  # runs in every epoch
        self.fraction = 0.0 if arguments.test is not None else arguments.validation_fraction  # held out and measured
        self.name = (arguments.test or Path(arguments.data)).resolve().name
        self.title = f"{arguments.method} probe{', MAE protocol' if arguments.protocol == 'mae' else ''}"

    def settings(self, size: int) -> ClassificationTaskConfig:
        """Return the settings of the encoder and of its images of `size` pixels."""
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
    def description(self) -> str:
        """Settings as a short title of the table."""
        pooled = "mean of the patch tokens" if self.arguments.pooling == "mean" else "class token"
        crops = ", fresh crops" if self.fresh else ""
        seen = "centre" if self.arguments.seen == "centre" else "whole image"
        return f"{self.title}, {self.config.crops.size} pixels, {seen}, {pooled}{crops}"

    def measure(self, seed: int) -> SeedResult:
        """Return the result of one seed, on every rank. Collective."""
        arguments = self.arguments
        encoder = self.encoder(self.config, pooling=arguments.pooling, seed=seed)
        train, test, cached = self.features(encoder)
        predicted = None
        if self.fresh:
            predicted = fit_fresh(
                encoder,
                self.train,
                np.zeros((0, encoder.width), np.float32) if test is None else test.features,
                arguments.linear,
                fraction=self.fraction,
                seed=seed,
                group=self.world,
            )
        few = f", {arguments.per_class} a class" if arguments.per_class else ""

        def judge() -> SeedResult:
            assert test is not None, "rank 0 has the features"
            answers = predicted
            if answers is None:
                assert train is not None
                learned = train
                if arguments.per_class:
                    learned = train.take(draw_of_each_class(train.labels, arguments.per_class, seed))
                answers = classify(learned, test.features, arguments, seed)
            summary = self.summarise_groups(answers == test.labels)
            return self.result(
                f"{self.title}{few}",
                seed,
                accuracy(answers, test.labels),
                detail={
                    "accuracy_by_class": accuracy_by_class(answers, test.labels, self.train.classes),
                    "images": len(test.labels),
                    "features_from_cache": cached,
                    **summary.pop("detail", {}),
                },
                figures=summary,
            )

        return on_rank_zero(self.world, "fitting the probe", judge)

    def summarise_groups(self, right: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return the figures of the groups of the measured images, empty without --groups; `right`: [n] of them."""
        source, images = self.arguments.groups, self.train if self.test is None else self.test
        if not source:
            return {}
        names = images.groups(source)
        groups = Groups.from_names(source, self.arguments.least_group, *names)
        numbers = np.concatenate([groups.number(part) for part in names])
        return groups.summarise(numbers[images.held_out(self.fraction)] if self.test is None else numbers, right)

    def result(
        self, name: str, seed: int, value: float, figures: Mapping[str, float] | None = None, **fields: Any
    ) -> SeedResult:
        """Return an accuracy on the measured images, and further figures."""
        return SeedResult(
            task=f"{self.name} ({name})",
            metric="accuracy",
            split=self.split,
            lower_is_better=False,
            seed=seed,
            metrics={"accuracy": value, **(figures or {})},
            **fields,
        )

    def features(self, encoder: FrozenEncoder) -> tuple[LabelledFeatures | None, LabelledFeatures | None, bool]:
        """Return features of training images (`None` if unused) and of measured images, on rank 0 only, and whether
        all were cached. Collective."""
        cache, cached = self.arguments.cache, True
        train = test = None
        if self.test is None or not self.fresh:
            train, cached = all_features(encoder, self.train, self.world, cache)
        if self.test is not None:
            test, test_cached = all_features(encoder, self.test, self.world, cache)
            return train, test, cached and test_cached
        held = self.train.held_out(self.fraction)
        return (None, None, cached) if train is None else (train.take(~held), train.take(held), cached)

    def stage_two(self) -> SeedResult | None:
        """Return MLO-MAE's figure, if --from has such a head and --test is given. Collective."""
        second_stage = None if self.arguments.from_ == SCRATCH else stage_two(self.arguments.from_)
        if second_stage is None:
            return None
        test = self.arguments.test
        reason, data = "" if test else "it needs a test set; give --test DIR", second_stage.config.data.path
        try:
            if test is not None:
                check_test(second_stage.config, test)
        except (DataError, RefusedError) as error:
            reason = str(error) if Path(data).exists() else ""
            if not reason:
                compared = "test images were not compared with the images that the masks were learned from"
                logger.warning("%s does not exist: %s", data, compared)
        if reason:
            logger.warning("%s is left out: %s", NAME, reason)
            return None
        from trp_scale.finetuning.classification.task import open_labelled

        # All test images, at the size that the head was trained with.
        settings = second_stage.config
        config = self.settings(settings.crops.size)
        encoder = self.encoder(config, pooling=str(settings.multilevel.pooling), weights=second_stage.encoder_weights())
        features, _ = all_features(encoder, open_labelled(config, str(test)), self.world, self.arguments.cache)

        def judge() -> SeedResult:
            assert features is not None, "rank 0 has the features"
            # Not judged: it measures the same task as the probe.
            return self.result(NAME, settings.training.seed, second_stage.accuracy(features), judged=False)

        return on_rank_zero(self.world, "measuring the head of stage II", judge)


def draw_of_each_class(labels: Integers, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """Select `count` rows of each label at random, as a mask [n]. Raises RefusedError if a label has fewer rows."""
    generator = np.random.default_rng(seed)
    drawn = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise RefusedError(
                f"--per_class is {count}, but class {label} has {len(places)} training images; allowed: at most these"
            )
        drawn[generator.choice(places, count, replace=False)] = True
    return drawn


NAME = "stage II head (MLO-MAE's own figure, no probe)"


@dataclass(frozen=True, kw_only=True)
class StageTwo:
    """Head of a run with learned masks.

    Attributes:
        config: of the run.
        weight, bias: [K, D] and [K].
    """

    config: MaeConfig
    checkpoint: Path
    weight: Tensor
    bias: Tensor

    def encoder_weights(self) -> dict[str, Tensor] | None:
        """Return the weights of stage II's encoder; `None` if it shares the run's encoder."""
        if not isinstance(self.config.multilevel, FineTuningSettings):
            return None

        from trp_scale.pretraining.mae.image_weights import is_encoder  # with timm

        stored = read_full_state(self.checkpoint, engine=FINE_TUNED)
        return {name: tensor for name, tensor in stored.items() if is_encoder(name)}

    def accuracy(self, test: LabelledFeatures) -> float:
        """Return the accuracy of the head, which is that of methods/learned_masks/head.py without dropout."""
        features = torch.from_numpy(test.features)
        if self.config.multilevel.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        predicted: Integers = F.linear(features, self.weight, self.bias).argmax(1).numpy()
        return accuracy(predicted, test.labels)


def stage_two(path: str) -> StageTwo | None:
    """Return the head of a run with learned masks. `None` for other encoders, for masks learned without a head, and
    for averaged weights, which the head was not trained with."""
    if not is_run(Path(path)):
        return None
    run = open_run(Path(path))
    config, checkpoint = run.config, run.checkpoint
    if not isinstance(config, MaeConfig) or not config.multilevel.reads_labels:
        return None
    head = read_hooks_state(checkpoint, run.document)["multilevel"]["outer"]["head"]
    return StageTwo(
        config=config,
        checkpoint=checkpoint,
        weight=head["weight"]["value"].float(),
        bias=head["bias"]["value"].float(),
    )


@while_training
def probe(arguments: ProbeArguments) -> Measurement:
    """Run `trp-scale probe`; return the result, the same on every rank."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.method == "logistic":
        require_scikit_learn()
    baseline = None if arguments.baseline is None else read_results(arguments.baseline)
    with Environment(timeout_minutes=60.0 * 24) as environment:  # ranks wait while rank 0 fits the classifiers
        world = environment.world
        run_dir = create_run_directory(arguments.run_dir, f"probe-{arguments.method}", world)
        check_shared_directory(run_dir, world)
        if arguments.task:
            from trp_scale.evaluation.probe.sentences import probe_sentences

            tasks = on_rank_zero(world, "fitting the probes", lambda: probe_sentences(arguments))
            description = f"logistic probe of frozen sentences, {arguments.rows or 'all'} rows"
        else:
            image_probe = ImageProbe(arguments, environment)
            seeds = range(arguments.seed, arguments.seed + arguments.seeds)
            tasks = [join([image_probe.measure(seed) for seed in seeds])]
            if (head_result := image_probe.stage_two()) is not None:
                tasks.append(join([head_result]))
            description = image_probe.description
        results = Results(recipe=description, encoder=arguments.from_, tasks=tasks)
        on_rank_zero(world, f"writing {run_dir}", lambda: write_results(run_dir / RESULTS_FILE, results))
    return Measurement(path=run_dir, results=results, baseline=baseline)
