"""One data set of shards in the making: in parallel, resumable, the same bytes for any number of processes.

DATASET/
  dataset.json                  what was made, from what, the counts, and what was left out and why; it is written last
  shards/KIND-000000.tar        one for each portion of the input
  shards/KIND-000000.index.json written after its tar and its report: it marks a finished shard
  shards/index.bin              all indexes in one, written before dataset.json
  progress/                     until dataset.json is there: the settings, the lock, a report for each finished shard

How the input is cut into portions depends on the input and the settings alone. A run that was stopped finds the
finished shards and makes the others.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from trp_scale.config.settings import Section, range_problems, sections
from trp_scale.data.index import DataError, index_path, read_index, read_json, write_json
from trp_scale.data.temporary import remove_leftovers
from trp_scale.preparation.binary_index import write_dataset_index
from trp_scale.preparation.sharding.lock import only_run
from trp_scale.preparation.sharding.workers import Advance, PortionT, Progressed, run_portions
from trp_scale.preparation.sharding.writing import ShardWriter, new_tar, report_path

DATASET_FORMAT = 1

MAX_LISTED = 1000
"""Skipped things that are listed by place, in a shard's report and in dataset.json; all are counted."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ShardingSettings:
    """Settings that every kind of data set has."""

    output: Path
    """Directory of the data set. A run that was stopped goes on there; one with other settings or other inputs is
    refused."""
    processes: int = 0
    """Processes at work; 0 = one for each core. The output does not depend on it."""
    max_skipped: float = 0.01
    """Largest share of documents or images that may be skipped."""
    progress: bool = True
    """Show a progress bar."""


def check_ranges(settings: object, **ranges: tuple[float, float]) -> None:
    """Raise DataError for a setting outside its (smallest, largest), naming its flag."""
    for name, (smallest, largest) in ranges.items():
        value = getattr(settings, name)
        if not smallest <= value <= largest:
            raise DataError(f"--{name} {value}: {smallest} to {largest} is allowed")


def check_sections(settings: object) -> None:
    """Raise DataError for what a section of a command says that no run of it can have, naming its flag."""
    own = [each.problems(settings) for each in sections(settings).values() if isinstance(each, Section)]
    if problem := next((line for lines in (range_problems(settings), *own) for line in lines), None):
        raise DataError(problem)


