"""Models that label images: depth estimators and segmentation models. Find one, refuse others, load it, and run it on
one batch at a time.

Only configuration, image processor and safetensors are read: no pickle, no code that comes with a model.
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
from trp_scale.sharding.pseudo_labels.directory import label_kinds

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


Precision = Literal["bf16", "fp32"]

PROBE: Size = (48, 64)
"""(H, W) of the grey image that every model is tried with; not square, so that exchanged sides are seen."""


class InFlight:
    """Maps of a batch on their way to the host."""

    def __init__(self, maps: Tensor, clipped: Tensor, sizes: Sequence[Size], copied: torch.cuda.Event | None) -> None:
        self._maps = maps
        self._clipped = clipped
        self._sizes = sizes
        self._copied = copied

    def wait(self, dtype: type[np.generic]) -> list[tuple[Map, int]]:
        """Map [H, W] of each image and its clipped pixels."""
        if self._copied is not None:
            self._copied.synchronize()
        lengths = [height * width for height, width in self._sizes]
        pieces = np.split(self._maps.numpy().astype(dtype), np.cumsum(lengths)[:-1])
        maps = [piece.reshape(size) for piece, size in zip(pieces, self._sizes, strict=True)]
        return list(zip(maps, self._clipped.tolist(), strict=True))


class Labeller:
    """Labels images with one model.

    Args:
        source: where the model is from.
        model: loaded, on `device`.
        processor: its image processor.
        interpret: makes maps of its output.
        precision: bf16: by autocast, so that normalisation and softmax stay in fp32.

    Raises:
        DataError: the model cannot label an image.
    """

    def __init__(
        self,
        source: FoundModel,
        model: Any,
        processor: Any,
        interpret: Interpret,
        *,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.modality = source.modality
        self.format: MapFormat = map_formats()[source.modality]
        self.dtype: type[np.generic] = np.uint16 if 16 in self.format.bits else np.uint8
        self._flag = source.flag
        self._model = model
        self._processor = processor
        self._interpret = interpret
        self._device = device
        self._precision = precision
        self._probe()

    def _probe(self) -> None:
        """Label a grey image: a model that cannot says so before any work is done."""
        grey = torch.full((3, *PROBE), 128, dtype=torch.uint8)
        try:
            prepared = self._call_processor(grey)
            mask = prepared.get("pixel_mask")
            if mask is not None and not bool(mask.all()):
                raise DataError(f"{self._flag}: its image processor pads images, so its labels would not lie on them")
            ((numbers, _),) = self.start([prepared["pixel_values"][0]], [PROBE]).wait(self.dtype)
            assert numbers.shape == PROBE
        except DataError:
            raise
        except Exception as error:  # whatever a model does that needs other inputs than an image
            raise DataError(
                f"{self._flag}: {type(self._model).__name__} cannot label an image by itself "
                f"({type(error).__name__}: {str(error)[:300]}); choose another model"
            ) from error

    def _call_processor(self, image: Tensor) -> Any:
        return self._processor(images=[image], return_tensors="pt", input_data_format="channels_first")

    def prepare(self, image: Tensor) -> Tensor | str:
        """The model's input of one image, float [3, h, w], or why the processor has none for it (some cannot scale an
        image a few pixels wide). Each image alone: a processor that gets several pads them to
        the largest, and its labels of the smaller ones are then stretched. Many threads may call this at once.

        Args:
            image: uint8 [3, H, W].
        """
        try:
            values: Tensor = self._call_processor(image)["pixel_values"][0]
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return f"the image processor cannot handle it: {error}"
        return values

    @torch.inference_mode()
    def start(self, inputs: Sequence[Tensor], sizes: Sequence[Size]) -> InFlight:
        """Label a batch, without waiting for the device.

        Args:
            inputs: of one shape, from `prepare`.
            sizes: of their images.

        Raises:
            DataError: the device has not enough memory.
        """
        on_gpu = self._device.type == "cuda"
        try:
            batch = torch.stack(  # [B, 3, h, w]
                list(inputs), out=torch.empty(len(inputs), *inputs[0].shape, dtype=inputs[0].dtype, pin_memory=on_gpu)
            ).to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
                output = self._model(pixel_values=batch)
            for name, value in output.items():  # scaled to images' sizes in fp32
                if isinstance(value, Tensor) and value.is_floating_point():
                    output[name] = value.float()
            maps, clipped = self._interpret(output, sizes)
            numbers = torch.cat([map_.flatten() for map_ in maps])  # [all pixels of the batch]
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{self._flag}: {self._device} has not enough memory for {len(inputs)} images at once; give a smaller "
                f"--batch. Finished shards stay"
            ) from error
        if not on_gpu:
            return InFlight(numbers, clipped, sizes, None)
        # One copy for all maps of the batch, and the host goes on meanwhile.
        numbers, clipped = (map_.to("cpu", non_blocking=True) for map_ in (numbers, clipped))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        return InFlight(numbers, clipped, sizes, copied)
