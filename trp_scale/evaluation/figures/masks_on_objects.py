"""Share of the masked pixels of a masked autoencoder that show an object, measured with segmentation maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.images import PatchSplit, split_patches
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import HeldOutPlan
from trp_scale.distributed.groups import ALONE
from trp_scale.errors import quote
from trp_scale.evaluation.figures.pictures import random_scores
from trp_scale.evaluation.figures.trained_images import TrainedImages, load_masking_network
from trp_scale.finetuning.dense.batch import DenseData, SegmentationMaps
from trp_scale.finetuning.dense.settings import SegmentationTaskConfig
from trp_scale.finetuning.dense.task import open_dense
from trp_scale.finetuning.measurement import all_blocks, read_once
from trp_scale.methods.learned_masks.masks import scheduled_split, select
from trp_scale.methods.learned_masks.self_guided import cluster_scores
from trp_scale.pretraining.modalities.semseg import VOID
from trp_scale.reporting.results import Results, SeedResult, join

METRIC = "on_objects"
"""Share of masked pixels, without void ones, that show an object; mean over images with objects. Random masks reach
the share of objects in these images."""

HIDDEN = "of_objects"
"""Share of object pixels that is masked; mean over images with objects."""


LEARNED, BEFORE = "masks", "masks before the first lesson"
"""Tasks of the results: the run's masks, random or learned; and masks of the masking network at its initialisation."""


@dataclass
class MaskOverlap:
    """Overlap of masks with objects.

    Attributes:
        on_objects, of_objects, by_chance: of each image with objects.
        left_out: number of images without objects, or with void masked patches only.
    """

    on_objects: list[float] = field(default_factory=list)
    of_objects: list[float] = field(default_factory=list)
    by_chance: list[float] = field(default_factory=list)
    left_out: int = 0

    def add(self, objects: Tensor, valid: Tensor, masked: Tensor) -> None:
        """Add a micro-batch.

        Args:
            objects, valid: [R, N] share of object pixels and of non-void pixels in each patch.
            masked: [R, M] patch numbers.
        """
        hidden, seen = objects.gather(1, masked).sum(1), valid.gather(1, masked).sum(1)  # [R]
        whole = objects.sum(1)
        measured = (whole > 0) & (seen > 0)
        self.on_objects += (hidden / seen)[measured].tolist()
        self.of_objects += (hidden / whole)[measured].tolist()
        self.by_chance += (whole / valid.sum(1))[measured].tolist()
        self.left_out += int((~measured).sum())


def measure_masks(trained: TrainedImages, data: str, background: Sequence[str], rows: int = 0) -> Results:
    """Measure the overlap of a run's masks with objects, on images with segmentation maps, in this process.

    The masks have the run's ratio, on whole images resized to its crop size. For learned masks, the masking network at
    its initialisation is measured too.

    Args:
        data: shards of images with segmentation maps.
        background: names of the classes that are not objects.
        rows: maximum number of images, in stored order; 0 = all.

    Raises:
        DataError: the data is missing or damaged.
        RefusedError: no segmentation maps, no such class, or only background.
    """
    config = SegmentationTaskConfig()
    config.crops.size, config.crops.interpolation = trained.config.crops.size, trained.config.crops.interpolation
    config.dense.measured = "squashed"
    config.data.path, config.data.workers = data, 0
    config.batch.global_size = config.batch.micro_size = trained.config.batch.micro_rows
    opened = open_dense(config, parse_paths(data), SegmentationMaps)
    assert isinstance(opened.maps, SegmentationMaps)
    ground = _numbers(background, opened.maps.classes)
    score = _patch_scores(trained)
    size = trained.config.vision.patch_size
    split = split_patches(config.crops.size, size, trained.config.masking.ratio)
    if trained.config.multilevel.learns:  # a curriculum sets the final ratio
        split = scheduled_split(trained.config.training.steps - 1, trained.config)
    overlaps: dict[str, MaskOverlap] = {}
    with torch.no_grad():
        for batch in _batches(opened, config, rows):
            valid = batch["semseg"] != VOID  # [R, S, S]
            objects = valid & ~torch.isin(batch["semseg"], ground)
            shares = _by_patch(objects, size), _by_patch(valid, size)  # [R, N] each
            for name, scores in score(batch).items():
                overlaps.setdefault(name, MaskOverlap()).add(*shares, select(scores, split).masked)
    if not any(overlap.on_objects for overlap in overlaps.values()):
        raise RefusedError(f"--background {','.join(background)}: {data} contains only these classes; name fewer")
    tasks = [join([_seed_result(trained, name, overlap, split)]) for name, overlap in overlaps.items()]
    return Results(recipe=trained.config.upstream, encoder=str(trained.checkpoint), tasks=tasks)


