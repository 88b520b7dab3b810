"""A directory of labels beside the images' shards: what may go on there, and what is finished.

DATASET/DIRECTORY/
  image-000000.tar              the same names, keys and order as DATASET/shards; one member each: KEY.depth.png ...
  image-000000.index.json       written last: it marks a finished shard
  progress/settings.json        until dataset.json names the directory: what the labels are made with
  progress/image-000000.json    report of a finished shard
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trp_scale.config.json_files import LARGEST_INDEX, read_content
from trp_scale.config.schema import Fields, record
from trp_scale.data.binary_index import NAME
from trp_scale.data.images.maps import OWN_TAR, map_formats, stored_maps
from trp_scale.data.index import index_path, read_fields, read_index_document, read_json, write_json
from trp_scale.data.samples import write_binary_index
from trp_scale.errors import DataError, quote
from trp_scale.sharding.job.job import PortionReport, check_skipped, refuse_differences
from trp_scale.sharding.job.writing import report_path
from trp_scale.storage.files import only_run, remove_leftovers

UNREADABLE = "unreadable"
REASONS = {UNREADABLE: "an image that cannot be decoded or labelled: its label is empty"}

PATIENCE = 120.0
"""Seconds to wait for another run's look at dataset.json; each takes far less than one."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LabelReport(PortionReport):
    """Counts of a shard, summed in dataset.json. An image that cannot be decoded or labelled has an empty
    label, and is listed as (why, where) among what was skipped.

    Attributes:
        labels: stored, with those that are empty.
        missing: pixels without a value in the other labels: MapFormat.empty.
        clipped: pixels beyond what can be stored.
        images: digest of the index of the images that were labelled.
    """

    labels: int = 0
    missing: int = 0
    clipped: int = 0
    images: str = ""


