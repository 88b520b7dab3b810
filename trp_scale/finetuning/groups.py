"""Groups of rows, such as waterbirds on land: read them from files, and report the accuracy of each group and of the
worst (Sagawa et al. 2020). Fine-tuning samples groups equally, or balances their losses as tasks (task.py)."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.config.files import read_content
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers
from trp_scale.data.plan import Addresses
from trp_scale.data.sources import Rows
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError, RefusedError, quote, shorten
from trp_scale.finetuning.measurement import GatheredRows, Metrics, label_ranks
from trp_scale.reporting.paired_tests import wilson_interval
from trp_scale.storage.files import content_key

logger = logging.getLogger(__name__)

NO_GROUP = -1
"""Number of the group of a row that has none."""


class GroupRow(NamedTuple):
    """Row of a file with groups; `group` is "" if the row has none."""

    key: str
    label: str
    group: str


FORMATS = {
    "file": ("label", ""),
    "img_filename": ("y", "place"),
    "image_id": ("Blond_Hair", "Male"),
    "comment_text": ("toxicity", "black"),
}
"""Columns of label and attribute by the column of files or texts: own files, Waterbirds, CelebA, CivilComments (WILDS).
Pairs of label and attribute, both 0 or 1, are the groups; without an attribute the column `group` names them."""


def read_group_file(source: str) -> list[GroupRow]:
    """Read the groups of a CSV file; a missing group is "".

    Args:
        source: FILE, or FILE:COLUMN with another attribute, such as another identity of CivilComments.

    Raises:
        DataError: the file is missing, damaged or of another format, or lacks a column.
    """
    path, attribute = Path(source), ""
    if not path.exists() and ":" in source:
        path, attribute = Path(source.rpartition(":")[0]), source.rpartition(":")[2]
    names, rows = _read_csv(path)
    key = next((key for key in FORMATS if key in names), None)
    if key is None:
        raise DataError(f"{path}: columns {quote(names)} found; expected one of {', '.join(FORMATS)}")
    label_column, attribute = FORMATS[key][0], attribute or FORMATS[key][1]
    if lacking := [name for name in ([label_column, attribute] if attribute else ["group"]) if name not in names]:
        raise DataError(f"{path}: no column {quote(lacking[0])}; found: {shorten(', '.join(names))}")
    listed = []
    for number, row in enumerate(rows, start=1):
        label, group = row.get(label_column, ""), row.get("group", "").strip()
        if attribute:
            label, value = (_binary(row[name], f"{path}: row {number}, {name}") for name in (label_column, attribute))
            group = f"{label_column} {label}, {attribute} {value}" if label and value else ""
        listed.append(GroupRow(row[key], label, group))
    return listed


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the rows of a file. Raises DataError with the file and the row."""
    content = read_content(path, DataError, largest=4 << 30)  # CivilComments has 0.4 GB
    try:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        names, rows = list(reader.fieldnames or []), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not CSV in UTF-8 ({error}); write it again") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise DataError(f"{path}: row {number} has another number of columns than the header, {len(names)}")
    return names, rows


def _binary(text: str, where: str) -> str:
    """Return "0" for numbers below 0.5 (CelebA: -1), "1" for others, "" for an empty cell."""
    if not text.strip():
        return ""
    try:
        return str(int(float(text) >= 0.5))
    except ValueError as error:
        raise DataError(f"{where}: {quote(text)} found, a number expected") from error


def image_groups(
    rows: Sequence[GroupRow], keys: Sequence[str], labels: Integers, classes: Sequence[str], where: str
) -> list[str]:
    """Return the group of each image, "" without one.

    An image of the key CLASS/DIR/NAME has the row of the file CLASS/DIR/NAME.jpg, DIR/NAME.jpg or NAME.jpg.

    Args:
        keys, labels: [n] of the images.
        classes: names by label.
        where: file of the rows, for messages.

    Raises:
        DataError: a file occurs twice, or its label is not the class of the image.
    """
    by_file = {name: row for row in rows for name in (row.key, re.sub(r"\.\w+$", "", row.key))}
    if count := len(rows) - len({row.key for row in rows}):
        raise DataError(f"{where}: {count} of {len(rows)} rows repeat a file; give each file once")
    groups, differences = [], []
    for key, label in zip(keys, labels.tolist(), strict=True):
        parts = unquote(key).split("/")
        tails = ("/".join(parts[first:]) for first in range(len(parts)))
        row = next((by_file[tail] for tail in tails if tail in by_file), None)
        groups.append("" if row is None else row.group)
        if row is not None and row.label not in ("", str(label), classes[label]):
            differences.append(f"{key}: label {shorten(row.label)}, class {classes[label]}")
    if differences:
        raise DataError(
            f"{where}: the labels of {len(differences)} images differ from their classes ({differences[0]}); shard the "
            "images in a folder for each label"
        )
    if missing := [key for key, group in zip(keys, groups, strict=True) if not group]:
        logger.warning(
            "%s: no group for %d of %d images (%s)", where, len(missing), len(keys), shorten(", ".join(missing))
        )
    return groups


