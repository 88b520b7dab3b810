"""Which head `dense.head` names."""

from __future__ import annotations

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.downstream.dense.heads import convnext, dpt, upernet
from trp_scale.downstream.dense.heads.base import DenseHead, initialise_head, quarters
from trp_scale.downstream.dense.heads.linear import LinearHead
from trp_scale.models.image_encoder import EncoderShape


def build_head(config: FinetuneConfig, shape: EncoderShape, outputs: int) -> DenseHead:
    """The head with its initial weights.

    Args:
        config: section dense, checked (recipes/dense_checks.py), and the seed.
        shape: of the encoder.
        outputs: channels of the prediction.
    """
    head = _build(config, shape, outputs)
    initialise_head(head, seed=config.training.seed)
    return head


def _build(config: FinetuneConfig, shape: EncoderShape, outputs: int) -> DenseHead:
    dense = config.dense
    if dense.head == "linear":
        return LinearHead(shape.width, outputs)
    if dense.head == "convnext":
        return convnext.ConvNextHead(shape.width, outputs, dense.width or convnext.WIDTH)
    after = tuple(dense.after) or quarters(shape.blocks)
    if dense.head == "upernet":
        auxiliary = dense.auxiliary_weight > 0
        return upernet.UperNetHead(shape.width, outputs, after, dense.width or upernet.WIDTH, auxiliary=auxiliary)
    return dpt.DptHead(shape.width, outputs, after, dense.width or dpt.WIDTH)
