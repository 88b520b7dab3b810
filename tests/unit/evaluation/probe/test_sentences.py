"""Frozen vectors of sentences: what they are, which rows are drawn, what is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runs import Refused, flags, pretrain_here
from tests.unit.finetuning.glue.small_data import sentences, write_cola
from tests.unit.finetuning.test_groups import write_sst2
from trp_scale.cli import main as cli
from trp_scale.evaluation.encoders import TextEncoder, load_encoder
from trp_scale.evaluation.probe import sentences as module
from trp_scale.finetuning.glue.folders import Examples
from trp_scale.reporting.results import read_results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text_dataset: Path) -> Path:
    directory = tmp_path_factory.mktemp("probed") / "run"
    assert pretrain_here(flags(text_dataset, directory, training__steps=1)) == 0
    return directory


def test_a_sentence_is_the_mean_of_its_pieces_whatever_stands_beside_it(run: Path) -> None:
    encoder = load_encoder(str(run))
    assert isinstance(encoder, TextEncoder)
    texts = sentences(12)
    vectors = module.sentence_vectors(encoder, texts, 32)
    for text, vector in zip(texts, vectors, strict=True):
        read = encoder.tokenizer([text], truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            alone = encoder(read["input_ids"])[0].mean(0)
        np.testing.assert_allclose(vector, alone.numpy(), rtol=1e-4, atol=1e-5)


def test_a_pair_is_both_their_distance_and_their_product(run: Path) -> None:
    encoder = load_encoder(str(run))
    assert isinstance(encoder, TextEncoder)
    texts = sentences(4)
    pair = Examples(name="dev", sentences=(texts[:2], texts[2:]), labels=None, line_numbers=[1, 2])
    vectors = module.pair_vectors(encoder, pair, np.array([1]), 32)
    one, two = (module.sentence_vectors(encoder, [text], 32) for text in (texts[1], texts[3]))
    np.testing.assert_allclose(vectors, np.concatenate([one, two, np.abs(one - two), one * two], 1), rtol=1e-5)


def test_rows_are_drawn_by_the_seed_each_label_alike() -> None:
    labels = np.repeat([0.0, 1.0, 2.0], [60, 30, 10])
    first, again, other = (module.draw_rows_alike(labels, 20, seed, alike=True) for seed in (0, 0, 1))
    assert np.bincount(labels[first].astype(int)).tolist() == [12, 6, 2]
    assert first.tolist() == again.tolist() != other.tolist()
    assert module.draw_rows_alike(labels, 0, 0, alike=True).tolist() == list(range(100))
    assert len(set(module.draw_rows_alike(labels, 20, 3, alike=False).tolist())) == 20


def test_vectors_that_hold_the_label_give_all_of_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    root = write_cola(tmp_path / "glue", 60, 32)
    texts = [
        line.split("\t") for name in ("train", "dev") for line in (root / f"CoLA/{name}.tsv").read_text().splitlines()
    ]
    label = {cells[3]: float(cells[1]) for cells in texts}

    def telling(encoder: TextEncoder, asked: list[str], length: int) -> np.ndarray:
        return np.array([[label[text], 1.0] for text in asked], np.float32)

    command = ["probe", "--from", str(run), "--data", str(root), "--task", "cola", "--rows", "30", "--seeds", "2"]
    assert cli.main([*command, "--run_dir", str(tmp_path / "honest")]) == 0
    (honest,) = read_results(tmp_path / "honest").tasks
    assert (honest.metric, honest.split, honest.seeds) == ("matthews", "dev", [0, 1])
    assert max(honest.values) < 0.9
    assert (honest.count, honest.detail[0]["training_rows"]) == (32, 30), "measured, trained on"
    monkeypatch.setattr(module, "sentence_vectors", telling)
    assert cli.main([*command, "--run_dir", str(tmp_path / "told")]) == 0
    (perfect,) = read_results(tmp_path / "told").tasks
    assert perfect.values == [1.0, 1.0]
    assert "--rows is 61" in refused(*command, "--run_dir", tmp_path / "more", "--rows", "61")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "knn"], "leave out --method"),
        (["--per_class", "4"], "leave out --per_class"),
        (["--test", "x"], "leave out --test"),
    ],
)
def test_flags_of_images_are_refused(more: list[str], message: str, refused: Refused) -> None:
    assert message in refused("probe", "--from", "x", "--data", "y", "--task", "cola", *more)


def test_groups_of_sentences_are_those_of_a_column(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    root = write_sst2(tmp_path / "glue", 60, 30)
    monkeypatch.setattr(module, "fit", lambda train, labels, unseen, **_: np.zeros(len(unseen)))
    command = ["probe", "--from", str(run), "--data", str(root), "--task", "sst2", "--groups"]
    assert cli.main([*command, "kind", "--run_dir", str(tmp_path / "run")]) == 0
    (task,) = read_results(tmp_path / "run").tasks
    rows = [line.split("\t") for line in (root / "SST-2/dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    groups = {name: [label == "0" for _, label, group in rows if group == name] for name in ("long", "short", "rare")}
    assert {name: (entry["accuracy"], entry["count"]) for name, entry in task.detail[0]["groups"].items()} == {
        name: (pytest.approx(np.mean(right)), len(right)) for name, right in groups.items()
    }
    assert not task.detail[0]["groups"]["rare"]["judged"], "three rows"
    assert task.metrics["worst_group"] == [pytest.approx(min(np.mean(groups["long"]), np.mean(groups["short"])))]
    assert "of sst2" in capsys.readouterr().out
    assert "'shape'" in refused(*command, "shape", "--run_dir", tmp_path / "other")
