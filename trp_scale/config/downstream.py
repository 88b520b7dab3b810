"""Fine-tuning of a pre-trained encoder: what a run of `trp-scale finetune` has beside the settings of every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class DownstreamConfig:
    """The task, the length of the run and what every head has."""

    kind: Literal["glue", "classification", "segmentation", "depth", "detection"] = "glue"
    """glue: sentences or pairs of sentences. classification: the classes of images. segmentation: the class of each
    pixel. depth: the distance of each pixel. detection: boxes and masks of objects."""
    task: str = ""
    """glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. Images: the name in tables; empty = the kind."""
    test_path: str = ""
    """Images: a data set to measure on, all of it. Empty: the rows of --data.path that --data.validation_fraction holds
    out."""
    split: Literal["dev", "test"] = "dev"
    """What tables call the measured samples: dev (a part of the training set) or test. glue: also the files that are
    measured."""
    epochs: float = 3.0
    """Passes over the training rows. They set training.steps; 0 = training.steps as given."""
    warmup_share: float = 0.0
    """Share of the steps that warm up. It sets optimizer.warmup_steps; 0 = optimizer.warmup_steps as given."""
    max_length: int = 128
    """glue: word pieces of a row, special ones included. Longer sentences are cut, the longer of a pair first."""
    padding: Literal["none", "length"] = "none"
    """glue: none = short rows share sequences, with little padding. length = each row is padded to max_length; all
    shapes are then the same, as --training.compile needs."""
    tokenizer: str = ""
    """glue: tokenizer directory; empty = the encoder's own. --from scratch needs one."""
    dropout: float = 0.1
    """Dropout of the head's input."""
    drop_path: float = 0.0
    """Images: probability that the last block's branch is left out for an image. It grows linearly from 0 at the first
    block (Huang et al. 2016)."""
    pooling: Literal["mean", "class"] = "mean"
    """classification: the head reads the mean of the patch tokens, or the class token."""
    positions: Literal["recomputed", "interpolated"] = "recomputed"
    """Fixed positions on a grid of another size than in pre-training. recomputed: sine and cosine of its own
    coordinates. interpolated: the pre-training's grid, stretched (bicubic). Learned ones are always interpolated."""
    learned_positions: bool = False
    """Set by --from: the encoder's positions are weights (a supervised ViT's), not fixed sines and cosines."""
    pretraining_grid: int = 0
    """Set by --from: patches along each side of the images that the encoder was pre-trained on."""
    classes: int = 0
    """Set by the data: width of the head's output."""
