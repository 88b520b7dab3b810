"""Pre-trained image encoders as `EncoderSource`: runs, transformers' ViTMAE, and timm's plain ViT."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import FILE, reading, stored_weights
from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import ImagePretrainConfig, RelativeVisionConfig
from trp_scale.config.schema import Fields
from trp_scale.errors import error_text, quote, shorten
from trp_scale.finetuning.encoders import EncoderSource, sizes_from_model, transformers_sizes
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.positions import PositionOrder, sine_cosine
from trp_scale.pretraining.mae.weights import (
    RELATIVE_ARCHITECTURE,
    TIMM,
    TIMM_ARCHITECTURE,
    TIMM_POSITIONS,
    VITMAE,
    VITMAE_POSITIONS,
    is_encoder,
    position_order,
    published_name,
)
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.weights import image_encoder_weights

HEADS = ("head", "head_dist", "fc_norm", "pre_logits", TIMM_POSITIONS)
"""Modules and parameters of a timm model outside the encoder."""


def image_encoder_from_run(
    config: Config, path: str, stored: Callable[[], dict[str, Tensor]], checkpoint: Path | None
) -> EncoderSource:
    if not isinstance(config, (ImagePretrainConfig, ImageTaskConfig)):
        raise RefusedError(f"--from {path}: the run's encoder reads neither images nor text; allowed: a run on either")
    if isinstance(config, MmMaeConfig) and "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--from {path}: the run's modalities.inputs are {', '.join(config.modalities.inputs)}; allowed: a run "
            "with the input rgb"
        )

    def read() -> dict[str, Tensor]:
        whole = {name.removeprefix("encoder."): tensor for name, tensor in stored().items()}
        named = image_encoder_weights(whole) if isinstance(config, MmMaeConfig) else whole
        weights = {name: tensor for name, tensor in named.items() if is_encoder(name) or name == "pos_embed"}
        # With mean pooling a classifier's last norm is fc_norm.
        of_mean = {f"norm.{kind}": f"fc_norm.{kind}" for kind in ("weight", "bias")}
        return weights | {name: named[stored_as] for name, stored_as in of_mean.items() if stored_as in named}

    grid, learned, index = config.crops.size // config.vision.patch_size, False, ""
    if isinstance(config, ImageTaskConfig):
        learned = config.trains_positions
        if not learned and config.downstream.positions == "interpolated":  # the positions of pre-training
            grid = config.downstream.pretraining_grid or grid
    elif config.adversary.kind == "relative_coordinate":
        # A coordinate adversary shifts this index, so it is the index without a shift.
        index = "relaxed" if config.adversary.index == "relaxed" else "rounded"
    settings = _vision_settings(
        sizes_from_model(config.model),
        patch_size=config.vision.patch_size,
        grid=grid,
        learned_positions=learned,
        position_order=config.vision.position_order,
    )
    if isinstance(config.vision, RelativeVisionConfig):
        settings["vision", "positions"] = config.vision.positions
        settings["vision", "index"] = index or config.vision.index
    return EncoderSource(path=path, text=False, settings=settings, read=read, checkpoint=checkpoint)


def encoder_from_vitmae(path: str, fields: Fields) -> EncoderSource:
    image_size, patch_size = fields.whole("image_size", least=1), fields.whole("patch_size", least=1)
    layers = fields.whole("num_hidden_layers", least=1)
    if fields.text("hidden_act", "gelu") != "gelu" or not fields.take("qkv_bias", bool, True):
        raise RefusedError(f"--from {path}: allowed: hidden_act gelu, and biases of queries, keys and values")

    def read() -> dict[str, Tensor]:
        stored = {published_name(name): tensor for name, tensor in stored_weights(path).items()}
        try:
            positions = stored[VITMAE_POSITIONS].squeeze(0)
            return _fold_positions(_rename_vitmae(stored, layers), positions, path)
        except KeyError as error:
            raise RefusedError(
                f"--from {path}: {FILE} has no {error.args[0]}; allowed: files of ViTMAEForPreTraining's "
                "save_pretrained"
            ) from error

    settings = _vision_settings(
        transformers_sizes(fields), patch_size=patch_size, grid=image_size // patch_size, learned_positions=False
    )
    return EncoderSource(path=path, text=False, settings=settings, read=read)


def _rename_vitmae(stored: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    # Lazily: the file states the number of blocks, and the first missing name must end the loop.
    of_blocks = (f"blocks.{n}.{part}.{kind}" for n in range(blocks) for part in parts for kind in ("weight", "bias"))
    names = chain(("cls_token", "patch_embed.weight", "patch_embed.bias", "norm.weight", "norm.bias"), of_blocks)
    return {name: VITMAE.to_ours(name, [stored[source] for source in VITMAE.sources(name)]) for name in names}


def _fold_positions(weights: dict[str, Tensor], positions: Tensor, path: str) -> dict[str, Tensor]:
    """Add the class token's fixed position to the class token; other fixed positions are computed, not loaded."""
    grid = round((len(positions) - 1) ** 0.5)
    if (positions[1:] - sine_cosine(grid, positions.shape[-1])).abs().max() > 1e-3:
        raise RefusedError(f"--from {path}: its positions differ from the fixed sine-cosine positions of ViTMAE")
    weights["cls_token"] = weights["cls_token"] + positions[0]
    return weights


