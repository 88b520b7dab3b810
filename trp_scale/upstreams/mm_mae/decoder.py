"""A task's decoder: from the visible tokens of all modalities to all patches of one (TRP 4.2.1; Bachmann et al.)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from trp_scale.models.patches import gather_patches
from trp_scale.models.positions import sine_cosine
from trp_scale.models.vit import TransformerBlock, attend
from trp_scale.upstreams.mm_mae.settings import MmMaeConfig


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another.

    Args:
        width: d, of both.
        heads: H, must divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        """[R, Q, d] and [R, K, d] -> [R, Q, d]."""
        parts = [self.query(queries), *self.key_value(context).chunk(2, dim=-1)]
        asked, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = attend(asked, keys, values, None)  # [R, H, Q, d / H]
        return self.proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TaskDecoder(nn.Module):
    """Queries are the N places of the task's own modality: its visible tokens where there are any, a mask token
    elsewhere. They look once at the visible tokens of all modalities, and then at each other.

    Args:
        config: sizes (vision.decoder_*, crops.size) and the inputs' modalities.
        own: modality that is predicted; of one that is no input nothing is visible.
        values: P, numbers predicted of a patch.
    """

    positions: Tensor

    def __init__(self, config: MmMaeConfig, own: str, values: int) -> None:
        super().__init__()
        vision, eps = config.vision, config.model.layer_norm_eps
        width, grid = vision.decoder_hidden_size, config.crops.size // vision.patch_size
        self.inputs: Sequence[str] = config.modalities.inputs
        self.own = own
        self.embed = nn.Linear(config.model.hidden_size, width)
        self.mask_token = nn.Parameter(torch.empty(width))
        for modality in dict.fromkeys((*self.inputs, own)):
            # Not in a ParameterDict: ZeRO-3 gathers what belongs to a module whose forward runs.
            self.register_parameter(f"{modality}_embedding", nn.Parameter(torch.empty(width)))
        self.register_buffer("positions", sine_cosine(grid, width, vision.position_order).float(), persistent=False)
        self.query_norm = nn.LayerNorm(width, eps=eps)
        self.context_norm = nn.LayerNorm(width, eps=eps)
        self.cross_attention = CrossAttention(width, vision.decoder_heads)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, 4 * width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, vision.decoder_heads, 4 * width, eps=eps, relative=False)
            for _ in range(vision.decoder_layers)
        )
        self.prediction = nn.Linear(width, values)

    def forward(self, tokens: Tensor, visible: Tensor, slots: Tensor) -> Tensor:
        """Predict every patch of the own modality, seen or not.

        Args:
            tokens: [R, 1 + V, D] the encoder's output, the global token first.
            visible: [R, V] int64, token numbers.
            slots: [R, N] int64, which visible token each patch of the own modality is; V where it is masked.

        Returns:
            [R, N, P].
        """
        entered = self.embed(tokens)  # [R, 1 + V, d]
        places = torch.cat([self.placed(modality) for modality in self.inputs])  # [I N, d]
        seen = entered[:, 1:] + F.embedding(visible, places)
        context = torch.cat([entered[:, :1], seen], dim=1)
        masked = (slots == visible.shape[1]).unsqueeze(-1)  # [R, N, 1]
        known = gather_patches(seen, slots.clamp(max=visible.shape[1] - 1))  # [R, N, d]
        queries = torch.where(masked, self.mask_token + self.placed(self.own), known)
        found = self.cross_attention(self.query_norm(queries), self.context_norm(context))
        found = found + self.mlp(self.norm(found))
        for block in self.blocks:
            found = block(found)
        return self.prediction(found)  # type: ignore[no-any-return]

    def placed(self, modality: str) -> Tensor:
        """[N, d] what a token of this modality gets at each place."""
        embedding: Tensor = getattr(self, f"{modality}_embedding")
        return self.positions.to(embedding.dtype) + embedding
