"""Image encoders of other libraries as plain encoders: timm's ViT, transformers' ViTMAE, MAE's and MultiMAE's files.

Layer scale, absent biases and pixel statistics are folded into other tensors, so that the encoder computes the same.
Registers and heads are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.checkpoint.export import COLOURS, PATCHES, TOKEN, Pair, WeightNames
from trp_scale.checkpoint.initial_weights import NO_FIELDS
from trp_scale.config.run_flags import Assumed
from trp_scale.config.schema import Fields
from trp_scale.errors import error_text, quote, shorten
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.positions import PositionOrder, sine_cosine

TIMM_POSITIONS = "pos_embed"

TIMM_ARCHITECTURE = "vit_base_patch16_224"
"""timm's name of a plain vision transformer; the file's arguments set the sizes."""

RELATIVE_ARCHITECTURE = "vision_transformer_irpe"
"""Name of the model of relative_vit.py, with relative positions; timm has no such model."""

TABLE = "relative_positions.table"
"""Table of relative positions of a block; the models of both libraries lack it."""

TIMM = WeightNames(
    Pair("cls_token", "cls_token", TOKEN),
    Pair("patch_embed.*", "patch_embed.proj.*", PATCHES),
    Pair(f"blocks.*.{TABLE}", "blocks.*.attn.relative_table"),  # relative_vit.py
    Pair("blocks.*", "blocks.*"),
    Pair("norm.*", "norm.*"),
)
"""The encoder."""

MAE = WeightNames(
    *TIMM.pairs,
    *(Pair(name, name) for name in ("decoder_embed.*", "decoder_blocks.*", "decoder_norm.*")),
    Pair("mask_token", "mask_token", TOKEN),
    Pair("prediction.*", "decoder_pred.*"),
)
"""The whole autoencoder in MAE's public code; the encoder has timm's names."""

MULTIMAE_NAMES = (
    (r"^global_tokens$", "cls_token"),
    (r"^encoder\.(\d+)\.", r"blocks.\1."),
    (r"^input_adapters\.rgb\.proj\.", "patch_embed.proj."),
    (r"^input_adapters\.rgb\.pos_emb$", TIMM_POSITIONS),
)
"""Names of MultiMAE's encoder and of its adapter of images, and timm's."""

_ATTENTION = "attention.attention"
VITMAE = WeightNames(
    Pair("cls_token", "vit.embeddings.cls_token", TOKEN),
    Pair("patch_embed.*", "vit.embeddings.patch_embeddings.projection.*", PATCHES),
    Pair("norm.*", "vit.layernorm.*"),
    Pair("decoder_embed.*", "decoder.decoder_embed.*"),
    Pair("mask_token", "decoder.mask_token", TOKEN),
    Pair("decoder_norm.*", "decoder.decoder_norm.*"),
    Pair("prediction.*", "decoder.decoder_pred.*"),
    *(
        Pair(f"{ours}.*.{part}.*", tuple(f"{theirs}.*.{name}.*" for name in names))
        for ours, theirs in (("blocks", "vit.encoder.layer"), ("decoder_blocks", "decoder.decoder_layers"))
        for part, names in (
            ("norm1", ("layernorm_before",)),
            ("attn.qkv", (f"{_ATTENTION}.query", f"{_ATTENTION}.key", f"{_ATTENTION}.value")),  # joined in our model
            ("attn.proj", ("attention.output.dense",)),
            ("norm2", ("layernorm_after",)),
            ("mlp.fc1", ("intermediate.dense",)),
            ("mlp.fc2", ("output.dense",)),
        )
    ),
)
"""The whole autoencoder."""

VITMAE_POSITIONS = "vit.embeddings.position_embeddings"
VITMAE_DECODER_POSITIONS = "decoder.decoder_pos_embed"
DECODER_POSITIONS = ("decoder_pos_embed", VITMAE_DECODER_POSITIONS)
"""Names in MAE's code and in transformers'."""

VITMAE_NEWER_NAMES = (
    (r"^vit\.layers\.", "vit.encoder.layer."),
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),  # transformers 5.23's save_pretrained
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)

HEADS = ("head.", "head_dist.", "attn_pool.", "pre_logits.", "fc_norm.", "input_adapters.", "output_adapters.")
"""Parts outside the encoder: timm's heads; MultiMAE's decoders, and adapters of other modalities."""

REGISTERS = ("reg_token", "dist_token")
"""Tokens between the class token and the patches."""

HEAD_SIZES = {1152: 72, 1280: 80, 1408: 88, 1664: 104}
"""Width of a head in published encoders of these widths; 64 in others."""

LAYER_SCALE = re.compile(r"blocks\.\d+\.ls[12]\.gamma")
HAS_BIAS = re.compile(r"patch_embed\.proj\.weight|blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])\.weight")
"""Matrices that have a bias in a plain encoder."""

MAX_TIMM_BLOCKS, MAX_TIMM_SIZE = 1_000, 1 << 16
"""Largest depth and largest other size of a model that timm builds."""


def is_encoder(name: str) -> bool:
    return TIMM.has(name)


def is_table(name: str) -> bool:
    return name.endswith((TABLE, "relative_values.table"))


def published_name(name: str) -> str:
    """Return the name in published files for a name in a newer transformers model."""
    for pattern, replacement in VITMAE_NEWER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def position_order(positions: Tensor) -> PositionOrder | None:
    """Return the order of the sine-cosine positions [N, D] of a square grid; `None` for other positions."""
    grid, width = round(len(positions) ** 0.5), positions.shape[-1]
    if grid**2 != len(positions) or width % 4:
        return None
    for order in get_args(PositionOrder):
        if (positions - sine_cosine(grid, width, order)).abs().max() <= 1e-4:  # some are stored in half precision
            return order  # type: ignore[no-any-return]
    return None


def build_timm(fields: Fields) -> Any:
    """Build the model of a config.json on the meta device; an export with relative positions is a plain one here.

    Raises RefusedError: timm has no such model, or it has a part that a plain encoder cannot compute.
    """
    import timm

    architecture, pooling = fields.text("architecture"), fields.take("global_pool", str | None, None)
    architecture = TIMM_ARCHITECTURE if architecture == RELATIVE_ARCHITECTURE else architecture
    arguments = _model_arguments(fields)
    try:
        if not timm.is_model(architecture):  # timm would download hf-hub:USER/MODEL
            raise RuntimeError(f"Unknown model ({shorten(architecture)})")
        with torch.device("meta"):
            options = {**({"global_pool": pooling} if pooling else {}), **arguments, "num_classes": 0}
            model = timm.create_model(architecture, pretrained=False, **options)
    except Exception as error:  # timm raises many types for settings that do not fit together
        raise fields.refusal(
            f"timm cannot build {shorten(architecture)} {quote(arguments)}: {error_text(error)}"
        ) from error
    if differences := _list_differences(model):
        raise fields.refusal(
            f"{architecture} has {', '.join(differences)}; allowed: a plain vision transformer such as "
            "vit_base_patch16_224"
        )
    return model


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
    """Describe parts of the model that no plain encoder computes."""
    if type(model).__name__ not in ("VisionTransformer", "VisionTransformerDistilled"):
        return [f"class {type(model).__name__}"]
    if not len(model.blocks):  # type: ignore[arg-type]
        return ["no blocks"]
    block: Any = model.blocks[0]  # type: ignore[index]
    vit: Any = model
    odd = {
        "no positions": vit.pos_embed is None,
        "a norm before the blocks": not isinstance(vit.norm_pre, nn.Identity),
        "a norm in the patch embedding": not isinstance(vit.patch_embed.norm, nn.Identity),
        "no last norm": isinstance(vit.norm, nn.Identity) and isinstance(vit.fc_norm, nn.Identity),
        f"blocks of class {type(block).__name__}": type(block).__name__ != "Block",
        "a grid that is not square": len({*vit.patch_embed.grid_size}) != 1 or len({*vit.patch_embed.patch_size}) != 1,
    }
    if type(block).__name__ == "Block":
        odd |= {
            "normalised queries": not isinstance(block.attn.q_norm, nn.Identity),
            f"feed-forward layers of class {type(block.mlp).__name__}": type(block.mlp).__name__ != "Mlp",
        }
    return [words for words, differs in odd.items() if differs]


def _pixel_statistics(fields: Fields) -> tuple[Tensor, Tensor]:
    """Return the mean [3] and deviation [3] with which the model normalises pixels in [0, 1]; ours if config.json does
    not tell."""
    described = fields.section("pretrained_cfg") if fields.document.get("pretrained_cfg") else fields
    three = tuple[float, float, float]
    mean, deviation = described.take("mean", three, CHANNEL_MEAN), described.take("std", three, CHANNEL_DEVIATION)
    return torch.tensor(mean), torch.tensor(deviation)


@dataclass(frozen=True, kw_only=True)
class ImageWeights:
    """Weights of an image encoder of another library, by the names of `MaskedAutoencoder`.

    Attributes:
        tensors: of the encoder, and of MAE's decoder if the file has it; a class token includes its position. Tensors
            of other parts keep their names.
        positions: [1 + N, D] fp32; that of the class token is 0.
        order: of sine-cosine positions; `None` = others.
        sizes: settings (section, field) that fit the tensors. Without config.json there is a head per 64 of the width
            (HEAD_SIZES), and per 32 of a decoder's, as in MAE.
        heads: names of tensors outside the encoder, which are left out.
        differences: lines on what the plain encoder computes in another way.
    """

    tensors: dict[str, Tensor]
    positions: Tensor
    order: PositionOrder | None
    sizes: dict[tuple[str, str], Any]
    heads: list[str]
    differences: list[str]

    @property
    def grid(self) -> int:
        """Patches along each side of the file's images."""
        return isqrt(len(self.positions) - 1)