@dataclass(kw_only=True)
class PortionReport:
    """What was made of a portion. Each kind of data set adds its counts; those of all portions go into dataset.json.

    Attributes:
        skipped: how many could not be used, by reason.
        skipped_places: (reason, or what is known of it, and place) of the first of them.
    """

    skipped: dict[str, int] = field(default_factory=dict)
    skipped_places: list[list[str]] = field(default_factory=list)

    def skip(self, reason: str, place: str, why: str = "") -> None:
        """Count what cannot be used, and list it while there is room."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.skipped_places) < MAX_LISTED:
            self.skipped_places.append([why or reason, place])

    def add(self, other: PortionReport) -> None:
        """Add the counts of another portion."""
        for name, theirs in vars(other).items():
            ours = getattr(self, name)
            if name == "skipped_places":
                total: object = (ours + theirs)[:MAX_LISTED]
            elif isinstance(ours, dict):
                total = dict(Counter(ours) + Counter(theirs))
            elif isinstance(ours, list):
                total = [a + b for a, b in zip(ours, theirs, strict=True)]
            elif isinstance(ours, int):
                total = ours + theirs
            else:  # said of one portion alone
                continue
            setattr(self, name, total)


ReportT = TypeVar("ReportT", bound=PortionReport)

Fill = Callable[[PortionT, ShardWriter], ReportT]
"""Writes the samples of a portion and reports on them."""


def shard_stem(kind: str, number: int) -> str:
    """text, 0 -> text-000000"""
    return f"{kind}-{number:06d}"


class ShardingJob(Generic[ReportT]):
    """The making of one data set. As a context it keeps other runs out.

    Args:
        settings: of the run.
        kind: "text" or "image".
        identity: the settings that the bytes of the data set depend on.
        report: makes an empty report, or one of the fields that were written down.
        items: name of the report's field that counts what was stored, and the word for it in messages.
        reasons: why something is skipped: what each key of PortionReport.skipped means.

    Raises:
        DataError: the directory holds something else than a data set of these settings.
    """

    def __init__(
        self,
        settings: ShardingSettings,
        kind: str,
        identity: Mapping[str, object],
        *,
        report: type[ReportT],
        items: str,
        reasons: Mapping[str, str],
    ) -> None:
        self.output = settings.output
        self.kind = kind
        self.identity = dict(identity)
        self.total = report()
        self._settings = settings
        self._report = report
        self._items = items
        self._reasons = reasons
        self._stems: list[str] = []
        self._refuse_other_content()

    def only_run(self) -> AbstractContextManager[None]:
        """Context in which no other run makes the data set.

        Raises:
            DataError: another process is in it.
        """
        return only_run(self.output)

    def _refuse_other_content(self) -> None:
        if not self.output.exists():
            return
        for path in (self.output / "dataset.json", self.output / "progress" / "settings.json"):
            if path.exists():
                found = read_json(path)
                refuse_differences(path, found.get("settings", found), self.identity)
                return
        if any(entry.name not in ("progress", "shards") for entry in self.output.iterdir()):
            raise DataError(f"--output {self.output}: the directory is not empty and holds no data set; choose another")

    def begin(self, fingerprint: str) -> bool:
        """Whether there is something to do for an input of this fingerprint; if so it is written down.

        Raises:
            DataError: the data set is of another input, or a finished one lacks a shard.
        """
        self.identity["input"] = fingerprint
        self._refuse_other_content()
        (self.output / "shards").mkdir(exist_ok=True)
        if (self.output / "dataset.json").exists():
            self._check_shards()
            log.info("%s is finished: nothing to do", self.output)
            shutil.rmtree(self.output / "progress")
            return False
        write_json(self.output / "progress" / "settings.json", self.identity)
        return True

    def _check_shards(self) -> None:
        path = self.output / "dataset.json"
        for name in read_json(path)["shards"]:
            shard = self.output / "shards" / name
            if not shard.exists() or shard.stat().st_size != read_index(shard).size:
                raise DataError(
                    f"{shard}: missing or of another size than its index says; remove {path} to make it again"
                )

    def make(
        self,
        portions: Sequence[PortionT],
        make: Callable[..., Fill[PortionT, ReportT]],
        arguments: tuple[Any, ...],
        progressed: Progressed,
    ) -> ReportT:
        """Make the shards that are missing, after `begin`; returns the sum of all reports.

        Args:
            portions: of the whole input.
            make: called once in each process as make(*arguments, advance); what it returns fills a shard.
            progressed: what the progress bar shows.

        Raises:
            DataError: too much had to be skipped (finished shards stay), or a process died.
        """
        self._stems = [shard_stem(self.kind, portion.number) for portion in portions]
        reports = {}
        for portion, stem in zip(portions, self._stems, strict=True):
            report = self._finished_report(stem)
            if report is not None:
                reports[portion.number] = report
        if reports:
            log.info("%d of %d shards are there already", len(reports), len(portions))
        reports |= run_portions(
            [portion for portion in portions if portion.number not in reports],
            _ShardMaker,
            (self.output, self.kind, make, arguments),
            processes=self._settings.processes,
            progressed=progressed,
        )
        for number in sorted(reports):
            self.total.add(reports[number])
        check_skipped(
            self._items,
            getattr(self.total, self._items),
            self.total,
            self._reasons,
            self._settings.max_skipped,
        )
        return self.total

    def _finished_report(self, stem: str) -> ReportT | None:
        """The report of a shard that is finished, or None. A report with other fields is of another version, and its
        shard is made again."""
        shard = self.output / "shards" / f"{stem}.tar"
        try:
            if shard.stat().st_size != read_index(shard).size:
                return None
            return self._report(**read_json(report_path(self.output, stem)))
        except (OSError, DataError, TypeError):
            return None

    def finish(self, description: Mapping[str, object]) -> list[str]:
        """Write dataset.json, the mark of a finished data set, and clear what only an unfinished one needs.

        Args:
            description: what dataset.json says of this kind of data.

        Returns:
            Names of the shards that hold rows; those without any are taken away.
        """
        shards, blocks = [], 0
        for stem in self._stems:
            shard = self.output / "shards" / f"{stem}.tar"
            index = read_index(shard)
            if index.blocks:
                shards.append(shard.name)
                blocks += len(index.blocks)
            else:
                index_path(shard).unlink()
                shard.unlink()
        for directory in (self.output, self.output / "shards"):
            remove_leftovers(directory)
        places = [{"reason": reason, "place": place} for reason, place in self.total.skipped_places]
        document = {
            "format": DATASET_FORMAT,
            "kind": self.kind,
            "shards": shards,
            "blocks": blocks,
            "skipped": self.total.skipped,
            "skipped_places": places,
            "skipped_places_limit": MAX_LISTED,
            "settings": self.identity,
        }
        complete = {**document, **description}
        if shards:
            write_dataset_index(self.output, complete)
        write_json(self.output / "dataset.json", complete)
        shutil.rmtree(self.output / "progress")
        return shards


class _ShardMaker(Generic[PortionT, ReportT]):
    """What a process keeps between portions. Called with one, it makes the shard."""

    def __init__(
        self,
        output: Path,
        kind: str,
        make: Callable[..., Fill[PortionT, ReportT]],
        arguments: tuple[Any, ...],
        advance: Advance,
    ) -> None:
        self._output, self._kind = output, kind
        self._fill = make(*arguments, advance)

    def __call__(self, portion: PortionT) -> ReportT:
        stem = shard_stem(self._kind, portion.number)
        with new_tar(self._output / "shards" / f"{stem}.tar", report_path(self._output, stem)) as shard:
            report = self._fill(portion, shard.writer)
            shard.report = vars(report)
        return report


def refuse_differences(
    path: Path,
    found: Mapping[str, object],
    wanted: Mapping[str, object],
    holds: str = "a data set with other settings or input",
    advice: str = "choose another --output, or remove the directory",
) -> None:
    """Raise DataError naming each setting of `wanted` that `found`, from the file `path`, has otherwise."""
    differences = [
        f"{name} {found.get(name)!r} there, {value!r} asked for"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise DataError(f"{path}: {holds}: {'; '.join(differences)}. Ask for the same, {advice}")


def check_skipped(items: str, used: int, report: PortionReport, reasons: Mapping[str, str], max_skipped: float) -> None:
    """Warn of what was skipped.

    Args:
        items: "documents", "images".
        used: how many were not skipped.
        report: what was skipped, and where.
        reasons: what each reason means.
        max_skipped: largest share that may be skipped.

    Raises:
        DataError: more were skipped than `max_skipped` allows.
    """
    count = sum(report.skipped.values())
    found = used + count
    named = "; ".join(f"{number} {reason} ({reasons[reason]})" for reason, number in sorted(report.skipped.items()))
    if count:
        log.warning("%d of %d %s were skipped: %s", count, found, items, named)
    if count > max_skipped * found:
        first = "\n".join(f"  {place} ({why})" for why, place in report.skipped_places[:20])
        raise DataError(
            f"{count} of {found} {items} were skipped, more than --max_skipped {max_skipped} allows: "
            f"{named}. The first ones:\n{first}"
        )
