"""Groups: files of published data sets, figures against numpy and scikit-learn, refusals; real runs with groups, and
balanced sampling (task.py)."""

from __future__ import annotations

import csv
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score

from tests.runs import Refused, lines
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, sentences
from tests.unit.finetuning.test_finetune import tuning_flags
from tests.unit.finetuning.test_task import LABELS, all_blocks, whole
from trp_scale.cli import main as cli
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.plan import TrainPlan
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError, RefusedError
from trp_scale.finetuning.groups import GroupAccuracy, GroupRow, Groups, image_groups, read_group_file
from trp_scale.finetuning.measurement import image_keys
from trp_scale.finetuning.task import TaskObjective, sample_groups
from trp_scale.reporting.results import read_results

FILES = {
    "waterbirds.csv": "img_id,img_filename,y,split,place,place_filename\n"
    "1,001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg,1,0,0,/b/bamboo_forest/1.jpg\n"
    "2,004.Groove_billed_Ani/Ani_0002.jpg,0,2,1,/o/ocean/2.jpg\n",
    "list_attr_celeba.csv": "image_id,5_o_Clock_Shadow,Blond_Hair,Male\n000001.jpg,-1,1,-1\n000002.jpg,-1,-1,1\n",
    "all_data_with_identities.csv": "id,comment_text,split,toxicity,male,black\n"
    '7,"two lines,\nof a comment",train,0.6,0.0,0.5\n8,fine,test,0.2,1.0,\n',
    "own.csv": "file,label,group,split\na/1.png,0,tall,train\na/2.png,0,,train\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (
            "waterbirds.csv",
            [
                ("001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg", "1", "y 1, place 0"),
                ("004.Groove_billed_Ani/Ani_0002.jpg", "0", "y 0, place 1"),
            ],
        ),
        (
            "list_attr_celeba.csv",
            [
                ("000001.jpg", "1", "Blond_Hair 1, Male 0"),
                ("000002.jpg", "0", "Blond_Hair 0, Male 1"),
            ],
        ),
        (
            "all_data_with_identities.csv",
            [("two lines,\nof a comment", "1", "toxicity 1, black 1"), ("fine", "0", "")],
        ),
        (
            "all_data_with_identities.csv:male",
            [
                ("two lines,\nof a comment", "1", "toxicity 1, male 0"),
                ("fine", "0", "toxicity 0, male 1"),
            ],
        ),
        ("own.csv", [("a/1.png", "0", "tall"), ("a/2.png", "0", "")]),
    ],
)
def test_published_files_are_read(folder: Path, source: str, rows: list[tuple[str, ...]]) -> None:
    assert read_group_file(f"{folder}/{source}") == [GroupRow(*row) for row in rows]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name,group\na,b\n", "name"),
        ("file,label\na,0\n", "'group'"),
        ("img_filename,y,place\na.jpg,0,1\nb.jpg,water,1\n", "row 2, y"),
        ("file,group\na,b,c\n", "row 1"),
        ('file,group\n"a,b\n', "own.csv"),
    ],
)
def test_a_damaged_file_is_refused_by_its_row_and_column(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(DataError) as refused:
        read_group_file(str(tmp_path / "own.csv"))
    assert named in str(refused.value)


def test_images_are_found_by_the_end_of_their_keys(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        GroupRow("001.Albatross/a.jpg", "1", "y 1"),
        GroupRow("b.png", "land", "y 0"),
        GroupRow("c/d.jpg", "", "?"),
    ]
    keys = ["water/001%2EAlbatross/a", "land/x/b", "d", "c/d"]
    groups = image_groups(rows, keys, np.array([1, 0, 0, 0]), ("land", "water"), "birds.csv")
    assert groups == ["y 1", "y 0", "", "?"]
    assert "1 of 4" in caplog.text and "(d)" in caplog.text
    with pytest.raises(DataError, match="1 images") as refused:
        image_groups(rows, keys[:2], np.array([0, 0]), ("land", "water"), "birds.csv")
    assert "water/001%2EAlbatross/a" in str(refused.value)
    with pytest.raises(DataError, match="2 of 5"):
        image_groups([*rows, *rows[:2]], keys, np.array([1, 0, 0, 0]), ("land", "water"), "birds.csv")


def test_figures_are_those_of_scikit_learn_and_scipy() -> None:
    generator = np.random.default_rng(0)
    names = generator.choice(["a", "b", "c", "d"], 400, p=[0.5, 0.3, 0.19, 0.01])
    labels, predicted = generator.integers(0, 3, (2, 400))
    groups = Groups.from_names("own.csv", 10, list(names))
    accuracy = GroupAccuracy(NoMetrics(), groups)
    logits = torch.nn.functional.one_hot(torch.from_numpy(predicted), 3).float()
    for first in (200, 0):  # another order, and padding rows at the end
        weights = torch.ones(201)
        weights[200:] = 0
        part = np.append(np.arange(first, first + 200), 0)
        fields = {
            "labels": torch.from_numpy(labels[part]),
            "row_weights": weights,
            "groups": torch.from_numpy(groups.number(list(names[part]))),
        }
        accuracy.add(logits[part], Batch(fields=fields, keys=torch.from_numpy(part), start=first))
    figures = accuracy.finish(Group("data"))
    detail = figures["detail"]
    for name in "abcd":
        of_group = names == name
        share = accuracy_score(labels[of_group], predicted[of_group])
        hits = int((labels[of_group] == predicted[of_group]).sum())
        interval = stats.binomtest(hits, int(of_group.sum())).proportion_ci(0.95, method="wilson")
        assert detail["groups"][name]["accuracy"] == pytest.approx(share)
        assert detail["groups"][name]["count"] == of_group.sum()
        assert detail["groups"][name]["interval"] == pytest.approx([interval.low, interval.high])
    assert detail["rows"] == 400 and (names == "d").sum() < 10
    worst = min("abc", key=lambda name: accuracy_score(labels[names == name], predicted[names == name]))
    assert detail["worst_group"] == worst
    assert figures["group_average"] == pytest.approx(accuracy_score(labels, predicted))
    assert figures["worst_group"] == detail["groups"][worst]["accuracy"]
    assert figures["group_gap"] == pytest.approx(figures["group_average"] - figures["worst_group"])


class NoMetrics:
    """Metrics of a task whose only figure is the number of rows."""

    rows = 0

    def add(self, outputs: torch.Tensor, batch: Batch) -> None:
        self.rows += int(batch["row_weights"].sum())

    def finish(self, group: Group) -> dict[str, object]:
        return {"detail": {"rows": self.rows}}


def test_a_small_group_is_the_worst_only_if_asked() -> None:
    names = ["big"] * 10 + ["small"] * 3
    right = np.array([True] * 9 + [False] * 4)
    figures = {
        least: Groups.from_names("x", least, names).summarise(np.repeat([0, 1], [10, 3]), right) for least in (10, 3)
    }
    assert figures[10]["worst_group"] == 0.9 and figures[10]["detail"]["worst_group"] == "big"
    assert figures[3]["worst_group"] == 0.0 and figures[3]["group_gap"] == pytest.approx(9 / 13)
    assert figures[10]["detail"]["groups"]["small"]["count"] == 3
    assert "worst_group" not in Groups.from_names("x", 11, names).summarise(np.repeat([0, 1], [10, 3]), right)


def test_rows_without_a_group_are_counted_and_named() -> None:
    groups = Groups.from_names("own.csv", 10, ["a", "", "b", ""])
    groups.require(groups.number(["a", "b"]), "training")
    with pytest.raises(RefusedError, match="2 of 4") as refused:
        groups.require(groups.number(["a", "", "b", ""]), "training")
    assert "own.csv" in str(refused.value) and "1, 3" in str(refused.value)


GROUPS = ("long", "short", "rare")


def write_sst2(root: Path, train: int, dev: int) -> Path:
    """SST-2's columns, and the group of each sentence: one in ten is rare."""
    rows = [
        f"{text}\t{number % 2}\t{'rare' if number % 10 == 0 else GROUPS[number % 3 > 0]}\n"
        for number, text in enumerate(sentences(train + dev))
    ]
    (root / "SST-2").mkdir(parents=True)
    for name, part in (("train", rows[:train]), ("dev", rows[train:])):
        (root / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\tkind\n" + "".join(part), encoding="utf-8")
    return root


def text_flags(text_dataset: Path, tmp_path: Path, **changes: object) -> list[str]:
    root = tmp_path / "data" if (tmp_path / "data").exists() else write_sst2(tmp_path / "data", 40, 120)
    values = {
        "downstream__tokenizer": text_dataset / "tokenizer",
        "downstream__epochs": 0,
        "training__steps": 5,
        **changes,
    }
    return glue_flags(root, tmp_path / "run", "sst2", "scratch", **values)


def test_groups_of_sentences_are_reported_and_balanced(text_dataset: Path, tmp_path: Path) -> None:
    """Group DRO on balanced batches; the first weights are those of Sagawa et al., Algorithm 1."""
    dro = {"downstream__groups": "kind", "downstream__group_sampling": "balanced", "balancer__kind": "group_dro"}
    changes = {**dro, "balancer__rate": 0.5, "batch__global_size": 12, "batch__micro_size": 6}
    assert finetune_here(text_flags(text_dataset, tmp_path, **changes)) == 0
    steps = [line for line in lines(tmp_path / "run" / "sst2" / "seed_0") if "tasks" in line and "lr" in line]
    assert steps and all(
        {name: task["count"] for name, task in line["tasks"].items()} == dict.fromkeys(sorted(GROUPS), 4)
        for line in steps
    )
    shares = np.full(3, 1 / 3)
    for line in steps:
        shares = shares * np.exp(0.5 * np.array([line["tasks"][name]["loss"] for name in sorted(GROUPS)]))
        shares /= shares.sum()
        assert [line["tasks"][name]["weight"] for name in sorted(GROUPS)] == pytest.approx(shares.tolist(), rel=1e-5)
    (task,) = read_results(tmp_path / "run").tasks
    detail = task.detail[0]
    assert {name: entry["count"] for name, entry in detail["groups"].items()} == {"long": 36, "short": 72, "rare": 12}
    assert sum(entry["count"] * entry["accuracy"] for entry in detail["groups"].values()) / 120 == pytest.approx(
        task.metrics["accuracy"][0]
    )
    assert task.metrics["worst_group"][0] == min(entry["accuracy"] for entry in detail["groups"].values())
    assert task.count == 120


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"downstream__groups": "shape"}, "'shape'"),
        ({"downstream__group_sampling": "balanced"}, "--downstream.group_sampling"),
        ({"downstream__groups": "kind", "downstream__group_sampling": "balanced", "downstream__rows": 8}, "rows 8"),
    ],
)
def test_other_columns_and_settings_are_refused(
    text_dataset: Path, tmp_path: Path, refused: Refused, changes: dict[str, object], named: str
) -> None:
    assert named in refused("finetune", *text_flags(text_dataset, tmp_path, **changes))


