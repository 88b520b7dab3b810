"""Settings of all runs on images: crops, patches, encoders and masked autoencoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro.conf

from trp_scale.config import MaskingConfig, PretrainConfig
from trp_scale.config.registry import Section, default_settings, setting


@dataclass(kw_only=True)
class VisionConfig:
    """Tokenization of images."""

    patch_size: int = setting(16, at_least=1)
    """Patch side in pixels; must divide --crops.size."""
    position_order: Literal["column_row", "row_column"] = "column_row"
    """Coordinate that the first half of a fixed position encodes. column_row: MAE (He et al.). row_column: MultiMAE
    (Bachmann et al.). The networks are equivalent up to a swap of the halves, but the weights of each library need
    their own order."""


@dataclass(kw_only=True)
class RelativeVisionConfig(VisionConfig, Section):
    """Encoders with optional relative positions."""

    positions: Literal["absolute", "relative"] = "absolute"
    """absolute: fixed sine-cosine positions. relative: also iRPE (a table per block)."""
    relative_mode: Literal["contextual", "bias"] = "contextual"
    """Bias of the score of a query and a key (AdPE 4.2.1). contextual: product of the query and the offset's vector.
    bias: a number per offset."""
    relative_values: bool = False
    """Also add an offset's vector to the value of a key, from a second table (r^V of AdPE 4.2.1). Attention is then not
    fused."""
    index: Literal["rounded", "relaxed"] = "rounded"
    """Lookup of an offset in the relative table: rounded (iRPE), or relaxed with interpolation (AdPE 4.2.3). A relative
    coordinate adversary always uses --adversary.index."""

    def problems(self, config: Any) -> Iterator[str]:
        default = RelativeVisionConfig()
        for name in ("relative_mode", "relative_values"):
            if self.positions == "absolute" and (value := getattr(self, name)) != getattr(default, name):
                yield (
                    f"--vision.{name} is {value} but --vision.positions is absolute; allowed: --vision.positions "
                    f"relative, or --vision.{name} {getattr(default, name)}"
                )


@dataclass(kw_only=True)
class DecodedVisionConfig(VisionConfig):
    """Masked autoencoder (He et al.). Defaults are MAE's."""

    learned_positions: bool = False
    """Train the encoder's absolute positions, of patches and class token, from sine-cosine positions or those of
    --model.weights. False: they stay sine-cosine, as those of decoders always do."""
    decoder_layers: int = setting(8, at_least=1)
    """Number of decoder blocks."""
    decoder_hidden_size: int = setting(512, at_least=1)
    """Width of the decoder."""
    decoder_heads: int = setting(16, at_least=1)
    """Attention heads of the decoder; must divide decoder_hidden_size."""


@dataclass(kw_only=True)
class CropConfig(Section):
    """Image crop. Crops and flips depend only on (seed, row key, epoch)."""

    size: int = 224
    """Side of a crop in pixels (MAE+: 112)."""
    min_scale: float = 0.2
    """Minimum share of the image's area that a random resized crop (or the view) covers."""
    max_scale: float = 1.0
    """Maximum share of the image's area that a random resized crop (or the view) covers."""
    flip: float = setting(0.5, at_least=0, at_most=1)
    """Probability of a horizontal flip."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Interpolation of resized crops; both with antialiasing."""
    scaled_decoding: bool = False
    """Decode JPEGs at 1/2, 1/4 or 1/8 size if all crops keep at least --crops.size pixels per side (libjpeg's scaled
    inverse DCT). Pixels differ slightly, and crop edges are multiples of 2, 4 or 8 pixels. Faster for images more than
    twice as large as the crop; no effect on others."""

    def problems(self, config: Any) -> Iterator[str]:
        if not 0 < self.min_scale <= self.max_scale <= 1:
            yield (
                f"--crops.min_scale is {self.min_scale} and --crops.max_scale {self.max_scale}, allowed: shares of the "
                "image's area, more than 0, at most 1, the first not above the second"
            )


@dataclass(kw_only=True)
class CropsConfig(CropConfig):
    """Image crops, one model row each. Crops and flips depend only on (seed, row key, epoch)."""

    count: int = setting(1, at_least=1)
    """Crops per image and epoch (k in AdPE 3.2); they share one decoding of the file."""
    from_: Annotated[Literal["image", "view"], tyro.conf.arg(name="from")] = "image"
    """image: each crop is a random resized crop of the image. view: crop and resize the image to a view of view_size,
    then cut windows of `size` at random positions (AdPE, Appendix A)."""
    view_size: int = 224
    """Side of the view in pixels, for --crops.from view."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.from_ == "view" and self.view_size < self.size:
            yield (
                f"--crops.view_size is {self.view_size}, below --crops.size {self.size}: the view cannot contain such "
                "a window; raise it, or use --crops.from image"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.from_ == "image" and self.view_size != CropsConfig.view_size:
            yield f"--crops.view_size {self.view_size} has no effect with --crops.from image"


MOST_PATCHES = 1 << 16
"""Maximum number of patches of a crop: masks store patch numbers in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class PatchSplit:
    """Numbers of patches of a crop.

    Attributes:
        patches: N, all patches.
        visible: V = int(N (1 - ratio)), patches that the encoder reads.
    """

    patches: int
    visible: int

    @property
    def masked(self) -> int:
        """M = N - V, predicted patches."""
        return self.patches - self.visible