def read_image_weights(state: Mapping[str, Tensor], fields: Fields = NO_FIELDS) -> ImageWeights:
    """Read the state dict of timm's ViT, of MAE's or MultiMAE's public code, or of transformers' ViTMAE.

    Args:
        fields: of config.json.

    Raises:
        ValueError: no image encoder, or no positions of a square grid.
        RefusedError: timm cannot build the model of config.json, or a plain encoder cannot compute it.
    """
    differences: list[str] = []
    model = build_timm(fields) if "architecture" in fields else None
    if model is not None and (type(act := model.blocks[0].mlp.act) is not nn.GELU or act.approximate != "none"):
        differences.append(f"activation: {type(act).__name__} there, exact GELU here")
    if "embeddings.cls_token" in state:  # ViTMAEModel
        state = {f"vit.{name}": tensor for name, tensor in state.items()}
    if is_vitmae := any(name.startswith("vit.") for name in state):
        state, names, positions_name = {published_name(name): state[name] for name in state}, VITMAE, VITMAE_POSITIONS
    else:
        state, names, positions_name = _with_timm_names(state), MAE, TIMM_POSITIONS
    tensors, heads = dict(state), [name for name in state if name.startswith(HEADS)]
    if positions_name not in tensors:
        raise ValueError(f"{positions_name} is missing")
    before = [len(tensors[name].squeeze(0)) for name in ("cls_token", *REGISTERS) if name in tensors]
    positions = tensors.pop(positions_name).float().squeeze(0)
    positions = _split_positions(positions, 1 if is_vitmae else sum(before), is_vitmae or "cls_token" in tensors)
    registers = [name for name in REGISTERS if tensors.pop(name, None) is not None]
    if registers:
        differences.append(f"left out: registers ({', '.join(registers)})")
    if not is_vitmae:
        _fold(tensors, _pixel_statistics(fields))
    ours = names.rename({name: tensor for name, tensor in tensors.items() if name not in heads})
    if "cls_token" in ours:
        ours["cls_token"] = ours["cls_token"] + positions[0]
    else:
        differences.append("no class token in the file")
    order = position_order(positions[1:])
    if not fields.document:
        pixels = "" if order else ", and pixels normalised with ImageNet's mean and deviation"
        differences.append(f"assumed, as there is no config.json: the number of heads{pixels}")
    return ImageWeights(
        tensors=ours,
        positions=torch.cat([torch.zeros_like(positions[:1]), positions[1:]]),
        order=order,
        sizes=_sizes(ours, fields, model)
        | ({("vision", "position_order"): order} if order else {("vision", "learned_positions"): True}),
        heads=heads,
        differences=differences,
    )