def _vision_settings(
    sizes: dict[tuple[str, str], Any],
    *,
    patch_size: int,
    grid: int,
    learned_positions: bool,
    position_order: PositionOrder = "column_row",
) -> dict[tuple[str, str], Any]:
    return sizes | {
        ("vision", "patch_size"): patch_size,
        ("vision", "positions"): "absolute",
        ("vision", "position_order"): position_order,
        ("downstream", "pretraining_grid"): grid,
        ("downstream", "learned_positions"): learned_positions,
    }


def encoder_from_timm(path: str, document: dict[str, Any], where: str) -> EncoderSource:
    """Return timm's vision transformer, or an export with relative positions.

    Sine-cosine positions stay fixed, others become weights. The model's pixel mean and deviation are folded into the
    patch embedding, which then reads pixels normalised with ours. `document` is config.json.
    """
    index = ""
    if document["architecture"] == RELATIVE_ARCHITECTURE:  # an export: timm's plain ViT with position tables
        index = Fields(document, where).text("relative_index")
        if index not in ("relaxed", "rounded"):
            raise RefusedError(f"{where}: relative_index is {quote(index)}, allowed: relaxed, rounded")
        document = {**document, "architecture": TIMM_ARCHITECTURE}
    statistics = _pixel_statistics(Fields(document, where))
    model = _build_timm(path, Fields(document, where))
    block, grid, patch_size = model.blocks[0], model.patch_embed.grid_size[0], model.patch_embed.patch_size[0]
    positions = _read_positions(path)
    order = position_order(positions[1:]) if len(positions) == 1 + grid**2 else None

    def read() -> dict[str, Tensor]:
        stored = stored_weights(path)
        with reading(path, FILE):
            weights = _weights_from_timm(path, stored, patch_size, statistics)
        if order is not None:
            del weights["pos_embed"]
        return weights

    sizes = {
        ("model", "layers"): len(model.blocks),
        ("model", "hidden_size"): model.embed_dim,
        ("model", "heads"): block.attn.num_heads,
        ("model", "intermediate_size"): block.mlp.fc1.out_features,
        ("model", "layer_norm_eps"): block.norm1.eps,
    }
    settings = _vision_settings(
        sizes,
        patch_size=patch_size,
        grid=grid,
        learned_positions=order is None,
        position_order=order or "column_row",
    )
    if index:
        settings |= {("vision", "positions"): "relative", ("vision", "index"): index}
    return EncoderSource(path=path, text=False, settings=settings, read=read)


def _build_timm(path: str, fields: Fields) -> Any:
    """Build timm's model on the meta device."""
    import timm

    architecture, pooling = fields.text("architecture"), fields.take("global_pool", str | None, None)
    arguments = _model_arguments(fields)
    try:
        if not timm.is_model(architecture):  # timm would download hf-hub:USER/MODEL
            raise RuntimeError(f"Unknown model ({shorten(architecture)})")
        with torch.device("meta"):
            options = {**({"global_pool": pooling} if pooling else {}), **arguments, "num_classes": 0}
            model = timm.create_model(architecture, pretrained=False, **options)
    except Exception as error:  # timm raises many types for settings that do not fit together
        raise RefusedError(
            f"--from {path}: timm cannot build {shorten(architecture)} {quote(arguments)}: {error_text(error)}"
        ) from error
    if differences := _list_differences(model):
        raise RefusedError(
            f"--from {path}: {architecture} has {', '.join(differences)}; allowed: a plain vision transformer "
            "with a class token, such as vit_base_patch16_224"
        )
    return model


MAX_TIMM_BLOCKS, MAX_TIMM_SIZE = 1_000, 1 << 16
"""Largest depth and largest other size of a model that timm builds."""


def _model_arguments(fields: Fields) -> dict[str, Any]:
    """Return the file's arguments of timm's `VisionTransformer`.

    `timm.create_model` also accepts others, such as a checkpoint that it would unpickle.
    """
    from timm.models.vision_transformer import VisionTransformer

    section = fields.section("model_args")
    known = inspect.signature(VisionTransformer).parameters.keys() - {"device", "dtype"}
    for name, value in section.document.items():
        if name not in known:
            raise section.refusal(f"{quote(name)} found, an argument of timm's VisionTransformer expected")
        sizes = value if isinstance(value, list) else [value]
        most = MAX_TIMM_BLOCKS if name == "depth" else MAX_TIMM_SIZE
        if any(type(size) in (int, float) and not -1 <= size <= most for size in sizes):
            raise section.refusal(f"{name} {quote(value)} found, at most {most} allowed")
    return dict(section.document)


