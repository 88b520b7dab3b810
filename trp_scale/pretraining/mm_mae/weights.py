"""Import of MultiMAE's weights (Bachmann et al., names of their public code) and of image encoders, and export of the
encoder to timm as a vision transformer of images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.export import PATCHES, TOKEN, Export, Pair, WeightLayout, WeightNames
from trp_scale.checkpoint.initial_weights import NO_FIELDS, GivenWeights, listed_names
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import Fields
from trp_scale.models.initialise import current_value, set_value
from trp_scale.pretraining.mae.image_weights import count_blocks, decoder_sizes, read_image_weights
from trp_scale.pretraining.mae.weights import check_positions, check_timm, find_part, import_encoder, write_encoder
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig

CLASS_EMBEDDING = "tokenisers.semseg.class_embedding"
INPUTS, OUTPUTS, POSITIONS = "input_adapters", "output_adapters", "pos_emb"

ADAPTERS = {"rgb": "norm_rgb", "raw_rgb": "rgb", "depth": "depth", "semseg": "semseg"}
"""MultiMAE's name of each task's decoder; its rgb is our raw_rgb."""

CHANNELS = {"rgb": 3, "raw_rgb": 3, "depth": 1}
"""Channels of each prediction of pixels; semseg has one per class."""

CLASSES = "map_classes"
"""In `CheckpointDocument.extra`: number of classes of each modality's maps, which set model shapes."""

RGB_TOKENISER = "tokenisers.rgb."


def weight_names(model: MultimodalMaskedAutoencoder) -> WeightNames:
    """Return the table of MultiMAE's names for the tasks of this model."""

    def join_classes(classes: Tensor) -> Tensor:
        """[C, E] -> [(C, E)]; if their table lacks void labels, ours keep their vector."""
        has_void = len(classes) != model.classes["semseg"]
        void = own_classes[:0] if has_void else own_classes[-classes.shape[-1] :]  # [E]
        return torch.cat([classes.flatten(), void.to(classes)])

    parameters = dict(model.named_parameters())
    # Read before the import replaces it.
    own_classes = current_value(parameters[CLASS_EMBEDDING]) if CLASS_EMBEDDING in parameters else torch.empty(0)
    return WeightNames(
        Pair("cls_token", "global_tokens", TOKEN),
        Pair("blocks.*", "encoder.*"),
        Pair(CLASS_EMBEDDING, f"{INPUTS}.semseg.class_emb.weight", WeightLayout(join_classes)),
        Pair("tokenisers.*.projection.*", f"{INPUTS}.*.proj.*", PATCHES),
        Pair("tokenisers.*.*", f"{INPUTS}.*.proj.*", PATCHES),
        *(pair for task in model.outputs for pair in _decoder_pairs(task, model.classes)),
    )


def _decoder_pairs(task: str, classes: Mapping[str, int]) -> list[Pair]:
    def order_pixels(prediction: Tensor) -> Tensor:
        """[(channel, row, column), ...] -> [(row, column, channel), ...]"""
        channels = CHANNELS.get(task, classes.get(task, 1))
        if len(prediction) % channels:
            return prediction
        return prediction.view(channels, -1, *prediction.shape[1:]).transpose(0, 1).flatten(0, 1)

    ours, theirs = f"decoders.{task}", f"{OUTPUTS}.{ADAPTERS.get(task, task)}"
    return [
        Pair(f"{ours}.*_embedding", f"{theirs}.task_embeddings.*", TOKEN),
        Pair(f"{ours}.mask_token", f"{theirs}.mask_token", TOKEN),
        Pair(f"{ours}.prediction.*", f"{theirs}.out_proj.*", WeightLayout(order_pixels)),
        Pair(f"{ours}.embed.*", f"{theirs}.proj_context.*"),
        Pair(f"{ours}.cross_attention.query.*", f"{theirs}.decoder.q.*"),
        Pair(f"{ours}.cross_attention.key_value.*", f"{theirs}.decoder.kv.*"),
        Pair(f"{ours}.cross_attention.proj.*", f"{theirs}.decoder.proj.*"),
        Pair(f"{ours}.norm.*", f"{theirs}.out_norm.*"),
        Pair(f"{ours}.blocks.*", f"{theirs}.decoder_transformer.*"),
        Pair(f"{ours}.*", f"{theirs}.*"),
    ]