def _with_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with timm's names for the encoder of MultiMAE, which has no last norm."""
    if "global_tokens" not in state:
        if "norm.weight" in state:
            return dict(state)
        return {re.sub(r"^fc_norm\.", "norm.", name): tensor for name, tensor in state.items()}  # mean pooling
    named = {}
    for name, tensor in state.items():
        for pattern, theirs in MULTIMAE_NAMES:
            name = re.sub(pattern, theirs, name)
        named[name] = tensor
    if (positions := named.pop(TIMM_POSITIONS, None)) is not None and positions.ndim == 4:  # [1, D, G, G]
        named[TIMM_POSITIONS] = F.pad(positions.flatten(2).transpose(1, 2), (0, 0, 1, 0))  # [1, 1 + N, D]
    return named


def _split_positions(stored: Tensor, prefix: int, has_class_token: bool) -> Tensor:
    """Return positions [1 + N, D] from the stored ones, with or without those of `prefix` tokens before the patches."""
    counts = [count for count in (prefix, 0) if len(stored) > count]
    before = next((count for count in counts if isqrt(len(stored) - count) ** 2 == len(stored) - count), -1)
    if stored.ndim != 2 or before < 0:
        raise ValueError(f"positions of the shape {tuple(stored.shape)} are not those of a square grid")
    first = stored[:1] if before and has_class_token else torch.zeros_like(stored[:1])
    return torch.cat([first, stored[before:]])