def split_patches(size: int, patch_size: int, ratio: float) -> PatchSplit:
    """Return the numbers of patches of a crop.

    Args:
        size: side of the crop in pixels (crops.size), a multiple of patch_size.
        patch_size: side of a patch in pixels (vision.patch_size).
        ratio: predicted share (masking.ratio).
    """
    patches = (size // patch_size) ** 2
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))


@dataclass(kw_only=True)
class MaeVisionConfig(DecodedVisionConfig, RelativeVisionConfig):
    """Decoder and options of a masked autoencoder (AdPE 3.2; He et al.). Defaults are MAE's."""

    tokens: Literal["visible", "all"] = "visible"
    """Input of the encoder: visible patches only (MAE), or all, with mask tokens for the masked ones (MAE+)."""
    decoder: Literal["transformer", "linear"] = "transformer"
    """Transformer blocks, or one linear layer (AdPE 3.2, SimMIM; needs --vision.tokens all)."""


@dataclass(kw_only=True)
class MaeMaskingConfig(MaskingConfig):
    """Selection of the predicted patches."""

    ratio: float = setting(0.75, above=0, below=1)
    """Share of an image's patches that is predicted (MAE: 0.75)."""


@dataclass(kw_only=True)
class ImagePretrainConfig(PretrainConfig):
    """Settings of one pre-training run on images with masked patches and, optionally, an adversary."""

    vision: DecodedVisionConfig = field(default_factory=DecodedVisionConfig)
    crops: CropConfig = field(default_factory=CropConfig)
    adversary: Any = field(default_factory=default_settings("adversary", "none"), metadata={"role": "adversary"})
    """Settings of this kind of adversary."""

    @property
    def reads(self) -> str:
        return "image"

    @property
    def patches(self) -> int:
        """Patches of a crop; 0 if patch_size does not divide size."""
        size, side = self.crops.size, self.vision.patch_size
        return (size // side) ** 2 if side > 0 and size > 0 and size % side == 0 else 0

    def problems(self) -> Iterator[str]:
        model, vision, size = self.model, self.vision, self.crops.size
        if vision.decoder_heads > 0 and vision.decoder_hidden_size % vision.decoder_heads:
            yield (
                f"--vision.decoder_heads is {vision.decoder_heads} and does not divide --vision.decoder_hidden_size "
                f"{vision.decoder_hidden_size}"
            )
        for flag, width in (
            ("--model.hidden_size", model.hidden_size),
            ("--vision.decoder_hidden_size", vision.decoder_hidden_size),
        ):
            if width % 4:
                yield f"{flag} is {width}, allowed: multiples of 4 (sine and cosine of two coordinates)"
        if vision.patch_size < 1:
            return  # its range refuses it
        if not self.patches:
            yield (
                f"--crops.size is {size}, allowed: multiples of --vision.patch_size {vision.patch_size}, "
                f"for example {max(1, size // vision.patch_size) * vision.patch_size}"
            )
        if self.patches > MOST_PATCHES:
            yield (
                f"--crops.size {size} has {self.patches} patches of --vision.patch_size {vision.patch_size}; "
                f"allowed: at most {MOST_PATCHES}"
            )


@dataclass(kw_only=True)
class MaskedAutoencoderConfig(ImagePretrainConfig):
    """Settings of one pre-training run that predicts masked patches from visible ones. Only these runs support
    adversaries on positions and learned masks."""

    vision: MaeVisionConfig = field(default_factory=MaeVisionConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    masking: MaeMaskingConfig = field(default_factory=MaeMaskingConfig)
    multilevel: Any = field(default_factory=default_settings("multilevel", "none"), metadata={"role": "multilevel"})
    """Settings of this kind of learned masks."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        vision, ratio = self.vision, self.masking.ratio
        if vision.decoder == "linear" and vision.tokens == "visible":
            yield (
                "--vision.decoder linear predicts from the encoder's tokens alone, and --vision.tokens visible leaves "
                "the masked ones out; allowed: --vision.tokens all, or --vision.decoder transformer"
            )
        if vision.learned_positions and vision.tokens == "all" and self.adversary.kind == "absolute_coordinate":
            yield (
                "--adversary.kind is absolute_coordinate, which shifts sine-cosine positions, but "
                "--vision.learned_positions is True; allowed: --vision.tokens visible, or another kind"
            )
        if self.patches:
            split = split_patches(self.crops.size, vision.patch_size, ratio)
            if not 0 < split.visible < split.patches:
                yield (
                    f"--masking.ratio {ratio} leaves {split.visible} of {split.patches} patches visible; at least one "
                    "must be visible and one masked: change it, or --crops.size"
                )

    def cautions(self) -> Iterator[str]:
        vision, default = self.vision, MaeVisionConfig()
        if vision.decoder == "linear":
            for name in ("decoder_layers", "decoder_hidden_size", "decoder_heads"):
                if (value := getattr(vision, name)) != getattr(default, name):
                    yield f"--vision.{name} {value} has no effect with --vision.decoder linear"
        if vision.index == default.index:
            return
        if vision.positions == "absolute":
            yield f"--vision.index {vision.index} has no effect with --vision.positions absolute"
        elif self.adversary.kind == "relative_coordinate":
            yield (
                f"--vision.index {vision.index} has no effect with --adversary.kind relative_coordinate, which uses "
                "--adversary.index"
            )
