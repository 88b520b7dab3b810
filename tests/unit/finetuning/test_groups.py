"""Groups: the files of the published data sets, the figures against numpy and scikit-learn, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score

from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError, RefusedError
from trp_scale.finetuning.groups import GroupAccuracy, GroupRow, Groups, image_groups, read_group_file

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
