"""A pre-trained encoder as a torch module of its own: `trp_scale.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.config import Config, RefusedError
from trp_scale.data.text.tokenizer import open_given
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoder_source import EncoderSource, open_encoder
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.task import take_encoder
from trp_scale.models.patches import Pixels


class Encoder(nn.Module):
    """Gives the token features of the last block.

    Attributes:
        backbone: transformers' `BertModel`; of images our `ImageEncoder` (models/image_encoder.py).
        settings: sizes of the encoder, under `model` and `vision`.
        tokenizer: of text: transformers' tokenizer, as the pre-training had it; None for images.
        image_size: of images: their side in pixels; 0 for text.
    """

    backbone: nn.Module
    settings: Config
    tokenizer: Any = None
    image_size: int = 0


class TextEncoder(Encoder):
    """BERT without heads, over the pieces of its tokenizer."""

    def __init__(self, source: EncoderSource, config: GlueTaskConfig) -> None:
        super().__init__()
        from transformers import BertModel

        from trp_scale.pretraining.pos_bert.model import bert_config

        assert source.tokenizer is not None
        self.settings, self.tokenizer = config, open_given(source.tokenizer, flag="--run")
        weights = source.read()
        rows, pieces = weights["embeddings.word_embeddings.weight"], len(self.tokenizer)
        if len(rows) < pieces:
            raise RefusedError(f"{source.path}: embeddings of {len(rows)} pieces, the tokenizer has {pieces}")
        weights["embeddings.word_embeddings.weight"] = rows[:pieces]  # the rest only fills the hardware's tiles
        pooled = any(name.startswith("pooler.") for name in weights)
        self.backbone = BertModel(bert_config(config.model, pieces), add_pooling_layer=pooled)
        take_encoder(self.backbone, weights, source.path)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """[B, L] pieces, as `tokenizer(texts, padding=True, return_tensors="pt")` gives them -> [B, L, D]."""
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return output.last_hidden_state  # type: ignore[no-any-return]


class VisionEncoder(Encoder):
    """A vision transformer on whole images."""

    backbone: nn.Module

    def __init__(self, config: ClassificationTaskConfig) -> None:
        from trp_scale.evaluation.probe.encoder import FrozenEncoder

        super().__init__()
        self.settings, self.image_size = config, config.crops.size
        self.backbone = FrozenEncoder(config, pooling="mean").module.requires_grad_()
        self._pixels = Pixels()

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] uint8 with S = image_size, normalised here -> [B, 1 + N, D], the class token first."""
        if images.dtype != torch.uint8 or images.shape[1:] != (3, self.image_size, self.image_size):
            raise RefusedError(
                f"images of {images.dtype} and shape {list(images.shape)}; allowed: torch.uint8, [B, 3, "
                f"{self.image_size}, {self.image_size}]; trp_scale.load(..., image_size=S) takes other sizes"
            )
        tokens: Tensor = self.backbone(self._pixels(images))[0]
        return tokens


def load_encoder(path: str, image_size: int = 0) -> Encoder:
    """The encoder that --from names (encoder_source.py), in evaluation mode.

    Args:
        image_size: images: side in pixels; 0 = that of the pre-training.

    Raises:
        RefusedError: there is none, or a size that its patches do not fill.
    """
    source = open_encoder(path)
    if not source.text:
        from trp_scale.evaluation.probe.encoder import encoder_config

        return VisionEncoder(encoder_config(path, size=image_size)).eval()
    if image_size:
        raise RefusedError(f"image_size is {image_size}, but {path} is an encoder of text")
    config = GlueTaskConfig()
    source.adopt(config)
    return TextEncoder(source, config).eval()
