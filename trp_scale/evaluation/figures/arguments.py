"""The flags of `trp-scale represent`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trp_scale.config.flags import ReadsRuns
from trp_scale.config.upstream import Weights
from trp_scale.evaluation.probe.arguments import FrozenPositions, Pooling


@dataclass(kw_only=True)
class RepresentArguments(ReadsRuns):
    """Look at what an encoder has learned: how much more alike images of one class are than images of two, the
    representations in a plane, attention maps; of a run of ours its reconstructions and masks; of fine-tuned runs what
    they decide by. Writes PNG files, representation.json and one page, index.html."""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")]
    """The encoder: a run directory of trp-scale pretrain or finetune, an export, a directory of transformers (ViTMAE)
    or of timm (ViT, such as DINO's); scratch: weights drawn at random, in the sizes of --recipe, for comparison."""
    weights: Weights = "last"
    """Of a run with the hook weight_average, in --from: average takes the average of its weights in place of the last
    ones."""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Sharded images to look at. Figures about classes need images with classes."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; made if it is not there."""
    run: Annotated[list[Path], tyro.conf.arg(metavar="DIR")] = field(default_factory=list)
    """Fine-tuned runs of one kind of task, each the run directory of a seed (DIR/TASK/seed_N): what their task draws of
    them, side by side. Classifiers have Grad-CAM; segmentation and depth predicted maps."""
    images: int = 1024
    """Largest number of images that figures, plane and averaged attention are made of; 0 = all."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """For --from scratch: a recipe of images with the encoder's sizes; a run's config.yaml is one too."""
    image_size: int = 0
    """Side of the images in pixels, a multiple of the patches'; 0 = that of the pre-training."""
    encoder_positions: FrozenPositions = "recomputed"
    """Fixed positions on images of another size than in pre-training. recomputed: sine and cosine of their own
    coordinates. interpolated: the pre-training grid, stretched (bicubic), as in MAE's code."""
    seen: Literal["centre", "whole"] = "centre"
    """Part of an image that the encoder sees. centre: the central square, image_size of image_size / 0.875 pixels.
    whole: the whole image, squashed to a square."""
    shown: int = 6
    """Images in the pictures that show images."""
    pooling: Pooling = "mean"
    """The representation of an image: the mean of its patch tokens, or the class token, after the last norm."""
    plane: Literal["pca", "tsne"] = "pca"
    """How representations are laid out in a plane: principal components, or t-SNE."""
    block: int = 0
    """Block whose attention is shown, from 0; negative ones count from the last."""
    positions: Annotated[list[str], tyro.conf.arg(metavar="ROW,COLUMN")] = field(default_factory=list)
    """Patches whose attention is shown, such as 3,3 3,10; empty = three by three over the image."""
