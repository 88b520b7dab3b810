"""GLUE out of Hugging Face dataset directories: the same examples as out of the files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.finetuning.glue.standard_files import write_glue
from trp_scale.config import RefusedError
from trp_scale.errors import DataError
from trp_scale.finetuning.glue.folders import FORMATS, read_glue

datasets = pytest.importorskip("datasets")

COLUMNS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
}
"""Hugging Face's names of the sentences; sentence1 and sentence2 elsewhere."""


def save(root: Path, tmp_path: Path, task: str, names: tuple[str, ...] = ()) -> Path:
    """What the TSV files below `root` hold, as save_to_disk writes it; labels numbered in the order of `names`."""
    form = FORMATS[task]
    read = read_glue(root, task, split="dev", allowed_bad=0)
    names = names or form.names
    splits = {"train": read.train} | {f"validation_{name}".rstrip("_"): one for name, one in read.measured.items()}
    columns = COLUMNS.get(task, ("sentence1", "sentence2"))
    stored = {}
    for split, examples in splits.items():
        assert examples.labels is not None
        numbers = [names.index(form.names[int(label)]) if names else label for label in examples.labels]
        values: dict[str, Any] = dict(zip(columns, examples.sentences, strict=True))
        values |= {"label": numbers, "idx": list(range(len(numbers)))}
        features = datasets.Features(
            {name: datasets.Value("string") for name in columns}
            | {"label": datasets.ClassLabel(names=list(names)) if names else datasets.Value("float32")}
            | {"idx": datasets.Value("int32")}
        )
        stored[split] = datasets.Dataset.from_dict(values, features=features)
    datasets.DatasetDict(stored).save_to_disk(str(tmp_path / "hf" / task))
    return tmp_path / "hf"


@pytest.mark.parametrize("task", FORMATS)
def test_both_forms_are_the_same_examples(tmp_path: Path, task: str) -> None:
    root = write_glue(tmp_path / "tsv")
    files = read_glue(root, task, split="dev", allowed_bad=0)
    # MNLI also with its names in another order: a label goes by its name.
    other = ("contradiction", "entailment", "neutral") if task == "mnli" else ()
    directory = save(root, tmp_path, task, other)
    found = read_glue(directory, task, split="dev", allowed_bad=0)
    assert list(found.measured) == list(files.measured) and not found.notices
    for one in found.measured.values():
        assert one.indices == [str(row) for row in range(len(one.places))], "GLUE's server knows rows by them"
    for ours, theirs in (
        (found.train, files.train),
        *zip(found.measured.values(), files.measured.values(), strict=True),
    ):
        assert ours.sentences == theirs.sentences and ours.name == theirs.name
        assert ours.labels is not None and ours.labels.tolist() == pytest.approx(theirs.labels.tolist())  # type: ignore[union-attr]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="bad, good"):
        directory = tmp_path / "b" / "sst2"
        rows = datasets.Dataset.from_dict(
            {"sentence": ["x", "y"], "label": [0, 1]},
            features=datasets.Features(
                {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
            ),
        )
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(directory))
        read_glue(tmp_path / "b", "sst2", split="dev", allowed_bad=0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sentence": ["x", "y"], "label": [0, 2]}, r"split train, row 1: label 2 found, 0 to 1 expected"),
        ({"sentence": ["x", "y"], "label": [0, -1]}, r"row 1: label -1 found"),
        ({"sentence": ["x", None], "label": [0, 1]}, r"row 1: NoneType found, a sentence expected"),
        ({"text": ["x", "y"], "label": [0, 1]}, r"no column 'sentence'; found: 'text', 'label'"),
        ({"sentence": ["x", "y"], "label": ["positive", "no"]}, r"row 0: label 'positive' found, 0 to 1 expected"),
        ({"sentence": ["x", "y"], "label": [-1, -1]}, r"train has no labels"),
        ({"sentence": ["x", "y"], "label": [None, None]}, r"train has no labels"),
    ]
    for number, (values, message) in enumerate(cases):
        rows = datasets.Dataset.from_dict(values)
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / str(number) / "sst2"))
        with pytest.raises(RefusedError, match=message):
            read_glue(tmp_path / str(number), "sst2", split="dev", allowed_bad=0)


@pytest.mark.parametrize("damage", ["arrow", "json", "split"])
def test_a_damaged_directory_is_refused_by_its_name(tmp_path: Path, damage: str) -> None:
    directory = save(write_glue(tmp_path / "tsv"), tmp_path, "sst2") / "sst2"
    if damage == "split":
        shutil.rmtree(directory / "train")
    for path in directory.rglob({"arrow": "*.arrow", "json": "dataset_dict.json", "split": "nothing"}[damage]):
        path.write_text("{")
    with pytest.raises(DataError, match=rf"^{directory}:"):
        read_glue(tmp_path / "hf", "sst2", split="dev", allowed_bad=0)


@pytest.mark.parametrize(("kept", "missing"), [("train", "validation"), ("validation", "train")])
def test_a_split_that_is_missing_is_named_as_it_is_called_there(tmp_path: Path, kept: str, missing: str) -> None:
    rows = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [0, 1]})
    datasets.DatasetDict({kept: rows}).save_to_disk(str(tmp_path / "sst2"))
    with pytest.raises(DataError, match=rf"sst2: .*{missing}.*dataset_dict\.json"):
        read_glue(tmp_path, "sst2", split="dev", allowed_bad=0)