def _fold(tensors: dict[str, Tensor], statistics: tuple[Tensor, Tensor]) -> None:
    """Replace timm's tensors that a plain encoder lacks, with the same result: layer scale, absent biases, and the mean
    and deviation of pixels in `statistics`.

    timm's input (p - mean) / deviation = ours x d / deviation + (m - mean) / deviation, where ours is (p - m) / d.
    """
    for name in [name for name in tensors if LAYER_SCALE.fullmatch(name)]:
        block, _, part = name.removesuffix(".gamma").rpartition(".")
        gamma, scaled = tensors.pop(name), f"{block}.{'attn.proj' if part == 'ls1' else 'mlp.fc2'}"
        for key in (f"{scaled}.weight", f"{scaled}.bias"):
            if key in tensors:
                tensors[key] = gamma.view(-1, *[1] * (tensors[key].ndim - 1)) * tensors[key]  # [D, ...]
    for name in [name for name in tensors if HAS_BIAS.fullmatch(name)]:
        tensors.setdefault(f"{name.removesuffix('weight')}bias", torch.zeros(len(tensors[name])))
    mean, deviation = statistics
    scale = torch.tensor(CHANNEL_DEVIATION) / deviation
    offset = (torch.tensor(CHANNEL_MEAN) - mean) / deviation
    if (kernel := tensors.get("patch_embed.proj.weight")) is not None:  # [D, channel, row, column]
        bias = tensors["patch_embed.proj.bias"]
        tensors["patch_embed.proj.bias"] = bias + (kernel * offset.view(3, 1, 1)).sum((1, 2, 3))
        tensors["patch_embed.proj.weight"] = kernel * scale.view(3, 1, 1)


def _sizes(tensors: Mapping[str, Tensor], fields: Fields, model: Any) -> dict[tuple[str, str], Any]:
    """Return the settings that fit tensors by our names, of the timm model `model` if it is known."""
    if missing := [name for name in ("patch_embed.weight", "blocks.0.mlp.fc1.weight") if name not in tensors]:
        raise ValueError(f"not the weights of an image encoder (missing: {', '.join(missing)})")
    width, values = tensors["patch_embed.weight"].shape
    heads = Assumed(max(1, width // HEAD_SIZES.get(width, 64)))
    sizes: dict[tuple[str, str], Any] = {
        ("model", "layers"): count_blocks(tensors, "blocks."),
        ("model", "hidden_size"): width,
        ("model", "heads"): fields.whole("num_attention_heads", least=1, default=heads),
        ("model", "intermediate_size"): len(tensors["blocks.0.mlp.fc1.weight"]),
        ("vision", "patch_size"): isqrt(values // COLOURS),
    }
    if model is not None:
        block = model.blocks[0]
        sizes |= {("model", "heads"): block.attn.num_heads, ("model", "layer_norm_eps"): block.norm1.eps}
    if "layer_norm_eps" in fields:
        sizes["model", "layer_norm_eps"] = fields.take("layer_norm_eps", float)
    if "decoder_embed.weight" in tensors:
        width = len(tensors["decoder_embed.weight"])
        sizes |= decoder_sizes(width, count_blocks(tensors, "decoder_blocks."), fields)
    return sizes


def count_blocks(tensors: Iterable[str], prefix: str) -> int:
    """Return the number of blocks with tensors PREFIX<number>.NAME."""
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


def decoder_sizes(width: int, layers: int, fields: Fields = NO_FIELDS) -> dict[tuple[str, str], Any]:
    """Return the settings of a decoder."""
    heads = Assumed(max(1, width // 32))
    return {
        ("vision", "decoder_hidden_size"): width,
        ("vision", "decoder_layers"): layers,
        ("vision", "decoder_heads"): fields.whole("decoder_num_attention_heads", least=1, default=heads),
    }
