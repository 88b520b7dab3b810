"""Load a trained masked autoencoder, of one or several modalities, with images to draw: the run's held-out images,
or image files (centre crops at the run's size, masked at random)."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from trp_scale.checkpoint.document import read_document, read_hooks_state
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import STATE_OF, named_weights, read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig, split_patches
from trp_scale.core.batch import Batch
from trp_scale.core.run import tensor_seed
from trp_scale.data.hashing import Words
from trp_scale.data.images.dataset import ImageMeta, decode_image
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Sources
from trp_scale.errors import DataError, error_text, finding
from trp_scale.finetuning.encoders import load_weights
from trp_scale.finetuning.measurement import ReadRun, open_run
from trp_scale.methods.learned_masks.hook import NETWORK
from trp_scale.methods.learned_masks.masks import NETWORKS, MaskingNetwork
from trp_scale.models.positions import PerturbationShape, perturbation_shape
from trp_scale.pretraining.base import find_upstream, open_sources
from trp_scale.pretraining.mae.masks import draw_masks, random_order
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mm_mae.batch import open_rows
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction
from trp_scale.pretraining.mm_mae.weights import CLASSES

ORIENTATION = 0x0112
"""EXIF tag of the orientation."""

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
"""Filters by crops.interpolation."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(kw_only=True)
class TrainedRun:
    """Trained image model. Attributes: data_digest: of the training data."""

    checkpoint: Path
    config: ImagePretrainConfig
    data_digest: str | None

    def open_sources(self, config: ImagePretrainConfig) -> Sources:
        """Open the run's data in this process; all training images are in one source. Raises RefusedError if the
        data is missing or has changed."""
        config = copy.deepcopy(find_upstream(config).inference_config(config))
        config.data.workers = 0
        where = f"the run's data, data.path {config.data.path} from {Path.cwd()}"
        try:
            sources = open_sources(config, rank=0, world=1)
        except DataError as error:
            raise RefusedError(f"{where}, cannot be read: {error}; give its current path with --data DIR") from error
        except RefusedError as error:  # the run could use its data
            raise RefusedError(
                f"{where}, is not the training data: {finding(error)}; give its path with --data DIR"
            ) from error
        if self.data_digest not in (None, sources.digest()):
            sources.close()
            raise RefusedError(f"{where}, is not the training data; give the path of the training data with --data DIR")
        return sources

    def images(self, rows: int) -> Batch:
        """Return at most `rows` readable held-out images; training images if none are held out."""
        config = copy.deepcopy(self.config)
        config.batch.global_size = config.batch.micro_size = rows
        sources = self.open_sources(config)
        try:
            held_out = config.data.validation_fraction > 0
            batch = next(iter(sources.validation.windows())) if held_out else sources.train.next_window()[0]
        finally:
            sources.close()
        present = batch["row_weights"] > 0
        fields = {name: value[present] for name, value in batch.fields.items()}
        return Batch(fields=fields, keys=batch.keys[present], start=batch.start)


@dataclass(kw_only=True)
class TrainedImages(TrainedRun):
    """Trained masked autoencoder.

    Attributes:
        model: trained, on the CPU.
        shape: of the adversary's perturbation; `None` without an adversary.
        perturbation: vector in the checkpoint [shape.numel]; `None` without an adversary.
    """

    config: MaeConfig
    model: MaskedAutoencoder
    objective: MaskedPatchReconstruction
    shape: PerturbationShape | None
    perturbation: Tensor | None

    def own_images(self, files: Sequence[Path]) -> Batch:
        """Return a batch of one crop of each file. Masks depend on the run's seed and the pixels. Raises
        RefusedError for a file that is not an image."""
        config = self.config
        images, words = _read_squares(files, config.crops.size, config.crops.interpolation, config.training.seed)
        split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)
        visible, masked = draw_masks(words[:, None], split, config.multilevel)  # [R, 1, V], [R, 1, M]
        fields = {
            "images": images.unsqueeze(1),
            "visible": torch.from_numpy(visible),
            "masked": torch.from_numpy(masked),
        }
        return _own_batch(fields, words)