def write_image_groups(dataset: Path, path: Path, omitted: int = 0, number: int = 2) -> dict[str, str]:
    """Write a file with one of `number` groups for each image, in turn; return the groups by key in stored order.

    Args:
        omitted: rows that the file lacks.
    """
    opened = open_image_dataset(dataset)
    keys, labels = image_keys(opened), opened.samples.labels.tolist()
    groups = {key: f"group {row % number}" for row, key in enumerate(keys)}
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "label", "group"])
        writer.writerows(
            [f"{key}.jpg", label, groups[key]] for key, label in [*zip(keys, labels, strict=True)][omitted:]
        )
    return groups


def test_groups_of_images_are_those_of_the_predictions(image_dataset: Path, tmp_path: Path) -> None:
    groups = write_image_groups(image_dataset, tmp_path / "groups.csv")
    changes = {"downstream__groups": tmp_path / "groups.csv", "downstream__least_group": 1}
    assert cli.main(["finetune", *tuning_flags(image_dataset, tmp_path / "run", "scratch", **changes)]) == 0
    (task,) = read_results(tmp_path / "run").tasks
    seed_dir = tmp_path / "run" / "classification" / "seed_0"
    assert not {"group 0", "group 1"} - set(task.detail[0]["groups"])
    saved = ["--predictions", str(tmp_path / "saved"), "--output", str(tmp_path / "again")]
    assert cli.main(["evaluate", "--run", str(seed_dir), *saved]) == 0
    rows = list(csv.DictReader((tmp_path / "saved" / "classification.csv").open()))
    right = {
        name: np.array([row["predicted"] == row["label"] for row in rows if groups[row["key"]] == name])
        for name in ("group 0", "group 1")
    }
    for detail in (task.detail[0], read_results(tmp_path / "again").tasks[0].detail[0]):
        assert {name: entry["accuracy"] for name, entry in detail["groups"].items()} == {
            name: pytest.approx(values.mean()) for name, values in right.items()
        }
    assert task.metrics["worst_group"][0] == pytest.approx(min(values.mean() for values in right.values()))


