"""Depth estimators and segmentation models: finding one, refusing what is none, loading it.

Only configuration, image processor and safetensors are read: no pickle, no code that comes with a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trp_scale.data.raw_files import files_fingerprint
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import PseudoLabels
from trp_scale.sharding.pseudo_labels.settings import label_kinds

CONFIGURATION = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
NEVER_RUN = {"dpt": "neck.fusion_stage.layers.0.residual_layer1."}
"""By kind, how the names of weights begin that no output depends on, so that a model may come without them. DPT's first
fusion layer has nothing to add to its input, and Intel/dpt-* have no weights for that (transformers' issue 28292)."""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model that can label, not yet loaded. Small: it is sent to every process.

    Attributes:
        modality: that it labels.
        name: as given.
        directory: of its files.
        task: which Auto class loads it, such as "DepthEstimation" (PseudoLabels.auto_classes).
        fingerprint: changes with its configuration, its image processor or its weights.
        details: its labels by its configuration (PseudoLabels.read_model).
    """

    modality: str
    name: str
    directory: Path
    task: str
    fingerprint: str
    details: Any

    @property
    def flag(self) -> str:
        """Flag that selects the model, for messages."""
        return f"--{self.modality}.model {self.name}"


def find_model(modality: str, name: str) -> FoundModel:
    """Find a model by directory or hub name, and see by its configuration that it can label.

    Raises:
        DataError: no such model, another kind of model, no safetensors, no image processor, or too many classes.
    """
    labels = label_kinds()[modality]
    where = f"--{modality}.model {name}"
    directory = _find_directory(where, name)
    config = _read_config(where, directory)
    task = _find_task(where, labels, config)
    files = [file for pattern in (CONFIGURATION, *PROCESSORS, *WEIGHTS) for file in sorted(directory.glob(pattern))]
    if not any(file.name.endswith((".safetensors", ".safetensors.index.json")) for file in files):
        raise DataError(
            f"{where}: no {WEIGHTS[0]} in {directory}; other weight files can run code when they are read and are not "
            f"opened. Save the model with save_pretrained, or choose one that has safetensors"
        )
    _check_processor(where, labels, load_processor(where, directory))
    return FoundModel(
        modality=modality,
        name=name,
        directory=directory,
        task=task,
        fingerprint=files_fingerprint(files).hex(),
        details=labels.read_model(where, config),
    )


def _find_directory(where: str, name: str) -> Path:
    """A local directory, or the hub's files of that name (from its cache where there is no network)."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.exists():
        raise DataError(f"{where}: a file; give the directory that save_pretrained wrote")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise DataError(f"{where}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIGURATION, *PROCESSORS, *WEIGHTS]))
    except Exception as error:  # of many kinds: no network, offline by HF_HUB_OFFLINE, no such name, not allowed
        raise DataError(
            f"{where}: no such directory here, and the Hugging Face hub gives no model of that name "
            f"({type(error).__name__}: {_first_line(error)}). Give a directory that save_pretrained wrote, or fetch "
            f"it where there is a network (hf download {name}) and set HF_HOME to that cache"
        ) from error


def _read_config(where: str, directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError: whatever a wrong file leads to
        raise DataError(
            f"{where}: no model of a kind that transformers knows ({_first_line(error)}); code that comes with a model "
            f"is not run. Give a directory that save_pretrained wrote"
        ) from error


def _find_task(where: str, labels: PseudoLabels, config: Any) -> str:
    """Return the Auto class for the architecture of the weights. The model type is not enough: DPT does both."""
    from transformers.models.auto import modeling_auto

    saved = set(config.architectures or [])
    known: set[str] = set()
    for task, listing in labels.auto_classes.items():
        names = getattr(modeling_auto, listing)  # kind -> class, or classes
        listed = names.get(config.model_type, ())
        if saved & ({listed} if isinstance(listed, str) else set(listed)):
            return task
        known |= set(names)
    raise DataError(
        f"{where}: {', '.join(sorted(saved)) or 'no architecture'} of kind {config.model_type} found, no model for "
        f"{labels.purpose}; kinds that are: {', '.join(sorted(known))}"
    )


def load_processor(where: str, directory: Path) -> Any:
    """The image processor of a model.

    Raises:
        DataError: there is none, or it cannot be made.
    """
    from transformers import AutoImageProcessor

    try:
        with _quiet():
            return AutoImageProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in _read_config
        raise DataError(
            f"{where}: no image processor that transformers can make ({_first_line(error)}); {PROCESSORS[0]} must lie "
            f"beside {CONFIGURATION}: copy it from the model that this one comes from"
        ) from error


def _check_processor(where: str, labels: PseudoLabels, processor: Any) -> None:
    """Refuse processors whose labels do not cover the whole image."""
    if getattr(processor, "do_center_crop", False):
        raise DataError(
            f"{where}: its image processor cuts off the edges of images (do_center_crop), so its labels would not lie "
            f'on them; set "do_center_crop": false and a "size" of height and width in {PROCESSORS[0]}'
        )
    labels.check_processor(where, processor)


def load_model(source: FoundModel, device: torch.device) -> Any:
    """The model on its device, in fp32 and ready for inference.

    Raises:
        DataError: the weights do not fit the configuration, or there are not all of them.
    """
    import transformers

    auto = getattr(transformers, f"AutoModelFor{source.task}")
    try:
        with _quiet():
            model, info = auto.from_pretrained(
                source.directory,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # as in _read_config
        raise DataError(f"{source.flag}: the weights cannot be loaded ({_first_line(error)})") from error
    parameters = {name for name, _ in model.named_parameters()}
    never_run = NEVER_RUN.get(model.config.model_type)
    missing = sorted(
        name for name in parameters & set(info["missing_keys"]) if never_run is None or not name.startswith(never_run)
    )
    if missing:
        raise DataError(
            f"{source.flag}: {len(missing)} weights are not in its safetensors ({', '.join(missing[:3])}) and would be "
            f"random; give the whole model, not its backbone"
        )
    return model.eval().requires_grad_(False).to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports: what matters of them is an error here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
