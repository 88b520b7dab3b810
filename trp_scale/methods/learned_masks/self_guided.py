"""Masks from the encoder's own clusters of patches, without a masking network (Shin et al., "Self-Guided Masked
Autoencoder", NeurIPS 2024, arXiv:2507.19773).

1. Encode the whole image without gradients, and compute the cosine similarities of its patches.
2. Split the patches in two by a normalised cut (Shi and Malik 2000), the signs of the second eigenvector. Choose the
   side of its largest entry, which tends to be the object (TokenCut, Wang et al. 2022).
3. Mask the patches with the largest mean similarity to that side, but for a few hints spread over the ranking.

Written from a summary of the paper and not compared with its code. Ours are: the choice of the side, the number and
the rule of the hints, and the layer (the encoder's output; the paper reports little difference between layers).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from trp_scale.config.images import PatchSplit, split_patches
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import PatchObjective, RunContext
from trp_scale.methods.learned_masks.masks import Selection, apply_selection, masked_config
from trp_scale.methods.learned_masks.settings import SelfGuidedSettings

EDGE = 1e-5
"""Smallest similarity of two patches, so that no patch is unconnected."""


class SelfGuidedMasks(Hook):
    """Chooses the masks of each step after `start`; before it the loader's random masks stay."""

    name = "multilevel"

    def __init__(self, settings: SelfGuidedSettings, run: RunContext) -> None:
        config = masked_config(run)
        self.objective: PatchObjective = run.objective  # type: ignore[assignment]  # checked with the settings
        self.hints, self.first_step = settings.hints, settings.first_step(config)
        self.split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)
        self.selections: dict[int, Selection] = {}

    @torch.no_grad()
    def before_step(self, ctx: StepContext) -> None:
        self.selections = {}
        if ctx.step < self.first_step:
            return
        for micro in ctx.window:
            patches = self.objective.patches(micro)  # [B, N, P]
            every = torch.arange(self.split.patches, device=patches.device).expand(len(patches), -1)
            features = ctx.engine(patches, every, every[:, :0], output="features")[:, 1:]  # [B, N, D]
            self.selections[micro.start] = select_cluster(features, self.split, self.hints)

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        selection = self.selections.get(micro.start)
        return micro if selection is None else apply_selection(micro, selection)


def select_cluster(features: Tensor, split: PatchSplit, hints: float) -> Selection:
    """Mask the cluster of the object.

    Args:
        features: of all patches, [B, N, D].
        hints: share of the masked patches that are shown instead; the next patches of the ranking are masked for them.
    """
    scores = cluster_scores(features)
    order = scores.argsort(dim=1, descending=True, stable=True)
    shown = min(round(hints * split.masked), split.visible)
    ranks = torch.arange(split.patches, device=features.device)
    is_hint = (ranks < split.masked) & ((ranks + 1) * shown // split.masked > ranks * shown // split.masked)
    order = order[:, (ranks + split.patches * is_hint).argsort()]  # hints last
    masked, visible = order[:, : split.masked], order[:, split.masked :]
    return Selection(masked=masked.sort(dim=1).values, visible=visible.sort(dim=1).values, probabilities=scores)


def cluster_scores(features: Tensor) -> Tensor:
    """Return the mean similarity of each patch to the cluster of the object, [B, N, D] -> [B, N]."""
    similarity = cosine_similarity(features)  # [B, N, N]
    cluster = object_cluster(similarity).to(similarity.dtype)  # [B, N]
    return torch.einsum("bnm,bm->bn", similarity, cluster) / cluster.sum(1, keepdim=True)


def cosine_similarity(features: Tensor) -> Tensor:
    """Return the cosine similarities of the patches of each image, [B, N, D] -> [B, N, N], at least fp32."""
    unit = normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    return unit @ unit.mT


def object_cluster(similarity: Tensor) -> Tensor:
    """Return the side of the normalised cut with the largest entry of the second eigenvector, [B, N] bool.

    The generalised eigenvector of (D - W) y = lambda D y is y = D^-1/2 z, with z that of D^-1/2 W D^-1/2. A fixed
    number of power iterations, without its known first eigenvector D^1/2 1, needs no wait for the device.
    """
    weights = similarity.clamp_min(EDGE)
    roots = weights.sum(2, keepdim=True).sqrt()  # [B, N, 1]
    scaled = weights / roots / roots.mT
    first = normalize(roots, dim=1)
    vector = weights.gather(2, roots.argmin(1, keepdim=True).expand(-1, weights.shape[1], 1))  # least connected patch
    for _ in range(64):
        vector = vector - first * (first * vector).sum(1, keepdim=True)
        vector = normalize(vector + scaled @ vector, dim=1)  # eigenvalues in [0, 2]
    cut = (vector / roots).squeeze(2)
    positive = cut > 0
    return positive == positive.gather(1, cut.abs().argmax(1, keepdim=True))
