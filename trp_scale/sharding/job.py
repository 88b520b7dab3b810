"""Parallel, resumable sharding; the bytes do not depend on the number of processes.

DATASET/
  dataset.json                  settings, counts and skipped samples; written last
  shards/KIND-000000.tar        one for each portion of the input
  shards/KIND-000000.index.json written after the tar and its report; marks a finished shard
  shards/index.bin              all indexes in one file, written before dataset.json
  progress/                     until dataset.json exists: files of the parts, a report for each finished shard

The split of the input into portions depends only on the input and the settings. A resumed run makes the missing shards.
Several runs may each make a part (parts.py); `finish_dataset` joins them. With --source_field each source of the input
becomes a data set (`shard_sources`).
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
from trp_scale.data.mixture import format_paths
from trp_scale.data.raw_files import DATASET_FORMAT
from trp_scale.errors import MOST_PROBLEMS, DataError, quote
from trp_scale.sharding.parts import (
    MAX_LISTED,
    Part,
    PortionReport,
    ShardWriter,
    SpreadSettings,
    all_parts,
    check_skipped,
    missing_parts,
    new_tar,
    report_path,
    started_parts,
    unfinished_line,
    write_dataset_index,
)
from trp_scale.sharding.workers import Advance, Portion, PortionT, ProgressBar, run_portions
from trp_scale.storage.files import only_run, remove_leftovers, write_text

FAILED = "failed"
"""Field of a part file: all shards were made, but too many samples were skipped. The same command resumes; other
settings start over."""

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{32,}")

_DIGEST_OF = {
    "input": "other input: files were added, removed or changed; for images also --semseg.classes and similar settings",
    "tokenizer": "another --tokenizer",
}
"""Message for a difference in a setting that is a digest."""


ReportT = TypeVar("ReportT", bound=PortionReport)

Fill = Callable[[PortionT, ShardWriter], ReportT]
"""Writes the samples of a portion and returns its report."""


def shard_stem(kind: str, number: int) -> str:
    """Return the name of a shard, such as text-000000."""
    return f"{kind}-{number:06d}"


@dataclass(frozen=True, kw_only=True)
class DataKind(Generic[ReportT]):
    """Kind of data set, without settings.

    Attributes:
        name: "text", "image", "tars" or a modality.
        report: class of the reports.
        items: field of the report that counts stored items; also the word for messages.
        reasons: description of each key of PortionReport.skipped.
        counted: returns the fields of dataset.json from the sum of all reports.
        warn: logs warnings about the finished data set.
        renewable: whether the command updates a finished data set, with any settings.
        folder: of the tars, in the output directory.
        flag: that selects another directory, for messages.
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
        """Whether a finished data set exists.

        Raises:
            DataError: its settings differ from `identity`.
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
        """Raise DataError if settings in `stored`, read from `path`, differ from `wanted`."""
        differences = [
            _difference(name, stored.get(name), value) for name, value in wanted.items() if stored.get(name) != value
        ]
        if differences:
            advice = advice or f"choose another {self.flag}, or remove the directory"
            raise DataError(f"{path}: {holds}: {'; '.join(differences[:MOST_PROBLEMS])}. Use the same, {advice}")

    def shard_names(self, count: int) -> list[str]:
        """Return the file name of each shard, in the order of the portions."""
        return [f"{shard_stem(self.name, number)}.tar" for number in range(count)]

    def finished_shard(self, output: Path, name: str) -> tuple[ReportT, int] | None:
        """Read the report and the number of blocks of a shard; `None` if the shard is unfinished, or the report is from
        another version."""
        shard = output / "shards" / name
        try:
            index = read_index(shard)
            if shard.stat().st_size != index.size:
                return None
            path = report_path(output, shard.stem)
            report = record(self.report, read_json(path), str(path), DataError)
            return report, len(index.blocks)
        except (OSError, DataError):
            return None

    def document(self, part: Mapping[str, Any], shards: list[str], blocks: int, total: ReportT) -> dict[str, object]:
        """Return dataset.json.

        Args:
            part: file of any part.
            shards: tars with rows.
            blocks: number of their blocks.
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
        """Raise DataError for an input without usable items."""
        raise DataError(f"{output}: the input contains no usable {self.items}")

    def store(self, output: Path, document: dict[str, Any]) -> None:
        """Write the binary index, then dataset.json, which marks a finished data set."""
        write_dataset_index(output, document)
        write_json(output / "dataset.json", document)

    def clear(self, output: Path) -> None:
        """Remove temporary files and empty shards of a finished data set. No run may be writing."""
        listed = set(read_fields(output / "dataset.json").file_names("shards"))
        for shard in (output / "shards").glob("*.tar"):
            if shard.name not in listed:  # no rows
                index_path(shard).unlink(missing_ok=True)
                shard.unlink()
        for directory in (output, output / "shards"):
            remove_leftovers(directory)
        shutil.rmtree(output / "progress", ignore_errors=True)


