"""Which patches a masking network masks, beside random ones on the same images (MLO-MAE, Figure 4), as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trp_scale.config import PatchSplit
from trp_scale.core.batch import Batch
from trp_scale.core.seeds import tensor_seed
from trp_scale.downstream.trained_images import TrainedImages
from trp_scale.masks.masking_network import MaskingNetwork
from trp_scale.masks.masks import select
from trp_scale.models.image_patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.patches import unpatchify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 0.1
"""Share of masked patches in the paper's figure: at that of training nearly everything is masked."""
DIMMED = 0.25
"""What is left of a masked patch's brightness."""


def draw_masks(
    figure_of: type[Figure], trained: TrainedImages, network: MaskingNetwork, batch: Batch, path: Path
) -> str:
    """Draw images, each patch's probability, and the masks of a tenth and of the run's own share of the patches, drawn
    at random and chosen by the network; returns a sentence about them.

    Args:
        batch: images to show; the first crop of each.
    """
    shown = mask_strips(trained, network, batch)
    probabilities = shown.pop("probability")
    images = len(probabilities)
    figure = figure_of(figsize=(1.3 * images + 1.0, 1.3 * (len(shown) + 1)), layout="constrained")
    axes = figure.subplots(len(shown) + 1, images, squeeze=False)
    for each in axes.flat:
        each.set(xticks=[], yticks=[], frame_on=False)
    for row, (name, strip) in enumerate(shown.items()):
        axes[row, 0].set_ylabel(name, fontsize=8)
        for column, image in enumerate(strip):
            axes[row, column].imshow(image.permute(1, 2, 0).numpy())
    axes[-1, 0].set_ylabel("probability", fontsize=8)
    grid = round(probabilities.shape[1] ** 0.5)
    for column, values in enumerate(probabilities):
        drawn = axes[-1, column].imshow(values.view(grid, grid).numpy(), vmin=0, vmax=1, cmap="magma")
    figure.colorbar(drawn, ax=axes[-1, :].tolist(), shrink=0.8)
    figure.savefig(path, dpi=110)
    spread = float(probabilities.std(dim=0).mean())
    return (
        f"learned masks beside random ones, {images} images; a patch's probability is "
        f"{float(probabilities.mean()):.3f} on average, and differs by {spread:.3f} (standard deviation) between images"
    )


@torch.no_grad()
def mask_strips(trained: TrainedImages, network: MaskingNetwork, batch: Batch) -> dict[str, Tensor]:
    """{"image", "random 10 %", ...}: [R, 3, S, S] in [0, 1] each, and "probability": [R, N]."""
    first = Batch(fields={"images": batch["images"][:, :1]}, keys=batch.keys, start=batch.start)
    patches = trained.objective.patches(first)  # [R, N, P]
    probabilities = network(trained.model.patch_embed(patches))  # [R, N]
    count, patch_size = patches.shape[1], trained.config.vision.patch_size
    orders = torch.stack([_random_order(trained.config.training.seed, key, count) for key in batch.keys.tolist()])
    strips = {"image": pixels(patches, patch_size)}
    for share in (FEW, trained.config.masking.final_ratio or trained.config.masking.ratio):
        split = PatchSplit(patches=count, visible=min(count - 1, int(count * (1.0 - share))))
        for name, scores in (("random", orders), ("learned", probabilities)):
            masked = select(scores, split).masked
            dimmed = torch.ones(len(patches), count, 1).scatter(1, masked.unsqueeze(-1), DIMMED)
            strips[f"{name} {100 * share:g} %"] = pixels(patches, patch_size, dimmed)
    return {**strips, "probability": probabilities}


def pixels(patches: Tensor, patch_size: int, brightness: Tensor | None = None) -> Tensor:
    """[R, N, P] normalised -> [R, 3, S, S] in [0, 1], each patch times its brightness [R, N, 1]."""
    mean, deviation = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION]).view(2, 1, 3, 1, 1)
    found: Tensor = (unpatchify(patches, patch_size) * deviation + mean).clamp(0, 1)
    if brightness is None:
        return found
    return found * unpatchify(brightness.expand_as(patches), patch_size)


def _random_order(seed: int, key: int, count: int) -> Tensor:
    """[N] scores whose largest are a random choice that stays the same for this image."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, f"masks to show/{key}"))
    return torch.rand(count, generator=generator)
