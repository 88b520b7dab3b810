"""ModernBERT (Warner et al. 2024, arXiv 2412.13663) for pre-training, with a last layer and a head for the masked
positions only.

Blocks have a norm before each branch, rotary positions, a gated feed-forward layer and no biases. Every
`global_every`-th layer attends to all positions, the others to a window. Parameter names are those of transformers'
`ModernBertForMaskedLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ModernBertConfig, ModernBertForMaskedLM

from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.models.attention import PackedSegments, attend, attend_segments, has_segment_kernel
from trp_scale.models.initialise import initialise_modern
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan
from trp_scale.pretraining.pos_bert.model import (
    BertOutput,
    Decoder,
    KeptPositions,
    ListedLayer,
    ListedModel,
    RowsToList,
    WordLosses,
    padded_vocabulary,
    to_rows,
)


class Rotation(NamedTuple):
    """Cosines and sines of rotary positions, each [R or 1, S, D / H]."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor, size: int, base: float) -> Rotation:
        """Return the rotation of heads of `size` at positions [R or 1, S] (Su et al. 2021, eq. 34)."""
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() * base ** (-steps / size)  # [R, S, size / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [R, S, size]
        return cls(angles.cos(), angles.sin())

    def gather(self, positions: Tensor) -> Rotation:
        """Return the rotation at positions [R, S] of the rows."""
        chosen = positions[..., None].expand(-1, -1, self.cosines.shape[-1])  # [R, S, size]
        rows = len(positions)
        return Rotation(*(table.expand(rows, -1, -1).gather(1, chosen) for table in self))

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [R, H, S, size], in fp32 at least."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        cosines, sines = (table[:, None] for table in self)  # [R or 1, 1, S, size]
        return (wide * cosines + turned * sines).to(heads.dtype)


class AttentionInputs(NamedTuple):
    """Inputs of a layer besides the hidden states.

    Attributes:
        rotation: of all positions.
        reach: attention is to keys at most this far away; -1 = everywhere.
        mask: [R, 1, 1, L], [R or 1, 1, L, L] bool, True where a query reads a key; `None` = everywhere.
        segments: of packed rows, if a kernel replaces their mask.
    """

    rotation: Rotation
    reach: int
    mask: Tensor | None
    segments: PackedSegments | None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of all positions, [R, H, L, D / H]."""
        queries, keys = self.rotation.apply(queries), self.rotation.apply(keys)
        if self.segments is None:
            return attend(queries, keys, values, self.mask)
        return attend_segments(queries, keys, values, self.segments.bounds, self.reach)

    def attend_positions(self, positions: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of positions [R, S], [R, H, S, D / H]; queries are of all positions."""
        chosen = positions[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])  # [R, H, S, D / H]
        queries = self.rotation.gather(positions).apply(queries.gather(2, chosen))
        return attend(queries, self.rotation.apply(keys), values, self.gather_mask(positions))

    def gather_mask(self, positions: Tensor) -> Tensor | None:
        """Return the mask of queries at positions [R, S]."""
        if self.segments is not None:
            length = self.segments.starts.shape[1]
            return window_mask(self.segments.mask(positions), length, self.reach, positions[:, None, :, None])
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        rows, length = len(positions), self.mask.shape[-1]
        chosen = positions[:, None, :, None].expand(-1, -1, -1, length)  # [R, 1, S, L]
        return self.mask.expand(rows, -1, -1, -1).gather(2, chosen)


def window_mask(mask: Tensor | None, length: int, reach: int, queries: Tensor) -> Tensor | None:
    """Return the mask of attention to keys at most `reach` positions away; -1 = everywhere.

    Args:
        mask: [R, 1, 1 or Q, L] bool of real tokens, or of keys in the query's segment. A query always reads itself, so
            that no row of the mask is empty.
        queries: [1 or R, 1, Q, 1], their positions.
    """
    if reach < 0 or length <= reach + 1:
        return mask
    distances = (queries - torch.arange(length, device=queries.device)).abs()  # [1 or R, 1, Q, L]
    near = distances <= reach
    return near if mask is None else near & mask | (distances == 0)


