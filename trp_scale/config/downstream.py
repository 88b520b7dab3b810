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
    """glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. Of images: the name in tables; empty = the kind."""
    test_path: str = ""
    """Of images: data set on all of whose samples the metrics are measured; empty = what --data.validation_fraction
    holds out of --data.path."""
    split: Literal["dev", "test"] = "dev"
    """What the measured samples are called in every table: of the training set's side (dev), or the test set; of GLUE
    also which of its files are measured."""
    epochs: float = 3.0
    """Passes over the training rows, from which training.steps follows; 0 = training.steps as it is."""
    warmup_share: float = 0.0
    """Share of the steps that warm up, from which optimizer.warmup_steps follows; 0 = optimizer.warmup_steps as it
    is."""
    max_length: int = 128
    """glue: word pieces of a row, special ones included; longer sentences are cut, the longer of a pair first."""
    padding: Literal["none", "length"] = "none"
    """glue: none = short rows share sequences, with little padding. length = each row is padded to max_length: one
    shape for --training.compile."""
    tokenizer: str = ""
    """glue: tokenizer directory; empty = the encoder's own. --from scratch needs one."""
    dropout: float = 0.1
    """Dropout of the head's input."""
    drop_path: float = 0.0
    """Of images: probability that a block's branch is left out for an image, growing linearly from 0 at the first
    block to this at the last (Huang et al. 2016)."""
    pooling: Literal["mean", "class"] = "mean"
    """classification: the head reads the mean of the patch tokens, or the class token."""
    positions: Literal["recomputed", "interpolated"] = "recomputed"
    """Fixed positions of a grid that is not the pre-training's: sine and cosine of its own coordinates, or the
    pre-training's grid stretched by bicubic interpolation. Learned ones are always interpolated."""
    learned_positions: bool = False
    """Set by --from: the encoder's positions are weights (a supervised ViT's), not fixed sines and cosines."""
    pretraining_grid: int = 0
    """Set by --from: patches along each side of the images that the encoder was pre-trained on."""
    classes: int = 0
    """Set by the data: width of the head's output."""
