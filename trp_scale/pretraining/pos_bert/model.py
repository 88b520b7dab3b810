"""BERT for pre-training: transformers' encoder, with a last layer and heads for the masked positions only.

The heads of transformers compute logits at every position, and 85 % of them are never used. Our loop over the layers
takes a finished mask; that of transformers checks at every step if the mask is all ones, which synchronises with the
GPU. Parameter names are those of transformers' `BertForPreTraining`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.models.initialise import initialise, set_value
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan

VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, for full tiles in matrix products."""


def padded_vocabulary(vocab_size: int) -> int:
    """Round `vocab_size` up to a multiple of VOCABULARY_MULTIPLE."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def bert_config(model: TextModelConfig, vocab_size: int, **changes: Any) -> BertConfig:
    """Return transformers' configuration of the encoder."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate_size,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.dropout,
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.initializer_range,
        "layer_norm_eps": model.layer_norm_eps,
    }
    return BertConfig(**(values | changes))


WordLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits [N, V] in fp32 and labels [N] -> cross-entropies [N]."""


class BertOutput(NamedTuple):
    """Outputs for the objective. A tuple, because ZeRO-3 attaches its hooks to the tensors in an output.

    Attributes:
        prediction_logits: [R, M, V_padded], rows beyond the vocabulary are -inf.
        next_sentence_logits: [R, 2], index 0 = the second sentence follows the first (transformers' convention).
        shared_inputs: [R, M, D] without a graph, input of the transform; only with a tap on its output.
        word_losses: cross-entropy over a vocabulary that is cut over tensor-parallel ranks; `None` = torch's.
        training: whether the model is in training mode.
    """

    prediction_logits: Tensor
    next_sentence_logits: Tensor
    shared_inputs: Tensor | None = None
    word_losses: WordLosses | None = None
    training: bool = True


class KeptPositions(NamedTuple):
    """Computed positions of rows, as a list.

    Attributes:
        kept: [K] int64, positions of the flattened rows, each once.
        numbers: [R, L] int64, index of each position in the list; any index for positions outside it.
    """

    kept: Tensor
    numbers: Tensor

    @classmethod
    def from_mask(cls, kept: Tensor, rows: Tensor) -> KeptPositions:
        """Return the list of positions `kept` [K] of rows [R, L]."""
        numbers = torch.zeros_like(rows, dtype=torch.int64).view(-1)
        numbers = numbers.index_copy(0, kept, torch.arange(len(kept), device=kept.device))
        return cls(kept, numbers.view_as(rows))


def typical_length(rows: Tensor) -> int:
    """Return the list length for which graphs are traced: three quarters of the positions of rows [R, L]. With all of
    them, a graph would treat the lengths of list and rows as the same number."""
    return max(2, rows.numel() * 3 // 4)


class ListToRows(torch.autograd.Function):
    """Copy a list into rows. Positions outside the list have arbitrary values, and their gradient is ignored. The
    backward pass is one copy; that of torch indexing would be a scatter-add."""

    @staticmethod
    def forward(ctx: Any, listed: Tensor, kept: Tensor, numbers: Tensor) -> Tensor:
        """[K, D] -> [R, L, D]."""
        ctx.save_for_backward(kept)
        return listed.index_select(0, numbers.view(-1)).view(*numbers.shape, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return gradient.flatten(0, 1).index_select(0, kept), None, None


class RowsToList(torch.autograd.Function):
    """Copy the listed positions of rows into a list; the gradient of other positions is 0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor) -> Tensor:
        """[R, L, D] -> [K, D]."""
        ctx.save_for_backward(kept)
        ctx.shape = rows.shape
        return rows.flatten(0, 1).index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        rows = gradient.new_zeros(ctx.shape)
        rows.view(-1, ctx.shape[-1]).index_copy_(0, kept, gradient)  # positions are unique: no nondeterministic sum
        return rows, None