def load_multimae(
    model: MultimodalMaskedAutoencoder, state: Mapping[str, Tensor], fields: Fields = NO_FIELDS
) -> list[str]:
    """Import all weights from a state dict of MultiMAE, or the encoder from one that `read_image_weights` reads. Return
    a line on each difference.

    Tasks and modalities that this model lacks are left out; those that MultiMAE's lacks keep their initial weights.
    MultiMAE has no vector for void labels, which keep theirs. Embeddings of a modality that is no input, in this model
    or in MultiMAE's, become 0.

    Raises:
        ValueError: names are missing, unexpected or of another shape, positions differ, or the model has an encoder
            norm, which MultiMAE lacks.
    """
    if "global_tokens" not in state:
        if "rgb" not in model.inputs:
            raise ValueError("weights of an encoder of images; add rgb to --modalities.inputs")
        return import_encoder(model, read_image_weights(state, fields), model.position_order, RGB_TOKENISER)
    if not isinstance(model.norm, nn.Identity):
        raise ValueError("MultiMAE has no norm between encoder and decoders; set --modalities.encoder_norm False")
    inputs = {f"{INPUTS}.{modality}" for modality in model.inputs}
    outputs = {f"{OUTPUTS}.{ADAPTERS.get(task, task)}" for task in model.outputs}
    tensors = {}
    for name, tensor in state.items():
        adapter, _, rest = name.partition(".")
        if adapter in (INPUTS, OUTPUTS) and f"{adapter}.{rest.split('.')[0]}" not in inputs | outputs:
            continue
        if name.endswith(f".{POSITIONS}"):
            check_positions(name, tensor.float().squeeze(0).flatten(1).T, model.position_order)
        else:
            tensors[name] = tensor
    names, parameters = weight_names(model), dict(model.named_parameters())
    present = {find_part(name) for name in parameters if any(source in tensors for source in names.sources(name))}
    kept = [name for name in parameters if find_part(name) not in present]
    embeddings = (re.fullmatch(r"decoders\..*?(\w+)_embedding", name) for name in parameters)
    embedded = {match[0]: match[1] for match in embeddings if match}
    absent = [modality for modality in model.inputs if f"tokenisers.{modality}" not in present]
    fresh = [name for name, modality in embedded.items() if modality in absent]
    unused = [name for name, modality in embedded.items() if modality not in model.inputs]
    names.import_weights(model, tensors, kept={*kept, *fresh, *unused})
    for name in unused:
        set_value(parameters[name], lambda: 0.0)
    left_out = [name for name in state if name not in tensors and not name.endswith(f".{POSITIONS}")]
    started = [listed_names(kept)] * bool(kept) + [f"embeddings of {modality} in decoders" for modality in absent]
    lines = {"left out": listed_names(left_out), "left at their start": ", ".join(started)}
    return [f"{what}: {listed}" for what, listed in lines.items() if listed]


def sizes_from_weights(source: GivenWeights) -> dict[tuple[str, str], Any]:
    """Return the settings that weights fix, with decoders for MultiMAE's; {} if MultiMAE reads no images. Raises
    ValueError: no encoder of images."""
    if "global_tokens" in source.tensors and f"{INPUTS}.rgb.proj.weight" not in source.tensors:
        return {}
    sizes = read_image_weights(source.tensors, source.fields).sizes
    sizes = {setting: value for setting, value in sizes.items() if not setting[1].startswith("decoder_")}
    contexts = [name for name in source.tensors if name.startswith(OUTPUTS) and name.endswith(".proj_context.weight")]
    for name in contexts[:1]:
        blocks = name.replace("proj_context.weight", "decoder_transformer.")
        sizes |= decoder_sizes(len(source.tensors[name]), count_blocks(source.tensors, blocks))
    return sizes


def image_encoder_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a multi-modal model's weights by the names of a masked autoencoder; the tokeniser of images becomes the
    patch embedding.

    Without modalities.encoder_norm, a last norm with weight 1 and bias 0 is added, as in a vision transformer with
    MultiMAE's published weights.
    """
    named = {name.replace(RGB_TOKENISER, "patch_embed."): tensor for name, tensor in weights.items()}
    width = named["cls_token"].shape[-1]
    return {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)} | named


def write_multimodal_timm(export: Export) -> None:
    """Write the encoder with the tokeniser of images and without a head, for
    `timm.create_model("local-dir:DIRECTORY", pretrained=True)`.

    timm's output equals that of the encoder for all patches of an image and no other modality, with a layer norm
    (`image_encoder_weights`).

    Raises:
        RefusedError: images are no input of the run, or timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of the model in its settings.
    """
    config = from_dict(export.document.config, source=str(export.checkpoint))
    assert isinstance(config, MmMaeConfig)
    if "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--to timm: the run's modalities.inputs are {', '.join(config.modalities.inputs)}, so its encoder reads "
            "no images; allowed: a run with rgb in its inputs"
        )
    check_timm(config, export.image_size)
    model = MultimodalMaskedAutoencoder(config, export.document.extra[CLASSES])
    write_encoder(export, config, image_encoder_weights(export.read_weights(model)))
