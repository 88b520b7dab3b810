"""A data set of tars that others made: they are read once, indexed, and stay where they are.

DATASET/
  dataset.json                  as of shard-images, and what was asked for; written last
  shards/places.json            where each tar lies (data/stores/external.py)
  shards/NAME.index.json        of each tar, and what it was made of: a run that was stopped goes on with the others
  shards/index.bin
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from trp_scale.config.schema import Fields, record
from trp_scale.config.settings import check_settings, setting
from trp_scale.data.binary_index import NAME
from trp_scale.data.images.dataset import FORMAT
from trp_scale.data.images.maps import OWN_TAR, read_names
from trp_scale.data.index import (
    INDEX_FORMAT,
    ShardIndex,
    index_path,
    read_fields,
    read_index,
    read_index_document,
    write_json,
)
from trp_scale.data.stores import find_store
from trp_scale.data.stores.external import PLACES, ExternalTar, look_up, open_stream, write_places
from trp_scale.data.stores.tars import StoredPart
from trp_scale.errors import DataError, quote, shorten
from trp_scale.sharding.binary_index import write_dataset_index
from trp_scale.sharding.images.foreign_tar import AUTO, IMAGE_MEMBERS, NONE, REASONS, MemberChoice, ReadTar, read_tar
from trp_scale.sharding.images.samples import list_members
from trp_scale.sharding.images.tar_members import tar_members
from trp_scale.sharding.images.tar_places import find_tars, unique_names
from trp_scale.sharding.job.job import MAX_LISTED, PortionReport, check_skipped, refuse_differences
from trp_scale.sharding.job.parts import Part, begun_parts, missing_parts, unfinished_line
from trp_scale.sharding.job.workers import Advance, Progressed, run_portions
from trp_scale.storage.files import remove_leftovers
from trp_scale.storage.locks import only_run
from trp_scale.storage.transfer import AT_ONCE

log = logging.getLogger(__name__)

TARS = "tars"
"""Of the parts of such a data set: what they make."""

ALL = Part(count=1, index=0)

_IDENTITY = ("tars", "image", "label", "class_names", "split", "rows_per_block", "max_pixels")
"""Settings that the data set depends on."""


@dataclass(frozen=True, kw_only=True)
class IndexTars:
    """Settings of `trp-scale index`, whose flags explain them."""

    tars: str
    output: Path
    image: str
    label: str
    class_names: str
    split: str
    rows_per_block: int = setting(64, at_least=1, at_most=1 << 20)
    max_pixels: int = setting(100_000_000, at_least=1, at_most=1 << 40)
    max_skipped: float = setting(0.01, at_least=0, at_most=1)
    processes: int = setting(0, at_least=0, at_most=4096)
    progress: bool = False
    executor: str = "local"
    part: Part = ALL

    def identity(self) -> dict[str, Any]:
        """Settings that all parts share."""
        return {name: getattr(self, name) for name in _IDENTITY}

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        suffix, colon, name = self.label.partition(":")
        if not suffix or (colon and (suffix != "json" or not name)):
            raise DataError(f"--label {self.label}: auto, none, a suffix such as cls, or json:FIELD is allowed")
        if suffix == "json" and not colon:
            raise DataError("--label json: of which field? Give --label json:FIELD, such as json:label")
        if self.image not in (AUTO, *IMAGE_MEMBERS):
            raise DataError(f"--image {self.image}: {AUTO}, {', '.join(IMAGE_MEMBERS)} are allowed")
        if self.class_names and self.label == NONE:
            raise DataError(f"--class_names {self.class_names}: goes with classes, not with --label none")
        check_settings(self, DataError)


def is_indexed(directory: Path) -> bool:
    """Whether a directory holds a data set that this file made."""
    return (directory / OWN_TAR / PLACES).exists()


def index_settings(directory: Path) -> dict[str, Any]:
    """Return the settings that a data set was indexed with.

    Raises:
        DataError: dataset.json is missing or says nothing of it.
    """
    path = directory / "dataset.json"
    return _identity(
        read_fields(path).section("settings"), f"give the tars that it was made of, and --output {directory}"
    )


def _identity(settings: Fields, advice: str) -> dict[str, Any]:
    """The settings that all parts have alike, each of its type."""
    types = get_type_hints(IndexTars)
    if any(name not in settings for name in _IDENTITY):
        raise settings.refusal(f"does not say which tars it was made of; {advice}")
    return {name: settings.take(name, types[name]) for name in _IDENTITY}


@dataclass(kw_only=True)
class TarReport(PortionReport):
    """Counts of indexed tars.

    Attributes:
        images: indexed.
        bytes: of them.
        pixels: of them.
        per_class: images by class number (a string, as in JSON).
        ignored: members that are not read, by suffix.
    """

    images: int = 0
    bytes: int = 0
    pixels: int = 0
    per_class: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Tar:
    number: int
    name: str
    source: ExternalTar


def index_tars(config: IndexTars) -> Path:
    """Index tars where they lie, or the part of them that is asked for, and return the directory of the data set. Tars
    that were indexed before, and that are the same, are not read again.

    Raises:
        DataError: there are no tars, one cannot be read or used (`read_tar`), too many images had to be left out, or
            the directory holds another data set.
        RemoteError: a URL cannot be read.
    """
    config.check()
    path = config.output / "dataset.json"
    if path.exists() and not is_indexed(config.output):
        raise DataError(f"{path}: a data set that was not made of tars of others is there; choose another --output")
    tars, choice = _look_up_tars(config)
    part = config.part
    try:
        (config.output / OWN_TAR).mkdir(parents=True, exist_ok=True)
        (config.output / "progress").mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--output {config.output}: cannot be written ({error.strerror}); give another one, the tars stay where "
            "they are"
        ) from error
    with only_run(config.output, part.lock):
        if part.count > 1:
            _begin(config)
        mine = tars[part.index :: part.count]
        left = [tar for tar in mine if _report(config.output, tar, choice) is None]
        if len(left) < len(mine):
            log.info("%d of %d tars are indexed already", len(mine) - len(left), len(mine))
        run_portions(
            left,
            _Indexer,
            (config.output, choice),
            processes=config.processes,
            progressed=_progress_bar(config, left),
            executor=config.executor,
        )
        if part.count > 1:
            log.info("%s is made; when all parts are: trp-scale merge %s", part, config.output)
        else:
            _finish(config, tars, choice)
    with suppress(OSError):
        (config.output / "progress").rmdir()
    return config.output


def _look_up_tars(config: IndexTars) -> tuple[list[_Tar], MemberChoice]:
    """All tars as they are now, and which of their members are read."""
    places = find_tars(config.tars)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = list(pool.map(look_up, places))
    tars = [_Tar(number=n, name=name, source=looked[n]) for n, name in enumerate(unique_names(places))]
    choice = MemberChoice(image=config.image, label=_label(config, tars[0].source), max_pixels=config.max_pixels)
    return tars, choice


def _begin(config: IndexTars) -> None:
    """Write down what a part is asked for.

    Raises:
        DataError: another part was asked for something else.
    """
    document = {"kind": TARS, "settings": config.identity(), "max_skipped": config.max_skipped}
    for part, stored in begun_parts(config.output).items():
        asked = {**document, "parts": config.part.count}
        refuse_differences(
            part.path(config.output), {**stored, "parts": part.count}, asked, f"{part} is of another run"
        )
    config.part.write(config.output, document)


def finish_tars(directory: Path, parts: Mapping[Part, Mapping[str, Any]], max_skipped: float | None) -> list[str]:
    """Make the parts of an index one data set; returns its shards.

    Raises:
        DataError: tars are not indexed, or have changed since; or as `index_tars`.
    """
    first, stored = next(iter(parts.items()))
    limit = stored["max_skipped"] if max_skipped is None else max_skipped
    asked = _identity(
        Fields(stored["settings"], f"{first.path(directory)}: settings", DataError), "run the parts again"
    )
    config = IndexTars(output=directory, max_skipped=limit, **asked)
    config.check()
    tars, choice = _look_up_tars(config)
    missing: dict[Part, list[str]] = {}
    for tar in tars:
        if _report(directory, tar, choice) is None:
            missing.setdefault(Part(count=first.count, index=tar.number % first.count), []).append(tar.name)
    if missing:
        raise missing_parts(
            directory, [unfinished_line(part, names) for part, names in sorted(missing.items())], first.count
        )
    return _finish(config, tars, choice)


def _label(config: IndexTars, source: ExternalTar) -> str:
    """Resolve `--label auto`: `.cls` if the first images have one."""
    if config.label != AUTO:
        return config.label
    suffixes: set[str] = set()
    key = None
    with _open_tar(source) as stream:
        for member in tar_members(source.place, stream):
            if member.hidden:
                continue
            if key is not None and member.key != key:
                break
            suffixes.add(member.suffix)
            if member.suffix in IMAGE_MEMBERS:
                key = member.key
    if "cls" in suffixes:
        return "cls"
    if "json" in suffixes:
        log.warning("images have no .cls, so they get no classes; --label json:FIELD reads them from the .json")
    return NONE


def _open_tar(source: ExternalTar) -> Any:
    try:
        return open_stream(source)
    except OSError as error:
        raise DataError(f"{source.place}: cannot be opened ({error.strerror})") from error


def _source(tar: _Tar, choice: MemberChoice) -> dict[str, object]:
    """Identify the source of an index."""
    return {"place": asdict(tar.source), "choice": asdict(choice)}


def _report(output: Path, tar: _Tar, choice: MemberChoice) -> TarReport | None:
    """The report of a tar that was indexed as it is now, or None."""
    try:
        fields = read_index_document(output / OWN_TAR / tar.name).fields
        if fields.document.get("source") != _source(tar, choice):
            return None
        return record(TarReport, fields.document.get("report"), "report", DataError)
    except DataError:
        return None


class _Indexer:
    """Write the index of a tar when called with it."""

    def __init__(self, output: Path, choice: MemberChoice, advance: Advance) -> None:
        self._output, self._choice, self._advance = output, choice, advance

    def __call__(self, tar: _Tar) -> None:
        with _open_tar(tar.source) as stream:
            contents = read_tar(tar.source.place, stream, self._choice, advance=self._advance)
        report = _count_rows(contents)
        index = ShardIndex(shard=tar.name, size=tar.source.size, blocks=contents.blocks)
        document = {"format": INDEX_FORMAT, **asdict(index), "source": _source(tar, self._choice)}
        write_json(index_path(self._output / OWN_TAR / tar.name), {**document, "report": vars(report)})


def _count_rows(contents: ReadTar) -> TarReport:
    report = TarReport(images=len(contents.blocks), pixels=contents.pixels, ignored=dict(contents.ignored))
    for reason, name in contents.skipped:
        report.skip(reason, name)
    report.bytes = sum(block.members["jpg"].length for block in contents.blocks)
    report.per_class = {str(n): c for n, c in Counter(b.label for b in contents.blocks if b.label is not None).items()}
    return report


def _progress_bar(config: IndexTars, tars: Sequence[_Tar]) -> Progressed:
    def text(values: Sequence[int], seconds: float) -> str:
        images, size = values
        return f"{images:,} images  {images / seconds:,.0f} images/s  {size / seconds / 1e6:,.1f} MB/s"

    total = sum(tar.source.size for tar in tars)
    return Progressed(counters=2, total=total, text=text, shown=config.progress, title="indexing")


def _finish(config: IndexTars, tars: Sequence[_Tar], choice: MemberChoice) -> list[str]:
    """Write what makes it one data set; returns its shards."""
    total, used = TarReport(), []
    for tar in tars:
        report = _report(config.output, tar, choice)
        if report is None:
            raise DataError(f"{index_path(config.output / OWN_TAR / tar.name)}: gone; run the same command again")
        total.add(report)
        if report.images:
            used.append(tar)
    if total.ignored:
        log.info("members that are not read: %s", list_members(total.ignored))
    check_skipped("images", total.images, total, REASONS, config.max_skipped)
    if not total.images:
        raise DataError(f"{config.tars}: no image in {len(tars)} tars; {', '.join(IMAGE_MEMBERS)} are looked for")
    names = _class_names(config, total)
    write_places(config.output / OWN_TAR, {tar.name: tar.source for tar in used})
    document: dict[str, object] = {
        "format": FORMAT,
        "kind": "image",
        "shards": [tar.name for tar in used],
        "blocks": total.images,
        "rows": total.images,
        "rows_per_block": config.rows_per_block,
        "suffixes": list(choice.suffixes),
        "classes": names,
        "modalities": {},
        "synthetic": False,
        "counts": {name: getattr(total, name) for name in ("images", "bytes", "pixels", "per_class")},
        "skipped": total.skipped,
        "skipped_places": total.skipped_places,
        "skipped_places_limit": MAX_LISTED,
        "ignored": total.ignored,
        "settings": config.identity(),
    }
    (config.output / OWN_TAR / NAME).unlink(missing_ok=True)
    write_dataset_index(config.output, document)
    write_json(config.output / "dataset.json", document)
    _remove_others(config.output, {tar.name for tar in tars})
    for part in begun_parts(config.output):
        part.path(config.output).unlink(missing_ok=True)
    log.info("%s: %d images of %d tars", config.output, total.images, len(used))
    return [tar.name for tar in used]


def _class_names(config: IndexTars, total: TarReport) -> list[str] | None:
    if not config.class_names:
        return None
    names, _ = read_names("--class_names", config.class_names)
    highest = max(map(int, total.per_class), default=-1)
    if highest >= len(names):
        raise DataError(
            f"--class_names {config.class_names}: {len(names)} names, and an image of class {highest}; classes are "
            f"numbered from 0"
        )
    return names


def _remove_others(output: Path, names: set[str]) -> None:
    """Indexes of tars that are no longer among them."""
    kept = {index_path(Path(name)).name for name in names}
    for path in (output / OWN_TAR).glob("*.index.json"):
        if path.name not in kept:
            path.unlink()
    for directory in (output, output / OWN_TAR):
        remove_leftovers(directory)


def verify_tar(shard: Path, where: str, choice: MemberChoice, check: Any) -> int:
    """Read a tar again, whole, beside its index; returns its bytes.

    Args:
        shard: its path in the data set.
        where: it lies.
        choice: as when it was indexed.
        check: called with the place and the content of each image.

    Raises:
        DataError: the first thing that differs.
    """
    index = read_index(shard)
    with os.fdopen(find_store(shard.parent).open(StoredPart(shard, index.size)), "rb", buffering=0) as stream:
        contents = read_tar(where, stream, choice, check=check)  # type: ignore[arg-type]  # raw, as a tar needs
    advice = f"index the tars again: trp-scale index {shard.parent.parent}"
    for ours, theirs in zip(index.blocks, contents.blocks, strict=False):
        if ours != theirs:
            raise DataError(
                f"{where}: image {shorten(theirs.key)}: {quote(theirs)} found, the index says {quote(ours)}; {advice}"
            )
    if len(index.blocks) != len(contents.blocks):
        raise DataError(f"{where}: {len(contents.blocks)} images found, the index has {len(index.blocks)}; {advice}")
    return index.size


def member_choice(shard: Path) -> MemberChoice:
    """Return the members that were read when a tar was indexed.

    Raises:
        DataError: its index does not say.
    """
    source = read_index_document(shard).fields.section("source")
    where = f"{index_path(shard)}: which members were read"
    return record(MemberChoice, source.document.get("choice"), where, DataError, "index the tars again")
