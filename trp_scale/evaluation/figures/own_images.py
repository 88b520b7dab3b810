"""Images of one's own, in files, as a pre-trained model sees them: the central square, at the run's size, masked at
random. Nothing but the images is known of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from trp_scale.config import RefusedError, split_patches
from trp_scale.core.batch import Batch
from trp_scale.core.seeds import tensor_seed
from trp_scale.data.hashing import Words
from trp_scale.data.images.rows import decode_image
from trp_scale.errors import error_text
from trp_scale.evaluation.figures.trained_images import TrainedImages, TrainedModalities
from trp_scale.pretraining.mae.batch import draw_masks, random_order

ORIENTATION = 0x0112
"""EXIF tag: how a camera was held."""

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
"""By crops.interpolation."""


def read_square(file: Path, size: int, interpolation: str) -> Tensor:
    """[3, S, S] uint8: the central square of a JPEG, PNG or WebP, upright, shrunk or stretched to `size` pixels.

    Raises:
        RefusedError: no such file, or it cannot be decoded.
    """
    try:
        content = file.read_bytes()
        image = Image.fromarray(decode_image(bytearray(content)).permute(1, 2, 0).contiguous().numpy())
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as opened:
            image.getexif()[ORIENTATION] = opened.getexif().get(ORIENTATION, 1)
        square = ImageOps.fit(ImageOps.exif_transpose(image), (size, size), method=FILTERS[interpolation])
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise RefusedError(
            f"--images {file}: not an image that can be read ({error_text(error)}); JPEG, PNG or WebP is allowed"
        ) from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def own_images(trained: TrainedImages, files: Sequence[Path]) -> Batch:
    """A batch of a masked autoencoder of one crop of each image. Masks depend on the run's seed and the pixels.

    Raises:
        RefusedError: a file that is no image.
    """
    config = trained.config
    images, words = _read(files, config.crops.size, config.crops.interpolation, config.training.seed)
    split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)
    visible, masked = draw_masks(words[:, None], split)  # [R, 1, V], [R, 1, M]
    fields = {"images": images.unsqueeze(1), "visible": torch.from_numpy(visible), "masked": torch.from_numpy(masked)}
    return _batch(fields, words)


def own_images_alone(trained: TrainedModalities, files: Sequence[Path]) -> Batch:
    """A batch of a multi-modal masked autoencoder: patches of the image are seen, and nothing is known of any other
    modality.

    Raises:
        RefusedError: a file that is no image, or the encoder reads none.
    """
    config = trained.config
    inputs = config.modalities.inputs
    if "rgb" not in inputs:
        raise RefusedError(
            f"--images: the run's modalities.inputs are {', '.join(inputs)}: its encoder reads no images; allowed: "
            "--pictures without --images"
        )
    images, words = _read(files, config.crops.size, config.crops.interpolation, config.training.seed)
    patches = (config.crops.size // config.vision.patch_size) ** 2
    seen = np.sort(random_order(words, patches)[:, : config.modalities.visible_tokens], axis=1)  # [R, at most N]
    fields = {"visible": torch.from_numpy(seen + inputs.index("rgb") * patches)}
    for modality in trained.objective.modalities.used.values():
        fields |= {"images": images} if modality.format is None else modality.unknown(len(images), config.crops)
    return _batch(fields, words)


def _read(files: Sequence[Path], size: int, interpolation: str, seed: int) -> tuple[Tensor, Words]:
    """[R, 3, S, S] uint8, and a word for each image's masks [R]."""
    images = [read_square(file, size, interpolation) for file in files]
    digests = [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest() for image in images]
    words = np.array([tensor_seed(seed, f"masks of an image/{digest}") for digest in digests], dtype=np.uint64)
    return torch.stack(images), words


def _batch(fields: dict[str, Tensor], words: Words) -> Batch:
    """All rows are there, and have no class."""
    common = {"labels": torch.full((len(words),), -1), "row_weights": torch.ones(len(words))}
    return Batch(fields={**fields, **common}, keys=torch.from_numpy(words.astype(np.int64)), start=0)
