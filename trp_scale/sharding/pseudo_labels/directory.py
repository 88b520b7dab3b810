"""Pseudo-labels of one modality as a data kind (sharding/job.py), in a directory next to the image shards.

DATASET/
  dataset.json                  "modalities" lists the new directories, after all their shards are finished
  shards/image-000000.tar       images, unchanged
  depth/image-000000.tar        one sample for each image, with the same keys in the same order: KEY.depth.png
  depth/image-000000.index.json written last; marks a finished shard
  depth/progress/               until dataset.json lists the directory: part files, a report for each finished shard
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trp_scale.config.files import LARGEST_INDEX, read_content
from trp_scale.config.flags import TakesModalities
from trp_scale.config.registry import check_settings, non_default_values, preparation_sections, setting
from trp_scale.config.schema import Fields, record
from trp_scale.data.images.maps import OWN_TAR, map_formats, stored_maps
from trp_scale.data.index import index_path, read_index_document, read_json, write_json
from trp_scale.data.samples import write_binary_index
from trp_scale.errors import DataError, RefusedError
from trp_scale.pretraining.modalities import modalities
from trp_scale.pretraining.modalities.settings import LabelSettings
from trp_scale.sharding.job import DataKind
from trp_scale.sharding.parts import PortionReport, SpreadSettings, report_path
from trp_scale.storage.files import only_run, remove_leftovers

if TYPE_CHECKING:
    from trp_scale.pretraining.modalities.base import PseudoLabels


@dataclass(kw_only=True)
class PseudoLabelConfig(SpreadSettings, TakesModalities):
    """Add depth or segmentation labels predicted by models to a data set of images."""

    part: ClassVar[Literal["files", "labels"]] = "labels"

    data: Path
    """Directory of the data set (kind image). A stopped run resumes with the next shard."""
    batch: int = setting(32, at_least=1, at_most=4096)
    """Batch size of the models. It changes labels only by rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: all GPUs, or the CPU without GPUs."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the models; auto: bf16 if the GPU supports it, else fp32. In bf16, depth has about three digits."""
    replace: bool = False
    """Replace a modality that dataset.json already lists. The old maps stay in place, described under "replaced"."""

    def check(self) -> None:
        """Raise DataError with the flag of an invalid setting."""
        if not self.models():
            raise DataError(f"give at least one model: {', '.join(f'--{name}.model' for name in self.labelling())}")
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
                raise DataError(f"--{modality}.{values[0][0]} {values[0][1]}: needs --{modality}.model")
            name, flag = self.directory(modality), f"--{modality}.directory"
            if Path(name).name != name or name.startswith(".") or name in (OWN_TAR, "progress"):
                raise DataError(f"{flag} {name!r}: a plain name other than {OWN_TAR} and progress is allowed")
            if name in directories:
                raise DataError(f"{flag} {name}: same directory as {directories[name]}; give another one")
            directories[name] = flag

    def labelling(self) -> dict[str, LabelSettings]:
        """Return the label settings by modality.

        Raises:
            RefusedError: the settings of a modality are not LabelSettings.
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
        """Return the selected models by modality."""
        return {name: settings.model for name, settings in self.labelling().items() if settings.model}

    def directory(self, modality: str) -> str:
        """Return the directory name of a modality in the data set."""
        return self.labelling()[modality].directory or modality


def label_kinds() -> dict[str, PseudoLabels]:
    """Return the pseudo-label definition of each modality that has one."""
    return {name: kind.labels for name, kind in modalities().items() if kind.labels is not None}


UNREADABLE = "unreadable"
REASONS = {UNREADABLE: "an image that cannot be decoded or labelled: its label is empty"}

PATIENCE_S = 120.0
"""Seconds to wait while another run updates dataset.json; an update takes far less than a second."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LabelReport(PortionReport):
    """Counts of a shard, summed in dataset.json. An image that cannot be decoded or labelled gets an empty label and is
    listed as skipped.

    Attributes:
        images: number of images with a non-empty label.
        missing: pixels without a value (MapFormat.empty) in these labels.
        clipped: pixels outside the stored range.
        digest: of the index of the labelled images.
    """

    images: int = 0
    missing: int = 0
    clipped: int = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class LabelKind(DataKind[LabelReport]):
    """Data kind of labels; `name` is the modality.

    Attributes:
        dataset: directory of the images.
        shards: names of the image tars.
    """

    dataset: Path
    shards: list[str]

    def shard_names(self, count: int) -> list[str]:
        return self.shards

    def finished_shard(self, output: Path, name: str) -> tuple[LabelReport, int] | None:
        """Read the report and the number of labels of a shard; `None` unless it is complete and made from the current
        images."""
        images = self.dataset / OWN_TAR / name
        try:
            index = read_index_document(output / name)
            if (output / name).stat().st_size != index.size or index.keys() != read_index_document(images).keys():
                return None
            path = report_path(output, Path(name).stem)
            if path.exists():
                report = record(LabelReport, read_json(path), str(path), DataError)
                if report.digest != digest_of_images(images):
                    return None
            elif self._is_listed(read_json(self.dataset / "dataset.json"), output):
                report = LabelReport(images=len(index.blocks))  # a finished directory has no reports
            else:
                return None
        except (OSError, DataError):
            return None
        return report, len(index.blocks)

    def is_stored(self, output: Path, identity: Mapping[str, object]) -> bool:
        path = self.dataset / "dataset.json"
        document = read_json(path)
        if not self._is_listed(document, output):
            return False
        fields = Fields(self._entry(document) or {}, f"{path}: modalities.{self.name}", DataError)
        wanted = {name: value for name, value in identity.items() if name != "input"}
        holds = f"{output.name}/ has labels made with other settings"
        self.refuse_differences(path, fields.section("settings").document, wanted, holds)
        return True

    def _entry(self, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the description of the modality in dataset.json; `None` if the data set has no such maps."""
        described = Fields(document, str(self.dataset / "dataset.json"), DataError).section("modalities")
        entry: dict[str, Any] | None = described.take(self.name, dict | None, None)
        return {} if entry is None and map_formats()[self.name].suffix in document["suffixes"] else entry

    def _is_listed(self, document: Mapping[str, Any], output: Path) -> bool:
        """Whether dataset.json lists a directory of labels."""
        entry = self._entry(document)
        return entry is not None and entry.get("directory", OWN_TAR) == output.name

    def refuse_present(self, document: Mapping[str, Any], flag: str, *, replace: bool) -> None:
        """Raise DataError if dataset.json already lists the modality and `replace` is not set.

        Args:
            flag: that selects the directory of the labels, for the message.
        """
        entry = self._entry(document)
        if entry is not None and not replace:
            raise DataError(
                f"{self.dataset / 'dataset.json'}: modality {self.name} already exists in "
                f"{entry.get('directory', OWN_TAR)}/{' (exact)' if entry.get('exact') else ''}; give --replace to "
                f"replace it with the new labels ({flag})"
            )

    def document(
        self, part: Mapping[str, Any], shards: list[str], blocks: int, total: LabelReport
    ) -> dict[str, object]:
        unreadable = total.skipped.get(UNREADABLE, 0)
        return {
            **part["description"],
            "exact": False,
            "labels": total.images + unreadable,
            "unreadable": unreadable,
            "unreadable_places": [{"place": sample, "why": why} for why, sample in total.skipped_places],
            "missing_pixels": total.missing,
            "clipped_pixels": total.clipped,
            "settings": {name: value for name, value in part["settings"].items() if name != "input"},
        }

    def store(self, output: Path, document: dict[str, Any]) -> None:
        path = self.dataset / "dataset.json"
        replace = Fields(document, f"{output}: description of the parts", DataError).take("replace", bool)
        with only_run(self.dataset, patience=PATIENCE_S):
            whole = read_json(path)
            if not self._is_listed(whole, output):  # else only lost labels were restored
                self.refuse_present(whole, self.flag, replace=replace)
                if (before := self._entry(whole)) is not None:
                    document["replaced"] = before
                entry = {name: value for name, value in document.items() if name != "replace"}
                entry["directory"] = output.name
                whole["modalities"] = {**(whole.get("modalities") or {}), self.name: entry}
                stored_maps(path, whole)
            rows_per_block = Fields(whole, str(path), DataError).whole("rows_per_block", least=1)
            write_binary_index(output, self.shards, (map_formats()[self.name].suffix,), rows_per_block)
            write_json(path, whole)
        with suppress(OSError):  # another run may hold a lock there
            (self.dataset / "progress").rmdir()
        log.info("%s: %d labels, %d of them empty", output, document["labels"], document["unreadable"])

    def clear(self, output: Path) -> None:
        shutil.rmtree(output / "progress", ignore_errors=True)
        remove_leftovers(output)


def label_kind(dataset: Path, document: Mapping[str, Any], modality: str) -> LabelKind:
    """Return the data kind of the labels of a modality.

    Args:
        dataset: directory of the images.
        document: content of dataset.json.

    Raises:
        DataError: dataset.json lacks a required field.
    """
    fields = Fields(document, str(dataset / "dataset.json"), DataError)
    fields.texts("suffixes")
    return LabelKind(
        name=modality,
        report=LabelReport,
        items="images",
        reasons=REASONS,
        folder="",
        flag=f"--{modality}.directory",
        dataset=dataset,
        shards=fields.file_names("shards"),
    )


def digest_of_images(shard: Path) -> str:
    """Return the hash of a shard index. It contains the image checksums, so it changes with any image."""
    content = read_content(index_path(shard), DataError, largest=LARGEST_INDEX)
    return hashlib.blake2b(content, digest_size=16).hexdigest()
