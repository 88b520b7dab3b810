"""Depth estimators and segmentation models for pseudo-labels: search, checks, loading and inference.

Only the configuration, the image processor and safetensors are read: no pickle, no remote code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trp_scale.data.images.formats import Map
from trp_scale.data.images.maps import MapFormat, map_formats
from trp_scale.data.raw_files import files_fingerprint
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import Interpret, PseudoLabels, Size
from trp_scale.pretraining.modalities.settings import LabelSettings
from trp_scale.sharding.pseudo_labels.directory import label_kinds

CONFIGURATION = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
NEVER_RUN = {"dpt": "neck.fusion_stage.layers.0.residual_layer1."}
"""Prefix of unused weights by model type; a model may lack them. The first fusion layer of DPT has no second input, and
Intel/dpt-* have no weights for it (transformers issue 28292)."""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """Checked model, not loaded yet; pickled to every process.

    Attributes:
        modality: of its labels.
        name: value of the flag.
        directory: of its files.
        task: suffix of the Auto class, such as "DepthEstimation" (PseudoLabels.auto_classes).
        fingerprint: hash of configuration, image processor and weights.
        details: label details from the configuration (PseudoLabels.read_model).
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
    """Find a model by directory or hub name, and check its configuration.

    Raises:
        DataError: the model does not exist, has a wrong type, no safetensors, no image processor or too many classes.
    """
    labels = label_kinds()[modality]
    where = f"--{modality}.model {name}"
    directory = _find_directory(where, name)
    config = _read_config(where, directory)
    task = _find_task(where, labels, config)
    files = [file for pattern in (CONFIGURATION, *PROCESSORS, *WEIGHTS) for file in sorted(directory.glob(pattern))]
    if not any(file.name.endswith((".safetensors", ".safetensors.index.json")) for file in files):
        raise DataError(
            f"{where}: no {WEIGHTS[0]} in {directory}; other weight files can run code and are not opened. Save the "
            f"model with save_pretrained, or choose one with safetensors"
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
    """Return a local directory, or the directory of a hub model (from the cache if offline)."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.exists():
        raise DataError(f"{where}: a file; give a directory written by save_pretrained")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise DataError(f"{where}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIGURATION, *PROCESSORS, *WEIGHTS]))
    except Exception as error:  # many types: no network, HF_HUB_OFFLINE, unknown name, no access
        raise DataError(
            f"{where}: no such directory, and no such model on the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}). Give a directory written by save_pretrained, or download "
            f"the model on a machine with network (hf download {name}) and set HF_HOME to that cache"
        ) from error


def _read_config(where: str, directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError ...
        raise DataError(
            f"{where}: not a model type of transformers ({_first_line(error)}); remote code is not run. Give a "
            f"directory written by save_pretrained"
        ) from error


def _find_task(where: str, labels: PseudoLabels, config: Any) -> str:
    """Return the Auto class of the saved architecture. The model type is ambiguous: DPT has both tasks."""
    from transformers.models.auto import modeling_auto

    saved = set(config.architectures or [])
    known: set[str] = set()
    for task, listing in labels.auto_classes.items():
        names = getattr(modeling_auto, listing)  # model type -> class name or names
        listed = names.get(config.model_type, ())
        if saved & ({listed} if isinstance(listed, str) else set(listed)):
            return task
        known |= set(names)
    raise DataError(
        f"{where}: {', '.join(sorted(saved)) or 'no architecture'} of type {config.model_type} found, a model for "
        f"{labels.purpose} expected; allowed types: {', '.join(sorted(known))}"
    )


def load_processor(where: str, directory: Path) -> Any:
    """Load the image processor of a model.

    Raises:
        DataError: the processor is missing or cannot be loaded.
    """
    from transformers import AutoImageProcessor

    try:
        with _quiet():
            return AutoImageProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in _read_config
        raise DataError(
            f"{where}: the image processor cannot be loaded ({_first_line(error)}); copy {PROCESSORS[0]} of the "
            f"original model next to {CONFIGURATION}"
        ) from error


def _check_processor(where: str, labels: PseudoLabels, processor: Any) -> None:
    """Raise DataError for a processor that crops the image."""
    if getattr(processor, "do_center_crop", False):
        raise DataError(
            f"{where}: the image processor crops images (do_center_crop), so labels would be misaligned; set "
            f'"do_center_crop": false and a "size" of height and width in {PROCESSORS[0]}'
        )
    labels.check_processor(where, processor)


def load_model(source: FoundModel, device: torch.device) -> Any:
    """Load the model on its device, in fp32 and eval mode.

    Raises:
        DataError: weights are missing or do not match the configuration.
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
            f"{source.flag}: {len(missing)} weights are missing in safetensors ({', '.join(missing[:3])}) and would be "
            f"random; give the full model, not a backbone"
        )
    return model.eval().requires_grad_(False).to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without progress bars and log messages of transformers."""
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


Precision = Literal["bf16", "fp32"]

PROBE: Size = (48, 64)
"""(H, W) of the grey test image; not square, to detect swapped sides."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Maps of a batch, being copied to the host: all pixels in a row, clipped pixels and (H, W) of each image."""

    pixels: Tensor
    clipped: Tensor
    sizes: Sequence[Size]
    copied: torch.cuda.Event | None = None

    def wait(self, dtype: type[np.generic]) -> list[tuple[Map, int]]:
        """Wait for the copy; return (map [H, W], number of clipped pixels) of each image."""
        if self.copied is not None:
            self.copied.synchronize()
        lengths = [height * width for height, width in self.sizes]
        pieces = np.split(self.pixels.numpy().astype(dtype), np.cumsum(lengths)[:-1])
        maps = [piece.reshape(size) for piece, size in zip(pieces, self.sizes, strict=True)]
        return list(zip(maps, self.clipped.tolist(), strict=True))


