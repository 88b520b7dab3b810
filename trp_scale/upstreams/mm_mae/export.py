"""The encoder of a multi-modal run as a directory that timm loads: a vision transformer of images alone."""

from __future__ import annotations

from pathlib import Path

from trp_scale.checkpoint.document import CheckpointDocument
from trp_scale.config import RefusedError
from trp_scale.recipes.loader import from_dict
from trp_scale.upstreams.mae.export import check_timm, read_weights, write_encoder
from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder

CLASSES = "semseg_classes"
"""In `CheckpointDocument.extra`: number of classes of the segmentation maps, which the model's shapes depend on."""

RGB_TOKENISER = "tokenisers.rgb."


def write_multimodal_timm(directory: Path, checkpoint: Path, document: CheckpointDocument, *, image_size: int) -> None:
    """Write the encoder with the tokeniser of images for `timm.create_model("local-dir:DIRECTORY")`, without a head.

    What timm computes of an image is what the encoder does with all its patches visible, and none of another modality.

    Args:
        image_size: side of the images it is for, in pixels.

    Raises:
        RefusedError: the run saw no images, or timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of the model that its settings describe.
    """
    config = from_dict(document.config, source=str(checkpoint))
    if "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--to timm: the run's modalities.inputs are {', '.join(config.modalities.inputs)}: its encoder reads no "
            "images; allowed: a run with rgb among them"
        )
    check_timm(config, image_size)
    weights = read_weights(checkpoint, MultimodalMaskedAutoencoder(config, int(document.extra[CLASSES])))
    named = {name.replace(RGB_TOKENISER, "patch_embed."): tensor for name, tensor in weights.items()}
    write_encoder(directory, config, named, image_size)