class ShardingJob(Generic[ReportT]):
    """Run that makes a data set or a part of it.

    Args:
        output: directory of the data set.
        identity: settings that determine the bytes of the data set.

    Raises:
        DataError: the directory contains anything but a data set of these settings.
    """

    def __init__(
        self,
        settings: SpreadSettings,
        output: Path,
        kind: DataKind[ReportT],
        identity: Mapping[str, object],
    ) -> None:
        self.output = output
        self.identity = dict(identity)
        self.part = settings.own_part()
        self._settings, self._kind = settings, kind
        self._document: dict[str, object] = {}
        self._refuse_other_content()

    @contextmanager
    def only_run(self) -> Iterator[None]:
        """Lock the data set, or this part of it.

        Raises:
            DataError: another process holds the lock.
        """
        with only_run(self.output, self.part.lock):
            yield
        if (self.output / "dataset.json").exists():
            with suppress(OSError):  # not empty while other parts hold their locks
                (self.output / "progress").rmdir()

    def own_file(self, stem: str, suffix: str) -> Path:
        """Return the path of a temporary file of this run in progress/."""
        name = stem if self.part.count == 1 else f"{stem}-{self.part.index:05d}"
        return self.output / "progress" / f"{name}{suffix}"

    def _refuse_other_content(self) -> None:
        if not self.output.exists():
            return
        parts = started_parts(self.output)
        known = self._kind.renewable or self._kind.is_stored(self.output, self.identity)
        for part, document in parts.items():
            if self._may_begin_anew(part, document):
                continue
            self._kind.refuse_differences(part.path(self.output), document["settings"], self.identity)
            if part.count != self.part.count:
                raise DataError(
                    f"{part.path(self.output)}: the data set has {part.count} parts, --num_shards {self.part.count} "
                    f"was given. Run the missing ones of the {part.count} parts, or choose another {self._kind.flag}"
                )
        if not (known or parts) and any(entry.name not in ("progress", "shards") for entry in self.output.iterdir()):
            raise DataError(
                f"{self._kind.flag} {self.output}: the directory is not empty and has no data set; choose another"
            )

    def begin(self, fingerprint: str, portions: Sequence[Portion[Any]], listing: PortionReport | None = None) -> bool:
        """Write the part file; return False if the data set is finished.

        Args:
            fingerprint: of the input.
            portions: of the whole input.
            listing: samples skipped by the listing.

        Raises:
            DataError: the input or another part has other settings, or a finished data set lacks a shard.
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
            self._refuse_other_content()  # if two parts start together, at least one sees the other
        except DataError:
            self.part.path(self.output).unlink(missing_ok=True)
            raise
        return True

    def _may_begin_anew(self, part: Part, document: Mapping[str, Any]) -> bool:
        """Whether an unpartitioned run with other settings may replace a part: no shard is finished, or the part failed
        because too many samples were skipped."""
        if self.part.count > 1:
            return False
        is_finished = any((self.output / self._kind.folder).glob("*.index.json"))
        return self._kind.renewable or bool(document.get(FAILED)) or (part.count == 1 and not is_finished)

    def _forget_failed(self) -> None:
        """Remove the shards of a failed run with other settings."""
        parts = {p: stored for p, stored in started_parts(self.output).items() if self._may_begin_anew(p, stored)}
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
                raise DataError(f"{shard}: missing, or its size differs from its index; remove {path} to make it again")

    def make(
        self,
        portions: Sequence[PortionT],
        make: Callable[..., Fill[PortionT, ReportT]],
        arguments: tuple[Any, ...],
        counters: tuple[str, ...],
    ) -> None:
        """Make the missing shards of this run, after `begin`.

        Args:
            portions: of the whole input.
            make: called once in each process as make(*arguments, advance); returns the function that fills a shard.
            counters: of `advance`; the last one reaches the size of a portion.

        Raises:
            DataError: a process died.
        """
        self.run(portions, _ShardMaker, (self.output, self._kind.name, make, arguments), counters)

    def run(
        self,
        portions: Sequence[PortionT],
        worker: Callable[..., Callable[[PortionT], object]],
        arguments: tuple[Any, ...],
        counters: tuple[str, ...],
        title: str = "sharding",
        gpus: int = 0,
    ) -> None:
        """Call a worker with each unfinished portion of this run, as `run_portions`."""
        selected, names = self.part.select(portions), self._kind.shard_names(len(portions))
        missing = [
            portion for portion in selected if self._kind.finished_shard(self.output, names[portion.number]) is None
        ]
        if len(missing) < len(selected):
            log.info("%d of %d shards exist already", len(selected) - len(missing), len(selected))
        settings, total = self._settings, sum(portion.size for portion in selected)
        bar = ProgressBar(counters=counters, total=total, shown=settings.progress, title=title)
        run_portions(
            missing, worker, arguments, processes=settings.processes, bar=bar, executor=settings.executor, gpus=gpus
        )

    def finish(self, description: Mapping[str, object]) -> tuple[list[str], ReportT] | None:
        """Finish the data set and return the result of `finish_dataset`. One of several parts is only marked as
        finished; then return None.

        Args:
            description: fields of dataset.json for this kind of data, without counts.

        Raises:
            DataError: too many items were skipped (finished shards stay), or nothing is left.
        """
        document = {**self._document, "description": dict(description)}
        self.part.write(self.output, document)
        if self.part.count > 1:
            log.info("%s is finished; after all parts, run: trp-scale merge %s", self.part, self.output)
            return None
        try:
            return finish_dataset(self.output, self._kind)
        except DataError:
            self.part.write(self.output, {**document, FAILED: True})
            raise


def finish_dataset(
    output: Path, kind: DataKind[ReportT], max_skipped: float | None = None
) -> tuple[list[str], ReportT]:
    """Join all parts to a finished data set, and remove temporary files and shards without rows.

    Args:
        max_skipped: largest share of skipped items; None: the setting of the parts.

    Returns:
        Shards with rows, and the sum of all reports.

    Raises:
        DataError: a part or shard is missing, parts differ, too many items were skipped (finished shards stay), or
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
    """Return the shards with rows, their number of blocks, and the sum of all reports."""
    first, stored = next(iter(parts.items()))
    for part, document in parts.items():
        path = part.path(output)
        fields = Fields(document, str(path), DataError, "run the command of the part again")
        fields.whole("shards")
        fields.take("listing", dict)
        fields.take("description", dict, {})
        holds, advice = f"{part} has other settings than {first}", "and run this part again"
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
        report, blocks_of_shard = finished
        total.add(report)
        if blocks_of_shard:
            shards.append(name)
            blocks += blocks_of_shard
    if missing:
        lines = [unfinished_line(part, names) for part, names in sorted(missing.items())]
        raise missing_parts(output, lines, first.count)
    return shards, blocks, total


