"""A trained masked autoencoder, of one or several modalities, with images to look at, from a run directory alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.document import CheckpointDocument, read_document, read_hooks_state
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import from_dict
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import ImageMeta
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Sources
from trp_scale.errors import DataError, finding
from trp_scale.methods.learned_masks.hook import NETWORK
from trp_scale.methods.learned_masks.masking_network import NETWORKS, MaskingNetwork
from trp_scale.models.perturbation import PerturbationShape, perturbation_shape
from trp_scale.pretraining.base import find_upstream, open_sources
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.objective import MaskedPatchReconstruction
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.batch import open_rows
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.objective import MultimodalReconstruction
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.weights import CLASSES

Model = TypeVar("Model", bound=nn.Module)
Run = TypeVar("Run", bound=ImagePretrainConfig)


@dataclass(kw_only=True)
class TrainedRun:
    """Parts of every trained image model.

    Attributes:
        checkpoint: where it all was read from.
        config: settings of the run.
        data_digest: of the data set the run learned from.
    """

    checkpoint: Path
    config: ImagePretrainConfig
    data_digest: str | None

    def open_sources(self, config: ImagePretrainConfig) -> Sources:
        """The run's data with other crops or batches, in this process; all training images are in one source.

        Raises:
            RefusedError: the data is not at `data.path`, or is another one than the run's.
        """
        config = copy.deepcopy(find_upstream(config).inference_config(config))
        config.data.workers = 0
        where = f"the run's data, data.path {config.data.path} from {Path.cwd()}"
        try:
            sources = open_sources(config, rank=0, world=1)
        except DataError as error:
            raise RefusedError(f"{where}, cannot be read: {error}; say where it is now with --data DIR") from error
        except RefusedError as error:  # the run could learn from its own
            raise RefusedError(
                f"{where}, is not what the run learned from: {finding(error)}; say where that is with --data DIR"
            ) from error
        if self.data_digest not in (None, sources.digest()):
            sources.close()
            raise RefusedError(f"{where}, is not what the run learned from; say where that is with --data DIR")
        return sources

    def images(self, rows: int) -> Batch:
        """Return at most `rows` of the run's held-out images, the first readable ones; of the training images if
        nothing is held out.

        Raises:
            RefusedError: as `open_sources`.
        """
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
    """A masked autoencoder.

    Attributes:
        model: the trained weights, on the CPU.
        objective: the run's objective.
        shape: of the adversary's perturbation, None without one.
        perturbation: the adversary's vector in the checkpoint, [shape.numel], None without one.
    """

    config: MaeConfig
    model: MaskedAutoencoder
    objective: MaskedPatchReconstruction
    shape: PerturbationShape | None
    perturbation: Tensor | None


@dataclass(kw_only=True)
class TrainedModalities(TrainedRun):
    """A multi-modal masked autoencoder.

    Attributes:
        model: the trained weights, on the CPU.
        objective: the run's objective.
    """

    config: MmMaeConfig
    model: MultimodalMaskedAutoencoder
    objective: MultimodalReconstruction

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Names of each modality's classes, from the data; empty where that is gone: a checkpoint has their number."""
        try:
            meta: ImageMeta = open_rows(self.config, parse_paths(self.config.data.path)).meta  # type: ignore[assignment]
        except (DataError, RefusedError):
            return {}
        return {name: tuple(getattr(maps, "classes", None) or ()) for name, maps in meta.maps.items()}


def load_trained_images(source: Path | str, data: str = "") -> TrainedImages:
    """Read the newest checkpoint of a run directory, or the checkpoint itself.

    Args:
        source: with "@average" behind it for the average of the weights.
        data: where the run's data is now; empty = at its `data.path`.

    Raises:
        RefusedError: there is none, or it is not of a masked autoencoder.
    """
    checkpoint, state, document, config = _read(source, data, MaeConfig)
    shape = perturbation_shape(config.model, config.vision, config.adversary)
    return TrainedImages(
        checkpoint=checkpoint,
        config=config,
        data_digest=document.extra.get("data_digest"),
        model=_with_weights(MaskedAutoencoder(config), checkpoint, state),
        objective=MaskedPatchReconstruction(config.objective, config.vision.patch_size),
        shape=shape,
        perturbation=None if shape is None else _perturbation(checkpoint, document),
    )


def load_trained_modalities(source: Path | str, data: str = "") -> TrainedModalities:
    """Load a multi-modal masked autoencoder, like `load_trained_images`."""
    checkpoint, state, document, config = _read(source, data, MmMaeConfig)
    return TrainedModalities(
        checkpoint=checkpoint,
        config=config,
        data_digest=document.extra.get("data_digest"),
        model=_with_weights(MultimodalMaskedAutoencoder(config, document.extra[CLASSES]), checkpoint, state),
        objective=MultimodalReconstruction(config),
    )


def upstream_name(source: Path) -> str:
    """The run's upstream; empty for a fine-tuned one.

    Raises:
        RefusedError: no checkpoint there.
    """
    upstream: str = read_document(find_checkpoint(source)).config.get("upstream", "")
    return upstream


def _read(source: Path | str, data: str, kind: type[Run]) -> tuple[Path, str, CheckpointDocument, Run]:
    named, state = named_weights(str(source))
    checkpoint = find_checkpoint(Path(named))
    document = read_document(checkpoint)
    config = from_dict(document.config, source=str(checkpoint))
    config.data.path = data or config.data.path
    if not isinstance(config, kind):
        upstream = document.config.get("upstream", "none: it is a fine-tuned run")
        raise RefusedError(f"{checkpoint}: a run of --upstream {kind.upstream} is needed; its upstream is {upstream}")
    return checkpoint, state, document, config


def _with_weights(model: Model, checkpoint: Path, state: str = "weight", engine: str = "") -> Model:
    weights = read_full_state(checkpoint, state, engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval()


def load_masking_network(trained: TrainedImages) -> MaskingNetwork | None:
    """Load the masking network of a run; `None` if masks were random."""
    if not trained.config.multilevel.learns:
        return None
    return _with_weights(
        NETWORKS[trained.config.multilevel.network](trained.config), trained.checkpoint, engine=NETWORK
    )


def _perturbation(checkpoint: Path, document: CheckpointDocument) -> Tensor:
    state = read_hooks_state(checkpoint, document)
    perturbation: Tensor = state["adversary"]["tensors"]["vector"]
    return perturbation
