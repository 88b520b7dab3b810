"""Each GLUE task's file: how many rows, the first and the last, and the numbers of the labels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.finetuning.glue.small_data import FILES, write_glue
from trp_scale.config import RefusedError
from trp_scale.errors import DataError
from trp_scale.finetuning.glue.folders import FORMATS, find_folder, read_glue, read_tsv, require_folders

READ: dict[str, tuple[list[float], tuple[str, ...], tuple[str, ...]]] = {
    "cola": ([1, 0, 1], ("Our friends won't buy this.",), ("The cat sat.",)),
    "sst2": ([0, 1, 1, 0], ("hide new secretions ",), ("dull ",)),
    "mrpc": (
        [1, 0],
        ('Amrozi accused " the witness " .', "Referring to him ."),
        ("Yucaipa owned Dominick 's .", '" Yucaipa bought .'),
    ),
    "stsb": (
        [5.0, 3.8],
        ("A plane is taking off.", "An air plane takes off."),
        ("A man plays.", "A man is playing a flute."),
    ),
    "qqp": ([0, 1], ("How is it?", "How?"), ("How do I control it?", "How do you control it?")),
    "mnli": ([1, 0, 2, 1], ("premise 0", "hypothesis 0"), ("premise 3", "hypothesis 3")),
    "qnli": ([0, 1], ("When?", "In 1990."), ("Who?", "None")),
    "rte": ([1, 0], ("No weapons.", "Weapons found."), ("A place of sorrow.", "Pope dies.")),
    "wnli": ([1], ("I stuck a pin.", "The carrot had a hole."), ("I stuck a pin.", "The carrot had a hole.")),
}
"""Of each training file: all labels, the first and the last example."""


@pytest.mark.parametrize("task", FORMATS)
def test_rows_and_labels_of_every_task(tmp_path: Path, task: str) -> None:
    labels, first, last = READ[task]
    data = read_glue(write_glue(tmp_path), task, split="dev", max_bad_lines=0)
    assert data.train.labels is not None and data.train.labels.tolist() == labels
    assert tuple(texts[0] for texts in data.train.sentences) == first
    assert tuple(texts[-1] for texts in data.train.sentences) == last
    assert {len(texts) for texts in data.train.sentences} == {len(labels)}
    assert data.notices == []


def test_mnli_is_measured_on_both_its_sets(tmp_path: Path) -> None:
    data = read_glue(write_glue(tmp_path), "mnli", split="dev", max_bad_lines=0)
    assert {name: len(found.line_numbers) for name, found in data.measured.items()} == {"matched": 3, "mismatched": 2}
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    data = read_glue(tmp_path, "mnli", split="dev", max_bad_lines=0)
    assert list(data.measured) == ["matched"]
    assert "no dev_mismatched" in data.notices[0]


@pytest.mark.parametrize("name", ["CoLA/train.tsv", "MRPC/train.tsv"])
def test_marks_and_line_ends_change_nothing(tmp_path: Path, name: str) -> None:
    task = next(task for task, form in FORMATS.items() if form.folder == name.split("/")[0])
    plain = FILES[name].replace("\ufeff", "").replace("\r\n", "\n")
    read: list[Any] = []
    for content in (plain, "\ufeff" + plain, plain.replace("\n", "\r\n"), plain.removesuffix("\n")):
        (tmp_path / "file.tsv").write_bytes(content.encode("utf-8"))
        found = read_tsv(tmp_path / "file.tsv", FORMATS[task])
        assert found.labels is not None
        read.append((found.sentences, found.labels.tolist(), found.line_numbers))
    assert read.count(read[0]) == 4


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    content = 'sentence\tlabel\na\u2028b\x85c\x0cd\t1\n"open\t0\n\'"\t1\n'
    (tmp_path / "train.tsv").write_bytes(content.encode("utf-8"))
    found = read_tsv(tmp_path / "train.tsv", FORMATS["sst2"])
    assert found.sentences == (["a\u2028b\x85c\x0cd", '"open', "'\""],)


def refusal(tmp_path: Path, task: str, content: bytes, **arguments: Any) -> str:
    (tmp_path / "train.tsv").write_bytes(content)
    with pytest.raises(DataError) as refused:
        read_tsv(tmp_path / "train.tsv", FORMATS[task], **arguments)
    return str(refused.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("task", "content", "named"),
    [
        (
            "sst2",
            b"sentence\tlabel\nfine\t1\nshort\nx\t0\ty\n",
            ["/train.tsv:3: 1 columns found, 2 expected", "1 more"],
        ),
        ("cola", b"gj04\t1\t\tFine.\ngj04\t1\tnotes lost\n", ["/train.tsv:2: 3 columns found, 4 expected"]),
        ("sst2", b"sentence\tlabel\nfine\t1\n\nfine\t1\n", ["/train.tsv:3: 1 columns"]),
        ("mrpc", b"Quality\t#1 ID\t#2 ID\t#1 String\n", ["/train.tsv:1", "'#2 String' or 'sentence2'", "'Quality'"]),
        ("sst2", b"sentence\tlabel\nfine\t2\n", ["/train.tsv:2", "'2'", "0, 1"]),
        (
            "rte",
            b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n",
            ["/train.tsv:2", "'1'", "entailment, not_entailment"],
        ),
        ("stsb", b"sentence1\tsentence2\tscore\na\tb\tnan\n", ["/train.tsv:2", "'nan'", "a number"]),
        ("sst2", b"sentence\tlabel\nfine\t1\nbad\t-1\n", ["/train.tsv:3", "'-1'"]),
        ("sst2", b"sentence\tlabel\n", ["/train.tsv: no examples"]),
        ("sst2", b"", ["/train.tsv:1", "'sentence'"]),
        ("sst2", b"sentence\tlabel\nfine\t1\n\xff\xfe\t1\n", ["/train.tsv:3: not UTF-8"]),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, task: str, content: bytes, named: list[str]) -> None:
    message = refusal(tmp_path, task, content)
    assert all(part in message for part in named), message


def test_broken_lines_are_left_out_and_named_where_that_is_allowed(tmp_path: Path) -> None:
    """As in the published QQP: a line end within a question."""
    content = FILES["QQP/train.tsv"] + '5\t6\t7\tWhat is "\n\thistory?\t0\n9\t10\t11\tWho?\tWho is?\t1\n'
    assert "/train.tsv:4: 4 columns found, 6 expected" in refusal(tmp_path, "qqp", content.encode(), max_bad_lines=1)
    found = read_tsv(tmp_path / "train.tsv", FORMATS["qqp"], max_bad_lines=2)
    assert found.labels is not None and found.labels.tolist() == [0, 1, 1]
    assert found.line_numbers == [2, 3, 6]
    assert [line.rpartition("/")[2] for line in found.left_out] == [
        "train.tsv:4: 4 columns found, 6 expected",
        "train.tsv:5: 3 columns found, 6 expected",
    ]


def test_test_files_have_no_labels(tmp_path: Path) -> None:
    root = write_glue(tmp_path)
    for name, task, last in (("CoLA", "cola", "It."), ("SST-2", "sst2", "uneasy mishmash")):
        found = read_tsv(root / name / "test.tsv", FORMATS[task])
        assert found.labels is None and found.sentences[0][-1] == last
    kept_back = b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\t-1\n1\ta\tb\t-1\n"
    (root / "RTE" / "test.tsv").write_bytes(kept_back)
    assert read_tsv(root / "RTE" / "test.tsv", FORMATS["rte"]).labels is None
    for task in ("cola", "rte"):
        found_test = read_glue(root, task, split="test", max_bad_lines=0)
        assert "--predictions DIR" in found_test.unlabelled
        assert read_glue(root, task, split="dev", max_bad_lines=0).unlabelled == ""


def test_folders_are_found_by_their_usual_spellings(tmp_path: Path) -> None:
    for spelling in ("SST-2", "SST2", "sst_2"):
        root = tmp_path / spelling.replace("-", "x")
        write_glue(root, {f"{spelling}/train.tsv": FILES["SST-2/train.tsv"]})
        assert find_folder(root, "sst2") == root / spelling
        assert find_folder(root / spelling, "sst2") == root / spelling
    write_glue(tmp_path / "two", {"sst2/train.tsv": "", "SST2/train.tsv": ""})
    with pytest.raises(DataError, match="SST2 and sst2"):
        find_folder(tmp_path / "two", "sst2")


def test_all_missing_tasks_are_named_at_once(tmp_path: Path) -> None:
    root = write_glue(
        tmp_path, {name: text for name, text in FILES.items() if name.split("/")[0] not in ("RTE", "QNLI")}
    )
    with pytest.raises(DataError, match=r"(?s).*--task.*cola,sst2$") as refused:
        require_folders(root, ["cola", "qnli", "sst2", "rte"])
    assert "MNLI" in str(refused.value)
    (root / "SST-2" / "dev.tsv").unlink()
    with pytest.raises(DataError, match=r"SST-2: no dev\.tsv"):
        read_glue(root, "sst2", split="dev", max_bad_lines=0)


REAL = {
    "cola": (8551, 1043, 1, "Our friends won't buy this analysis, let alone the next one we propose."),
    "sst2": (67349, 872, 0, "hide new secretions from the parental units "),
    "stsb": (5749, 1500, 5.0, "A plane is taking off."),
}
"""Of the published files: training and dev rows, the first label and sentence."""


@pytest.mark.parametrize("task", REAL)
def test_the_published_files(task: str) -> None:
    if not (root := os.environ.get("TRP_SCALE_GLUE")):
        pytest.skip("TRP_SCALE_GLUE is not set: the directory of the published GLUE files")
    train, dev, label, sentence = REAL[task]
    data = read_glue(Path(root), task, split="dev", max_bad_lines=0)
    assert (len(data.train.line_numbers), len(data.measured[""].line_numbers)) == (train, dev)
    assert data.train.labels is not None and data.train.labels[0] == label
    assert data.train.sentences[0][0] == sentence


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
    read = read_glue(root, task, split="dev", max_bad_lines=0)
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
    files = read_glue(root, task, split="dev", max_bad_lines=0)
    # MNLI also with its names in another order: a label goes by its name.
    other = ("contradiction", "entailment", "neutral") if task == "mnli" else ()
    directory = save(root, tmp_path, task, other)
    found = read_glue(directory, task, split="dev", max_bad_lines=0)
    assert list(found.measured) == list(files.measured) and not found.notices
    for one in found.measured.values():
        assert one.indices == [str(row) for row in range(len(one.line_numbers))], "GLUE's server knows rows by them"
    for ours, theirs in (
        (found.train, files.train),
        *zip(found.measured.values(), files.measured.values(), strict=True),
    ):
        assert ours.sentences == theirs.sentences and ours.name == theirs.name
        assert ours.labels is not None and ours.labels.tolist() == pytest.approx(theirs.labels.tolist())  # type: ignore[union-attr]


def test_errors_of_dataset_directories(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="bad, good"):
        directory = tmp_path / "b" / "sst2"
        rows = datasets.Dataset.from_dict(
            {"sentence": ["x", "y"], "label": [0, 1]},
            features=datasets.Features(
                {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
            ),
        )
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(directory))
        read_glue(tmp_path / "b", "sst2", split="dev", max_bad_lines=0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sentence": ["x", "y"], "label": [0, 2]}, r"split train, row 1: label 2 found"),
        ({"sentence": ["x", "y"], "label": [0, -1]}, r"row 1: label -1 found"),
        ({"sentence": ["x", None], "label": [0, 1]}, r"row 1: NoneType found, a sentence expected"),
        ({"text": ["x", "y"], "label": [0, 1]}, r"no column 'sentence'; found: 'text', 'label'"),
        ({"sentence": ["x", "y"], "label": ["positive", "no"]}, r"row 0: label 'positive' found"),
        ({"sentence": ["x", "y"], "label": [-1, -1]}, r"train has no labels"),
        ({"sentence": ["x", "y"], "label": [None, None]}, r"train has no labels"),
    ]
    for number, (values, message) in enumerate(cases):
        rows = datasets.Dataset.from_dict(values)
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / str(number) / "sst2"))
        with pytest.raises(RefusedError, match=message):
            read_glue(tmp_path / str(number), "sst2", split="dev", max_bad_lines=0)


@pytest.mark.parametrize("damage", ["arrow", "json", "split"])
def test_a_damaged_directory_is_refused_by_its_name(tmp_path: Path, damage: str) -> None:
    directory = save(write_glue(tmp_path / "tsv"), tmp_path, "sst2") / "sst2"
    if damage == "split":
        shutil.rmtree(directory / "train")
    for path in directory.rglob({"arrow": "*.arrow", "json": "dataset_dict.json", "split": "nothing"}[damage]):
        path.write_text("{")
    with pytest.raises(DataError, match=rf"^{directory}:"):
        read_glue(tmp_path / "hf", "sst2", split="dev", max_bad_lines=0)


@pytest.mark.parametrize(("kept", "missing"), [("train", "validation"), ("validation", "train")])
def test_a_split_that_is_missing_is_named_as_it_is_called_there(tmp_path: Path, kept: str, missing: str) -> None:
    rows = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [0, 1]})
    datasets.DatasetDict({kept: rows}).save_to_disk(str(tmp_path / "sst2"))
    with pytest.raises(DataError, match=rf"sst2: .*{missing}.*dataset_dict\.json"):
        read_glue(tmp_path, "sst2", split="dev", max_bad_lines=0)


def test_a_column_gives_the_groups_of_tasks_with_labels(tmp_path: Path) -> None:
    root = write_glue(tmp_path)
    data = read_glue(root, "mnli", split="dev", max_bad_lines=0, group_column="genre")
    assert data.train.groups == ["fiction"] * 4
    assert {name: examples.groups for name, examples in data.measured.items()} == {
        "matched": ["fiction"] * 3,
        "mismatched": ["fiction"] * 2,
    }
    with pytest.raises(DataError, match="'shape'"):
        read_glue(root, "mnli", split="dev", max_bad_lines=0, group_column="shape")
    with pytest.raises(RefusedError, match="stsb"):
        read_glue(root, "stsb", split="dev", max_bad_lines=0, group_column="genre")
