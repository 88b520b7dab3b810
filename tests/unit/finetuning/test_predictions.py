"""`trp-scale evaluate --predictions`: files that say what the figures say, in the forms that others read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import copy_dataset
from tests.runs import Refused
from tests.unit.data.images.stored import write_images
from tests.unit.evaluation.test_evaluate import reddish
from tests.unit.finetuning.dense.test_task import flags as dense_flags
from tests.unit.finetuning.detection.small_sets import small_scenes
from tests.unit.finetuning.glue.small_data import FILES, MNLI_COLUMNS, finetune_here, glue_flags, write_glue
from trp_scale.cli import main as cli
from trp_scale.data.images.dataset import RowReader, open_image_dataset
from trp_scale.data.plan import HeldOutPlan, MixtureMember, held_out
from trp_scale.distributed.groups import ALONE
from trp_scale.errors import DataError
from trp_scale.finetuning.glue.task import GlueSubmission
from trp_scale.finetuning.measurement import image_names
from trp_scale.reporting.results import read_results

TESTS = {
    "CoLA/test.tsv": "index\tsentence\n0\tBill whistled past.\n1\tIt.\n2\tHe ran away.\n",
    "MNLI/test_matched.tsv": "".join(
        [f"{MNLI_COLUMNS}\n", *(f"{row}\t\t\t\t\t\t\t\tpremise {row}\tmore {row}\n" for row in range(5))]
    ),
    "MNLI/test_mismatched.tsv": "".join(
        [f"{MNLI_COLUMNS}\n", *(f"{row}\t\t\t\t\t\t\t\tpremise {row}\tless {row}\n" for row in range(3))]
    ),
    "RTE/test.tsv": "index\tsentence1\tsentence2\n0\tNo weapons.\tWeapons.\n1\tA place.\tA pope.\n",
    "STS-B/test.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
    + "".join(f"{row}\t\t\t\t\t\t\tA man {row}.\tA man dances.\n" for row in range(4)),
    "QQP/test.tsv": "id\tquestion1\tquestion2\n7\tWould it?\tWould it so?\n8\tWhy?\tWhen?\n",
}
"""GLUE's test sets, which have no labels."""


def table(path: Path, delimiter: str = "\t") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")), delimiter=delimiter))


