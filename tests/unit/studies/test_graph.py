"""The commands of a study."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.studies.study_files import document, graph_of, run_here
from trp_scale.errors import RefusedError
from trp_scale.studies.execute import Claim, claim
from trp_scale.studies.graph import UNTRAINED
from trp_scale.studies.study import to_arguments


def test_every_variant_has_the_same_seeds_steps_and_judging(tmp_path: Path) -> None:
    """But for what the study's file says of it."""
    graph = graph_of(tmp_path)
    flags = {name: set(pairwise(words)) for name in graph.nodes if (words := graph.command_arguments(name))}
    plain, slow = flags["runs/plain/seed_1"], flags["runs/slow/seed_1"]
    apart = {pair for pair in plain ^ slow if pair[0].startswith("--")}
    assert apart == {
        ("--masking.ratio", "2"),
        ("--run_dir", str(graph.path("runs/plain/seed_1"))),
        ("--run_dir", str(graph.path("runs/slow/seed_1"))),
    }
    one, two = flags["judged/glue/runs/plain/seed_1"], flags["judged/glue/runs/slow/seed_1"]
    assert {first for first, _ in one ^ two if first.startswith("--")} == {"--from", "--run_dir"}
    assert ("--training.seed", "100") in one
    assert ("--training.seed", "1") in plain


def test_an_untrained_encoder_has_the_weights_of_the_seed(tmp_path: Path) -> None:
    words = graph_of(tmp_path).command_arguments("runs/scratch/seed_0")
    assert words[words.index("--optimizer.lr") + 1] == str(UNTRAINED["optimizer.lr"])
    assert words[words.index("--training.steps") + 1] == "1"


def test_needs_come_first_and_judging_needs_its_run(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    seen: set[str] = set()
    for name, needs in graph.nodes.items():
        assert set(needs) <= seen
        seen.add(name)
    assert graph.nodes["judged/glue/runs/slow/seed_0"] == ("runs/slow/seed_0",)
    assert graph.nodes["runs/slow/seed_0"] == ("data/words",)


def test_steps_of_equal_time_follow_from_the_seconds_of_a_step(tmp_path: Path) -> None:
    """A step of `slow` takes twice the time: half the steps. The baseline itself gets no second run."""
    graph = graph_of(tmp_path, document(budgets=["steps", "time"]))
    assert not any("plain@time" in name or "scratch@time" in name for name in graph.nodes)
    run_here(graph)
    words = graph.command_arguments("runs/slow@time/seed_1")
    assert words[words.index("--training.steps") + 1] == "50"


def test_equal_time_that_is_equal_steps_makes_no_run(tmp_path: Path) -> None:
    study = document(budgets=["steps", "time"])
    study["variants"]["slow"]["settings"] = {"masking.ratio": 1.02}
    graph = graph_of(tmp_path, study)
    ended = run_here(graph)
    assert graph.command_arguments("runs/slow@time/seed_0") == []
    assert {state.status for state in ended.values() if state} == {"finished"}
    assert not graph.path("runs/slow@time").exists()


def test_a_rate_is_chosen_for_each_variant_by_rows_that_are_not_the_tests(tmp_path: Path) -> None:
    tuning = {
        "setting": "optimizer.lr",
        "values": [0.001, 0.002, 0.004],
        "flags": {"training.steps": 10},
        "judge": "glue",
        "row": "worst",
    }
    study = document(tuning=tuning)
    judge = study["scales"]["cpu"]["judges"]["glue"]
    judge["validation"] = {"downstream.split": "held_out"}
    graph = graph_of(tmp_path, study)
    run_here(graph)
    words = graph.command_arguments("runs/plain/seed_0")
    assert words[words.index("--optimizer.lr") + 1] == "0.002"
    tried = graph.command_arguments("tuning/plain/0.001")
    assert (tried[tried.index("--training.steps") + 1], tried[tried.index("--training.seed") + 1]) == ("10", "1000")
    assert "held_out" in graph.command_arguments("judged/glue/tuning/plain/0.001")
    assert "held_out" not in graph.command_arguments("judged/glue/runs/plain/seed_0")
    assert not any("tuning/scratch" in name for name in graph.nodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "plane"}, "the baseline 'plane' does not take part"),
        ({"ground": "plain"}, "ground 'plain' is trained"),
        ({"outcome": {"judges": ["probe"]}}, "the outcome's judge 'probe' is not among glue"),
        ({"colour": 1}, "'colour'"),
        ({"variants": {"plain": {"title": 3}}}, "variants.plain.title"),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        graph_of(tmp_path, document() | change)