@dataclass(frozen=True, kw_only=True)
class LabelDirectory:
    """Directory for the labels of one modality, and what they are made with.

    Attributes:
        dataset: directory of the data set.
        name: of the labels' directory in it.
        modality: its name.
        identity: settings that the labels' values depend on.
        description: for dataset.json.
        flag: that another directory can be given with, for messages.
        max_skipped: largest share of empty labels.
        replace: the labels may replace others of the modality.
    """

    dataset: Path
    name: str
    modality: str
    identity: Mapping[str, object]
    description: Mapping[str, object]
    flag: str
    max_skipped: float
    replace: bool

    @property
    def path(self) -> Path:
        """The directory itself."""
        return self.dataset / self.name

    def is_listed(self, document: Mapping[str, Any]) -> bool:
        """Whether dataset.json (`document`) names these labels.

        Raises:
            DataError: it names others in this directory.
        """
        entry = self.entry(document)
        if entry is None or entry.get("directory", OWN_TAR) != self.name:
            return False
        path = self.dataset / "dataset.json"
        settings = Fields(entry, f"{path}: modalities.{self.modality}", DataError).section("settings").document
        self._refuse_differences(path, settings)
        return True

    def entry(self, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the description of the modality in dataset.json; `None` if it has no maps of it."""
        described = Fields(document, str(self.dataset / "dataset.json"), DataError).section("modalities")
        entry: dict[str, Any] | None = described.take(self.modality, dict | None, None)
        return {} if entry is None and map_formats()[self.modality].suffix in document["suffixes"] else entry

    def check(self, document: Mapping[str, Any]) -> None:
        """See that these labels may be made here.

        Raises:
            DataError: the directory holds other ones, or the data set has the modality already and is to keep it.
        """
        if self.is_listed(document):
            return
        self.refuse_present(document)
        if not any(self.path.glob("*.tar")):
            if self._is_busy():
                self.check_settings()
        elif self._settings.exists():
            self.check_settings()
        else:
            raise DataError(
                f"{self.path}: tars of unknown making lie there; remove the directory or give another {self.flag}"
            )

    def begin(self, document: Mapping[str, Any]) -> None:
        """Make the directory and write down how its labels are made, after `check`."""
        if not self.is_listed(document):
            self._settings.parent.mkdir(parents=True, exist_ok=True)
            names = ("modality", "flag", "max_skipped", "replace")
            stored = {"settings": dict(self.identity), "description": dict(self.description)}
            write_json(self._settings, {**stored, **{name: getattr(self, name) for name in names}})

    def check_settings(self) -> None:
        """Raise DataError if a run has written down, since this one began, that it makes other labels here."""
        if self._settings.exists():
            self._refuse_differences(self._settings, read_fields(self._settings).take("settings", dict))

    @property
    def _settings(self) -> Path:
        return self.path / "progress" / "settings.json"

    def _is_busy(self) -> bool:
        """Whether a run is at a shard."""
        return any(_is_held(self.path, lock.name) for lock in (self.path / "progress").glob("*.lock"))

    def refuse_present(self, document: Mapping[str, Any]) -> None:
        """Raise DataError if dataset.json has the modality from elsewhere and is to keep it."""
        entry = self.entry(document)
        if entry is not None and not self.replace:
            raise DataError(
                f"{self.dataset / 'dataset.json'}: modality {self.modality} is there already, in "
                f"{entry.get('directory', OWN_TAR)}/{' (exact)' if entry.get('exact') else ''}; ask for --replace if "
                f"the new labels in {self.name}/ are to stand for it"
            )

    def _refuse_differences(self, path: Path, stored: Mapping[str, object]) -> None:
        holds, advice = f"{self.name}/ holds labels of another making", f"or give another {self.flag}"
        refuse_differences(path, stored, self.identity, holds, advice)

    def tar(self, shard: str) -> Path:
        """Return the path of a shard's labels."""
        return self.path / shard

    def report_path(self, shard: str) -> Path:
        """Return the path of a shard's report, which is stored until dataset.json names the directory."""
        return report_path(self.path, Path(shard).stem)

    def is_whole(self, shard: str) -> bool:
        """Whether the labels of a shard are there, with the keys of its images."""
        try:
            index = read_index_document(self.tar(shard))
            if self.tar(shard).stat().st_size != index.size:
                return False
            keys = index.keys()
        except (OSError, DataError):
            return False
        return keys == read_index_document(self.dataset / OWN_TAR / shard).keys()

    def written_report(self, shard: str) -> LabelReport | None:
        """The report of a shard, whatever became of its labels; None: there is none that can be read."""
        try:
            return record(LabelReport, read_json(self.report_path(shard)), "report", DataError)
        except DataError:  # of another version: made again
            return None

    def report(self, shard: str) -> LabelReport | None:
        """The report of a shard whose labels are finished, of the images that are there now; else None."""
        report = self.written_report(shard)
        if report is None or report.images != digest_of_images(self.dataset, shard) or not self.is_whole(shard):
            return None
        return report

    def is_finished(self, shard: str) -> bool:
        """Whether nothing is left to do for a shard."""
        if self.report(shard) is not None:
            return True
        # The run that finished the directory took the reports away, after it had written dataset.json.
        return self.is_listed(read_json(self.dataset / "dataset.json")) and self.is_whole(shard)


def unfinished_labels(dataset: Path) -> list[LabelDirectory]:
    """Return the labels of a data set that dataset.json does not name yet."""
    directories = []
    for path in sorted(dataset.glob("*/progress/settings.json")):
        stored = read_fields(path, "run pseudo-label with the same flags again")
        if (modality := stored.text("modality")) not in map_formats():
            raise stored.refusal(f"modality {quote(modality)} found, one of {', '.join(map_formats())} expected")
        directories.append(
            LabelDirectory(
                dataset=dataset,
                name=path.parent.parent.name,
                modality=modality,
                identity=stored.take("settings", dict),
                description=stored.take("description", dict),
                flag=stored.text("flag"),
                max_skipped=stored.take("max_skipped", float),
                replace=stored.take("replace", bool),
            )
        )
    return directories


def _is_held(directory: Path, lock: str) -> bool:
    try:
        with only_run(directory, lock):
            return False
    except DataError:
        return True


def digest_of_images(dataset: Path, shard: str) -> str:
    """Hash of a shard's index: changes with any image, by its checksum."""
    content = read_content(index_path(dataset / OWN_TAR / shard), DataError, largest=LARGEST_INDEX)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextmanager
def turn(dataset: Path) -> Iterator[dict[str, Any]]:
    """Context in which no other run looks at or changes dataset.json; gives its content. Runs wait for each other.

    Raises:
        DataError: another run holds the lock for too long (images are being sharded there).
    """
    with only_run(dataset, patience=PATIENCE):
        yield read_json(dataset / "dataset.json")
    with suppress(OSError):  # another run's lock may lie there by now
        (dataset / "progress").rmdir()


def complete(directory: LabelDirectory, document: dict[str, Any], *, alone: bool) -> bool:
    """Add the labels to dataset.json if all are there; whether it names them now. Asking again changes nothing.

    Args:
        directory: of the labels.
        document: dataset.json as it was; only what never changes is taken from it.
        alone: no other part may still be writing, so that what killed ones left behind is removed.

    Raises:
        DataError: too many labels are empty, or the data set has the modality from elsewhere by now.
    """
    fields = Fields(document, str(directory.dataset / "dataset.json"), DataError)
    shards, rows = fields.file_names("shards"), fields.whole("rows")
    fields.texts("suffixes")
    fields.whole("rows_per_block", least=1)
    if not all(index_path(directory.tar(shard)).exists() for shard in shards):  # no lock needed to see this
        _log_parts(directory, shards)
        written = (directory.written_report(shard) for shard in shards)
        _sum_reports(directory, written, rows)
        return False
    with turn(directory.dataset) as current:
        if not directory.is_listed(current):
            reports = {shard: directory.report(shard) for shard in shards}
            total = _sum_reports(directory, reports.values(), rows)
            if None in reports.values():
                _log_parts(directory, [shard for shard, report in reports.items() if report is not None])
                return False
            directory.refuse_present(current)
            _write(directory, current, total)
        elif not (directory.path / NAME).exists():  # labels that were lost are there again
            _write_index(directory, current)
        shutil.rmtree(directory.path / "progress", ignore_errors=True)
        if alone:
            remove_leftovers(directory.path)
    return True


def _log_parts(directory: LabelDirectory, shards: list[str]) -> None:
    finished = sum(index_path(directory.tar(shard)).exists() for shard in shards)
    log.info(
        "%s: %d shards are labelled, not yet all: dataset.json is left as it is until the last part is done",
        directory.path,
        finished,
    )


def _sum_reports(directory: LabelDirectory, reports: Iterable[LabelReport | None], rows: int) -> LabelReport:
    """Add up the reports that exist; refuse too many empty labels."""
    total = LabelReport()
    for report in reports:
        if report is not None:
            total.add(report)
    used = rows - sum(total.skipped.values())
    check_skipped(f"images of {directory.path}", used, total, REASONS, directory.max_skipped)
    return total


def _write(directory: LabelDirectory, document: dict[str, Any], total: LabelReport) -> None:
    before = directory.entry(document)
    entry: dict[str, object] = {
        **directory.description,
        "exact": False,
        "directory": directory.name,
        "labels": total.labels,
        "unreadable": total.skipped.get(UNREADABLE, 0),
        "unreadable_places": [{"place": sample, "why": why} for why, sample in total.skipped_places],
        "missing_pixels": total.missing,
        "clipped_pixels": total.clipped,
        "settings": dict(directory.identity),
    }
    if before is not None:
        entry["replaced"] = before
    document["modalities"] = {**(document.get("modalities") or {}), directory.modality: entry}
    _write_index(directory, document)
    write_json(directory.dataset / "dataset.json", document)
    log.info("%s: %d labels, %d of them empty", directory.path, entry["labels"], entry["unreadable"])


def _write_index(directory: LabelDirectory, document: Mapping[str, Any]) -> None:
    suffix = stored_maps(directory.dataset / "dataset.json", document)[directory.modality].suffix
    write_binary_index(directory.path, document["shards"], (suffix,), document["rows_per_block"])