@pytest.fixture(scope="module")
def glue(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on five tasks; the data lies beside it."""
    directory = tmp_path_factory.mktemp("glue")
    root = write_glue(directory / "data", {**FILES, **TESTS})
    changes = {"downstream__tokenizer": text_dataset / "tokenizer", "downstream__epochs": 0, "training__steps": 1}
    assert finetune_here(glue_flags(root, directory / "run", "cola,mnli,rte,stsb,qqp", "scratch", **changes)) == 0
    return directory / "run"


def test_test_sets_without_labels_become_the_files_that_glue_s_server_takes(
    glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    run, out = ["--run", str(glue), "--split", "test"], tmp_path / "out"
    said = " ".join(refused("evaluate", *run).split())
    assert "has no labels" in said and "trp-scale evaluate --split test --predictions DIR" in said
    assert cli.main(["evaluate", *run, "--predictions", str(out), "--output", str(tmp_path / "results")]) == 0
    assert str(out / "MNLI-mm.tsv") in capsys.readouterr().out
    assert not (tmp_path / "results" / "results.json").exists()
    expected = {
        "CoLA": (["0", "1", "2"], {"0", "1"}),
        "MNLI-m": (["0", "1", "2", "3", "4"], {"entailment", "neutral", "contradiction"}),
        "MNLI-mm": (["0", "1", "2"], {"entailment", "neutral", "contradiction"}),
        "RTE": (["0", "1"], {"entailment", "not_entailment"}),
        "STS-B": (["0", "1", "2", "3"], None),
        "QQP": (["7", "8"], {"0", "1"}),
    }
    assert {path.stem for path in out.iterdir()} == set(expected)
    for name, (indices, allowed) in expected.items():
        assert (out / f"{name}.tsv").read_text().startswith("index\tprediction\n")
        lines = table(out / f"{name}.tsv")
        assert [line["index"] for line in lines] == indices
        if allowed is not None:
            assert {line["prediction"] for line in lines} <= allowed
        else:
            assert all(0 <= float(line["prediction"]) <= 5 for line in lines)


def test_predictions_of_labelled_rows_are_those_of_the_figures(glue: Path, tmp_path: Path) -> None:
    assert cli.main(["evaluate", "--run", str(glue), "--predictions", str(tmp_path), "--output", str(tmp_path)]) == 0
    (mnli,) = (task for task in read_results(tmp_path).tasks if task.task == "mnli")
    gold = ["neutral", "entailment", "contradiction"]
    given = [line["prediction"] for line in table(tmp_path / "MNLI-m.tsv")]
    assert mnli.values[0] == pytest.approx(np.mean([one == two for one, two in zip(given, gold, strict=True)]))


def test_scores_are_clipped_to_their_range(tmp_path: Path) -> None:
    submission = GlueSubmission("stsb", {}, tmp_path, ALONE)
    assert [submission.format_prediction(score) for score in (-0.2, 1.23456, 7.0)] == ["0.000", "1.235", "5.000"]


def test_maps_lie_at_the_images_keys_in_the_data_s_own_numbers(image_dataset: Path, tmp_path: Path) -> None:
    """Figures worked out from the files, with a class left out of what is learned."""
    short = {"downstream__epochs": 0, "training__steps": 3, "optimizer__lr": 1e-2}
    kinds = {"segmentation": ["--dense.ignored", "0"], "depth": ["--dense.region", "whole"]}
    for kind, more in kinds.items():
        assert cli.main(["finetune", *dense_flags(kind, image_dataset, tmp_path / kind, **short), *more]) == 0
        words = ["evaluate", "--run", str(tmp_path / kind), "--predictions", str(tmp_path / "out")]
        assert cli.main([*words, "--output", str(tmp_path / f"found_{kind}")]) == 0
    dataset = open_image_dataset(image_dataset, used=("depth", "semseg"))
    chosen = held_out(dataset.blocks.identities, 0.2, where="")
    plan = HeldOutPlan(members=[MixtureMember(name="", weight=None, table=dataset.blocks, chosen=chosen)])  # type: ignore[arg-type]
    rows = RowReader([dataset], dataset.meta, verify=True).read(plan.locate(np.arange(plan.rows)))
    names = image_names(plan, [dataset])
    assert len(set(names)) == plan.rows and "/" not in names[0]
    right = labelled = near = measured = 0
    for name, sample in zip(names, rows.samples, strict=True):
        assert sample is not None
        classes = np.asarray(Image.open(tmp_path / "out" / "segmentation" / f"{name}.png"))
        depth = np.asarray(Image.open(tmp_path / "out" / "depth" / f"{name}.png"))
        assert classes.dtype == np.uint8 and depth.dtype == np.uint16 and classes.shape == depth.shape == sample.size
        assert 0 not in classes
        there = ~np.isin(sample.maps["semseg"], (0, 255))
        right, labelled = right + int((classes == sample.maps["semseg"])[there].sum()), labelled + int(there.sum())
        true, found = sample.maps["depth"].astype(np.float64), depth.astype(np.float64)
        there = true > 0
        ratio = np.maximum(true[there] / found[there], found[there] / true[there])
        near, measured = near + int((ratio < 1.25).sum()), measured + int(there.sum())
    (segmented,) = read_results(tmp_path / "found_segmentation").tasks
    (distances,) = read_results(tmp_path / "found_depth").tasks
    assert segmented.metrics["pixel_accuracy"][0] == right / labelled > 0
    assert distances.metrics["delta_1"][0] == pytest.approx(near / measured, abs=2e-3)


def test_detections_are_read_by_coco_beside_the_annotations(tmp_path: Path) -> None:
    """Image and category ids with gaps: AP of the file is that of the run."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    from tests.distributed.test_finetune import detection_flags, finetune_here

    scenes = small_scenes(tmp_path / "scenes", count=24)
    (annotations,) = scenes.glob("*.json")
    document = json.loads(annotations.read_text())
    for one in document["images"]:
        one["id"] = 1000 + 3 * one["id"]
    for one in document["categories"]:
        one["id"] = 7 * one["id"] + 2
    for one in document["annotations"]:
        one["image_id"], one["category_id"] = 1000 + 3 * one["image_id"], 7 * one["category_id"] + 2
    annotations.write_text(json.dumps(document))
    assert finetune_here(detection_flags(scenes, tmp_path / "run")) == 0
    assert cli.main(["evaluate", "--run", str(tmp_path / "run"), "--predictions", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "detection.json").read_text())
    measured = sorted({one["image_id"] for one in found})
    truth = COCO(str(annotations))
    for kind, figure in (("bbox", "AP"), ("segm", "mask_AP")):
        judged = COCOeval(truth, truth.loadRes(str(tmp_path / "out" / "detection.json")), kind)
        judged.params.imgIds = measured
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        (task,) = read_results(tmp_path / "run").tasks
        assert judged.stats[0] == pytest.approx(task.metrics[figure][0], abs=1e-9)
    assert len(measured) < 24 and {one["category_id"] % 7 for one in found} == {2}


def test_repeated_and_hostile_keys(tmp_path: Path) -> None:
    several = write_images(tmp_path / "several", [[reddish(1), reddish(2)], [reddish(1)]])
    hostile = write_images(tmp_path / "hostile", [[{**reddish(1), "__key__": "../../out"}]])

    def names_in(path: Path, name: str = "") -> list[str]:
        dataset = open_image_dataset(path, name)
        every = np.ones(len(dataset.blocks.rows), dtype=np.bool_)
        plan = HeldOutPlan(members=[MixtureMember(name=name, weight=None, table=dataset.blocks, chosen=every)])  # type: ignore[arg-type]
        return image_names(plan, [dataset])

    assert names_in(several) == ["image-000000/n00001", "image-000000/n00002", "image-000001/n00001"]
    one = copy_dataset(several, tmp_path / "one", shards=["image-000000.tar"], rows=2)
    assert names_in(one) == ["n00001", "n00002"] and names_in(one, "a") == ["a/n00001", "a/n00002"]
    with pytest.raises(DataError, match=r"\.\./out"):
        names_in(hostile)
