"""Checks of the settings of image runs against each other; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from trp_scale.config import MOST_PATCHES, Config, PretrainConfig, split_patches
from trp_scale.recipes.modality_checks import modality_problems, unread_modalities


def vision_problems(config: PretrainConfig) -> Iterator[str]:
    """Settings that no image run can have. Text has no such checks."""
    upstream, objective = config.upstream, config.objective
    if config.reads == "text":
        return
    if objective.output_bias != "zero":
        yield f"--objective.output_bias is {objective.output_bias}, allowed for --upstream {upstream}: zero"
    yield from _sizes(config)
    if upstream == "mm_mae":
        yield from modality_problems(config)


def _sizes(config: PretrainConfig) -> Iterator[str]:
    model, vision = config.model, config.vision
    if model.dropout:
        yield f"--model.dropout is {model.dropout}, allowed: 0 (a masked autoencoder has no dropout)"
    for name in ("patch_size", "decoder_layers", "decoder_hidden_size", "decoder_heads"):
        if getattr(vision, name) < 1:
            yield f"--vision.{name} is {getattr(vision, name)}, allowed: 1 or more"
            return
    if vision.decoder_hidden_size % vision.decoder_heads:
        yield (
            f"--vision.decoder_heads is {vision.decoder_heads} and does not divide --vision.decoder_hidden_size "
            f"{vision.decoder_hidden_size}"
        )
    for flag, width in (
        ("--model.hidden_size", model.hidden_size),
        ("--vision.decoder_hidden_size", vision.decoder_hidden_size),
    ):
        if width % 4:
            yield f"{flag} is {width}, allowed: multiples of 4 (sine and cosine of two coordinates)"
    if config.upstream == "mae" and vision.decoder == "linear" and vision.tokens == "visible":
        yield (
            "--vision.decoder linear predicts from the encoder's tokens alone, and --vision.tokens visible leaves the "
            "masked ones out; allowed: --vision.tokens all, or --vision.decoder transformer"
        )
    if config.crops.size < 1 or config.crops.size % vision.patch_size:
        yield (
            f"--crops.size is {config.crops.size}, allowed: multiples of --vision.patch_size {vision.patch_size}, "
            f"for example {max(1, config.crops.size // vision.patch_size) * vision.patch_size}"
        )
        return
    split = split_patches(config.crops.size, vision.patch_size, config.masking.ratio)
    if split.patches > MOST_PATCHES:
        yield (
            f"--crops.size {config.crops.size} has {split.patches} patches of --vision.patch_size {vision.patch_size}; "
            f"allowed: at most {MOST_PATCHES}"
        )
    if config.upstream == "mae" and not 0 < split.visible < split.patches:
        yield (
            f"--masking.ratio {config.masking.ratio} leaves {split.visible} of {split.patches} patches visible; at "
            "least one must be visible and one masked: change it, or --crops.size"
        )


TEXT_ONLY = ("objective.other", "objective.next_sentence", "objective.next_sentence_weight", "masking.limit",
             "masking.unit", "masking.sampling", "model.max_positions")  # fmt: skip
MAE_ONLY = ("objective.target", "objective.uniformity")
MODALITIES_ONLY = ("modalities", "objective.reduction")
UNREAD = {
    "pos_bert": ("vision", "crops", *MAE_ONLY, *MODALITIES_ONLY),
    "mae": (*TEXT_ONLY, *MODALITIES_ONLY),
    "mm_mae": (*TEXT_ONLY, *MAE_ONLY, "masking.ratio"),
}
VIEW_ONLY = ("crops.view_size",)
DECODER_ONLY = ("vision.decoder_layers", "vision.decoder_hidden_size", "vision.decoder_heads")
"""Settings, or whole sections, that only some runs read."""


def unread_settings(config: PretrainConfig) -> Iterator[str]:
    """A caution for each setting that differs from its default and that this run does not read."""
    yield from _unread(config, UNREAD[config.upstream], f"--upstream {config.upstream}")
    if config.reads == "text":
        return
    if config.upstream == "mm_mae":
        for name, because in unread_modalities(config):
            yield from _unread(config, (name,), because)
    if config.crops.from_ == "image":
        yield from _unread(config, VIEW_ONLY, "--crops.from image")
    if config.vision.decoder == "linear":
        yield from _unread(config, DECODER_ONLY, "--vision.decoder linear")
    if config.vision.positions == "absolute":
        yield from _unread(config, ("vision.index",), "--vision.positions absolute")
    elif config.adversary.kind == "relative_coordinate":
        yield from _unread(
            config, ("vision.index",), "--adversary.kind relative_coordinate, which has an index of its own"
        )


def _unread(config: Config, names: tuple[str, ...], because: str) -> Iterator[str]:
    given, default = asdict(config), asdict(type(config)())
    for name in names:
        section, _, field = name.partition(".")
        for each in (field,) if field else given[section]:
            value = given[section][each]
            if value != default[section][each]:
                shown = " ".join(value) if isinstance(value, list) else value
                yield f"--{section}.{each.rstrip('_')} {shown} has no effect with {because}"
