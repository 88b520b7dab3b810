"""Sections that runs of several kinds have: the encoder, the data, the crops and the masks; and how many patches a crop
has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro.conf

from trp_scale.config.settings import Section, near_divisors, setting

Weights = Literal["last", "average"]
"""Which weights of a run: as its last step left them, or the average that its hook weight_average kept of them."""

AVERAGE = "@average"
"""Behind the path of a run or a checkpoint: the average, where `model.weights` names its weights."""


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The encoder. Defaults are BERT-base (TRP 001, Table 4)."""

    layers: int = setting(12, at_least=1)
    """Number of transformer blocks."""
    hidden_size: int = setting(768, at_least=1)
    """Width of the residual stream."""
    heads: int = setting(12, at_least=1)
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = setting(3072, at_least=1)
    """Width of the feed-forward layer."""
    initializer_range: float = setting(0.02, above=0)
    """Standard deviation of the normal initialisation."""
    layer_norm_eps: float = setting(1e-12, above=0)
    """Epsilon of the layer norms."""
    weights: str = ""
    """Start from another library's weights: a safetensors file, or a directory with model.safetensors. Allowed:
    transformers' BertForPreTraining or ViTMAEForPreTraining, timm's ViT (its encoder), MultiMAE. A run directory of
    trp-scale pretrain gives its last weights, with @average behind it their average. Empty = from the seed."""
    weights_names: bool = False
    """Where those weights are another model's: name every tensor that is missing, unexpected or of another shape."""

    @property
    def block_parameters(self) -> int:
        """Parameters of the blocks' matrices, which are nearly all of a large encoder: 4 d^2 of attention and 2 d f of
        the feed-forward layer in each."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    def problems(self, config: Any) -> Iterator[str]:
        if self.heads > 0 and self.hidden_size % self.heads:
            yield (
                f"--model.heads is {self.heads} and does not divide --model.hidden_size {self.hidden_size}; "
                f"allowed, for example: {near_divisors(self.hidden_size, self.heads)}"
            )


@dataclass(kw_only=True)
class TextModelConfig(ModelConfig):
    """The encoder of text."""

    max_positions: int = setting(512, at_least=8)
    """Longest sequence the position table can hold, special tokens included."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of hidden states and attention probabilities."""


@dataclass(kw_only=True)
class VisionConfig:
    """How an image becomes tokens."""

    patch_size: int = setting(16, at_least=1)
    """Side of a patch in pixels; must divide --crops.size."""
    position_order: Literal["column_row", "row_column"] = "column_row"
    """The coordinate that the first half of a fixed position encodes, then the other's. column_row: MAE (He et al.).
    row_column: MultiMAE (Bachmann et al.). The network is the same up to an exchange of the halves of its width, but
    each library's weights need their own order."""


@dataclass(kw_only=True)
class RelativeVisionConfig(VisionConfig):
    """Encoders with optional relative positions."""

    positions: Literal["absolute", "relative"] = "absolute"
    """Fixed sine-cosine positions; relative adds iRPE beside them: contextual product on keys, a table per block."""
    index: Literal["rounded", "relaxed"] = "rounded"
    """How an offset finds its entry of the relative table: rounded (iRPE), or relaxed and interpolated (AdPE 4.2.3). A
    relative coordinate adversary always takes --adversary.index instead."""


@dataclass(kw_only=True)
class DecodedVisionConfig(VisionConfig):
    """Masked autoencoders (He et al.). Defaults are MAE's."""

    decoder_layers: int = setting(8, at_least=1)
    """Number of decoder blocks."""
    decoder_hidden_size: int = setting(512, at_least=1)
    """Width of the decoder."""
    decoder_heads: int = setting(16, at_least=1)
    """Attention heads of the decoder; must divide decoder_hidden_size."""


