"""A multi-modal masked autoencoder's weights from MultiMAE's (Bachmann et al., the names of their public code), and its
encoder as a directory that timm loads: a vision transformer of images alone.

MultiMAE's checkpoints are pickled, which nothing here reads: save the state dict under `model` in such a file as
safetensors first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.export import Export
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.models.initialise import check_names, give, take, value_of
from trp_scale.pretraining.mae.export import check_timm, read_weights, write_encoder
from trp_scale.pretraining.mae.weights import order_of
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig

CLASS_EMBEDDING = "tokenisers.semseg.class_embedding"
INPUTS, OUTPUTS, POSITIONS = "input_adapters", "output_adapters", "pos_emb"

ADAPTERS = {"rgb": "norm_rgb", "raw_rgb": "rgb", "depth": "depth", "semseg": "semseg"}
"""Their name of each task's decoder: what they call rgb are pixels as they are."""

CHANNELS = {"rgb": 3, "raw_rgb": 3, "depth": 1}
"""Channels of each prediction of pixels; semseg has one for each class."""

DECODER_NAMES = {
    "embed": "proj_context",
    "cross_attention.query": "decoder.q",
    "cross_attention.key_value": "decoder.kv",
    "cross_attention.proj": "decoder.proj",
    "norm": "out_norm",
    "prediction": "out_proj",
}
"""Modules of a decoder that they call otherwise."""


def load_multimae(model: MultimodalMaskedAutoencoder, state: Mapping[str, Tensor]) -> None:
    """Take all weights from a MultiMAE's state dict.

    Tasks and modalities of theirs that this model has not are left out. Void labels, which theirs has none of, keep the
    vector that they have; the embedding of a predicted modality that is no input, which theirs has none of, becomes 0.

    Raises:
        ValueError: names that are missing, unexpected or of another shape, other positions, or a norm after the encoder
            here, which MultiMAE has not.
    """
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
            _check_positions(model, name, tensor)
        else:
            tensors[name] = tensor
    parameters = dict(model.named_parameters())
    absent = [name for name in parameters if _is_of_no_input(model, name)]
    names = {name: _their_name(name) for name in parameters if name not in absent}
    check_names(set(names.values()), tensors)
    # Read now: what it is given replaces it.
    own_classes = value_of(parameters[CLASS_EMBEDDING]) if CLASS_EMBEDDING in parameters else None
    sources = {name: (theirs,) for name, theirs in names.items()}
    take(model, sources, tensors, lambda name, several: _ours(model, name, several[0], own_classes))
    for name in absent:
        give(parameters[name], lambda: 0.0)


def _their_name(name: str) -> str:
    first, _, rest = name.partition(".")
    if first == "cls_token":
        return "global_tokens"
    if first == "blocks":
        return f"encoder.{rest}"
    which, _, rest = rest.partition(".")
    if first == "tokenisers":
        if rest == "class_embedding":
            return f"{INPUTS}.{which}.class_emb.weight"
        return f"{INPUTS}.{which}.proj.{rest.split('.')[-1]}"
    adapter = f"{OUTPUTS}.{ADAPTERS.get(which, which)}"
    if rest.endswith("_embedding"):
        return f"{adapter}.task_embeddings.{rest.removesuffix('_embedding')}"
    if rest.startswith("blocks."):
        return f"{adapter}.decoder_transformer.{rest.removeprefix('blocks.')}"
    module, dot, kind = rest.rpartition(".")
    return f"{adapter}.{DECODER_NAMES.get(module, module)}{dot}{kind}"


def _is_of_no_input(model: MultimodalMaskedAutoencoder, name: str) -> bool:
    modality = name.rpartition(".")[2].removesuffix("_embedding")
    return name.startswith("decoders.") and name.endswith("_embedding") and modality not in model.inputs


def _ours(model: MultimodalMaskedAutoencoder, name: str, tensor: Tensor, own_classes: Tensor | None) -> Tensor:
    """Their tensor in our shape and order.

    Args:
        own_classes: the model's own embedding of classes, if it has one.
    """
    if name == CLASS_EMBEDDING:
        assert own_classes is not None
        has_void = len(tensor) != model.classes["semseg"]
        void = own_classes[:0] if has_void else own_classes[-tensor.shape[-1] :]  # [E]
        return torch.cat([tensor.flatten(), void.to(tensor)])
    if tensor.ndim == 4:  # a convolution [D, channel, row, column] -> [D, (row, column, channel)]
        return tensor.permute(0, 2, 3, 1).flatten(1)
    if name.endswith(("_token", "_embedding")):
        return tensor.flatten()
    if ".prediction." in name:  # [(channel, row, column), ...] -> [(row, column, channel), ...]
        task = name.split(".")[1]
        channels = CHANNELS.get(task, model.classes.get(task, 1))
        if len(tensor) % channels == 0:
            return tensor.view(channels, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)
    return tensor


def _check_positions(model: MultimodalMaskedAutoencoder, name: str, positions: Tensor) -> None:
    """Raises:
    ValueError: these [1, D, G, G] are not the fixed positions that the model has.
    """
    stored = order_of(positions.float().squeeze(0).flatten(1).T)
    if stored is None:
        raise ValueError(f"{name}: not fixed sine-cosine positions of a square grid; learned ones cannot be taken over")
    if stored != model.position_order:
        raise ValueError(f"{name}: positions in the order {stored}; set --vision.position_order {stored} for them")


CLASSES = "map_classes"
"""In `CheckpointDocument.extra`: number of classes of each modality's maps, which the model's shapes depend on."""

RGB_TOKENISER = "tokenisers.rgb."


def images_alone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A multi-modal model's weights by the names of a masked autoencoder: the tokeniser of images is its patch
    embedding.

    Without modalities.encoder_norm there is no last norm. One of gain 1 and offset 0 stands in its place, which is what
    a vision transformer has that takes MultiMAE's published weights.
    """
    named = {name.replace(RGB_TOKENISER, "patch_embed."): tensor for name, tensor in weights.items()}
    width = named["cls_token"].shape[-1]
    return {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)} | named


def write_multimodal_timm(asked: Export) -> None:
    """Write the encoder with the tokeniser of images, without a head, for
    `timm.create_model("local-dir:DIRECTORY", pretrained=True)`.

    What timm computes of an image is what the encoder does with all its patches visible and none of another modality,
    through a layer norm (`images_alone`).

    Raises:
        RefusedError: the run saw no images, or timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of the model that its settings describe.
    """
    config = from_dict(asked.document.config, source=str(asked.checkpoint))
    assert isinstance(config, MmMaeConfig)
    if "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--to timm: the run's modalities.inputs are {', '.join(config.modalities.inputs)}: its encoder reads no "
            "images; allowed: a run with rgb among them"
        )
    check_timm(config, asked.image_size)
    model = MultimodalMaskedAutoencoder(config, asked.document.extra[CLASSES])
    weights = read_weights(asked.checkpoint, model, asked.state)
    write_encoder(asked.directory, config, images_alone(weights), asked.image_size)
