"""What is learned from: the model, the objective, the data and the masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro.conf

from trp_scale.config.settings import Section, setting

Weights = Literal["last", "average"]
"""Which weights of a run: as its last step left them, or the average that its hook weight_average kept of them."""

AVERAGE = "@average"
"""Behind the path of a run or a checkpoint: the average, where `model.weights` names its weights."""


@dataclass(kw_only=True)
class ModelConfig:
    """The encoder. Defaults are BERT-base (TRP 001, Table 4)."""

    layers: int = setting(12, at_least=1)
    """Number of transformer blocks."""
    hidden_size: int = setting(768, at_least=1)
    """Width of the residual stream."""
    heads: int = setting(12, at_least=1)
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = setting(3072, at_least=1)
    """Width of the feed-forward layer."""
    max_positions: int = setting(512, at_least=8)
    """Longest sequence the position table can hold, special tokens included."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of hidden states and attention probabilities."""
    initializer_range: float = setting(0.02, above=0)
    """Standard deviation of the normal initialisation."""
    layer_norm_eps: float = setting(1e-12, above=0)
    """Epsilon of the layer norms."""
    weights: str = ""
    """Start from another library's weights: a safetensors file, or a directory with model.safetensors. Allowed:
    transformers' BertForPreTraining or ViTMAEForPreTraining, timm's ViT (its encoder), MultiMAE. A run directory of
    trp-scale pretrain gives its last weights, with @average behind it their average. Empty = from the seed."""


@dataclass(kw_only=True)
class VisionConfig:
    """What a masked autoencoder has beside its encoder's sizes (AdPE 3.2; He et al.). Defaults are MAE's."""

    patch_size: int = 16
    """Side of a patch in pixels; must divide --crops.size."""
    tokens: Literal["visible", "all"] = "visible"
    """What enters the encoder: visible patches only (MAE), or all of them, with mask tokens in place (MAE+)."""
    decoder: Literal["transformer", "linear"] = "transformer"
    """Transformer blocks, or one linear layer (AdPE 3.2, as SimMIM; needs --vision.tokens all)."""
    decoder_layers: int = 8
    """Number of decoder blocks."""
    decoder_hidden_size: int = 512
    """Width of the decoder."""
    decoder_heads: int = 16
    """Attention heads of the decoder; must divide decoder_hidden_size."""
    positions: Literal["absolute", "relative"] = "absolute"
    """Fixed sine-cosine positions; relative adds iRPE beside them: contextual product on keys, a table per block."""
    position_order: Literal["column_row", "row_column"] = "column_row"
    """The coordinate that the first half of a fixed position encodes, then the other's. column_row: MAE (He et al.).
    row_column: MultiMAE (Bachmann et al.). The network is the same up to an exchange of the halves of its width, but
    each library's weights need their own order."""
    index: Literal["rounded", "relaxed"] = "rounded"
    """How an offset finds its entry of the relative table: rounded (iRPE), or relaxed and interpolated (AdPE 4.2.3). A
    relative coordinate adversary always takes --adversary.index instead."""


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What is predicted, and which of it takes part in the maximum (TRP 4)."""

    other: Literal["outside", "exclude", "unmasked", "task"] = "outside"
    """Words outside the nine groups: outside = added with their natural share n_other / n, exclude = no loss,
    unmasked = never chosen for masking, task = a tenth task in the maximum."""
    next_sentence: Literal["outside", "inside", "off"] = "outside"
    """Next-sentence prediction: outside the maximum with next_sentence_weight, inside it, or off."""
    next_sentence_weight: float = setting(1.0, at_least=0)
    """Weight of next-sentence prediction when it is outside the maximum."""
    output_bias: Literal["zero", "frequency"] = "zero"
    """pos_bert: first value of the word prediction's bias. frequency: the logarithm of each piece's share of the first
    training rows. A short run otherwise learns little but these shares, and gives nearly the same output for all words.
    --model.weights brings a bias of its own."""
    target: Literal["normalised", "pixels"] = "normalised"
    """What mae predicts: pixels with each patch's mean and deviation taken out (He et al.), or as they are."""
    reduction: Literal["sample", "element"] = "sample"
    """mm_mae, a task's loss: sample = the mean of each image's masked elements, then over images that have any
    (MultiMAE); element = the mean over all masked elements of the global batch."""
    uniformity: float = setting(0.0, at_least=0)
    """mae: weight of U-MAE's second loss, the mean square of the cosines between the class tokens of all pairs of the
    global batch (Zhang et al. 2022); 0 = none. U-MAE takes 0.01."""