def outside_flops(model: TextModelConfig, lengths: Tensor, rows: int, length: int, *, last_queries: int) -> float:
    """Return the FLOPs of attention in a forward pass from queries to keys outside their window or segment.

    Args:
        lengths: of all segments of rows [R, L].
        last_queries: positions of a row that the last layer computes.
    """
    spared = 0.0
    for number in range(model.layers):
        reach = model.local_attention // 2 if number % model.global_every else length
        near = lengths.double().clamp(max=reach + 1)
        pairs = near**2 + (lengths - near) * (2 * reach + 1)  # of positions at most `reach` apart
        share = 1 - float(pairs.sum()) / (rows * length**2)
        queries = length if number < model.layers - 1 else last_queries
        spared += share * rows * queries * length
    return 4 * model.hidden_size * spared  # products of queries and keys, and of weights and values


def matrices(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Return matrices by name, of these numbers of inputs and outputs."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class ModernLayer(ListedLayer, nn.Module):
    """ModernBERT's block, over rows or over a list of their positions, with equal results.

    Attention is computed on rows, everything else on the list.
    """

    cut: Cut = WHOLE

    def __init__(self, model: TextModelConfig, number: int) -> None:
        super().__init__()
        width = model.hidden_size
        self.head_size = width // model.heads
        # The embeddings have a norm already.
        self.attn_norm = make_norm(model) if number else nn.Identity()
        self.attn = matrices(Wqkv=(width, 3 * width), Wo=(width, width))
        self.mlp_norm = make_norm(model)
        # GeGLU (Shazeer 2020)
        self.mlp = matrices(Wi=(width, 2 * model.intermediate_size), Wo=(model.intermediate_size, width))

    def forward(self, hidden: Tensor, attention_inputs: AttentionInputs, places: KeptPositions | None = None) -> Tensor:
        """[R, L, D] -> [R, L, D]; with places, [K, D] -> [K, D]."""
        queries, keys, values = self.project(hidden, places)
        context = attention_inputs.attend(queries, keys, values)  # [R, H, L, D / H]
        context = context.transpose(1, 2).flatten(2)  # [R, L, D]
        if places is not None:
            context = RowsToList.apply(context, places.kept)  # type: ignore[no-untyped-call]  # [K, D]
        return self.feed_forward(hidden + self.attn["Wo"](context))

    def project(self, hidden: Tensor, places: KeptPositions | None) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [R, H, L, D / H]."""
        (projected,) = self.cut.project(self.attn_norm(hidden), self.attn["Wqkv"])
        parts = to_rows(projected, places).chunk(3, dim=-1)  # [R, L, D]
        # With tensor parallelism, D is the width of this rank's heads.
        return tuple(part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)  # type: ignore[no-untyped-call]

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the feed-forward branch, [..., D] -> [..., D]."""
        (projected,) = self.cut.project(self.mlp_norm(hidden), self.mlp["Wi"])
        values, gate = projected.chunk(2, dim=-1)  # [..., intermediate]
        return hidden + self.mlp["Wo"](F.gelu(values) * gate)  # type: ignore[no-any-return]


class LastModernLayer(ModernLayer):
    """The last block, computed only at the positions that the head reads, with equal results. Queries of all positions
    are projected, because one matrix product is faster than two."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, attention_inputs: AttentionInputs, positions: Tensor, places: KeptPositions | None = None
    ) -> Tensor:
        """Compute `ModernLayer` at positions [R, S] -> [R, S, D]; a list must contain them."""
        queries, keys, values = self.project(hidden, places)
        context = attention_inputs.attend_positions(positions, queries, keys, values)  # [R, H, S, D / H]
        width = hidden.shape[-1]
        if places is None:
            tokens = hidden.gather(1, positions[..., None].expand(-1, -1, width))  # [R, S, D]
        else:
            numbers = places.numbers.gather(1, positions)  # [R, S]
            tokens = hidden.index_select(0, numbers.view(-1)).view(*positions.shape, width)  # [R, S, D]
        return self.feed_forward(tokens + self.attn["Wo"](context.transpose(1, 2).flatten(2)))


def make_norm(model: TextModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps, bias=False)


class ModernEmbeddings(nn.Module):
    """Word embeddings and their norm."""

    def __init__(self, model: TextModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, model.hidden_size)
        self.norm = make_norm(model)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(tokens))  # type: ignore[no-any-return]


class ModernEncoder(nn.Module):
    """Embeddings, blocks and the final norm, named as in transformers."""

    def __init__(self, model: TextModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.settings = model
        self.embeddings = ModernEmbeddings(model, vocabulary)
        whole = [ModernLayer(model, number) for number in range(model.layers - 1)]
        self.layers = nn.ModuleList([*whole, LastModernLayer(model, model.layers - 1)])
        self.final_norm = make_norm(model)

    def encode(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention_mask: Tensor | None = None,
        kept: Tensor | None = None,
        segment_ends: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of tokens [R, L] at `positions` [R, S] of the rows, [R, S, D].

        Other arguments as for `ModernBertForMaskedPositions`.
        """
        places = None if kept is None else KeptPositions.from_mask(kept, tokens)
        hidden = self.embeddings(tokens if kept is None else tokens.flatten()[kept])  # [R, L, D], or [K, D]
        fused = has_segment_kernel(hidden)
        if fused and segment_ends is None:  # dense attention would be slow in local layers
            real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
            segment_ends = real.sum(1, keepdim=True)
        kinds = self.attention_inputs(tokens, attention_mask, segment_ends, fused=fused)
        inputs = [kinds[number % self.settings.global_every == 0] for number in range(len(self.layers))]
        *layers, last = self.layers
        for layer, attention in zip(layers, inputs[:-1], strict=True):
            hidden = layer(hidden, attention, places=places)
        return self.final_norm(last(hidden, inputs[-1], positions, places=places))  # type: ignore[no-any-return]

    def attention_inputs(
        self, tokens: Tensor, attention_mask: Tensor | None, segment_ends: Tensor | None, *, fused: bool
    ) -> dict[bool, AttentionInputs]:
        """Return the inputs of global (True) and of local layers, for tokens [R, L]. `fused`: a kernel computes the
        attention inside segments, without a mask."""
        settings, length = self.settings, tokens.shape[1]
        columns = torch.arange(length, device=tokens.device)
        positions = columns[None]  # [1, L]
        mask = None if attention_mask is None else attention_mask[:, None, None, :]  # [R, 1, 1, L]
        segments = None
        if segment_ends is not None:
            segments = PackedSegments.from_ends(segment_ends, length)
            positions = segments.positions()  # [R, L]
            mask = None if fused else segments.mask()  # [R, 1, L, L]
        size, reach = settings.hidden_size // settings.heads, settings.local_attention // 2
        kernel = segments if fused else None
        local = None if fused else window_mask(mask, length, reach, columns[None, None, :, None])
        return {
            True: AttentionInputs(
                Rotation.from_positions(positions, size, settings.global_rotary_base), -1, mask, kernel
            ),
            False: AttentionInputs(
                Rotation.from_positions(positions, size, settings.local_rotary_base), reach, local, kernel
            ),
        }


class ModernTransform(nn.Module):
    """Linear, GELU, norm: the last layer that all masked-word tasks share."""

    def __init__(self, model: TextModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.norm = make_norm(model)

    def forward(self, hidden: Tensor, tap: Tensor | None = None) -> Tensor:
        hidden = self.dense(hidden)
        if tap is not None:
            hidden = hidden + tap.to(hidden.dtype)
        return self.norm(F.gelu(hidden))  # type: ignore[no-any-return]


class ModernBertForMaskedPositions(ListedModel, nn.Module):
    """ModernBERT with masked-word prediction at given positions; `vocab_size` is without padding, which has probability
    0. It has no segments and no next-sentence prediction."""

    padded_parameters: ClassVar[tuple[str, ...]] = ("model.embeddings.tok_embeddings.weight", "decoder.bias")
    tied_parameters: ClassVar[Mapping[str, str]] = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    word_losses: WordLosses | None = None
    cut: Cut = WHOLE

    def __init__(self, model: TextModelConfig, *, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.settings, self.vocab_size = model, vocab_size
        self.model = ModernEncoder(model, padded_vocabulary(vocab_size))
        self.head = ModernTransform(model)
        self.decoder = Decoder(vocab_size)
        initialise_modern(self, seed=seed, std=model.initializer_range, layers=model.layers)

    @classmethod
    def transformers_model(
        cls, model: TextModelConfig, vocab_size: int, special: Mapping[str, int]
    ) -> ModernBertForMaskedLM:
        """Return transformers' model of the same sizes; `special` are the numbers of pad, cls and sep."""
        numbers = {
            "pad_token_id": special["pad"],
            **dict.fromkeys(("cls_token_id", "bos_token_id"), special["cls"]),
            **dict.fromkeys(("sep_token_id", "eos_token_id"), special["sep"]),
        }
        config = ModernBertConfig(
            vocab_size=vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            intermediate_size=model.intermediate_size,
            max_position_embeddings=model.max_positions,
            initializer_range=model.initializer_range,
            norm_eps=model.layer_norm_eps,
            local_attention=model.local_attention,
            global_attn_every_n_layers=model.global_every,
            global_rope_theta=model.global_rotary_base,
            local_rope_theta=model.local_rotary_base,
            architectures=["ModernBertForMaskedLM"],
            **numbers,
        )
        return ModernBertForMaskedLM(config)

    @staticmethod
    def spared_flops(model: TextModelConfig, batch: Batch) -> float:
        """Return the FLOPs of attention from queries to keys outside their window or segment."""
        rows, length = batch["tokens"].shape
        ends = batch.fields.get("segment_ends")
        lengths = torch.full((rows,), length) if ends is None else F.pad(ends, (1, 0)).diff().flatten()
        return outside_flops(model, lengths, rows, length, last_queries=1 + batch["masked_positions"].shape[1])

    @property
    def layers(self) -> nn.ModuleList:
        """The encoder's blocks; each is sharded as one unit."""
        return self.model.layers

    @property
    def tensor_plan(self) -> TensorPlan:
        """Tensor-parallel plan: heads, feed-forward and vocabulary are cut."""
        return TensorPlan(
            packed={"model.layers.*.attn.Wqkv": 3, "model.layers.*.mlp.Wi": 2},
            rows=("model.layers.*.attn.Wo", "model.layers.*.mlp.Wo"),
            vocabulary=("model.embeddings.tok_embeddings",),
            first_dimension=("decoder.bias", "decoder.out_of_vocabulary"),
            entered=("head",),
            losses="word_losses",
            divided={
                "--model.heads": self.settings.heads,
                "--model.intermediate_size": self.settings.intermediate_size,
                "the padded vocabulary of": padded_vocabulary(self.vocab_size),
            },
        )

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        attention_mask: Tensor | None,
        masked_positions: Tensor,
        kept: Tensor | None = None,
        segment_ends: Tensor | None = None,
        representation_tap: Tensor | None = None,
        transform_tap: Tensor | None = None,
    ) -> BertOutput:
        """Predict the masked words.

        Arguments as for `BertForMaskedPositions`; `token_types` are not read, and the padding of a mask is at the end.
        The first row of `representation_tap` is that of [CLS], which no head reads.

        Args:
            segment_ends: [R, S] int64, ends of the segments of packed rows, ascending, padded with the last one; `None`
                = each row is one. Packed rows take no mask.
        """
        assert kept is None or attention_mask is not None, "kept needs a mask"
        first = torch.zeros_like(masked_positions[:, :1])
        selected = self.model.encode(
            tokens,
            torch.cat([first, masked_positions], dim=1),  # [R, 1 + M]
            attention_mask=attention_mask,
            kept=kept,
            segment_ends=segment_ends,
        )  # [R, 1 + M, D]
        if representation_tap is not None:
            selected = selected + representation_tap.to(selected.dtype)
        words = selected[:, 1:]
        return BertOutput(
            prediction_logits=self.decoder(
                self.head(words, transform_tap), self.model.embeddings.tok_embeddings.weight
            ),
            next_sentence_logits=words.new_zeros(len(words), 2),
            shared_inputs=None if transform_tap is None else words.detach(),
            word_losses=self.word_losses,
            training=self.training,
        )

    def set_output_bias(self, values: Tensor) -> None:
        """Set the bias of the word prediction to these logits, [V]; that of padding stays 0."""
        self.decoder.set_bias(values)
