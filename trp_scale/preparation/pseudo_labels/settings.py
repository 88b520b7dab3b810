"""Settings of pseudo-labelling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trp_scale.command_line import TakesModules
from trp_scale.data.images.maps import OWN_TAR
from trp_scale.data.index import DataError
from trp_scale.modalities import modalities
from trp_scale.preparation.sharding.job import check_ranges

if TYPE_CHECKING:
    from trp_scale.modalities.base import PseudoLabels


@dataclass(kw_only=True)
class PseudoLabelConfig(TakesModules):
    """Label a data set of images with a depth estimator, a segmentation model, or both."""

    data: Path
    """Directory of the data set (kind image). A run that was stopped goes on, shard by shard."""
    depth_model: str = ""
    """Depth estimator (DPT and Depth Anything, and others that transformers has): a directory that save_pretrained
    wrote, or a name on the Hugging Face hub. Weights are read from safetensors alone, and no code of theirs is run."""
    segmentation_model: str = ""
    """Model for semantic or panoptic segmentation (Mask2Former, SegFormer, UPerNet and others), given as --depth_model
    is. Its classes, at most 255, become the data set's. A model for instances (such as ...-coco-instance) is no
    choice: it knows things only, and would call sky, walls and ground a thing."""
    depth_scale: float | None = None
    """Metres per unit of the stored 16-bit depth (0.001: up to 65 m), for a model whose output is in metres. Without it
    each image's output is stretched to 1..65535."""
    larger_is: Literal["auto", "nearer", "farther"] = "auto"
    """What a larger output of the depth estimator means; auto: farther if it is in metres by --depth_scale or by the
    model's configuration, else nearer (DPT and Depth Anything estimate inverse depth)."""
    batch: int = 32
    """Images that a model sees at once. Labels depend on it by rounding alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: every GPU there is, else the CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of the models; auto: bf16 on a GPU that has it, else fp32. In bf16 depth has about three digits."""
    processes: int = 0
    """Processes at work, each with its share of the shards and, in turn, of the GPUs; 0 = one for each GPU, or one on
    the CPU."""
    shard_index: int = 0
    """Job arrays: which part of the shards this run labels, from 0."""
    num_shards: int = 1
    """Job arrays: number of parts. Part i has the shards i, i + num_shards, ...; the last to finish adds the labels to
    dataset.json."""
    depth_directory: str = "depth"
    """Directory of the depth maps within the data set. Another model needs another one."""
    segmentation_directory: str = "semseg"
    """Directory of the segmentation maps within the data set."""
    replace: bool = False
    """Replace a modality that dataset.json has already. The old maps stay where they are, described under
    "replaced"."""
    max_skipped: float = 0.01
    """Largest share of images that may be without a label because they cannot be decoded."""
    progress: bool = True
    """Show a progress bar."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        if not self.models():
            raise DataError("give --depth_model, --segmentation_model, or both")
        check_ranges(self, batch=(1, 4096), processes=(0, 256), num_shards=(1, 1 << 20), max_skipped=(0, 1))
        if not 0 <= self.shard_index < self.num_shards:
            raise DataError(
                f"--shard_index {self.shard_index}: 0 to {self.num_shards - 1} is allowed with "
                f"--num_shards {self.num_shards}"
            )
        self._check_depth()
        for setting in (labels.directory_setting for labels in labelled().values()):
            name = getattr(self, setting)
            if not name or Path(name).name != name or name.startswith(".") or name in (OWN_TAR, "progress"):
                raise DataError(f"--{setting} {name!r}: a plain name other than {OWN_TAR} and progress is allowed")
        if self.depth_directory == self.segmentation_directory:
            raise DataError(f"--segmentation_directory {self.segmentation_directory}: --depth_directory is the same")

    def _check_depth(self) -> None:
        if self.depth_scale is None:
            return
        if not self.depth_model:
            raise DataError(f"--depth_scale {self.depth_scale}: goes with --depth_model")
        if not 0 < self.depth_scale < float("inf"):
            raise DataError(f"--depth_scale {self.depth_scale}: metres above 0 are allowed, such as 0.001")
        if self.larger_is == "nearer":
            raise DataError("--larger_is nearer: not with --depth_scale, whose metres grow with distance")

    def models(self) -> dict[str, str]:
        """The models asked for, by modality."""
        given = {name: str(getattr(self, labels.model_setting)) for name, labels in labelled().items()}
        return {name: model for name, model in given.items() if model}

    def directory(self, modality: str) -> str:
        """Where the maps of a modality go, in the data set."""
        return str(getattr(self, labelled()[modality].directory_setting))


def labelled() -> dict[str, PseudoLabels]:
    """The modalities that models label images with, by name."""
    return {name: kind.labels for name, kind in modalities().items() if kind.labels is not None}
