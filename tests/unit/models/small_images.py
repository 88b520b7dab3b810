"""A tiny masked autoencoder, crops of random patches for it, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trp_scale.config import Config, ModelConfig
from trp_scale.config.images import CropsConfig, MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.models.patches import unpatchify
from trp_scale.models.positions import PositionOrder, RelativeMode, sine_cosine
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig

GRID = 5
PATCH = 4
VALUES = 3 * PATCH**2
VISIBLE = 6
CROPS = 2


class Crops(NamedTuple):
    """The model's inputs, in its arguments' order."""

    patches: Tensor
    visible: Tensor
    masked: Tensor


def config(
    *,
    tokens: Literal["visible", "all"] = "all",
    decoder: Literal["transformer", "linear"] = "transformer",
    positions: Literal["absolute", "relative"] = "absolute",
    index: Literal["rounded", "relaxed"] = "rounded",
    mode: RelativeMode = "contextual",
    values: bool = False,
    position_order: PositionOrder = "column_row",
    **adversary: Any,
) -> Config:
    """Two blocks of 24 with 2 heads, a decoder of two of 16, 5 x 5 patches of 4 x 4 pixels, of which 6 are visible."""
    return MaeConfig(
        model=ModelConfig(layers=2, hidden_size=24, heads=2, intermediate_size=40, layer_norm_eps=1e-6),
        vision=MaeVisionConfig(
            patch_size=PATCH,
            tokens=tokens,
            decoder=decoder,
            decoder_layers=2,
            decoder_hidden_size=16,
            decoder_heads=4,
            positions=positions,
            index=index,
            relative_mode=mode,
            relative_values=values,
            position_order=position_order,
        ),
        crops=CropsConfig(size=GRID * PATCH),
        masking=MaeMaskingConfig(ratio=0.75, maskings=0),
        adversary=make_settings("adversary", **{"kind": "none", **adversary}),
    )


def randomise_weights(model: nn.Module, *, seed: int = 0) -> None:
    """Every parameter is drawn, large enough that all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((1.0 if name.endswith("table") else 0.25) * drawn)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)


def images(rows: int = 3, grid: int = GRID) -> Tensor:
    """[R, 3, S, S] float64."""
    generator = torch.Generator().manual_seed(5)
    return unpatchify(torch.randn(rows, grid**2, VALUES, generator=generator, dtype=torch.float64), PATCH)


def small_model(settings: Config, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> MaskedAutoencoder:
    """Every weight is drawn anew, relative tables too, and large enough that all of them matter."""
    model = MaskedAutoencoder(settings)
    randomise_weights(model, seed=100 + seed)
    model.to(dtype)
    if dtype == torch.float64:  # as exact as the weights
        model.encoder_positions = sine_cosine(GRID, settings.model.hidden_size, settings.vision.position_order)
        if settings.vision.decoder == "transformer":
            width, order = settings.vision.decoder_hidden_size, settings.vision.position_order
            model.decoder_positions = sine_cosine(GRID, width, order)
    return model


def crops(rows: int = 2, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Crops:
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(GRID**2, generator=generator) for _ in range(rows)])
    return Crops(
        patches=torch.randn(rows, GRID**2, VALUES, generator=generator, dtype=torch.float64).to(dtype),
        visible=order[:, :VISIBLE].sort(-1).values,
        masked=order[:, VISIBLE:].sort(-1).values,
    )


def image_rows(weights: Sequence[float], *, seed: int = 0) -> Batch:
    """Rows of two crops with these weights, bytes as from the loader."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = len(weights), GRID * PATCH
    order = torch.rand(rows, CROPS, GRID**2, generator=generator).argsort(-1)
    return Batch(
        fields={
            "images": torch.randint(0, 256, (rows, CROPS, 3, side, side), generator=generator, dtype=torch.uint8),
            "visible": order[..., :VISIBLE].sort(-1).values,
            "masked": order[..., VISIBLE:].sort(-1).values,
            "row_weights": torch.tensor(weights),
        },
        keys=torch.arange(rows),
        start=0,
    )


def perturbation(model: MaskedAutoencoder, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    """A random vector of the model's shape, [numel] float64, which takes gradients."""
    generator = torch.Generator().manual_seed(7 + seed)
    drawn = torch.randn(model.shape.numel, generator=generator, dtype=torch.float64)
    return (scale * drawn).requires_grad_()


def loss_of(model: MaskedAutoencoder, batch: Crops, vector: Tensor | None = None) -> Tensor:
    """Mean squared error of the masked patches."""
    target = batch.patches.gather(1, batch.masked.unsqueeze(-1).expand(-1, -1, VALUES))
    prediction = model(*batch, perturbation=vector).prediction
    return (prediction - target).square().mean()  # type: ignore[no-any-return]