@dataclass(kw_only=True)
class DataConfig(Section):
    """Where rows come from and in which order."""

    path: str = ""
    """Directory with dataset.json, or several with weights: 'books:0.7=/a,wiki:0.3=/b'."""
    workers: int = setting(1, at_least=0)
    """Loader processes per rank, at most as many as it has CPUs; 0 fetches in the training process. The three sources
    of learned masks share them; each has at least one."""
    prefetch: int = setting(4, at_least=1)
    """Micro-batches each worker prepares ahead."""
    blocks_per_group: int = setting(16, at_least=1)
    """Blocks whose rows are shuffled together. Part of the order: a resumed run cannot change it."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the blocks held out for validation, chosen by a hash of their keys."""
    max_corrupt_blocks: int = setting(0, at_least=0)
    """Most unreadable blocks (text) or images that are left out and reported. One more stops the run on all ranks."""
    verify: bool = True
    """Compare the checksum of each block at its first reading, and of each image. Those of depth and segmentation maps
    are always compared."""

    def problems(self, config: Any) -> Iterator[str]:
        if not self.path:
            yield (
                "--data.path is empty; allowed: the directory with dataset.json that trp-scale shard-text or "
                "trp-scale shard-images wrote"
            )


@dataclass(kw_only=True)
class MaskingConfig:
    """Selection of the predicted positions."""

    maskings: int = setting(0, at_least=0)
    """Different maskings per row, used in turn by epoch; 0 = a fresh one each epoch."""


@dataclass(kw_only=True)
class CropConfig(Section):
    """Crop of an image that the model sees. Crops and flips follow from (seed, row key, epoch)."""

    size: int = 224
    """Side of a crop in pixels (MAE+: 112)."""
    min_scale: float = 0.2
    """Smallest share of the image's area that a random resized crop (or the view) covers."""
    max_scale: float = 1.0
    """Largest share of the image's area that a random resized crop (or the view) covers."""
    flip: float = setting(0.5, at_least=0, at_most=1)
    """Probability of a horizontal flip."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized; both with antialiasing."""
    scaled_decoding: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where all its crops still have --crops.size pixels a side (libjpeg's
    scaled inverse DCT). Pixels differ a little, and crops begin and end at multiples of 2, 4 or 8 pixels. It is faster
    for images of more than twice the crop's size; for others nothing changes."""

    def problems(self, config: Any) -> Iterator[str]:
        if not 0 < self.min_scale <= self.max_scale <= 1:
            yield (
                f"--crops.min_scale is {self.min_scale} and --crops.max_scale {self.max_scale}, allowed: shares of the "
                "image's area, more than 0, at most 1, the first not above the second"
            )


@dataclass(kw_only=True)
class CropsConfig(CropConfig):
    """Crops of an image, one model row each. Crops and flips follow from (seed, row key, epoch)."""

    count: int = setting(1, at_least=1)
    """Crops of each image in each epoch, k in AdPE 3.2; they share one decoding of the file."""
    from_: Annotated[Literal["image", "view"], tyro.conf.arg(name="from")] = "image"
    """image: each crop is a random resized crop of the image. view: the image is first cropped and resized to a view
    of view_size, from which windows of `size` are cut at random places (AdPE, Appendix A)."""
    view_size: int = 224
    """Side of the view in pixels, for crops.from = view."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.from_ == "view" and self.view_size < self.size:
            yield (
                f"--crops.view_size is {self.view_size}, below --crops.size {self.size}: no window of that size lies "
                "in the view; raise it, or use --crops.from image"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.from_ == "image" and self.view_size != CropsConfig.view_size:
            yield f"--crops.view_size {self.view_size} has no effect with --crops.from image"


MOST_PATCHES = 1 << 16
"""That a crop may have: masks carry a patch's number in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class PatchSplit:
    """How many patches a crop has.

    Attributes:
        patches: N, all of them.
        visible: V = int(N (1 - ratio)), those that the encoder is shown.
    """

    patches: int
    visible: int

    @property
    def masked(self) -> int:
        """M = N - V, those that are predicted."""
        return self.patches - self.visible


def split_patches(size: int, patch_size: int, ratio: float) -> PatchSplit:
    """The patches of a crop.

    Args:
        size: side of the crop in pixels (crops.size), a multiple of the patch's.
        patch_size: side of a patch (vision.patch_size).
        ratio: share that is predicted (masking.ratio).
    """
    patches = (size // patch_size) ** 2
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))