@dataclass(frozen=True, kw_only=True)
class GroupedBuilder(BatchBuilder):
    """Adds the field `groups`, [R] int64, to the batches of a builder; see `fetch.BatchBuilder`.

    Attributes:
        first: [blocks] first row of each block, for each data set.
        numbers: [n] groups of the rows in stored order, for each data set; NO_GROUP for none.
    """

    builder: BatchBuilder
    first: list[Integers]
    numbers: list[Integers]

    def build(self, addresses: Addresses, start: int) -> Batch:
        batch = self.builder.build(addresses, start)
        groups = np.full(len(addresses.member), NO_GROUP)
        for member, (first, numbers) in enumerate(zip(self.first, self.numbers, strict=True)):
            of_member = addresses.member == member
            groups[of_member] = numbers[first[addresses.block[of_member]] + addresses.row[of_member]]
        batch.fields["groups"] = torch.from_numpy(groups)
        return batch


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Names of groups, and how the worst is chosen.

    Attributes:
        source: file or column.
        names: sorted.
        least: fewest measured rows of a group that may be the worst.
    """

    source: str
    names: tuple[str, ...]
    least: int

    @classmethod
    def from_names(cls, source: str, least: int, *names: Sequence[str]) -> Groups:
        """Return the groups that occur among `names` of rows; "" is none."""
        return cls(source=source, least=least, names=tuple(sorted(set().union(*names) - {""})))

    def number(self, names: Sequence[str]) -> Integers:
        """Return the number of each name, [n]; NO_GROUP for ""."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return np.array([numbers.get(name, NO_GROUP) for name in names], dtype=np.int64)

    def attach(self, rows: Rows, names: Sequence[Sequence[str]]) -> Rows:
        """Return rows with a field `groups` in their batches; `names`: [n] in stored order, for each data set."""
        counts = [np.asarray(table.rows, dtype=np.int64) for table in rows.blocks]
        first, numbers = [count.cumsum() - count for count in counts], [self.number(part) for part in names]
        builder = GroupedBuilder(builder=rows.builder, first=first, numbers=numbers)
        return replace(rows, builder=builder, digests=[*rows.digests, content_key(*self.names, *numbers)])

    def require(self, numbers: Integers, rows: str) -> None:
        """Raise RefusedError if some of the rows with groups `numbers`, [n], have none; `rows` names them."""
        missing = np.flatnonzero(numbers == NO_GROUP)
        if len(missing):
            raise RefusedError(
                f"groups {self.source}: {len(missing)} of {len(numbers)} {rows} rows have no group (rows "
                f"{', '.join(map(str, missing[:3].tolist()))}{', ...' if len(missing) > 3 else ''}, from 0, in stored "
                "order); expected: a group for each row; add them, or leave these rows out of the data"
            )

    def summarise(self, numbers: Integers, right: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return the accuracy over all rows, of the worst group, their difference, and "detail" by group with counts
        and intervals.

        Groups of fewer than `least` rows are not the worst; without other groups no group is.

        Args:
            numbers: [n] group of each row.
            right: [n] whether each row is predicted correctly.

        Raises:
            RefusedError: rows have no group.
        """
        self.require(numbers, "measured")
        counts = np.bincount(numbers, minlength=len(self.names)).tolist()
        hits = np.bincount(numbers[right], minlength=len(self.names)).tolist()
        groups = {
            name: {
                "accuracy": hit / count,
                "count": count,
                "interval": list(wilson_interval(hit / count, count)),
                "judged": count >= self.least,
            }
            for name, hit, count in zip(self.names, hits, counts, strict=True)
            if count
        }
        figures: dict[str, Any] = {"group_average": float(right.mean())}
        judged = {name: entry["accuracy"] for name, entry in groups.items() if entry["judged"]}
        detail: dict[str, Any] = {"groups": groups, "least_group": self.least}
        if judged:
            worst = min(judged, key=lambda name: judged[name])
            figures |= {"worst_group": judged[worst], "group_gap": figures["group_average"] - judged[worst]}
            detail["worst_group"] = worst
        return {**figures, "detail": detail}


class GroupAccuracy:
    """Adds the accuracy by group to the metrics of a classification task; see `Metrics`."""

    def __init__(self, metrics: Metrics, groups: Groups) -> None:
        self._metrics, self._groups, self._rows = metrics, groups, GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add logits [R, C]."""
        self._metrics.add(outputs, batch)
        right = label_ranks(outputs, batch["labels"].clamp(min=0)) == 0  # [R]
        self._rows.add(batch, right=right, groups=batch["groups"])

    def finish(self, group: Group) -> dict[str, Any]:
        figures, rows = self._metrics.finish(group), self._rows.gather(group)
        summary = self._groups.summarise(rows["groups"], rows["right"])
        detail = figures.get("detail", {}) | summary.pop("detail")
        return {**figures, **summary, "detail": detail}