def _patch_scores(trained: TrainedImages) -> Callable[[Batch], dict[str, Tensor]]:
    """Return a function from a batch to scores [R, N], the largest of which are masked: random, self-guided
    (without hints), or of the masking network and of its initialisation."""
    network, seed = load_masking_network(trained), trained.config.training.seed
    if trained.config.multilevel.kind == "self_guided":

        def score_clusters(batch: Batch) -> dict[str, Tensor]:
            patches = _patches(trained, batch)
            everywhere = torch.arange(patches.shape[1]).expand(len(patches), -1)
            features: Tensor = trained.model(patches, everywhere, None, output="features")  # [R, 1 + N, D]
            return {LEARNED: cluster_scores(features[:, 1:])}

        return score_clusters
    if network is None:
        count = (trained.config.crops.size // trained.config.vision.patch_size) ** 2
        return lambda batch: {LEARNED: torch.stack([random_scores(seed, key, count) for key in batch.keys.tolist()])}
    untrained = type(network)(trained.config).eval()  # initialised from the seed, as in the run

    def score(batch: Batch) -> dict[str, Tensor]:
        embeddings = trained.model.patch_embed(_patches(trained, batch))  # [R, N, D]
        return {LEARNED: network(embeddings), BEFORE: untrained(embeddings)}

    return score


def _patches(trained: TrainedImages, batch: Batch) -> Tensor:
    """Return the patches of whole images, [R, N, P]."""
    images = Batch(fields={"images": batch["images"][:, None]}, keys=batch.keys, start=batch.start)
    return trained.objective.patches(images)


def _seed_result(trained: TrainedImages, name: str, overlap: MaskOverlap, split: PatchSplit) -> SeedResult:
    return SeedResult(
        task=name,
        metric=METRIC,
        split="test",
        lower_is_better=False,
        seed=trained.config.training.seed,
        metrics={
            METRIC: float(np.mean(overlap.on_objects)),
            HIDDEN: float(np.mean(overlap.of_objects)),
            "by_chance": float(np.mean(overlap.by_chance)),
        },
        detail={
            "images": len(overlap.on_objects),
            "images_left_out": overlap.left_out,
            "masked": split.masked,
            "patches": split.patches,
        },
        judged=False,  # neither higher nor lower is better
    )


def _numbers(background: Sequence[str], classes: Sequence[str]) -> Tensor:
    if unknown := [name for name in background if name not in classes]:
        raise RefusedError(f"--background: the maps have no class {quote(unknown[0])}; allowed: {', '.join(classes)}")
    return torch.tensor([classes.index(name) for name in background])


def _batches(opened: DenseData, config: SegmentationTaskConfig, most: int) -> Iterator[Batch]:
    """Yield micro-batches of all images, each once."""
    rows = opened.rows(config, whole=True)
    members = rows.members(parse_paths(config.data.path), all_blocks(rows.blocks))
    for batch in read_once(rows, HeldOutPlan(members=members, most=most or None), config, ALONE):
        present = batch["row_weights"] > 0
        fields = {name: batch[name][present] for name in ("images", "semseg")}
        yield Batch(fields=fields, keys=batch.keys[present], start=batch.start)


def _by_patch(present: Tensor, size: int) -> Tensor:
    """Average [R, S, S] over each patch: [R, N], row by row."""
    return torch.nn.functional.avg_pool2d(present.float()[:, None], size).flatten(1)
