"""Accuracy among the classes that a set has: a classifier of 1000 classes on a set of 200 of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.downstream.task import GatheredRows


def class_columns(model: tuple[str, ...], found: tuple[str, ...] | None, where: Path) -> Tensor:
    """[k] int64: the model's number of each class of a set, by name.

    Args:
        model: names of the model's classes.
        found: of the set's.
        where: the set.

    Raises:
        RefusedError: the set's classes have no names, or the model does not know one of them, or has two of its name.
    """
    if found is None:
        raise RefusedError(
            f"{where}: dataset.json names no classes, and they are matched with the model's by name; shard it from a "
            "folder with a sub-folder for each class, such as n01440764, or with --class_names"
        )
    number = {name: place for place, name in enumerate(model)}
    unknown = [name for name in found if name not in number]
    if unknown:
        raise RefusedError(
            f"{where}: {len(unknown)} of its {len(found)} classes ({', '.join(unknown[:3])}) are not among the model's "
            f"{len(model)} ({', '.join(model[:3])}, ...); the names of the folders that both were sharded from must be "
            "the same, such as n01440764"
        )
    if found == model:
        return torch.arange(len(found))
    if several := [name for name, count in Counter(model).items() if count > 1 and name in found]:
        raise RefusedError(
            f"{where}: the model has two classes of the name {several[0]}, so that it is not known which one is meant; "
            "fine-tune and shard with the names of folders, such as n01440764"
        )
    return torch.tensor([number[name] for name in found])


class SubsetAccuracy:
    """Share of the images whose class has the highest logit among the set's classes; see `Metrics`.

    Args:
        columns: [k] the model's number of each class of the set.
    """

    def __init__(self, columns: Tensor) -> None:
        self._columns = columns
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        among = outputs[:, self._columns.to(outputs.device)]  # [R, k]
        right = (among.argmax(1) == batch["labels"]) & among.isfinite().all(1)
        self._rows.add(batch, right=right)

    def finish(self, group: Group) -> dict[str, Any]:
        right = self._rows.gather(group)["right"]
        return {"accuracy": float(right.mean()), "detail": {"images": len(right), "classes": len(self._columns)}}