def test_training_rows_without_a_group_are_refused_if_groups_are_trained(
    image_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    write_image_groups(image_dataset, tmp_path / "groups.csv", omitted=5)
    changes = {"downstream__groups": tmp_path / "groups.csv", "downstream__group_sampling": "balanced"}
    message = refused("finetune", *tuning_flags(image_dataset, tmp_path / "run", "scratch", **changes))
    assert "groups.csv" in message and " of " in message


def test_balanced_batches_have_as_many_rows_of_each_group() -> None:
    """No row of a group is repeated before all of its rows are used."""
    names = [np.where(labels < 1, "rare", "usual").tolist() for labels in LABELS]
    names[0][:10] = ["third"] * 10
    groups = Groups.from_names("own.csv", 10, *names)
    allowed = all_blocks()
    allowed[1][:4] = False
    rows, paths = sample_groups(groups.attach(whole(), names), allowed, groups)
    chosen = [np.ones(len(table.rows), dtype=np.bool_) for table in rows.blocks]
    plan = TrainPlan(seed=3, members=rows.members(paths, chosen), blocks_per_group=4)
    batch = rows.builder.build(plan.locate(np.arange(30)), 0)
    assert [path.weight for path in paths] == [Fraction(1)] * 3 and plan.rows == 260
    assert (batch["groups"].view(10, 3).sort(1).values == torch.arange(3)).all()
    third = batch["groups"] == groups.names.index("third")
    assert sorted(batch["row"][third].tolist()) == list(range(10)) and not batch["block"][third].any()
    stored = zip(*(batch[name].tolist() for name in ("member", "block", "row", "groups")), strict=True)
    assert all(names[member][10 * block + row] == groups.names[number] for member, block, row, number in stored)
    assert all(allowed[member][block] for member, block in zip(batch["member"], batch["block"], strict=True))


def test_losses_of_groups_are_sums_over_their_rows() -> None:
    objective = TaskObjective()
    objective.balance_groups(Groups(source="x", names=("a", "b", "c"), least=10))
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    fields = {"groups": torch.tensor([0, 2, 0, 2, -1]), "row_weights": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])}
    sums = objective.sum_rows(losses, Batch(fields=fields, keys=torch.arange(5), start=0))
    assert objective.tasks == ("a", "b", "c") and objective.balanced == (0, 1, 2)
    assert sums.sums.tolist() == [5.0, 0.0, 2.0] and sums.counts.tolist() == [2.0, 0.0, 1.0]


def test_a_run_without_groups_is_measured_by_group(
    image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    """Only the measured images need a group; the table has a line for each."""
    assert cli.main(["finetune", *tuning_flags(image_dataset, tmp_path / "run", "scratch")]) == 0
    groups = write_image_groups(image_dataset, tmp_path / "groups.csv")
    command = ["evaluate", "--run", str(tmp_path / "run"), "--groups", str(tmp_path / "groups.csv")]
    assert cli.main([*command, "--output", str(tmp_path / "by_group")]) == 0
    (task,) = read_results(tmp_path / "by_group").tasks
    detail = task.detail[0]
    assert sum(entry["count"] for entry in detail["groups"].values()) == task.count < len(groups)
    printed = capsys.readouterr().out
    for name, entry in detail["groups"].items():
        assert re.search(rf"{name} .* {entry['accuracy']:.4f} \[.*\] of {entry['count']}\b", printed)
    assert "worst group" in printed
    lines_of_file = (tmp_path / "groups.csv").read_text().splitlines()
    (tmp_path / "groups.csv").write_text("\n".join(lines_of_file[:3]) + "\n")
    assert f" of {task.count} measured rows" in refused(*command, "--output", tmp_path / "missing")