def to_rows(hidden: Tensor, places: KeptPositions | None) -> Tensor:
    """Return a list [K, D] as rows [R, L, D]; without a list, return the rows."""
    return hidden if places is None else ListToRows.apply(hidden, *places)  # type: ignore[no-untyped-call, no-any-return]


class ListedLayer:
    """Layer over rows or over a list of their positions."""

    def varying(
        self, hidden: Tensor, *others: Any, places: KeptPositions | None = None
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return arguments of `forward` with a varying first dimension, and a typical length (engines/compiled.py)."""
        return ((), 0) if places is None else ((hidden, places.kept), typical_length(places.numbers))


class ListedModel:
    """Model over rows or over a list of their positions."""

    @staticmethod
    def spared_flops(model: Any, batch: Batch) -> float:
        """Return the FLOPs of a forward pass that dense attention has and this model's does not (`Outline`)."""
        return 0.0

    def varying(
        self, tokens: Tensor, *others: Any, kept: Tensor | None = None, **named: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return arguments of `forward` with a varying first dimension, and a typical length (engines/compiled.py)."""
        return ((), 0) if kept is None else ((kept,), typical_length(tokens))


class Layer(ListedLayer, BertLayer):  # type: ignore[misc]
    """BERT's layer, over rows or over a list of their positions, with equal results.

    Attention is computed on rows, everything else on the list. Parameter names are those of transformers.
    """

    cut: Cut = WHOLE

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, places: KeptPositions | None = None) -> Tensor:
        """[R, L, D] and mask [R, 1, 1, L] bool or `None` -> [R, L, D]; with places, [K, D] and a mask -> [K, D]."""
        projections = self.attention.self.query, self.attention.self.key, self.attention.self.value
        parts = self.cut.project(hidden, *projections)
        queries, keys, values = (to_rows(part, places) for part in parts)
        context = self.attend(queries, keys, values, attention_mask)  # [R, L, D]
        if places is not None:
            context = RowsToList.apply(context, places.kept)  # type: ignore[no-untyped-call]  # [K, D]
        return self.feed_forward_chunk(self.attention.output(context, hidden))

    def feed_forward_chunk(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        (parts,) = self.cut.project(hidden, self.intermediate.dense)  # [..., intermediate]
        return self.output(self.intermediate.intermediate_act_fn(parts), hidden)  # type: ignore[no-any-return]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Projections [R, S, D], [R, L, D] and [R, L, D] -> [R, S, D]."""
        attention = self.attention.self

        def heads(projected: Tensor) -> Tensor:
            rows, length, width = projected.shape
            size = attention.attention_head_size  # with tensor parallelism, D is the width of this rank's heads
            return projected.view(rows, length, width // size, size).transpose(1, 2)  # [R, H, *, D / H]

        dropout = attention.dropout.p if self.training else 0.0
        with self.cut.drawing() if dropout else nullcontext():
            context = F.scaled_dot_product_attention(
                heads(queries), heads(keys), heads(values), attn_mask=attention_mask, dropout_p=dropout
            )  # [R, H, S, D / H]
        return context.transpose(1, 2).flatten(2)


class LastLayer(Layer):
    """BERT's last layer, computed only at the positions that the heads read, with equal results.

    Keys and values come from all positions; queries, attention output and feed-forward from the selected positions.
    This is about 30 % of the layer's work at 15 % masked. Parameter names are those of the full layer.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, attention_mask: Tensor | None, positions: Tensor, places: KeptPositions | None = None
    ) -> Tensor:
        """Compute `Layer` at positions [R, S] -> [R, S, D]; a list must contain them."""
        attention, width = self.attention.self, hidden.shape[-1]
        if places is None:
            chosen = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, width))  # [R, S, D]
        else:
            numbers = places.numbers.gather(1, positions)  # [R, S]
            chosen = hidden.index_select(0, numbers.view(-1)).view(*positions.shape, width)  # [R, S, D]
        (queries,) = self.cut.project(chosen, attention.query)
        keys, values = (to_rows(part, places) for part in self.cut.project(hidden, attention.key, attention.value))
        context = self.attend(queries, keys, values, attention_mask)  # [R, S, D]
        return self.feed_forward_chunk(self.attention.output(context, chosen))


class PredictionTransform(nn.Module):
    """Linear, GELU, layer norm: the last layer that all masked-word tasks share."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=eps)

    def forward(self, hidden: Tensor, tap: Tensor | None = None) -> Tensor:
        hidden = self.dense(hidden)
        if tap is not None:
            hidden = hidden + tap.to(hidden.dtype)
        return self.LayerNorm(F.gelu(hidden))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Logits over the padded vocabulary with the word embeddings as weights."""

    out_of_vocabulary: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        padded = padded_vocabulary(vocab_size)
        self.bias = nn.Parameter(torch.zeros(padded))
        # Padding gets a bias of -inf: a slice of the logits would copy the model's largest tensor.
        mask = torch.zeros(padded)
        mask[vocab_size:] = -torch.inf
        self.register_buffer("out_of_vocabulary", mask, persistent=False)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        # DeepSpeed casts parameters to bf16 or fp16, but not buffers.
        return F.linear(hidden, embeddings, self.bias + self.out_of_vocabulary.to(self.bias.dtype))

    def set_bias(self, values: Tensor) -> None:
        """Set the bias to these logits, [V]; that of padding stays 0."""
        padded = F.pad(values, (0, len(self.bias) - len(values)))  # not in the lambda: an engine cuts the bias first
        set_value(self.bias, lambda: padded)


class PredictionHead(Decoder):
    """Transform and decoder."""

    def __init__(self, hidden_size: int, eps: float, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.transform = PredictionTransform(hidden_size, eps)

    def forward(self, hidden: Tensor, embeddings: Tensor, tap: Tensor | None = None) -> Tensor:
        return super().forward(self.transform(hidden, tap), embeddings)


class BertForMaskedPositions(ListedModel, nn.Module):
    """BERT with masked-word prediction at given positions and next-sentence prediction.

    `vocab_size` is without padding; padding has probability 0.
    """

    padded_parameters: ClassVar[tuple[str, ...]] = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    """Parameters whose first dimension is the padded vocabulary."""
    tied_parameters: ClassVar[Mapping[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    """Second names of tied tensors in transformers."""
    word_losses: WordLosses | None = None
    cut: Cut = WHOLE

    def __init__(self, model: TextModelConfig, *, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.config = bert_config(model, vocab_size)
        padded = bert_config(model, padded_vocabulary(vocab_size), attn_implementation="sdpa")
        self.bert = BertModel(padded)
        whole = [Layer(padded, layer_idx=number) for number in range(model.layers - 1)]
        self.bert.encoder.layer = nn.ModuleList([*whole, LastLayer(padded, layer_idx=model.layers - 1)])
        predictions = PredictionHead(model.hidden_size, model.layer_norm_eps, vocab_size)
        # Masked-word and next-sentence heads, named as in transformers
        self.cls = nn.ModuleDict({"predictions": predictions, "seq_relationship": nn.Linear(model.hidden_size, 2)})
        initialise(self, seed=seed, std=model.initializer_range)

    @classmethod
    def transformers_model(
        cls, model: TextModelConfig, vocab_size: int, special: Mapping[str, int]
    ) -> BertForPreTraining:
        """Return transformers' model of the same sizes; `special` are the numbers of pad, cls and sep."""
        return BertForPreTraining(bert_config(model, vocab_size, architectures=["BertForPreTraining"]))

    @property
    def layers(self) -> nn.ModuleList:
        """The encoder's layers; each is sharded as one unit."""
        return self.bert.encoder.layer  # type: ignore[no-any-return]

    @property
    def tensor_plan(self) -> TensorPlan:
        """Tensor-parallel plan: cut heads, feed-forward and vocabulary, but not next-sentence head, pooler, transform
        and norms."""
        layer = "bert.encoder.layer.*"
        return TensorPlan(
            columns=(
                *(f"{layer}.attention.self.{name}" for name in ("query", "key", "value")),
                f"{layer}.intermediate.dense",
            ),
            rows=(f"{layer}.attention.output.dense", f"{layer}.output.dense"),
            vocabulary=("bert.embeddings.word_embeddings",),
            first_dimension=("cls.predictions.bias", "cls.predictions.out_of_vocabulary"),
            entered=("cls.predictions.transform",),
            split=tuple(f"bert.encoder.layer.{number}" for number in range(len(self.layers) - 1)),
            losses="word_losses",
            divided={
                "--model.heads": self.config.num_attention_heads,
                "--model.intermediate_size": self.config.intermediate_size,
                "the padded vocabulary of": padded_vocabulary(self.config.vocab_size),
            },
        )

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        attention_mask: Tensor | None,
        masked_positions: Tensor,
        kept: Tensor | None = None,
        representation_tap: Tensor | None = None,
        transform_tap: Tensor | None = None,
    ) -> BertOutput:
        """Predict the masked words and whether the second sentence follows.

        Args:
            tokens: [R, L] int64.
            token_types: [R, L] int64, 0 for the first sentence, 1 for the second.
            attention_mask: [R, L] bool, True at real tokens; `None` if all are, since flash attention takes no mask.
            masked_positions: [R, M] int64; unused slots may have any real position.
            kept: [K] int64, computed positions of the R * L, each once: all real ones and any others; `None` = all. It
                needs a mask.
            representation_tap: [R, 1 + M, D] zeros, added to the input of the heads.
            transform_tap: [R, M, D] zeros, added to the output of the transform's matrix.
        """
        assert kept is None or attention_mask is not None, "kept needs a mask"
        mask = None if attention_mask is None else attention_mask[:, None, None, :]  # [R, 1, 1, L]
        places = None if kept is None else KeptPositions.from_mask(kept, tokens)
        hidden = self.embed(tokens, token_types, kept)  # [R, L, D], or [K, D]
        *layers, last = self.layers
        hidden = self.cut.split(hidden)
        for layer in layers:
            hidden = layer(hidden, mask, places=places)
        hidden = self.cut.whole(hidden)
        first = torch.zeros_like(masked_positions[:, :1])  # the pooler reads [CLS]
        selected = last(hidden, mask, torch.cat([first, masked_positions], dim=1), places=places)  # [R, 1 + M, D]
        if representation_tap is not None:
            selected = selected + representation_tap.to(selected.dtype)
        words, embeddings = selected[:, 1:], self.bert.embeddings.word_embeddings.weight
        return BertOutput(
            prediction_logits=self.cls["predictions"](words, embeddings, transform_tap),
            next_sentence_logits=self.cls["seq_relationship"](self.bert.pooler(selected)),
            shared_inputs=None if transform_tap is None else words.detach(),
            word_losses=self.word_losses,
            training=self.training,
        )

    def embed(self, tokens: Tensor, token_types: Tensor, kept: Tensor | None) -> Tensor:
        """Return the embeddings of all positions [R, L, D], or of `kept` [K, D]."""
        if kept is None:
            return self.bert.embeddings(input_ids=tokens, token_type_ids=token_types)  # type: ignore[no-any-return]
        listed = self.bert.embeddings(
            input_ids=tokens.flatten()[None, kept],
            token_type_ids=token_types.flatten()[None, kept],
            position_ids=kept[None] % tokens.shape[1],
        )  # [1, K, D]
        return listed.squeeze(0)  # type: ignore[no-any-return]

    def set_output_bias(self, values: Tensor) -> None:
        """Set the bias of the word prediction to these logits, [V]; that of padding stays 0."""
        self.cls["predictions"].set_bias(values)  # type: ignore[operator]
