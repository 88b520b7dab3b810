"""Probes while an encoder trains: the figures of `trp-scale probe`, a training that does not notice, and their cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runs import essence, flags, image_flags, lines, pretrain_here
from tests.unit.finetuning.glue.small_data import write_glue
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.evaluation.arguments import ProbesSettings
from trp_scale.evaluation.encoders import set_shown_images
from trp_scale.evaluation.probe import online as probes
from trp_scale.evaluation.probe.classifiers import LabelledFeatures
from trp_scale.evaluation.probe.online import OnlineProbes, first_blocks, rank_me, require_two_classes
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled
from trp_scale.reporting.results import read_results

SMALL = {"crops__size": 16, "vision__patch_size": 4, "training__steps": 4, "data__validation_fraction": 0.25}
PROBED = {"hooks": "probes", "probes__every": 2, "probes__seen": "whole"}


def found_in(run: Path) -> list[dict[str, Any]]:
    return [line["probes"] for line in lines(run) if "probes" in line]


def test_the_rank_of_features() -> None:
    """As many orthogonal directions of one size, whatever the width; and a known spectrum, by the formula."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((40, 40)))[0]
    assert rank_me((basis[:, :7] @ basis[:7]).astype(np.float32)) == pytest.approx(7, rel=1e-3)
    sigma = np.array([3.0, 2.0, 1.0])
    p = sigma / 6
    assert rank_me(basis[:, :3] * sigma) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-5)


