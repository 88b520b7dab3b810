"""The labelled rows of online probes, and how a run's encoder reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.checkpoint.agreement import on_rank_zero, together
from trp_scale.config import RefusedError
from trp_scale.core.run import RunContext
from trp_scale.data.images.kept_for_tests import check_test
from trp_scale.data.mixture import parse_paths
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.downstream.classification.settings import ClassificationTaskConfig
from trp_scale.downstream.encoder_source import encoder_of
from trp_scale.downstream.glue.examples import Examples
from trp_scale.downstream.glue.folders import read_glue
from trp_scale.downstream.glue.settings import GlueTaskConfig
from trp_scale.downstream.glue.task import require_libraries
from trp_scale.downstream.loaded_encoder import TextEncoder
from trp_scale.downstream.online import ProbesSettings
from trp_scale.downstream.probe.encoder import BATCH, FrozenEncoder, show
from trp_scale.downstream.probe.features import LabelledFeatures, extract
from trp_scale.downstream.probe.images import BlockMasks, ProbedImages, open_probed
from trp_scale.downstream.probe.sentences import BAD_LINES, few_of_all, pair_vectors

NAME = "this run"
"""What messages call the encoder."""

SHARE_MEASURED = 0.1
"""Of labelled images that no test set goes with, in a data set of which the run holds nothing out."""

Weights = dict[str, Tensor]
"""Of the run's model, by its names; on rank 0 alone."""

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of the rows that are learned from, and of those that are measured."""


class LabelledRows(Protocol):
    """Rows with labels, as the run's encoder sees them."""

    def features(self, weights: Weights) -> Pair | None:
        """By the weights as they are now; on rank 0 alone. Collective."""
        ...


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
        encoder_of(run.config, NAME, dict).adopt(config)
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
        self.learned = first_blocks(self.train, [~each for each in self.train.held_blocks(fraction)], settings.rows)
        require_two_classes(self.train.labels(self.learned)[: settings.rows], path)

    def features(self, weights: Weights) -> Pair | None:
        world, made = self.run.world, list[FrozenEncoder]()

        def make() -> None:
            given = None
            if world.rank == 0:
                source = encoder_of(self.run.config, NAME, lambda: weights)
                given = source.image_weights(self.config.crops.size // self.config.vision.patch_size)
            made.append(FrozenEncoder(self.config, pooling="mean", device=self.run.device, weights=given))

        together(world, "making the probed encoder", make)
        (encoder,) = made
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
    identities, sizes = (np.concatenate(each) for each in zip(*((b.identities, b.rows) for b in blocks), strict=True))
    order = np.argsort(identities)
    order = order[np.concatenate(among)[order]]
    enough = 1 + int(np.searchsorted(np.cumsum(sizes[order]), rows))
    taken = np.zeros(len(identities), dtype=np.bool_)
    taken[order[:enough]] = True
    return np.split(taken, np.cumsum([len(b.rows) for b in blocks])[:-1])


class LabelledSentences:
    """A task of GLUE: sentences are means over pieces, pairs [u, v, |u - v|, u * v], as `trp-scale probe` has them.
    Rank 0 alone reads them.

    Args:
        settings: of the probes.
        run: whose encoder it is.

    Raises:
        DataError, RefusedError: files that are missing or cannot be read.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        require_libraries()
        self.settings, self.run = settings, run
        self.config = GlueTaskConfig()
        encoder_of(run.config, NAME, dict).adopt(self.config)
        self.length = self.config.downstream.max_length
        on_rank_zero(run.world, f"reading {settings.data}", self._read)

    def _read(self) -> None:
        settings = self.settings
        self.tokenizer = open_text_dataset(parse_paths(self.run.config.data.path)[0].path).meta.tokenizer_directories[0]
        data = read_glue(Path(settings.data), settings.task, split="dev", allowed_bad=BAD_LINES)
        self.train, self.test = data.train, next(iter(data.measured.values()))
        self.learned, self.measured = drawn(self.train, settings.rows), drawn(self.test, settings.measured)
        assert self.train.labels is not None
        require_two_classes(self.train.labels[self.learned], settings.data)

    def features(self, weights: Weights) -> Pair | None:
        found: list[Pair] = []

        def read() -> None:
            source = encoder_of(self.run.config, NAME, lambda: weights, tokenizer=self.tokenizer)
            encoder = TextEncoder(source, self.config).eval().to(self.run.device)
            learned, measured = self._of(encoder, self.train, self.learned), self._of(encoder, self.test, self.measured)
            found.append((learned, measured))

        on_rank_zero(self.run.world, "reading labelled sentences", read)
        return found[0] if found else None

    def _of(self, encoder: TextEncoder, examples: Examples, rows: npt.NDArray[np.int64]) -> LabelledFeatures:
        assert examples.labels is not None
        vectors = pair_vectors(encoder, examples, rows, self.length)
        return LabelledFeatures(features=vectors, labels=examples.labels[rows].astype(np.int64))


def require_two_classes(labels: npt.NDArray[Any], where: str) -> None:
    """Raises:
    RefusedError: a classifier has nothing to tell apart."""
    if len(np.unique(labels)) < 2:
        raise RefusedError(
            f"--probes.data: the {len(labels):,} rows of {where} that a probe would learn from are all of one class; "
            "give other data, or more --probes.rows"
        )


def drawn(examples: Examples, rows: int) -> npt.NDArray[np.int64]:
    """Places of at most `rows` examples, each label's share as in all of them; always the same."""
    assert examples.labels is not None
    return few_of_all(examples.labels, rows if rows < len(examples.labels) else 0, seed=0, alike=True)


def open_rows(settings: ProbesSettings, run: RunContext) -> LabelledRows:
    """What the encoder of a run is probed on."""
    return LabelledSentences(settings, run) if run.config.reads == "text" else LabelledImages(settings, run)