@dataclass(kw_only=True)
class TrainedModalities(TrainedRun):
    """Trained multi-modal masked autoencoder. Attributes: model: trained, on the CPU."""

    config: MmMaeConfig
    model: MultimodalMaskedAutoencoder
    objective: MultimodalReconstruction

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Return class names by modality, read from the data; empty if it is missing: the checkpoint contains only
        their number."""
        try:
            meta: ImageMeta = open_rows(self.config, parse_paths(self.config.data.path)).meta  # type: ignore[assignment]
        except (DataError, RefusedError):
            return {}
        return {name: tuple(getattr(maps, "classes", None) or ()) for name, maps in meta.maps.items()}

    def own_images(self, files: Sequence[Path]) -> Batch:
        """Return a batch of the files: patches of the image are visible, other modalities unknown. Raises
        RefusedError for a file that is not an image, or if the encoder reads no images."""
        config = self.config
        inputs = config.modalities.inputs
        if "rgb" not in inputs:
            raise RefusedError(
                f"--images: the run's modalities.inputs are {', '.join(inputs)}: its encoder reads no images; use "
                "--pictures without --images"
            )
        images, words = _read_squares(files, config.crops.size, config.crops.interpolation, config.training.seed)
        patches = (config.crops.size // config.vision.patch_size) ** 2
        seen = np.sort(random_order(words, patches)[:, : config.modalities.visible_tokens], axis=1)  # [R, at most N]
        fields = {"visible": torch.from_numpy(seen + inputs.index("rgb") * patches)}
        for modality in self.objective.modalities.used.values():
            fields |= (
                {"images": images} if modality.format is None else modality.empty_fields(len(images), config.crops)
            )
        return _own_batch(fields, words)


def load_trained_images(source: Path | str, data: str = "") -> TrainedImages:
    """Load a masked autoencoder from a run directory (newest checkpoint) or a checkpoint. Raises RefusedError for other
    models.

    Args:
        source: with the suffix "@average" for averaged weights.
        data: current path of the run's data; empty = unchanged.
    """
    run = _read(source, data, MaeConfig)
    config: MaeConfig = run.config
    shape = perturbation_shape(config.model, config.vision, config.adversary)
    hooks = {} if shape is None else read_hooks_state(run.checkpoint, run.document)
    return TrainedImages(
        checkpoint=run.checkpoint,
        config=config,
        data_digest=run.document.extra.get("data_digest"),
        model=_with_weights(MaskedAutoencoder(config), run.checkpoint, STATE_OF[run.weights]),
        objective=MaskedPatchReconstruction(config.objective, config.vision.patch_size),
        shape=shape,
        perturbation=hooks["adversary"]["tensors"]["vector"] if hooks else None,
    )


def load_trained_modalities(source: Path | str, data: str = "") -> TrainedModalities:
    """Load a multi-modal masked autoencoder, like `load_trained_images`."""
    run = _read(source, data, MmMaeConfig)
    model = MultimodalMaskedAutoencoder(run.config, run.document.extra[CLASSES])
    return TrainedModalities(
        checkpoint=run.checkpoint,
        config=run.config,
        data_digest=run.document.extra.get("data_digest"),
        model=_with_weights(model, run.checkpoint, STATE_OF[run.weights]),
        objective=MultimodalReconstruction(run.config),
    )


def load_trained(source: Path | str, data: str = "") -> TrainedImages | TrainedModalities:
    """Load a masked autoencoder of one or several modalities, like `load_trained_images`."""
    several = upstream_name(source) == MmMaeConfig.upstream
    return load_trained_modalities(source, data) if several else load_trained_images(source, data)


def upstream_name(source: Path | str) -> str:
    """Return the upstream of a run; empty for a fine-tuned run. Raises RefusedError if no checkpoint exists."""
    upstream: str = read_document(find_checkpoint(Path(named_weights(str(source))[0]))).config.get("upstream", "")
    return upstream


def _read(source: Path | str, data: str, kind: type[ImagePretrainConfig]) -> ReadRun:
    named = named_weights(str(source))[0]
    run = open_run(Path(named), "last" if named == str(source) else "average")
    run.config.data.path = data or run.config.data.path
    if not isinstance(run.config, kind):
        upstream = upstream_name(run.checkpoint) or "none (a fine-tuned run)"
        raise RefusedError(
            f"{run.checkpoint}: expected a run of --upstream {kind.upstream}; its upstream is {upstream}"
        )
    return run


def _with_weights(model: Model, checkpoint: Path, state: str = "weight", engine: str = "") -> Model:
    load_weights(model, read_full_state(checkpoint, state, engine), str(checkpoint))
    return model.eval()


def load_masking_network(trained: TrainedImages) -> MaskingNetwork | None:
    """Load the masking network of a run; `None` if masks are random."""
    if not trained.config.multilevel.learns:
        return None
    return _with_weights(
        NETWORKS[trained.config.multilevel.network](trained.config), trained.checkpoint, engine=NETWORK
    )


def read_square(file: Path, size: int, interpolation: str) -> Tensor:
    """Return the centre crop of a JPEG, PNG or WebP file, resized to `size` pixels and upright: [3, S, S] uint8.
    Raises RefusedError if it cannot be decoded."""
    try:
        content = file.read_bytes()
        image = Image.fromarray(decode_image(bytearray(content)).permute(1, 2, 0).contiguous().numpy())
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as opened:
            image.getexif()[ORIENTATION] = opened.getexif().get(ORIENTATION, 1)
        square = ImageOps.fit(ImageOps.exif_transpose(image), (size, size), method=FILTERS[interpolation])
    except Exception as error:  # decoders raise many kinds of errors for a broken file
        raise RefusedError(
            f"--images {file}: cannot be read as an image ({error_text(error)}); allowed: JPEG, PNG or WebP"
        ) from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _read_squares(files: Sequence[Path], size: int, interpolation: str, seed: int) -> tuple[Tensor, Words]:
    """Return images [R, 3, S, S] uint8, and a seed for the masks of each [R]."""
    images = [read_square(file, size, interpolation) for file in files]
    digests = [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest() for image in images]
    words = np.array([tensor_seed(seed, f"masks of an image/{digest}") for digest in digests], dtype=np.uint64)
    return torch.stack(images), words


def _own_batch(fields: dict[str, Tensor], words: Words) -> Batch:
    """Add labels -1 and row weights 1."""
    common = {"labels": torch.full((len(words),), -1), "row_weights": torch.ones(len(words))}
    return Batch(fields={**fields, **common}, keys=torch.from_numpy(words.astype(np.int64)), start=0)
