"""Masked autoencoder: MAE (He et al.), MAE+ (AdPE 3.2), and AdPE's perturbed positions (AdPE 4).

The order of tokens is always [class, visible patches, masked patches]. Tokens are never unshuffled; the outputs for the
masked patches are a slice at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from trp_scale.models.initialise import initialise_vision
from trp_scale.models.patches import gather_patches
from trp_scale.models.positions import (
    IndexKind,
    IndexRows,
    Perturbation,
    RelativeInputs,
    gather_positions,
    perturbation_shape,
    relative_inputs,
    shift_positions,
    sine_cosine,
    to_perturbation,
)
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan
from trp_scale.models.vit import TransformerBlock, block_plan, stack_blocks
from trp_scale.pretraining.mae.settings import MaeConfig

CHANNELS = 3

ForwardOutput = Literal["prediction", "prediction_and_class", "class_token", "features", "patch_embedding"]
"""Output of a forward pass."""


class MaeOutput(NamedTuple):
    """Outputs for the objective. A tuple, because ZeRO-3 attaches its hooks to the tensors in an output.

    Attributes:
        prediction: [B, M, P] of the masked patches.
        class_token: [B, D] encoder output; `None` unless requested.
    """

    prediction: Tensor
    class_token: Tensor | None = None


class MaskedAutoencoder(nn.Module):
    """Predicts masked patches from visible patches.

    Every forward pass uses every parameter. Shapes are static, and no operation synchronises with the device.

    Args:
        config: sizes (model, vision, crops.size), adversary, and seed of the initial weights.
    Attributes:
        shape: shape of the perturbation in `forward`; `None` without an adversary on positions.
    """

    encoder_positions: Tensor
    decoder_positions: Tensor
    cut: Cut = WHOLE

    def __init__(self, config: MaeConfig) -> None:
        super().__init__()
        model, vision = config.model, config.vision
        self.vision, self.adversary = vision, config.adversary
        self.shape = perturbation_shape(model, vision, config.adversary)
        self.grid = config.crops.size // vision.patch_size
        values = vision.patch_size**2 * CHANNELS
        relative = vision if vision.positions == "relative" else None
        blocks = partial(stack_blocks, eps=model.layer_norm_eps, relative=relative)
        width = last_width = model.hidden_size
        self.patch_embed = nn.Linear(values, width)
        self.cls_token = nn.Parameter(torch.empty(width))
        if vision.learned_positions:
            self.pos_embed = nn.Parameter(torch.empty(1 + self.grid**2, width))
        self.blocks = blocks(model.layers, width, model.heads, model.intermediate_size)
        self.norm = nn.LayerNorm(width, eps=model.layer_norm_eps)
        self.register_buffer(
            "encoder_positions", sine_cosine(self.grid, width, vision.position_order).float(), persistent=False
        )
        self.decoder_blocks = nn.ModuleList()
        if vision.decoder == "transformer":
            last_width = vision.decoder_hidden_size
            self.decoder_embed = nn.Linear(width, last_width)
            self.decoder_blocks = blocks(vision.decoder_layers, last_width, vision.decoder_heads, 4 * last_width)
            self.decoder_norm = nn.LayerNorm(last_width, eps=model.layer_norm_eps)
            positions = sine_cosine(self.grid, last_width, vision.position_order)
            self.register_buffer("decoder_positions", positions.float(), persistent=False)
        self.mask_token = nn.Parameter(torch.empty(width if vision.tokens == "all" else last_width))
        self.prediction = nn.Linear(last_width, values)
        initialise_vision(self, seed=config.training.seed, std=model.initializer_range)

    @property
    def layers(self) -> list[nn.Module]:
        """Blocks of the encoder, then of the decoder; each is sharded as one unit."""
        return [*self.blocks, *self.decoder_blocks]

    @property
    def tensor_plan(self) -> TensorPlan:
        """Tensor-parallel plan."""
        heads = {"vision__decoder_heads": self.vision.decoder_heads} if self.decoder_blocks else {}
        block = cast(TransformerBlock, self.blocks[0])
        return block_plan(self, model__heads=block.heads, model__intermediate_size=block.mlp.fc1.out_features, **heads)

    @property
    def index(self) -> IndexKind:
        """Index of unperturbed offsets. A coordinate adversary uses its own index, so a zero shift changes nothing."""
        if self.adversary.kind == "relative_coordinate":
            return cast(IndexKind, self.adversary.index)
        return self.vision.index

    def forward(
        self,
        patches: Tensor,
        visible: Tensor,
        masked: Tensor,
        perturbation: Tensor | None = None,
        *,
        gate: Tensor | None = None,
        output: ForwardOutput = "prediction",
    ) -> MaeOutput | Tensor:
        """Predict the masked patches.

        Args:
            patches: [B, N, P] of the whole image, row by row, values in the order (row, column, channel).
            visible: [B, V] int64, numbers of the visible patches.
            masked: [B, M] int64, numbers of the masked patches.
            perturbation: [shape.numel] fp32; `None` = zeros.
            gate: [B, V], multiplied with the visible patches' tokens at the encoder's input; `None` = ones.
            output: kind of output. All go through `forward`, because sharded weights are gathered there. prediction:
                `MaeOutput`; prediction_and_class: with the class token; class_token: [B, D], without the decoder;
                features: [B, 1 + V, D], encoder output without perturbation and gate; patch_embedding: [B, N, D] of all
                patches, without positions.
        """
        if output == "features":
            return self.features(patches, visible)
        if output == "patch_embedding":
            return self.patch_embed(patches.to(self.cls_token.dtype))  # type: ignore[no-any-return]
        parts = (None, None) if perturbation is None or self.shape is None else self.shape.split(perturbation)
        encoder, decoder = (to_perturbation(part, self.adversary) for part in parts)
        seen = masked if self.vision.tokens == "all" else masked[:, :0]  # masked patches in the encoder
        tokens = self.embed(patches, visible, seen, encoder, gate)  # [B, 1 + V (+ M), D]
        count = masked.shape[1]
        last = None if self.decoder_blocks or output != "prediction" else count
        tokens = self.run(self.blocks, tokens, torch.cat([visible, seen], dim=1), seen.shape[1], encoder, last)
        tokens = self.norm(tokens)
        class_token = None if output == "prediction" else tokens[:, 0]
        if output == "class_token":
            return class_token  # type: ignore[return-value]
        if self.decoder_blocks:
            tokens = self.enter_decoder(tokens, visible, masked, decoder)  # [B, 1 + V + M, D']
            places = torch.cat([visible, masked], dim=1)
            tokens = self.run(self.decoder_blocks, tokens, places, count, decoder, count)  # [B, M, D']
            tokens = self.decoder_norm(tokens)
        return MaeOutput(prediction=self.prediction(tokens[:, -count:]), class_token=class_token)

    def features(self, patches: Tensor, visible: Tensor) -> Tensor:
        """Return the unperturbed encoder output of the visible patches: [B, N, P] and [B, V] -> [B, 1 + V, D]."""
        clean = Perturbation()
        tokens = self.embed(patches, visible, visible[:, :0], clean)
        return self.norm(self.run(self.blocks, tokens, visible, 0, clean, None))  # type: ignore[no-any-return]

    def embed(
        self, patches: Tensor, visible: Tensor, masked: Tensor, active: Perturbation, gate: Tensor | None = None
    ) -> Tensor:
        """Return the encoder's input [B, 1 + V + M, D]; the class token has no fixed position."""
        class_token: Tensor = self.cls_token
        dtype, positions = class_token.dtype, self.encoder_positions
        if hasattr(self, "pos_embed"):
            class_token, positions = class_token + self.pos_embed[0], self.pos_embed[1:]
        seen = self.patch_embed(gather_patches(patches, visible).to(dtype))  # [B, V, D]
        seen = seen + gather_positions(positions, visible).to(dtype)
        if gate is not None:
            seen = seen * gate.unsqueeze(-1).to(dtype)
        tokens = [class_token.expand(len(seen), 1, -1), seen]
        if masked.shape[1]:
            tokens.append(self.masked_tokens(positions, masked, active))
        return torch.cat(tokens, dim=1)

    def enter_decoder(self, tokens: Tensor, visible: Tensor, masked: Tensor, active: Perturbation) -> Tensor:
        """[B, 1 + V (+ M), D] -> [B, 1 + V + M, D']: add positions, and mask tokens unless the encoder had them."""
        tokens = self.decoder_embed(tokens)
        dtype, known = self.cls_token.dtype, 1 + visible.shape[1]
        seen = tokens[:, 1:known] + self.decoder_positions[visible].to(dtype)
        if self.vision.tokens == "visible":
            hidden = self.masked_tokens(self.decoder_positions, masked, active)
        else:
            hidden = tokens[:, known:] + self.masked_positions(self.decoder_positions, masked, active).to(dtype)
        return torch.cat([tokens[:, :1], seen, hidden], dim=1)

    def masked_tokens(self, positions: Tensor, masked: Tensor, active: Perturbation) -> Tensor:
        """Return mask tokens with perturbed positions [B, M, D], summed in fp32 or fp64."""
        token: Tensor = self.mask_token
        if self.adversary.kind == "absolute_embedding" and self.adversary.mask_token == "frozen":
            # The token stays in the graph: ZeRO-3 keeps the last gradient of a parameter outside it.
            token = token.detach() + 0.0 * token
        return (token + self.masked_positions(positions, masked, active)).to(token.dtype)

    def masked_positions(self, positions: Tensor, masked: Tensor, active: Perturbation) -> Tensor:
        """Return the perturbed positions of masked patches: [N, D] and [B, M] -> [B, M, D], not in half precision."""
        if active.coordinate is not None:  # one shift for all patches: shift the table, not each image's rows
            positions = shift_positions(positions, active.coordinate, self.vision.position_order)
            return cast(Tensor, IndexRows.apply(positions, masked))  # type: ignore[no-untyped-call]
        queries = gather_positions(positions, masked)  # [B, M, D]
        return queries if active.embedding is None else queries + active.embedding

    def run(
        self,
        blocks: Iterable[nn.Module],
        tokens: Tensor,
        places: Tensor,
        masked: int,
        active: Perturbation,
        last: int | None,
    ) -> Tensor:
        """Run the blocks on [B, 1 + K, D]; the last block computes only the final `last` tokens.

        Args:
            places: [B, K] patch numbers of the tokens after the class token; the last `masked` of them are masked.
        """
        blocks = list(blocks)
        relative: list[RelativeInputs] | list[None] = [None] * len(blocks)
        if self.vision.positions == "relative":
            relative = relative_inputs(
                places,
                self.grid,
                self.index,
                tokens.shape[-1] // cast(TransformerBlock, blocks[0]).heads,
                dtype=torch.promote_types(self.encoder_positions.dtype, torch.float32),
                blocks=len(blocks),
                masked=masked,
                shifts=active.offsets,
                tables=active.tables,
                values=self.vision.relative_values,
            )
        tokens = self.cut.split(tokens)
        for number, (block, inputs) in enumerate(zip(blocks, relative, strict=True)):
            value = None if active.values is None or not masked else active.values[number]
            tokens = block(tokens, inputs, value, masked, last if number == len(blocks) - 1 else None)
        return self.cut.whole(tokens)
