"""Multi-modal masked autoencoder: one encoder for the visible patches of all modalities, and one decoder for each task
(TRP 4.2.1; Bachmann et al.)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from trp_scale.models.attention import attend
from trp_scale.models.initialise import initialise_multimodal
from trp_scale.models.patches import gather_patches
from trp_scale.models.positions import gather_positions, sine_cosine
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan
from trp_scale.models.vit import block_plan, feed_forward, stack_blocks
from trp_scale.pretraining.mm_mae.batch import RunModalities, visible_slots
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig


class CrossAttention(nn.Module):
    """Cross-attention of H heads between sequences of width d."""

    cut: Cut = WHOLE

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        """[R, Q, d] and [R, K, d] -> [R, Q, d]."""
        (projected,) = self.cut.project(queries, self.query)  # the context is not split
        parts = [projected, *self.key_value(context).chunk(2, dim=-1)]
        queries, keys, values = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        output = attend(queries, keys, values, None)  # [R, H, Q, d / H]
        return self.proj(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TaskDecoder(nn.Module):
    """Decoder of one task. Its queries are the N patches of the predicted modality: visible tokens, and mask tokens for
    the others. One cross-attention reads the visible tokens of all modalities, then self-attention blocks follow.

    Args:
        config: sizes (vision.decoder_*, crops.size) and input modalities.
        predicted: predicted modality; all its patches are masked if it is not an input.
        values: P, predicted numbers per patch.
    """

    positions: Tensor
    cut: Cut = WHOLE

    def __init__(self, config: MmMaeConfig, predicted: str, values: int) -> None:
        super().__init__()
        vision, eps = config.vision, config.model.layer_norm_eps
        width, grid = vision.decoder_hidden_size, config.crops.size // vision.patch_size
        self.inputs: Sequence[str] = config.modalities.inputs
        self.predicted = predicted
        self.embed = nn.Linear(config.model.hidden_size, width)
        self.mask_token = nn.Parameter(torch.empty(width))
        for modality in dict.fromkeys((*self.inputs, predicted)):
            # No ParameterDict: ZeRO-3 gathers the parameters of modules whose forward runs.
            self.register_parameter(f"{modality}_embedding", nn.Parameter(torch.empty(width)))
        self.register_buffer("positions", sine_cosine(grid, width, vision.position_order).float(), persistent=False)
        self.query_norm = nn.LayerNorm(width, eps=eps)
        self.context_norm = nn.LayerNorm(width, eps=eps)
        self.cross_attention = CrossAttention(width, vision.decoder_heads)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, 4 * width)
        self.blocks = stack_blocks(vision.decoder_layers, width, vision.decoder_heads, 4 * width, eps=eps)
        self.prediction = nn.Linear(width, values)

    def forward(self, tokens: Tensor, visible: Tensor, slots: Tensor) -> Tensor:
        """Predict every patch of the modality, visible or masked, [R, N, P].

        Args:
            tokens: [R, 1 + V, D] encoder output, the global token first.
            visible: [R, V] int64, token numbers.
            slots: [R, N] int64, index of each patch of the modality among the visible tokens; V where it is masked.
        """
        entered = self.embed(tokens)  # [R, 1 + V, d]
        places = torch.cat([self.position_embeddings(modality) for modality in self.inputs])  # [I N, d]
        seen = entered[:, 1:] + F.embedding(visible, places)
        context = torch.cat([entered[:, :1], seen], dim=1)
        masked = (slots == visible.shape[1]).unsqueeze(-1)  # [R, N, 1]
        known = gather_patches(seen, slots.clamp(max=visible.shape[1] - 1))  # [R, N, d]
        queries = self.cut.split(torch.where(masked, self.mask_token + self.position_embeddings(self.predicted), known))
        output = self.cross_attention(self.query_norm(queries), self.context_norm(context))
        output = output + feed_forward(self.mlp, self.norm(output), self.cut)[0]
        for block in self.blocks:
            output = block(output)
        return self.prediction(self.cut.whole(output))  # type: ignore[no-any-return]

    def position_embeddings(self, modality: str) -> Tensor:
        """Return the position and modality embedding of each patch, [N, d]."""
        embedding: Tensor = getattr(self, f"{modality}_embedding")
        return self.positions.to(embedding.dtype) + embedding


class MultimodalOutput(NamedTuple):
    """Outputs for the objective. A tuple, because ZeRO-3 attaches its hooks to the tensors in an output.

    Attributes:
        predictions: [R, N, P_t] for each task, in the order of modalities.outputs (Modality.values).
        shared_inputs: [R, 1 + V, intermediate] without a graph, input of the encoder's last matrix; only with taps.
    """

    predictions: tuple[Tensor, ...]
    shared_inputs: Tensor | None = None


class MultimodalMaskedAutoencoder(nn.Module):
    """Predicts the patches of each output modality from the visible patches of all input modalities.

    With vision.position_order row_column and without modalities.encoder_norm, it equals MultiMAE's network (Bachmann et
    al., public code; weights.py imports its weights).

    Every forward pass uses every parameter. Shapes are static, and no operation synchronises with the device.

    Args:
        config: sizes (model, vision, modalities, crops.size) and seed of the initial weights.
        classes: number of classes of each modality's maps, where it has classes.
    """

    positions: Tensor
    cut: Cut = WHOLE

    def __init__(self, config: MmMaeConfig, classes: Mapping[str, int]) -> None:
        super().__init__()
        model, vision, width = config.model, config.vision, config.model.hidden_size
        self.grid = config.crops.size // vision.patch_size
        modalities = RunModalities(config)
        self.inputs, self.outputs = modalities.inputs, modalities.tasks
        self.predicted = {task: modalities.output_modality(task).name for task in self.outputs}
        self.divided = {
            "model__heads": model.heads,
            "model__intermediate_size": model.intermediate_size,
            "vision__decoder_heads": vision.decoder_heads,
        }
        self.classes, self.position_order = dict(classes), vision.position_order
        self.tokenisers = nn.ModuleDict(
            {name: modalities.used[name].tokeniser(width, classes.get(name, 0)) for name in self.inputs}
        )
        self.cls_token = nn.Parameter(torch.empty(width))
        if vision.learned_positions:
            self.pos_embed = nn.Parameter(torch.empty(1 + self.grid**2, width))
        positions = sine_cosine(self.grid, width, vision.position_order)
        self.register_buffer("positions", positions.float(), persistent=False)
        self.blocks = stack_blocks(model.layers, width, model.heads, model.intermediate_size, eps=model.layer_norm_eps)
        self.norm = nn.LayerNorm(width, eps=model.layer_norm_eps) if config.modalities.encoder_norm else nn.Identity()
        self.decoders = nn.ModuleDict(
            {
                task: TaskDecoder(
                    config, modality, modalities.output_modality(task).values(task, classes.get(modality, 0))
                )
                for task, modality in self.predicted.items()
            }
        )
        initialise_multimodal(self, seed=config.training.seed, std=model.initializer_range)

    @property
    def layers(self) -> list[nn.Module]:
        """The encoder's blocks, then the decoders; each is sharded as one unit."""
        return [*self.blocks, *self.decoders.values()]

    @property
    def tensor_plan(self) -> TensorPlan:
        """Tensor-parallel plan, with the decoders' cross-attention, whose queries can be split."""
        cross = "decoders.*.cross_attention"
        plan = block_plan(self, **self.divided)
        before = ("query_norm", "cross_attention", "norm", "mlp")
        return replace(
            plan,
            split=(*plan.split, *(f"decoders.{task}.{part}" for task in self.decoders for part in before)),
            columns=(*plan.columns, f"{cross}.query"),
            packed={**plan.packed, f"{cross}.key_value": 2},
            rows=(*plan.rows, f"{cross}.proj"),
        )

    def forward(
        self, patches: Mapping[str, Tensor], visible: Tensor, task_taps: Tensor | None = None
    ) -> MultimodalOutput:
        """Predict all patches of each output.

        Args:
            patches: [R, N, P] of each input modality, row by row, from Modality.seen; masked patches are not read.
            visible: [R, V] int64, token numbers (`visible_slots`).
            task_taps: [T, R, 1 + V, D] zeros, added for each task to the encoder output before its norm.
        """
        tokens, shared_inputs = self.encode(patches, visible, tapped=task_taps is not None)
        if task_taps is None:
            read: Sequence[Tensor] = (self.norm(tokens),) * len(self.outputs)
        else:
            read = self.norm(tokens + task_taps.to(tokens.dtype)).unbind(0)  # T times [R, 1 + V, D]
        slots = visible_slots(visible, len(self.inputs) * self.grid**2)
        predictions = tuple(
            self.decoders[task](features, visible, self.modality_slots(slots, visible.shape[1], self.predicted[task]))
            for task, features in zip(self.outputs, read, strict=True)
        )
        return MultimodalOutput(predictions=predictions, shared_inputs=shared_inputs)

    def features(self, patches: Mapping[str, Tensor], visible: Tensor) -> Tensor:
        """Return the encoder output, [R, 1 + V, D]; patches of modalities without visible tokens may be absent."""
        return self.norm(self.encode(patches, visible)[0])  # type: ignore[no-any-return]

    def encode(
        self, patches: Mapping[str, Tensor], visible: Tensor, *, tapped: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last block's output [R, 1 + V, D] and, if tapped, the input [R, 1 + V, intermediate] of its last
        matrix."""
        tokens, entered = self.cut.split(self.embed(patches, visible)), None
        *blocks, last = self.blocks
        for block in blocks:
            tokens = block(tokens)
        if tapped:
            tokens, entered = last(tokens, feed_forward_input=True)
        else:
            tokens = last(tokens)
        return self.cut.whole(tokens), entered

    def modality_slots(self, slots: Tensor, masked: int, modality: str) -> Tensor:
        """Return the slots of one modality: [R, I N] -> [R, N]; all are `masked` if it is not an input."""
        count = self.grid**2
        if modality not in self.inputs:
            return torch.full_like(slots[:, :count], masked)
        first = self.inputs.index(modality) * count
        return slots[:, first : first + count]

    def embed(self, patches: Mapping[str, Tensor], visible: Tensor) -> Tensor:
        """Return the encoder's input [R, 1 + V, D]: the global token, which has no fixed position, and the visible
        patches.

        To keep shapes static, each tokeniser embeds the patches at all V positions; tokens of other modalities are then
        set to 0.
        """
        class_token: Tensor = self.cls_token
        count, dtype, positions = self.grid**2, class_token.dtype, self.positions
        if hasattr(self, "pos_embed"):
            class_token, positions = class_token + self.pos_embed[0], self.pos_embed[1:]
        places = visible % count
        tokens = gather_positions(positions, places).to(dtype)  # [R, V, D]
        for modality, values in patches.items():
            present = gather_patches(values, places)  # [R, V, P]
            embedded = self.tokenisers[modality](present.to(dtype) if present.is_floating_point() else present)
            of_modality = visible // count == self.inputs.index(modality)
            tokens = tokens + torch.where(of_modality.unsqueeze(-1), embedded, 0.0)
        return torch.cat([class_token.expand(len(tokens), 1, -1), tokens], dim=1)