class _ShardMaker(Generic[PortionT, ReportT]):
    """Worker that makes the shard of a portion."""

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
            report = self._fill(portion, shard)
            shard.report = vars(report)
        return report


def _difference(name: str, stored: object, asked: object) -> str:
    if any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (stored, asked)):
        return _DIGEST_OF.get(name, f"another {name}")
    return f"{name} {quote(stored)} there, {quote(asked)} asked for"


FOLDER = "folder"
"""Value of --source_field for which each folder directly in the input is a source."""
MIXTURE = "mixture.txt"
"""File beside the data sets of sources with the value of --data.path; written when all are finished."""
MOST_SOURCES = 256
SHARES = 1000
"""Sum of the weights in a mixture: a weight is the share of the rows in thousandths, at least one."""


def source_folders(inputs: list[str]) -> dict[str, Path]:
    """Return the folders directly in the input, by name.

    Raises:
        DataError: the input is not a single folder with two or more folders.
    """
    root = Path(inputs[0])
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if len(inputs) == 1 and root.is_dir() else []
    if len(folders) < 2:
        raise DataError(
            f"--source_field {FOLDER} with --inputs {' '.join(inputs)}: {len(folders)} folders found, one folder with "
            "two or more folders expected; each becomes a source"
        )
    return {path.name: path for path in folders}


def shard_sources(output: Path, sources: Mapping[str, object], shard: Callable[[str, Path], object]) -> Path:
    """Make a data set for each source, and write the mixture when all are finished. Return `output`.

    Args:
        output: directory of all data sets.
        sources: sources by the value of the field.
        shard: makes the data set of a value in a directory, or a part of it.

    Raises:
        DataError: too many sources, or two with the same name.
    """
    if len(sources) > MOST_SOURCES:
        raise DataError(f"--source_field: {len(sources)} sources found, at most {MOST_SOURCES} allowed")
    directories: dict[str, Path] = {}
    for value in sources:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", value)
        if name in directories:
            raise DataError(f"--source_field: two values are named {quote(name)} in a mixture; rename one of them")
        directories[name] = output / name
        shard(value, directories[name])
    if all((directory / "dataset.json").exists() for directory in directories.values()):
        rows = {name: read_fields(path / "dataset.json").take("rows", int) for name, path in directories.items()}
        path = format_paths(rows, directories, total=SHARES)
        write_text(output / MIXTURE, path + "\n")
        with suppress(OSError):  # not empty while other parts hold their locks
            (output / "progress").rmdir()
        log.info("%s: %d sources; give --data.path %s", output / MIXTURE, len(directories), path)
    return output