def _list_differences(model: nn.Module) -> list[str]:
    """Describe features of the model that `ImageEncoder` does not support."""
    if type(model).__name__ != "VisionTransformer":
        return [f"class {type(model).__name__}"]
    if not len(model.blocks):  # type: ignore[arg-type]
        return ["no blocks"]
    block: Any = model.blocks[0]  # type: ignore[index]
    vit: Any = model
    odd = {
        "no class token, or registers": vit.num_prefix_tokens != 1,
        "no positions, or no position of the class token": vit.pos_embed is None or vit.no_embed_class,
        "a norm before the blocks": not isinstance(vit.norm_pre, nn.Identity),
        "a norm in the patch embedding": not isinstance(vit.patch_embed.norm, nn.Identity),
        "no last norm": isinstance(vit.norm, nn.Identity) and isinstance(vit.fc_norm, nn.Identity),
        "attention pooling": vit.attn_pool is not None,
        f"blocks of class {type(block).__name__}": type(block).__name__ != "Block",
        "a grid that is not square": len({*vit.patch_embed.grid_size}) != 1 or len({*vit.patch_embed.patch_size}) != 1,
    }
    if type(block).__name__ == "Block":
        odd |= {
            "layer scale": not isinstance(block.ls1, nn.Identity),
            "normalised queries": not isinstance(block.attn.q_norm, nn.Identity),
            "no bias of queries, keys and values": block.attn.qkv.bias is None,
            f"feed-forward layers of class {type(block.mlp).__name__}": type(block.mlp).__name__ != "Mlp",
            f"activation {type(block.mlp.act).__name__}": type(block.mlp.act) is not nn.GELU,
        }
    return [words for words, differs in odd.items() if differs]


def _read_positions(path: str) -> Tensor:
    """Return the stored positions, [1 + N, D]."""
    with reading(path, FILE), safe_open(Path(path) / FILE, framework="pt") as file:
        if TIMM_POSITIONS not in file.keys():  # noqa: SIM118 - not a mapping
            raise RefusedError(f"--from {path}: {FILE} has no {TIMM_POSITIONS}; allowed: weights of the whole model")
        positions: Tensor = file.get_tensor(TIMM_POSITIONS)
    return positions.float().squeeze(0)


def _pixel_statistics(fields: Fields) -> tuple[Tensor, Tensor]:
    """Return the mean [3] and deviation [3] with which the model normalises pixels in [0, 1]."""
    described = fields.section("pretrained_cfg") if fields.document.get("pretrained_cfg") else fields
    three = tuple[float, float, float]
    mean, deviation = described.take("mean", three, CHANNEL_MEAN), described.take("std", three, CHANNEL_DEVIATION)
    return torch.tensor(mean), torch.tensor(deviation)


def _weights_from_timm(
    path: str, stored: dict[str, Tensor], patch_size: int, statistics: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return the weights by the names of `ImageEncoder`, with the class token's position added to the class token."""
    if other := sorted({name.split(".")[0] for name in stored if not is_encoder(name)} - set(HEADS)):
        raise RefusedError(
            f"--from {path}: {FILE} has weights of {shorten(', '.join(other))}, which this encoder does not have"
        )
    named = {name: TIMM.our_name(name) for name in stored}
    weights = {ours: TIMM.to_ours(ours, [stored[name]]) for name, ours in named.items() if ours}
    if "norm.weight" not in weights:  # mean pooling: fc_norm is the only last norm
        weights |= {f"norm.{kind}": stored[f"fc_norm.{kind}"] for kind in ("weight", "bias")}
    positions = stored[TIMM_POSITIONS].squeeze(0)
    weights["cls_token"] = weights["cls_token"] + positions[0]
    weights["pos_embed"] = torch.cat([torch.zeros_like(positions[:1]), positions[1:]])
    # timm's input (p - mean) / deviation = ours x d / deviation + (m - mean) / deviation, where ours is (p - m) / d.
    mean, deviation = statistics
    scale = torch.tensor(CHANNEL_DEVIATION) / deviation
    offset = (torch.tensor(CHANNEL_MEAN) - mean) / deviation
    kernel = weights["patch_embed.weight"].view(-1, patch_size**2, 3)  # [D, row and column, channel]
    weights["patch_embed.bias"] = weights["patch_embed.bias"] + (kernel * offset).sum((1, 2))
    weights["patch_embed.weight"] = (kernel * scale).flatten(1)
    return weights