@pytest.mark.exhaustive
def test_figures_are_those_of_the_probe_command(stripes: Path, others: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = {"probes__data": stripes, "probes__test": others, "data__validation_fraction": 0.0}
    assert pretrain_here(image_flags("mae_vit_b", stripes, run, **{**SMALL, **PROBED, **more})) == 0
    first, last = found_in(run)
    assert (first["step"], last["step"], last["rows"], last["measured"]) == (2, 4, 64, 43)
    for method, name in (("logistic", "linear"), ("knn", "knn")):
        arguments = ["--from", run, "--data", stripes, "--test", others, "--seen", "whole", "--method", method]
        arguments += ["--cache", tmp_path / "cache", "--run_dir", tmp_path / method]
        assert cli.main(["probe", *(str(each) for each in arguments)]) == 0
        (task,) = read_results(tmp_path / method).tasks
        assert task.values == [last[name]]
    assert f"linear {last['linear']:.3f} on 43 rows" in " ".join((run / "report.txt").read_text().split())


def test_the_training_does_not_notice(stripes: Path, tmp_path: Path) -> None:
    for name, more in (("with", PROBED), ("without", {})):
        assert pretrain_here(image_flags("mae_vit_b", stripes, tmp_path / name, **SMALL, **more)) == 0
    ours, theirs = ([essence(line) for line in lines(tmp_path / name)] for name in ("with", "without"))
    assert ours == theirs
    assert not found_in(tmp_path / "without")


def test_measured_rows_are_those_that_the_run_holds_out(stripes: Path) -> None:
    config = set_shown_images(ClassificationTaskConfig(), size=224, batch=8)
    images = open_labelled(config, str(stripes))
    held = images.held_blocks(0.25)
    learned = first_blocks(images, [~each for each in held], 20)
    sizes = images.datasets[0].blocks.rows
    assert not (learned[0] & held[0]).any()
    assert sizes[learned[0]].sum() == 24, "blocks of 8"
    assert first_blocks(images, held, 1000)[0].tolist() == held[0].tolist(), "all where there are fewer"
    assert len(images.labels(learned)) == 24


class Clock:
    """A hook on a run of 100 steps, each of so many seconds; a measurement takes ten."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step_seconds: float, first_seconds: float = 1.0, **settings: Any
    ) -> None:
        self.now, self.step_seconds, self.first_seconds = 0.0, step_seconds, first_seconds
        self.measured = list[int]()
        vectors = LabelledFeatures(features=np.eye(4, dtype=np.float32), labels=np.array([0, 0, 1, 1]))
        rows = SimpleNamespace(features=lambda weights: self.take(10.0) or (vectors, vectors))
        monkeypatch.setattr(probes, "open_rows", lambda settings, run: rows)
        monkeypatch.setattr(probes.time, "monotonic", lambda: self.now)
        world = SimpleNamespace(rank=0, size=1, gather_objects=lambda value: [value])
        engine = SimpleNamespace(full_weights=dict)
        training = SimpleNamespace(steps=10_000)
        run: Any = SimpleNamespace(config=SimpleNamespace(training=training), engine=engine, world=world)
        self.hook = OnlineProbes(ProbesSettings(**settings), run)

    def take(self, seconds: float) -> None:
        self.now += seconds

    def train(self) -> None:
        for step in range(10_000):
            self.take(self.step_seconds if step else self.first_seconds)
            before = self.hook.latest
            self.hook.after_step(SimpleNamespace(step=step))  # type: ignore[arg-type]
            if self.hook.latest is not before:
                self.measured.append(step + 1)


def test_by_default_they_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Clock(monkeypatch, 1.0)
    slow.train()
    assert slow.measured == [*range(1000, 10_001, 1000)]
    assert slow.hook.metrics()["share"] == pytest.approx(0.01, rel=0.01)
    assert slow.hook.metrics() == {}, "told once"
    quick = Clock(monkeypatch, 0.05)  # 500 s in all: one that takes 10 is due at the first place, and at the end
    quick.train()
    assert quick.measured == [1000, 10_000]
    compiled = Clock(monkeypatch, 1.0, first_seconds=5000.0)
    compiled.train()
    assert compiled.measured == slow.measured, "the first step is no measure of the others"


def test_as_often_as_asked_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, every=4000)
    clock.train()
    assert clock.measured == [4000, 8000, 10_000]
    again = Clock(monkeypatch, 1.0, every=4000).hook
    again.load_state_dict(json.loads(json.dumps(clock.hook.state_dict())))
    assert (again.next, again.latest) == (clock.hook.next, clock.hook.latest)


def test_sentences_are_told_apart_by_the_encoder_of_text(text_dataset: Path, tmp_path: Path) -> None:
    lines_of = [f"a {word} thing \t{label}" for number in range(8) for label, word in enumerate(("dull", "fine"))]
    files = {f"SST-2/{name}.tsv": "\n".join(["sentence\tlabel", *lines_of, ""]) for name in ("train", "dev")}
    root = write_glue(tmp_path / "glue", files)
    run = tmp_path / "run"
    more = {"hooks": "probes", "probes__every": 2, "probes__data": root, "probes__rows": 10, "training__steps": 4}
    assert pretrain_here(flags(text_dataset, run, **more)) == 0
    last = found_in(run)[-1]
    assert (last["rows"], last["measured"], last["width"]) == (10, 16, 32)
    assert last["linear"] == last["knn"] == 1.0, "the two words have two vectors"


def test_an_encoder_of_several_modalities_is_probed_by_its_images(image_dataset: Path, tmp_path: Path) -> None:
    changes = {**PROBED, "training__steps": 2, "batch__micro_size": 2, "data__validation_fraction": 0.25}
    assert pretrain_here(image_flags("mm_mae_tiny", image_dataset, tmp_path / "run", **changes)) == 0
    (found,) = found_in(tmp_path / "run")
    assert (found["step"], found["width"]) == (2, 32)
    assert 0 <= found["linear"] <= 1 and 0 <= found["knn"] <= 1 and 1 <= found["rank_me"] <= 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--probes.data is empty"),
        ({"probes__data": "glue", "probes__task": "stsb"}, "--probes.task is 'stsb'"),
        ({"probes__data": "glue", "probes__test": "x"}, "--probes.test is x"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    changes: dict[str, str], message: str, text_dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=message):
        pretrain_here(flags(text_dataset, tmp_path / "run", hooks="probes", **changes))


def test_the_best_of_their_figures_is_kept(stripes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = {"checkpoint__best": "probes.rank_me", "probes__every": 1}
    assert pretrain_here(image_flags("mae_vit_b", stripes, run, **{**SMALL, **PROBED, **more})) == 0
    figures = found_in(run)
    best = max(figures, key=lambda each: each["rank_me"])
    assert {each["rows"] + each["measured"] for each in figures} == {64}, "no row is on both sides"
    assert f"best probes.rank_me {best['rank_me']:.4f} at step {best['step']}:" in (run / "report.txt").read_text()
    assert (run / "checkpoints" / f"step_{best['step']:08d}").is_dir()


def test_rows_of_one_class_are_refused(stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelledImages, "labels", lambda self, chosen: np.zeros(9))
    with pytest.raises(RefusedError, match=r"--probes.data"):
        pretrain_here(image_flags("mae_vit_b", stripes, tmp_path / "run", **SMALL, **PROBED))
    with pytest.raises(RefusedError, match=r"--probes.data.*.*5.*data/birds"):
        require_two_classes(np.zeros(5), "data/birds")
    require_two_classes(np.arange(2), "data/birds")
