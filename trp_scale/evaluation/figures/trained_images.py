"""Load a trained masked autoencoder, of one or several modalities, with images to draw: the run's held-out images,
or image files (centre crops at the run's size, masked at random)."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
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
from trp_scale.finetuning.measurement import open_run
from trp_scale.methods.learned_masks.hook import NETWORK
from trp_scale.methods.learned_masks.masks import NETWORKS, MaskingNetwork
from trp_scale.models.positions import perturbation_shape
from trp_scale.pretraining.base import find_upstream, open_sources
from trp_scale.pretraining.mae.batch import draw_masks, random_order
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mm_mae.batch import open_rows
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction
from trp_scale.pretraining.mm_mae.weights import CLASSES

Model = TypeVar("Model", bound=nn.Module)


class TrainedRun:
    """Trained masked autoencoder of images, from a run directory (newest checkpoint) or a checkpoint.

    Args:
        source: with the suffix "@average" for averaged weights.
        data: current path of the run's data; empty = unchanged.

    Attributes:
        run: checkpoint and settings.
        model: trained, on the CPU.

    Raises:
        RefusedError: a run of another upstream.
    """

    kind: ClassVar[type[ImagePretrainConfig]]
    config: Any
    model: Any

    def __init__(self, source: Path | str, data: str = "") -> None:
        named = named_weights(str(source))[0]
        self.run = open_run(Path(named), "last" if named == str(source) else "average")
        self.checkpoint, self.config = self.run.checkpoint, self.run.config
        if not isinstance(self.config, self.kind):
            upstream = getattr(self.config, "upstream", "none (a fine-tuned run)")
            raise RefusedError(
                f"{self.checkpoint}: expected a run of --upstream {self.kind.upstream}; its upstream is {upstream}"
            )
        self.config.data.path = data or self.config.data.path
        self.model = _with_weights(self.make_model(), self.checkpoint, STATE_OF[self.run.weights])

    def make_model(self) -> nn.Module:
        """Return the model with other weights."""
        raise NotImplementedError(f"{type(self).__name__} must implement make_model")

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
        if self.run.document.extra.get("data_digest") not in (None, sources.digest()):
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

    def own_images(self, files: Sequence[Path]) -> Batch:
        """Return a batch of the central square of each file, without a label. Masks depend on the run's seed and the
        pixels. Raises RefusedError for a file that is not an image."""
        crops, seed = self.config.crops, self.config.training.seed
        images = [read_square(file, crops.size, crops.interpolation) for file in files]
        digests = [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest() for image in images]
        words = np.array([tensor_seed(seed, f"masks of an image/{digest}") for digest in digests], dtype=np.uint64)
        common = {"labels": torch.full((len(words),), -1), "row_weights": torch.ones(len(words))}
        fields = {**self.mask(torch.stack(images), words), **common}
        return Batch(fields=fields, keys=torch.from_numpy(words.astype(np.int64)), start=0)

    def mask(self, images: Tensor, words: Words) -> dict[str, Tensor]:
        """Return the fields of a batch for images [R, 3, S, S] uint8, masked by a word for each, [R]."""
        raise NotImplementedError(f"{type(self).__name__} must implement mask")


class TrainedImages(TrainedRun):
    """Trained masked autoencoder of one modality.

    Attributes:
        shape: of the adversary's perturbation; `None` without an adversary.
        perturbation: vector in the checkpoint [shape.numel]; `None` without an adversary.
    """

    kind = MaeConfig
    config: MaeConfig
    model: MaskedAutoencoder

    def __init__(self, source: Path | str, data: str = "") -> None:
        super().__init__(source, data)
        config = self.config
        self.perturbation: Tensor | None = None
        self.objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
        self.shape = perturbation_shape(config.model, config.vision, config.adversary)
        if self.shape is not None:
            hooks = read_hooks_state(self.checkpoint, self.run.document)
            self.perturbation = hooks["adversary"]["tensors"]["vector"]

    def make_model(self) -> nn.Module:
        return MaskedAutoencoder(self.config)

    def mask(self, images: Tensor, words: Words) -> dict[str, Tensor]:
        config = self.config
        split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)
        visible, masked = draw_masks(words[:, None], split, config.multilevel)  # [R, 1, V], [R, 1, M]
        return {
            "images": images.unsqueeze(1),
            "visible": torch.from_numpy(visible),
            "masked": torch.from_numpy(masked),
        }


class TrainedModalities(TrainedRun):
    """Trained multi-modal masked autoencoder."""

    kind = MmMaeConfig
    config: MmMaeConfig
    model: MultimodalMaskedAutoencoder

    def __init__(self, source: Path | str, data: str = "") -> None:
        super().__init__(source, data)
        self.objective = MultimodalReconstruction(self.config)

    def make_model(self) -> nn.Module:
        return MultimodalMaskedAutoencoder(self.config, self.run.document.extra[CLASSES])

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Return class names by modality, read from the data; empty if it is missing: the checkpoint contains only
        their number."""
        try:
            meta: ImageMeta = open_rows(self.config, parse_paths(self.config.data.path)).meta  # type: ignore[assignment]
        except (DataError, RefusedError):
            return {}
        return {name: tuple(getattr(maps, "classes", None) or ()) for name, maps in meta.maps.items()}

    def own_images(self, files: Sequence[Path]) -> Batch:
        """Return a batch in which patches of the images are visible, and other modalities unknown. Raises RefusedError
        too if the encoder reads no images."""
        inputs = self.config.modalities.inputs
        if "rgb" not in inputs:
            raise RefusedError(
                f"--images: the run's modalities.inputs are {', '.join(inputs)}: its encoder reads no images; use "
                "--pictures without --images"
            )
        return super().own_images(files)

    def mask(self, images: Tensor, words: Words) -> dict[str, Tensor]:
        config = self.config
        inputs, patches = config.modalities.inputs, (config.crops.size // config.vision.patch_size) ** 2
        seen = np.sort(random_order(words, patches)[:, : config.modalities.visible_tokens], axis=1)  # [R, at most N]
        fields = {"visible": torch.from_numpy(seen + inputs.index("rgb") * patches)}
        for modality in self.objective.modalities.used.values():
            fields |= (
                {"images": images} if modality.format is None else modality.empty_fields(len(images), config.crops)
            )
        return fields


def load_trained(source: Path | str, data: str = "") -> TrainedImages | TrainedModalities:
    """Load a masked autoencoder of one or several modalities; see `TrainedRun`."""
    document = read_document(find_checkpoint(Path(named_weights(str(source))[0])))
    several = document.config.get("upstream") == MmMaeConfig.upstream
    return TrainedModalities(source, data) if several else TrainedImages(source, data)


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
            image.getexif()[ExifTags.Base.Orientation] = opened.getexif().get(ExifTags.Base.Orientation, 1)
        square = ImageOps.fit(
            ImageOps.exif_transpose(image), (size, size), method=Image.Resampling[interpolation.upper()]
        )
    except Exception as error:  # decoders raise many kinds of errors for a broken file
        raise RefusedError(
            f"--images {file}: cannot be read as an image ({error_text(error)}); allowed: JPEG, PNG or WebP"
        ) from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
