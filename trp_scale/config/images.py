"""Settings of all runs on images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trp_scale.config import (
    MOST_PATCHES,
    CropConfig,
    CropsConfig,
    DecodedVisionConfig,
    MaskingConfig,
    ModelConfig,
    PretrainConfig,
    RelativeVisionConfig,
    split_patches,
)
from trp_scale.config.registry import default_settings
from trp_scale.config.settings import setting


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
