"""One data set of shards in the making: in parallel, resumable, the same bytes for any number of processes.

DATASET/
  dataset.json                  what was made, from what, the counts, and what was left out and why; it is written last
  shards/KIND-000000.tar        one for each portion of the input
  shards/KIND-000000.index.json written after its tar and its report: it marks a finished shard
  shards/index.bin              all indexes in one, written before dataset.json
  progress/                     until dataset.json is there: the parts of the work, a report for each finished shard

How the input is cut into portions depends on the input and the settings alone. A run that was stopped finds the
finished shards and makes the others. Several runs may each make a part (parts.py); `finish_dataset` joins them.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from trp_scale.config.schema import Fields, record
from trp_scale.data.index import index_path, read_fields, read_index, read_json, write_json
from trp_scale.data.raw_files import DATASET_FORMAT
from trp_scale.errors import MOST_PROBLEMS, DataError, quote
from trp_scale.sharding.job.parts import (
    MAX_LISTED,
    Part,
    PortionReport,
    ShardingSettings,
    ShardWriter,
    all_parts,
    begun_parts,
    check_skipped,
    missing_parts,
    new_tar,
    report_path,
    unfinished_line,
    write_dataset_index,
)
from trp_scale.sharding.job.workers import Advance, Numbered, PortionT, Progressed, run_portions
from trp_scale.storage.files import only_run, remove_leftovers

FAILED = "failed"
"""Field of a part's file: all was made, and too much had to be skipped. The same command goes on; one with other
settings begins anew."""

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{32,}")

_DIGEST_OF = {
    "input": "other input: files were added, taken away or changed; of images also --semseg.classes and the like",
    "tokenizer": "another --tokenizer",
}
"""Settings that are digests, and what it means that they differ."""


ReportT = TypeVar("ReportT", bound=PortionReport)

Fill = Callable[[PortionT, ShardWriter], ReportT]
"""Writes the samples of a portion and reports on them."""


def shard_stem(kind: str, number: int) -> str:
    """text, 0 -> text-000000"""
    return f"{kind}-{number:06d}"


@dataclass(frozen=True, kw_only=True)
class FinishedShard(Generic[ReportT]):
    """The report of a finished shard, and the number of its blocks."""

    report: ReportT
    blocks: int


@dataclass(frozen=True, kw_only=True)
class DataKind(Generic[ReportT]):
    """Description of a kind of data set, without its settings.

    Attributes:
        name: "text", "image" or "tars".
        report: makes an empty report, or one of the fields that were written down.
        items: name of the report's field that counts what was stored, and the word for it in messages.
        reasons: why something is skipped: what each key of PortionReport.skipped means.
        counted: fields of dataset.json from the sum of all reports.
        warn: logs what is odd about it, when the data set is whole.
        renewable: whether a finished data set is brought up to date by the same command with any settings.
        folder: of the tars, in the directory that the job writes.
        flag: that chooses another directory, for messages.
    """

    name: str
    report: type[ReportT]
    items: str
    reasons: Mapping[str, str]
    counted: Callable[[ReportT], Mapping[str, object]] = lambda report: {}
    warn: Callable[[ReportT], None] = lambda report: None
    renewable: bool = False
    folder: str = "shards"
    flag: str = "--output"

    def is_stored(self, output: Path, identity: Mapping[str, object]) -> bool:
        """Whether a finished data set is there.

        Raises:
            DataError: it has other settings than `identity`.
        """
        path = output / "dataset.json"
        if path.exists():
            self.refuse_differences(path, read_fields(path).take("settings", dict), identity)
        return path.exists()

    def refuse_differences(
        self,
        path: Path,
        stored: Mapping[str, object],
        wanted: Mapping[str, object],
        holds: str = "a data set with other settings or input",
        advice: str = "",
    ) -> None:
        """Raise DataError naming each setting of `wanted` that `stored`, from the file `path`, has otherwise."""
        differences = [
            _difference(name, stored.get(name), value) for name, value in wanted.items() if stored.get(name) != value
        ]
        if differences:
            advice = advice or f"choose another {self.flag}, or remove the directory"
            raise DataError(f"{path}: {holds}: {'; '.join(differences[:MOST_PROBLEMS])}. Ask for the same, {advice}")

    def shard_names(self, count: int) -> list[str]:
        """Return the file names of all shards, by number of the portion."""
        return [f"{shard_stem(self.name, number)}.tar" for number in range(count)]

    def finished_shard(self, output: Path, name: str) -> FinishedShard[ReportT] | None:
        """Read the report of a shard; `None` if it is not finished. A report with other fields is of another version,
        and its shard is made again."""
        shard = output / "shards" / name
        try:
            index = read_index(shard)
            if shard.stat().st_size != index.size:
                return None
            path = report_path(output, shard.stem)
            report = record(self.report, read_json(path), str(path), DataError)
            return FinishedShard(report=report, blocks=len(index.blocks))
        except (OSError, DataError):
            return None

    def document(self, part: Mapping[str, Any], shards: list[str], blocks: int, total: ReportT) -> dict[str, object]:
        """Return dataset.json.

        Args:
            part: the file of any part.
            shards: those that hold rows.
            blocks: in them.
            total: sum of all reports.
        """
        return {
            "format": DATASET_FORMAT,
            "kind": self.name,
            "shards": shards,
            "blocks": blocks,
            "skipped": total.skipped,
            "skipped_places": [{"reason": reason, "place": sample} for reason, sample in total.skipped_places],
            "skipped_places_limit": MAX_LISTED,
            "settings": part["settings"],
            **part["description"],
            **self.counted(total),
        }

    def refuse_empty(self, output: Path) -> None:
        """Raise DataError, as nothing is left of the input."""
        raise DataError(f"{output}: the input holds no {self.items} that can be used")

    def store(self, output: Path, document: dict[str, Any]) -> None:
        """Write the binary index and dataset.json, the mark of a finished data set."""
        write_dataset_index(output, document)
        write_json(output / "dataset.json", document)

    def clear(self, output: Path) -> None:
        """Remove what a finished data set does not need. Nobody writes there any more."""
        listed = set(read_fields(output / "dataset.json").file_names("shards"))
        for shard in (output / "shards").glob("*.tar"):
            if shard.name not in listed:  # without any row
                index_path(shard).unlink(missing_ok=True)
                shard.unlink()
        for directory in (output, output / "shards"):
            remove_leftovers(directory)
        shutil.rmtree(output / "progress", ignore_errors=True)


class ShardingJob(Generic[ReportT]):
    """The making of one data set, or of a part of it.

    Args:
        settings: of the run.
        kind: of the data set.
        identity: the settings that the bytes of the data set depend on.

    Raises:
        DataError: the directory holds something else than a data set of these settings.
    """

    def __init__(self, settings: ShardingSettings, kind: DataKind[ReportT], identity: Mapping[str, object]) -> None:
        self.output = settings.output
        self.identity = dict(identity)
        self.part = settings.own_part()
        self._settings = settings
        self._kind = kind
        self._document: dict[str, object] = {}
        self._refuse_other_content()

    @contextmanager
    def only_run(self) -> Iterator[None]:
        """Context in which no other run makes the data set, or this part of it.

        Raises:
            DataError: another process is in it.
        """
        with only_run(self.output, self.part.lock, patience=self._settings.patience):
            yield
        if (self.output / "dataset.json").exists():
            with suppress(OSError):  # other parts may look whether something is to do, too
                (self.output / "progress").rmdir()

    def own_file(self, stem: str, suffix: str) -> Path:
        """A file of this run that lies in progress/ while the data set is made."""
        name = stem if self.part.count == 1 else f"{stem}-{self.part.index:05d}"
        return self.output / "progress" / f"{name}{suffix}"

    def mine(self, portions: Sequence[PortionT]) -> Sequence[PortionT]:
        """The portions that this run makes shards of."""
        return portions[self.part.index :: self.part.count]

    def _refuse_other_content(self) -> None:
        if not self.output.exists():
            return
        parts = begun_parts(self.output)
        known = self._kind.renewable or self._kind.is_stored(self.output, self.identity)
        for part, document in parts.items():
            if self._may_begin_anew(part, document):
                continue
            self._kind.refuse_differences(part.path(self.output), document["settings"], self.identity)
            if part.count != self.part.count:
                raise DataError(
                    f"{part.path(self.output)}: the data set is made in {part.count} parts, --num_shards "
                    f"{self.part.count} asked for. Run those of {part.count} that are missing, one after another if "
                    f"need be, or choose another {self._kind.flag}"
                )
        if not (known or parts) and any(entry.name not in ("progress", "shards") for entry in self.output.iterdir()):
            raise DataError(
                f"{self._kind.flag} {self.output}: the directory is not empty and holds no data set; choose another"
            )

    def begin(self, fingerprint: str, portions: Sequence[Numbered], listing: PortionReport | None = None) -> bool:
        """Whether there is something to do for an input of this fingerprint; if so it is written down.

        Args:
            portions: of the whole input.
            listing: what was skipped when the input was listed.

        Raises:
            DataError: the data set is of another input, or a finished one lacks a shard, or another part has other
                settings.
        """
        self.identity["input"] = fingerprint
        self._refuse_other_content()
        self._forget_failed()
        (self.output / self._kind.folder).mkdir(exist_ok=True)
        if (self.output / "dataset.json").exists() and not self._kind.renewable:
            self._check_shards()
            log.info("%s is finished: nothing to do", self.output)
            if self.part.count == 1:
                self._kind.clear(self.output)
            return False
        self._document = {
            "kind": self._kind.name,
            "settings": self.identity,
            "shards": len(portions),
            "listing": vars(listing or PortionReport()),
            "max_skipped": self._settings.max_skipped,
        }
        self.part.write(self.output, self._document)
        try:
            self._refuse_other_content()  # of two parts that began together, one at least sees the other
        except DataError:
            self.part.path(self.output).unlink(missing_ok=True)
            raise
        return True

    def _may_begin_anew(self, part: Part, document: Mapping[str, Any]) -> bool:
        """Whether a run of the whole with other settings may replace what a part left: nothing is finished, or all is
        and too much was skipped."""
        if self.part.count > 1:
            return False
        is_finished = any((self.output / self._kind.folder).glob("*.index.json"))
        return self._kind.renewable or bool(document.get(FAILED)) or (part.count == 1 and not is_finished)

    def _forget_failed(self) -> None:
        """Remove what a failed run of other settings has left."""
        parts = {p: stored for p, stored in begun_parts(self.output).items() if self._may_begin_anew(p, stored)}
        if self._kind.renewable:
            for part in parts:
                part.path(self.output).unlink(missing_ok=True)
        elif any(stored["settings"] != self.identity for stored in parts.values()):
            log.info("%s: the shards of a failed run with other settings or input are removed", self.output)
            for index in (self.output / self._kind.folder).glob("*.index.json"):
                index.unlink()
            shutil.rmtree(self.output / "tokenizer", ignore_errors=True)

    def _check_shards(self) -> None:
        path = self.output / "dataset.json"
        for name in read_fields(path).file_names("shards"):
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
    ) -> None:
        """Make the shards of this run that are missing, after `begin`.

        Args:
            portions: of the whole input.
            make: called once in each process as make(*arguments, advance); what it returns fills a shard.
            progressed: what the progress bar shows.

        Raises:
            DataError: a process died.
        """
        self.run(portions, _ShardMaker, (self.output, self._kind.name, make, arguments), progressed)

    def run(
        self,
        portions: Sequence[PortionT],
        worker: Callable[..., Callable[[PortionT], object]],
        arguments: tuple[Any, ...],
        progressed: Progressed,
    ) -> None:
        """Call a worker with each portion of this run that is not finished, as `run_portions`."""
        mine, names = self.mine(portions), self._kind.shard_names(len(portions))
        missing = [portion for portion in mine if self._kind.finished_shard(self.output, names[portion.number]) is None]
        if len(missing) < len(mine):
            log.info("%d of %d shards are there already", len(mine) - len(missing), len(mine))
        run_portions(
            missing,
            worker,
            arguments,
            processes=self._settings.processes,
            progressed=progressed,
            executor=self._settings.executor,
        )

    def finish(self, description: Mapping[str, object]) -> tuple[list[str], ReportT] | None:
        """Finish the data set, and return what `finish_dataset` does; a run that makes a part of it only says that this
        one is made, and returns None.

        Args:
            description: what dataset.json says of this kind of data, without counts.

        Raises:
            DataError: too much had to be skipped (finished shards stay), or nothing is left.
        """
        document = {**self._document, "description": dict(description)}
        self.part.write(self.output, document)
        if self.part.count > 1:
            log.info("%s is made; when all parts are: trp-scale merge %s", self.part, self.output)
            return None
        try:
            return finish_dataset(self.output, self._kind)
        except DataError:
            self.part.write(self.output, {**document, FAILED: True})
            raise


def finish_dataset(
    output: Path, kind: DataKind[ReportT], max_skipped: float | None = None
) -> tuple[list[str], ReportT]:
    """Store what all parts have made as a finished data set, and clear what only an unfinished one needs.
    Shards without any row are taken away.

    Args:
        max_skipped: largest share of items that may be skipped; None: as the parts were told.

    Returns:
        the shards that hold rows, and the sum of all reports.

    Raises:
        DataError: a part or a shard is missing, parts differ, too much had to be skipped (finished shards stay), or
            nothing is left.
    """
    parts = all_parts(output)
    first = next(iter(parts.values()))
    shards, blocks, total = _join_parts(output, kind, parts)
    if max_skipped is None:
        max_skipped = first["max_skipped"]
    stored = getattr(total, kind.items)
    check_skipped(kind.items, stored, total, kind.reasons, max_skipped)
    if stored == 0:
        kind.refuse_empty(output)
    document = kind.document(first, shards, blocks, total)
    kind.store(output, document)
    kind.clear(output)
    kind.warn(total)
    return shards, total


def _join_parts(
    output: Path, kind: DataKind[ReportT], parts: Mapping[Part, Mapping[str, Any]]
) -> tuple[list[str], int, ReportT]:
    """The shards that hold rows, the number of their blocks, and the sum of all reports."""
    first, stored = next(iter(parts.items()))
    for part, document in parts.items():
        path = part.path(output)
        fields = Fields(document, str(path), DataError, "run the command of the part again")
        fields.whole("shards")
        fields.take("listing", dict)
        fields.take("description", dict, {})
        holds, advice = f"{part} has other settings than {first}", "and make this part again"
        kind.refuse_differences(path, document["settings"], stored["settings"], holds, advice)
        both = {name: stored[name] for name in ("kind", "shards", "listing", "max_skipped")}
        kind.refuse_differences(path, document, both, holds, advice)
        if "description" in document and "description" in stored:
            kind.refuse_differences(path, document["description"], stored["description"], holds, advice)
    total = record(kind.report, stored["listing"], f"{first.path(output)}: listing", DataError)
    missing: dict[Part, list[str]] = {part: [] for part, document in parts.items() if "description" not in document}
    shards, blocks = [], 0
    for number, name in enumerate(kind.shard_names(stored["shards"])):
        finished = kind.finished_shard(output, name)
        if finished is None:
            missing.setdefault(Part(count=first.count, index=number % first.count), []).append(name)
            continue
        total.add(finished.report)
        if finished.blocks:
            shards.append(name)
            blocks += finished.blocks
    if missing:
        lines = [unfinished_line(part, names) for part, names in sorted(missing.items())]
        raise missing_parts(output, lines, first.count)
    return shards, blocks, total


class _ShardMaker(Generic[PortionT, ReportT]):
    """Make the shard of a portion when called with it."""

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


def _difference(name: str, stored: object, asked: object) -> str:
    if any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (stored, asked)):
        return _DIGEST_OF.get(name, f"another {name}")
    return f"{name} {quote(stored)} there, {quote(asked)} asked for"
