"""A batch in one buffer: the same batch on the other side, integers in as few bytes as hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.data.stored import config_for, write_dataset
from trp_scale.core import batch as batches
from trp_scale.core.batch import ALIGNMENT, Batch, narrowest
from trp_scale.pretraining.base import open_sources

META, CUDA = torch.device("meta"), torch.device("cuda", 0)


@pytest.fixture
def whole() -> Batch:
    fields = {
        "tokens": torch.arange(15).reshape(3, 5) * 1000,
        "labels": torch.tensor([[-1], [7], [300]]),
        "groups": torch.tensor([[255, 0]] * 3),
        "far": torch.tensor([2**40, -5, 1]),
        "large": torch.tensor([70_000, 0, -70_000]),
        "none": torch.zeros(3, 0, dtype=torch.int64),
        "flags": torch.tensor([[True, False, True]] * 3),
        "pixels": torch.arange(6, dtype=torch.uint8).reshape(3, 2),
        "depth": torch.tensor([1, -2, 3], dtype=torch.int16),
        "weights": torch.rand(3, 1),
        "wide": torch.rand(3, dtype=torch.float64),
    }
    return Batch(fields=fields, keys=torch.tensor([5, 6, 2**60]), start=40, epoch=3, corrupt=["x"], fetch_seconds=0.5)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_everything_comes_back(whole: Batch) -> None:
    result = whole.pack().unpack()
    same(result.fields, whole.fields)
    assert result.keys.tolist() == whole.keys.tolist() and result.keys.dtype == torch.int64
    assert (result.start, result.epoch, result.corrupt, result.fetch_seconds) == (40, 3, ["x"], 0.5)


def test_integers_take_few_bytes_and_others_are_as_they_were(whole: Batch) -> None:
    wire = whole.pack().wire
    assert wire is not None
    narrowed = {place.name: place.wire for place in wire.layout if place.wire != place.dtype}
    small = {"tokens": torch.int16, "labels": torch.int16, "groups": torch.uint8, "large": torch.int32}
    assert narrowed == small
    assert all(place.first % ALIGNMENT == 0 for place in wire.layout)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_the_ends_of_a_type_fit_and_what_is_beyond_does_not(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    assert narrowest(torch.tensor([ends.min, ends.max])) == dtype
    assert narrowest(torch.tensor([ends.max + 1])) != dtype
    assert narrowest(torch.tensor([ends.min - 1, ends.max])) != dtype


def test_a_device_gets_the_same_fields(whole: Batch) -> None:
    sent = whole.pack().unpack().to(META)
    described = {name: (value.shape, value.dtype) for name, value in sent.fields.items()}
    assert described == {name: (value.shape, value.dtype) for name, value in whole.fields.items()}
    assert all(value.device == META for value in sent.fields.values()) and sent.keys.device.type == "cpu"


def test_fields_that_were_changed_on_the_host_are_those_that_are_sent(whole: Batch) -> None:
    changed = replace(whole.pack().unpack(), fields={"tokens": torch.zeros(2, 2)})
    assert {name: value.shape for name, value in changed.to(META).fields.items()} == {"tokens": torch.Size([2, 2])}


class Streams:
    """Stands for torch.cuda: notes in which stream a copy was asked for, and what was waited for."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.inside = "present"
        self.present = SimpleNamespace(wait_stream=lambda stream: self.notes.append(("waits for", stream)))

    def Stream(self, device: torch.device) -> str:  # noqa: N802  torch's name
        return f"beside {device}"

    def current_stream(self, device: torch.device) -> Any:
        return self.present

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.inside = stream
        yield
        self.inside = "present"


def test_a_gpu_copies_one_buffer_beside_its_work(monkeypatch: pytest.MonkeyPatch, whole: Batch) -> None:
    streams, kept = Streams(), []
    monkeypatch.setattr(torch, "cuda", streams)
    monkeypatch.setattr(batches, "_streams", {})
    to: Callable[..., Tensor] = Tensor.to

    def copied(self: Tensor, target: Any, **named: Any) -> Tensor:
        if not isinstance(target, torch.device):
            return to(self, target, **named)
        streams.notes.append(("copies", self.dtype, self.dim(), streams.inside, named))
        return self.clone()

    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: kept.append(stream))
    sent = whole.pack().unpack().to(CUDA)
    beside = "beside cuda:0"
    assert streams.notes == [("copies", torch.uint8, 1, beside, {"non_blocking": True}), ("waits for", beside)]
    assert kept == [streams.present]
    same(sent.fields, whole.fields)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_text_are_a_quarter_of_what_they_were(tmp_path: Path, workers: int) -> None:
    dataset = write_dataset(tmp_path / "data", block_rows=[[5, 7, 3, 9]])
    sources = open_sources(config_for(dataset, data={"workers": workers}), rank=0, world=1)
    batch = sources.train.next_window()[0]
    sources.close()
    assert (batch.wire is not None) == (workers > 0)
    wire = batch.pack().wire
    assert wire is not None
    integers = [place for place in wire.layout if place.dtype == torch.int64 and place.name != "keys"]
    assert {place.name: place.wire.itemsize for place in integers} == {
        "tokens": 1 if int(batch["tokens"].max()) < 256 else 2,
        "token_types": 1,
        "masked_positions": 1,
        "labels": 1 if int(batch["labels"].max()) < 256 else 2,
        "label_groups": 1,
        "next_sentence": 1,
        "kept": 1 if int(batch["kept"].max()) < 256 else 2,
    }