@dataclass(kw_only=True)
class DataConfig:
    """Where rows come from and in which order."""

    path: str = ""
    """Directory with dataset.json, or several with weights: 'books:0.7=/a,wiki:0.3=/b'."""
    workers: int = setting(1, at_least=0)
    """Loader processes per rank; 0 fetches in the training process."""
    prefetch: int = setting(4, at_least=1)
    """Micro-batches each worker prepares ahead."""
    blocks_per_group: int = setting(16, at_least=1)
    """Blocks whose rows are shuffled together. Part of the order: a resumed run cannot change it."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the blocks held out for validation, chosen by a hash of their keys."""
    max_corrupt_blocks: int = setting(0, at_least=0)
    """Most unreadable blocks (text) or images that are left out and reported. One more stops the run on all ranks."""
    verify: bool = False
    """Compare the checksum of each block at its first reading, and of each image. Those of depth and segmentation maps
    are always compared."""


@dataclass(kw_only=True)
class MaskingConfig:
    """Which positions are predicted."""

    ratio: float = setting(0.15, above=0, below=1)
    """Share of the pieces of a row that are predicted (TRP 4.1.1), or of the patches of an image (MAE: 0.75)."""
    limit: int = setting(0, at_least=0)
    """Masked positions a row is padded to; 0 = round(ratio x sequence length)."""
    maskings: int = setting(10, at_least=0)
    """Different maskings per row, used in turn by epoch (TRP 001, D.1: ten); 0 = a fresh one each epoch."""
    unit: Literal["piece", "word"] = "piece"
    """Draw single word pieces, or whole words."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """stratified: positions are drawn systematically over the groups; each group's count then varies less."""


@dataclass(kw_only=True)
class CropsConfig(Section):
    """Which parts of an image are rows of the model. Crops and flips follow from (seed, row key, epoch)."""

    count: int = setting(1, at_least=1)
    """Crops of each image in each epoch, k in AdPE 3.2; they share one decoding of the file."""
    size: int = 224
    """Side of a crop in pixels (MAE+: 112)."""
    from_: Annotated[Literal["image", "view"], tyro.conf.arg(name="from")] = "image"
    """image: each crop is a random resized crop of the image. view: the image is first cropped and resized to a view
    of view_size, from which windows of `size` are cut at random places (AdPE, Appendix A)."""
    view_size: int = 224
    """Side of the view in pixels, for crops.from = view."""
    min_scale: float = 0.2
    """Smallest share of the image's area that a random resized crop (or the view) covers."""
    max_scale: float = 1.0
    """Largest share of the image's area that a random resized crop (or the view) covers."""
    flip: float = setting(0.5, at_least=0, at_most=1)
    """Probability of a horizontal flip."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized; both with antialiasing."""

    def problems(self, config: Any) -> Iterator[str]:
        if not 0 < self.min_scale <= self.max_scale <= 1:
            yield (
                f"--crops.min_scale is {self.min_scale} and --crops.max_scale {self.max_scale}, allowed: shares of the "
                "image's area, more than 0, at most 1, the first not above the second"
            )
        if self.from_ == "view" and self.view_size < self.size:
            yield (
                f"--crops.view_size is {self.view_size}, below --crops.size {self.size}: no window of that size lies "
                "in the view; raise it, or use --crops.from image"
            )
