"""Settings of all runs on images: crops, patches, encoders and masked autoencoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import tyro.conf

from trp_scale.config import MaskingConfig, ModelConfig, PretrainConfig
from trp_scale.config.registry import default_settings
from trp_scale.config.settings import Section, setting


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


class OnImages(Protocol):
    """Settings of a run whose encoder reads images, whether it is pre-trained or fine-tuned."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def vision(self) -> RelativeVisionConfig: ...
    @property
    def crops(self) -> CropConfig: ...


@dataclass(kw_only=True)
class MaeVisionConfig(DecodedVisionConfig, RelativeVisionConfig):
    """Decoder and options of a masked autoencoder (AdPE 3.2; He et al.). Defaults are MAE's."""

    tokens: Literal["visible", "all"] = "visible"
    """What enters the encoder: visible patches only (MAE), or all of them, with mask tokens in place (MAE+)."""
    decoder: Literal["transformer", "linear"] = "transformer"
    """Transformer blocks, or one linear layer (AdPE 3.2, as SimMIM; needs --vision.tokens all)."""


@dataclass(kw_only=True)
class MaeMaskingConfig(MaskingConfig):
    """Selection of the predicted patches."""

    ratio: float = setting(0.75, above=0, below=1)
    """Share of the patches of an image that are predicted (MAE: 0.75)."""


@dataclass(kw_only=True)
class ImagePretrainConfig(PretrainConfig):
    """One pre-training run on images some of whose patches are masked, with an adversary if asked."""

    vision: DecodedVisionConfig = field(default_factory=DecodedVisionConfig)
    crops: CropConfig = field(default_factory=CropConfig)
    adversary: Any = field(default_factory=default_settings("adversary", "none"), metadata={"role": "adversary"})
    """Settings of the adversary of this kind."""

    @property
    def reads(self) -> str:
        return "image"

    @property
    def patches(self) -> int:
        """Patches of a crop; 0 where they do not fill it."""
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
            return  # refused as such
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
    """One pre-training run that predicts a share of an image's patches from the others. Adversaries on positions and
    learned masks act on such runs alone."""

    vision: MaeVisionConfig = field(default_factory=MaeVisionConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    masking: MaeMaskingConfig = field(default_factory=MaeMaskingConfig)
    multilevel: Any = field(default_factory=default_settings("multilevel", "none"), metadata={"role": "multilevel"})
    """Settings of learned masks of this kind."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        vision, ratio = self.vision, self.masking.ratio
        if vision.decoder == "linear" and vision.tokens == "visible":
            yield (
                "--vision.decoder linear predicts from the encoder's tokens alone, and --vision.tokens visible leaves "
                "the masked ones out; allowed: --vision.tokens all, or --vision.decoder transformer"
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
                f"--vision.index {vision.index} has no effect with --adversary.kind relative_coordinate, which has an "
                "index of its own"
            )
