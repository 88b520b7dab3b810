"""Labelled rows that online probes learn from and are measured on: images with classes, or sentences of GLUE."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.run import RunContext
from trp_scale.data.images.leakage import check_test
from trp_scale.data.mixture import parse_paths
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.distributed.groups import on_rank_zero, run_on_all_ranks
from trp_scale.evaluation.encoders import BATCH, FrozenEncoder, TextEncoder, set_shown_images
from trp_scale.evaluation.online.settings import ProbesSettings
from trp_scale.evaluation.probe.features import LabelledFeatures, extract
from trp_scale.evaluation.probe.sentences import BAD_LINES, draw_rows_alike, pair_vectors
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoders import encoder_from_run
from trp_scale.finetuning.glue.folders import Examples, read_glue
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.glue.task import require_libraries

if TYPE_CHECKING:
    from trp_scale.evaluation.probe.images import BlockMasks, ProbedImages

NAME = "this run"
"""What messages call the encoder."""

Weights = dict[str, Tensor]
"""Of the run's model, by its names; on rank 0 alone."""

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of the rows that are learned from, and of those that are measured."""


class LabelledRows(Protocol):
    """Rows with labels, as the run's encoder sees them."""

    def features(self, weights: Weights) -> Pair | None:
        """Compute features with the current weights; `None` except on rank 0. Collective."""
        ...


def require_two_classes(labels: npt.NDArray[Any], where: str) -> None:
    """Raises:
    RefusedError: a classifier has nothing to tell apart."""
    if len(np.unique(labels)) < 2:
        raise RefusedError(
            f"--probes.data: the {len(labels):,} rows of {where} that a probe would learn from are all of one class; "
            "give other data, or more --probes.rows"
        )


def open_rows(settings: ProbesSettings, run: RunContext) -> LabelledRows:
    """Open the rows that a run's encoder is probed on.

    Raises: as `ImageRows` and `SentenceRows`.
    """
    if run.config.reads == "text":
        return SentenceRows(settings, run)
    return ImageRows(settings, run)


SHARE_MEASURED = 0.1
"""Of labelled images that no test set goes with, in a data set of which the run holds nothing out."""


class ImageRows:
    """Images with classes, each as a whole image of the pre-training's size; all ranks share the work.

    Args:
        settings: of the probes.
        run: whose encoder it is.

    Raises:
        DataError, RefusedError: the data is missing or damaged, has no classes, or two sets do not belong together.
    """

    def __init__(self, settings: ProbesSettings, run: RunContext) -> None:
        from trp_scale.evaluation.probe.images import open_probed  # with timm, which text goes without

        self.settings, self.run = settings, run
        config = ClassificationTaskConfig()
        encoder_from_run(run.config, NAME, dict).adopt(config)
        config.model.weights = ""  # they are given each time
        self.config = set_shown_images(config, size=0, batch=BATCH)
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

        run_on_all_ranks(world, "making the probed encoder", make)
        (encoder,) = encoders
        for parameter in encoder.module.parameters():  # rank 0 alone has them
            parameter.copy_(world.sum(parameter if world.rank == 0 else torch.zeros_like(parameter)))
        learned = self._extract(encoder, self.train, self.learned, self.settings.rows)
        measured = self._extract(encoder, self.test, self.measured, self.settings.measured)
        return (learned, measured) if world.rank == 0 else None

    def _extract(self, encoder: FrozenEncoder, images: ProbedImages, blocks: BlockMasks, rows: int) -> LabelledFeatures:
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


class SentenceRows:
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
        encoder_from_run(run.config, NAME, dict).adopt(self.config)
        self.length = self.config.downstream.max_length
        on_rank_zero(run.world, f"reading {settings.data}", self._read)

    def _read(self) -> None:
        settings = self.settings
        self.tokenizer = open_text_dataset(parse_paths(self.run.config.data.path)[0].path).meta.tokenizer_directories[0]
        data = read_glue(Path(settings.data), settings.task, split="dev", allowed_bad=BAD_LINES)
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
    """Places of at most `rows` examples, each label's share as in all of them; always the same."""
    assert examples.labels is not None
    return draw_rows_alike(examples.labels, rows if rows < len(examples.labels) else 0, seed=0, alike=True)
