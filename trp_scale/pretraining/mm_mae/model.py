"""The multi-modal masked autoencoder: one encoder over visible patches of several modalities, a decoder for each task
(TRP 4.2.1; Bachmann et al.)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from trp_scale.models.initialise import initialise_multimodal
from trp_scale.models.patches import gather_patches
from trp_scale.models.positions import sine_cosine
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan
from trp_scale.models.vit import attend, block_plan, feed_forward, stack_blocks
from trp_scale.pretraining.mm_mae.batch import RunModalities, visible_slots
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another.

    Args:
        width: d, of both.
        heads: H, must divide the width.
    """

    cut: Cut = WHOLE

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        """[R, Q, d] and [R, K, d] -> [R, Q, d]."""
        (asking,) = self.cut.project(queries, self.query)  # the context is whole, of other tokens
        parts = [asking, *self.key_value(context).chunk(2, dim=-1)]
        asked, keys, values = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        output = attend(asked, keys, values, None)  # [R, H, Q, d / H]
        return self.proj(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TaskDecoder(nn.Module):
    """Queries are the N places of the task's own modality: its visible tokens where there are any, a mask token
    elsewhere. They look once at the visible tokens of all modalities, and then at each other.

    Args:
        config: sizes (vision.decoder_*, crops.size) and the inputs' modalities.
        own: modality that is predicted; of one that is no input nothing is visible.
        values: P, numbers predicted of a patch.
    """

    positions: Tensor
    cut: Cut = WHOLE

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
        self.blocks = stack_blocks(vision.decoder_layers, width, vision.decoder_heads, 4 * width, eps=eps)
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
        places = torch.cat([self.position_values(modality) for modality in self.inputs])  # [I N, d]
        seen = entered[:, 1:] + F.embedding(visible, places)
        context = torch.cat([entered[:, :1], seen], dim=1)
        masked = (slots == visible.shape[1]).unsqueeze(-1)  # [R, N, 1]
        known = gather_patches(seen, slots.clamp(max=visible.shape[1] - 1))  # [R, N, d]
        queries = self.cut.split(torch.where(masked, self.mask_token + self.position_values(self.own), known))
        output = self.cross_attention(self.query_norm(queries), self.context_norm(context))
        output = output + feed_forward(self.mlp, self.norm(output), self.cut)[0]
        for block in self.blocks:
            output = block(output)
        return self.prediction(self.cut.whole(output))  # type: ignore[no-any-return]

    def position_values(self, modality: str) -> Tensor:
        """[N, d] what a token of this modality gets at each place."""
        embedding: Tensor = getattr(self, f"{modality}_embedding")
        return self.positions.to(embedding.dtype) + embedding


class MultimodalOutput(NamedTuple):
    """Outputs for the objective; a tuple, because ZeRO-3 looks for the tensors of an output to hang its hooks on.

    Attributes:
        predictions: [R, N, P_t] of each task, in the order of modalities.outputs (Modality.values).
        shared_inputs: [R, 1 + V, intermediate] without a graph, what entered the encoder's last matrix; only with taps.
    """

    predictions: tuple[Tensor, ...]
    shared_inputs: Tensor | None = None


class MultimodalMaskedAutoencoder(nn.Module):
    """Predicts the patches of each output modality from the visible patches of all input modalities.

    With vision.position_order row_column and without modalities.encoder_norm it is MultiMAE's network, weight for
    weight (Bachmann et al., public code; trp_scale/pretraining/mm_mae/weights.py).

    Every parameter takes part in every forward pass, shapes are static, and nothing waits for the device.

    Args:
        config: sizes (model, vision, modalities, crops.size) and the seed of the initial weights.
        classes: of each modality's maps, where they have any.
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
        """Units of sharding: the encoder's blocks, then the decoders."""
        return [*self.blocks, *self.decoders.values()]

    @property
    def tensor_plan(self) -> TensorPlan:
        """Plan of its blocks, and of the decoders' cross-attention, whose queries can be split."""
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
            patches: of each input modality [R, N, P] row by row, as Modality.seen gives them. What is masked is not
                read.
            visible: [R, V] int64, token numbers (trp_scale/pretraining/mm_mae/batch.py).
            task_taps: [T, R, 1 + V, D] zeros, added for each task to what its decoder reads of the encoder, before the
                encoder's norm.
        """
        tokens, shared_inputs = self.encode(patches, visible, tapped=task_taps is not None)
        if task_taps is None:
            read: Sequence[Tensor] = (self.norm(tokens),) * len(self.outputs)
        else:
            read = self.norm(tokens + task_taps.to(tokens.dtype)).unbind(0)  # T times [R, 1 + V, D]
        slots = visible_slots(visible, len(self.inputs) * self.grid**2)
        predictions = tuple(
            self.decoders[task](features, visible, self.own_slots(slots, visible.shape[1], self.predicted[task]))
            for task, features in zip(self.outputs, read, strict=True)
        )
        return MultimodalOutput(predictions=predictions, shared_inputs=shared_inputs)

    def features(self, patches: Mapping[str, Tensor], visible: Tensor) -> Tensor:
        """[R, 1 + V, D] the encoder's output for these tokens alone.

        Args:
            patches: as `forward`'s; a modality of which no token is visible may be left out.
            visible: [R, V] int64, token numbers.
        """
        return self.norm(self.encode(patches, visible)[0])  # type: ignore[no-any-return]

    def encode(
        self, patches: Mapping[str, Tensor], visible: Tensor, *, tapped: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[R, 1 + V, D] of the last block; and [R, 1 + V, intermediate] what entered its last matrix, if tapped."""
        tokens, entered = self.cut.split(self.embed(patches, visible)), None
        *blocks, last = self.blocks
        for block in blocks:
            tokens = block(tokens)
        if tapped:
            tokens, entered = last(tokens, feed_forward_input=True)
        else:
            tokens = last(tokens)
        return self.cut.whole(tokens), entered

    def own_slots(self, slots: Tensor, masked: int, modality: str) -> Tensor:
        """[R, N] the part of all slots [R, I N] that is one modality's; `masked` everywhere if it is no input."""
        count = self.grid**2
        if modality not in self.inputs:
            return torch.full_like(slots[:, :count], masked)
        first = self.inputs.index(modality) * count
        return slots[:, first : first + count]

    def embed(self, patches: Mapping[str, Tensor], visible: Tensor) -> Tensor:
        """[R, 1 + V, D] what enters the encoder: the global token, which has no position, and the visible patches.

        Each tokeniser reads the patch at the place of every visible token; tokens of other modalities are set to 0.
        (The number of tokens of a modality changes from row to row, and shapes must not.)
        """
        count, dtype = self.grid**2, self.cls_token.dtype
        places = visible % count
        tokens = self.positions[places].to(dtype)  # [R, V, D]
        for modality, values in patches.items():
            present = gather_patches(values, places)  # [R, V, P]
            embedded = self.tokenisers[modality](present.to(dtype) if present.is_floating_point() else present)
            of_modality = visible // count == self.inputs.index(modality)
            tokens = tokens + torch.where(of_modality.unsqueeze(-1), embedded, 0.0)
        return torch.cat([self.cls_token.expand(len(tokens), 1, -1), tokens], dim=1)