def test_equal_time_of_a_baseline_that_takes_none_is_refused(tmp_path: Path) -> None:
    study = document(budgets=["steps", "time"]) | {"baseline": "scratch", "ground": ""}
    with pytest.raises(RefusedError, match=r"'scratch'"):
        graph_of(tmp_path, study)


def of_another(**judges: object) -> dict[str, object]:
    """The study with a finetune of images, and judges of what it leaves."""
    study = document()
    flags = {"recipe": "classification_tiny", "downstream.task": "things"}
    study["scales"]["cpu"]["judges"] = {**judges, "glue": {"command": "finetune", "seeds": 2, "flags": flags}}
    return study


def test_a_judge_of_what_another_has_trained_reads_its_runs_and_waits_for_them(tmp_path: Path) -> None:
    others = {
        "robust": {"command": "evaluate", "of": "glue", "flags": {"robustness": ["a=one", "r=two"]}},
        "pixels": {"command": "finetune", "of": "glue", "flags": {"recipe": "segmentation_tiny"}},
    }
    graph = graph_of(tmp_path, of_another(**others))
    first = graph.path("judged/glue/runs/plain/seed_1")
    words = graph.command_arguments("judged/robust/runs/plain/seed_1")
    assert words[:3] == ["evaluate", "--finetuned", str(first)]
    assert words[-4:] == ["--robustness", "a=one", "--robustness", "r=two"]
    words = graph.command_arguments("judged/pixels/runs/plain/seed_1")
    assert words[words.index("--from") + 1] == str(first / "things" / "seed_100")
    seen: set[str] = set()
    for name, needs in graph.nodes.items():
        assert set(needs) <= seen
        seen.add(name)
    assert "judged/glue/runs/plain/seed_1" in graph.nodes["judged/robust/runs/plain/seed_1"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"command": "evaluate", "of": "nothing"}, "other.of is 'nothing'; allowed: glue"),
        ({"command": "probe", "of": "glue"}, "other.of is 'glue', allowed: none"),
    ],
)
def test_a_judge_of_what_nobody_has_trained_is_refused(tmp_path: Path, other: dict[str, object], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        graph_of(tmp_path, of_another(other={"flags": {}, **other}))


def test_a_placeholder_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, document(settings={"data.path": "{wrods}"}))
    with pytest.raises(RefusedError, match=r"'\{wrods\}' names 'wrods'; allowed: \{text\}, \{words\}"):
        graph.command_arguments("runs/plain/seed_0")


def test_another_study_in_the_directory_is_refused(tmp_path: Path) -> None:
    claim(tmp_path / "study", Claim(study="one", scale="cpu", inputs={}))
    claim(tmp_path / "study", Claim(study="one", scale="cpu", inputs={}))
    with pytest.raises(RefusedError, match=r"'cpu'.*'gpu'"):
        claim(tmp_path / "study", Claim(study="one", scale="gpu", inputs={}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RefusedError, match="is not empty"):
        claim(tmp_path / "full", Claim(study="one", scale="cpu", inputs={}))


def test_switches_and_lists_become_words_of_every_command() -> None:
    flags = {"embedded": True, "logging.progress": False, "inputs": ["a", "b"], "modality": ["depth=a", "semseg=b"]}
    words = ["--embedded", "--logging.progress", "false", "--inputs", "a", "b"]
    assert to_arguments(flags) == [*words, "--modality", "depth=a", "--modality", "semseg=b"]
