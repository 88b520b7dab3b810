"""What a pre-training run of ours shows on these images: reconstructions, masks, positions, depth and segmentation."""

from __future__ import annotations

import copy
from pathlib import Path

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.core.batch import Batch
from trp_scale.downstream.pictures import Picture, draw_images_of, draw_modalities_of
from trp_scale.downstream.representation.images import ImageChoice, trained_images
from trp_scale.downstream.trained_images import TrainedRun, load_trained_images, load_trained_modalities


def pretraining_pictures(source: str, choice: ImageChoice, output: Path) -> list[Picture]:
    """Draw them, with crops and masks as the run's own; none of what is no pre-training run.

    Raises:
        RefusedError: the data lacks a modality that the run needs.
    """
    path = Path(source)
    if not ((path / "checkpoints").is_dir() or (path / DOCUMENT_NAME).is_file()):
        return []
    config = read_document(find_checkpoint(path)).config
    if "downstream" in config:
        return []
    if config["model"]["kind"] == "mm_mae":
        several = load_trained_modalities(path, str(choice.dataset.directory))
        return draw_modalities_of(several, _batch(several, choice), output)
    trained = load_trained_images(path, str(choice.dataset.directory))
    return draw_images_of(trained, _batch(trained, choice), output)


def _batch(trained: TrainedRun, choice: ImageChoice) -> Batch:
    config = copy.deepcopy(trained.config)
    config.masking.network = "none"  # to look at a test set is no training on it
    return next(trained_images(config, choice))
