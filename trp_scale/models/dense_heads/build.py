"""Which head `dense.head` names."""

from __future__ import annotations

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.models.dense_heads import convnext, dpt, upernet
from trp_scale.models.dense_heads.base import DenseHead, initialise_head, quarters
from trp_scale.models.dense_heads.linear import LinearHead
from trp_scale.models.image_encoder import EncoderShape

LEVELS = 4


def build_head(config: FinetuneConfig, shape: EncoderShape, outputs: int) -> DenseHead:
    """The head with its initial weights.

    Args:
        config: section dense, and the seed.
        shape: of the encoder.
        outputs: channels of the prediction.

    Raises:
        RefusedError: dense.after that the encoder has not, or a setting that the head does not read.
    """
    dense = config.dense
    if dense.auxiliary_weight and dense.head != "upernet":
        raise RefusedError(f"--dense.auxiliary_weight is of upernet; --dense.head is {dense.head}, allowed then: 0")
    head = _build(config, shape, outputs)
    initialise_head(head, seed=config.training.seed)
    return head


def _build(config: FinetuneConfig, shape: EncoderShape, outputs: int) -> DenseHead:
    dense = config.dense
    if dense.head == "linear":
        return LinearHead(shape.width, outputs)
    if dense.head == "convnext":
        return convnext.ConvNextHead(shape.width, outputs, dense.width or convnext.WIDTH)
    after = _after(dense.after, shape)
    if dense.head == "upernet":
        auxiliary = dense.auxiliary_weight > 0
        return upernet.UperNetHead(shape.width, outputs, after, dense.width or upernet.WIDTH, auxiliary=auxiliary)
    return dpt.DptHead(shape.width, outputs, after, dense.width or dpt.WIDTH)


def _after(chosen: list[int], shape: EncoderShape) -> tuple[int, ...]:
    if not chosen:
        return quarters(shape.blocks)
    if len(chosen) != LEVELS or sorted(chosen) != chosen or not 0 <= chosen[0] <= chosen[-1] < shape.blocks:
        raise RefusedError(
            f"--dense.after {' '.join(map(str, chosen))}: allowed: {LEVELS} blocks in ascending order, numbered from 0 "
            f"to {shape.blocks - 1}"
        )
    return tuple(chosen)
