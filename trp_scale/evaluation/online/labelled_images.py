"""Images with classes that online probes learn from and are measured on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trp_scale.checkpoint.agreement import together
from trp_scale.core.run import RunContext
from trp_scale.data.images.leakage import check_test
from trp_scale.evaluation.online.labelled_rows import NAME, Pair, Weights, require_two_classes
from trp_scale.evaluation.online.settings import ProbesSettings
from trp_scale.evaluation.probe.encoder import BATCH, FrozenEncoder, show
from trp_scale.evaluation.probe.features import LabelledFeatures, extract
from trp_scale.evaluation.probe.images import BlockMasks, ProbedImages, open_probed
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoder_source import encoder_from_run

SHARE_MEASURED = 0.1
"""Of labelled images that no test set goes with, in a data set of which the run holds nothing out."""


class LabelledImages:
    """Images with classes, each as a whole image of the pre-training's size; all ranks share the work.

    Args:
        settings: of the probes.
        run: whose encoder it is.

    Raises:
        DataError, RefusedError: the data is missing or damaged, has no classes, or two sets do not belong together.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        self.settings, self.run = settings, run
        config = ClassificationTaskConfig()
        encoder_from_run(run.config, NAME, dict).adopt(config)
        config.model.weights = ""  # they are given each time
        self.config = show(config, size=0, batch=BATCH)
        config.augmentation.measured = settings.seen
        path = config.data.path = settings.data or run.config.data.path
        self.train = self.test = open_probed(config, path)
        fraction = run.config.data.validation_fraction if path == run.config.data.path else 0.0
        if settings.test:
            check_test(config, Path(settings.test))
            self.test = open_probed(config, settings.test)
            measured = self.test.every_block()
        else:
            fraction = fraction or SHARE_MEASURED
            measured = self.train.held_blocks(fraction)
        self.measured = first_blocks(self.test, measured, settings.measured)
        self.learned = first_blocks(self.train, [~held for held in self.train.held_blocks(fraction)], settings.rows)
        require_two_classes(self.train.labels(self.learned)[: settings.rows], path)

    def features(self, weights: Weights) -> Pair | None:
        world, encoders = self.run.world, list[FrozenEncoder]()

        def make() -> None:
            weighted = None
            if world.rank == 0:
                source = encoder_from_run(self.run.config, NAME, lambda: weights)
                weighted = source.image_weights(self.config)
            encoders.append(FrozenEncoder(self.config, pooling="mean", device=self.run.device, weights=weighted))

        together(world, "making the probed encoder", make)
        (encoder,) = encoders
        for parameter in encoder.module.parameters():  # rank 0 alone has them
            parameter.copy_(world.sum(parameter if world.rank == 0 else torch.zeros_like(parameter)))
        learned = self._of(encoder, self.train, self.learned, self.settings.rows)
        measured = self._of(encoder, self.test, self.measured, self.settings.measured)
        return (learned, measured) if world.rank == 0 else None

    def _of(self, encoder: FrozenEncoder, images: ProbedImages, blocks: BlockMasks, rows: int) -> LabelledFeatures:
        features, labels = extract(encoder, images.once(blocks, self.run.world), self.run.world)
        return LabelledFeatures(features=features[:rows], labels=labels[:rows])


def first_blocks(images: ProbedImages, among: BlockMasks, rows: int) -> BlockMasks:
    """The blocks among those given whose keys have the lowest hashes, as many as hold `rows` together, or all."""
    blocks = [dataset.blocks for dataset in images.opened.datasets]
    identities, sizes = (
        np.concatenate(columns) for columns in zip(*((b.identities, b.rows) for b in blocks), strict=True)
    )
    order = np.argsort(identities)
    order = order[np.concatenate(among)[order]]
    enough = 1 + int(np.searchsorted(np.cumsum(sizes[order]), rows))
    chosen = np.zeros(len(identities), dtype=np.bool_)
    chosen[order[:enough]] = True
    return np.split(chosen, np.cumsum([len(b.rows) for b in blocks])[:-1])