class Labeller:
    """Loaded model that labels images.

    Args:
        settings: label settings of the modality.
        precision: bf16 uses autocast, so that normalisation and softmax stay in fp32.

    Raises:
        DataError: the model cannot be loaded, or cannot label an image.
    """

    def __init__(
        self, source: FoundModel, settings: LabelSettings, *, device: torch.device, precision: Precision
    ) -> None:
        self.modality = source.modality
        self.format: MapFormat = map_formats()[source.modality]
        self.dtype: type[np.generic] = np.uint16 if 16 in self.format.bits else np.uint8
        self._flag, self._device, self._precision = source.flag, device, precision
        self._processor = load_processor(source.flag, source.directory)
        self._model = load_model(source, device)
        self._interpret: Interpret = label_kinds()[source.modality].interpret(self._processor, source.details, settings)
        self._probe()

    def _probe(self) -> None:
        """Label a grey image, to detect unsuitable models before any work."""
        grey = torch.full((3, *PROBE), 128, dtype=torch.uint8)
        try:
            prepared = self._call_processor(grey)
            mask = prepared.get("pixel_mask")
            if mask is not None and not bool(mask.all()):
                raise DataError(f"{self._flag}: its image processor pads images, so labels would be misaligned")
            ((numbers, _),) = self.start([prepared["pixel_values"][0]], [PROBE]).wait(self.dtype)
            assert numbers.shape == PROBE
        except DataError:
            raise
        except Exception as error:  # any error of a model that needs more inputs
            raise DataError(
                f"{self._flag}: {type(self._model).__name__} cannot label an image without other inputs "
                f"({type(error).__name__}: {str(error)[:300]}); choose another model"
            ) from error

    def _call_processor(self, image: Tensor) -> Any:
        return self._processor(images=[image], return_tensors="pt", input_data_format="channels_first")

    def prepare(self, image: Tensor) -> Tensor | str:
        """Preprocess one image. Thread-safe. Images are processed one at a time: in a batch, processors pad to the
        largest image, and the labels of smaller images would be stretched.

        Args:
            image: uint8 [3, H, W].

        Returns:
            Model input, float [3, h, w], or the reason for its absence (some processors cannot scale very thin images).
        """
        try:
            values: Tensor = self._call_processor(image)["pixel_values"][0]
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return f"the image processor cannot handle it: {error}"
        return values

    @torch.inference_mode()
    def start(self, inputs: Sequence[Tensor], sizes: Sequence[Size]) -> InFlight:
        """Queue a batch on the device, without waiting.

        Args:
            inputs: from `prepare`, of equal shape.
            sizes: of the images.

        Raises:
            DataError: the device is out of memory.
        """
        on_gpu = self._device.type == "cuda"
        try:
            batch = torch.stack(  # [B, 3, h, w]
                list(inputs), out=torch.empty(len(inputs), *inputs[0].shape, dtype=inputs[0].dtype, pin_memory=on_gpu)
            ).to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
                output = self._model(pixel_values=batch)
            for name, value in output.items():  # maps are resized in fp32
                if isinstance(value, Tensor) and value.is_floating_point():
                    output[name] = value.float()
            maps, clipped = self._interpret(output, sizes)
            numbers = torch.cat([map_.flatten() for map_ in maps])  # [all pixels of the batch]
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{self._flag}: {self._device} is out of memory with a batch of {len(inputs)} images; give a smaller "
                f"--batch. Finished shards stay"
            ) from error
        if not on_gpu:
            return InFlight(pixels=numbers, clipped=clipped, sizes=sizes)
        # One asynchronous copy for all maps of the batch.
        numbers, clipped = (map_.to("cpu", non_blocking=True) for map_ in (numbers, clipped))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        return InFlight(pixels=numbers, clipped=clipped, sizes=sizes, copied=copied)
