"""Settings of pseudo-labelling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from trp_scale.config.flags import TakesModalities
from trp_scale.config.registry import preparation_sections
from trp_scale.config.settings import check_settings, non_default_values, setting
from trp_scale.data.images.maps import OWN_TAR
from trp_scale.errors import DataError, RefusedError
from trp_scale.pretraining.modalities import modalities
from trp_scale.pretraining.modalities.settings import LabelSettings
from trp_scale.sharding.job.parts import SpreadSettings

if TYPE_CHECKING:
    from trp_scale.pretraining.modalities.base import PseudoLabels


@dataclass(kw_only=True)
class PseudoLabelConfig(SpreadSettings, TakesModalities):
    """Label a data set of images with a depth estimator, a segmentation model, or both."""

    part: ClassVar[Literal["files", "labels"]] = "labels"

    data: Path
    """Directory of the data set (kind image). A run that was stopped goes on, shard by shard."""
    batch: int = setting(32, at_least=1, at_most=4096)
    """Images that a model sees at once. Labels depend on it by rounding alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: every GPU there is, else the CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of the models; auto: bf16 on a GPU that has it, else fp32. In bf16 depth has about three digits."""
    processes: int = setting(0, at_least=0, at_most=4096)
    """Shards that are labelled at once, each on one GPU; 0 = one for each GPU of this machine or of the Ray cluster;
    without GPUs one, and one for each core of the Ray cluster."""
    replace: bool = False
    """Replace a modality that dataset.json has already. The old maps stay where they are, described under
    "replaced"."""
    max_skipped: float = setting(0.01, at_least=0, at_most=1)
    """Largest share of images that may be without a label because they cannot be decoded."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        if not self.models():
            raise DataError(f"give one model or more: {', '.join(f'--{name}.model' for name in self.labelling())}")
        check_settings(self, DataError)
        self.own_part()
        self._check_labelling()

    def _check_labelling(self) -> None:
        directories: dict[str, str] = {}
        for modality, settings in self.labelling().items():
            values = [
                (setting, value) for setting, value in non_default_values(settings).items() if setting != "directory"
            ]
            if values and not settings.model:
                raise DataError(f"--{modality}.{values[0][0]} {values[0][1]}: goes with --{modality}.model")
            name, flag = self.directory(modality), f"--{modality}.directory"
            if Path(name).name != name or name.startswith(".") or name in (OWN_TAR, "progress"):
                raise DataError(f"{flag} {name!r}: a plain name other than {OWN_TAR} and progress is allowed")
            if name in directories:
                raise DataError(f"{flag} {name}: {directories[name]} is the same")
            directories[name] = flag

    def labelling(self) -> dict[str, LabelSettings]:
        """The settings of each modality that models label images with, by its name.

        Raises:
            RefusedError: one of another kind.
        """
        models: dict[str, LabelSettings] = {}
        for name in preparation_sections(self.part):
            section = self.section(name)
            if not isinstance(section, LabelSettings):
                raise RefusedError(
                    f"LabelSettings of the modality {name} is {type(section)!r}; allowed: a class derived from "
                    "trp_scale.pretraining.modalities.settings.LabelSettings"
                )
            models[name] = section
        return models

    def models(self) -> dict[str, str]:
        """The models asked for, by modality."""
        return {name: settings.model for name, settings in self.labelling().items() if settings.model}

    def directory(self, modality: str) -> str:
        """Return the directory of a modality's maps in the data set."""
        return self.labelling()[modality].directory or modality


def label_kinds() -> dict[str, PseudoLabels]:
    """The modalities that models label images with, by name."""
    return {name: kind.labels for name, kind in modalities().items() if kind.labels is not None}
