"""`trp-scale finetune`: seeds, results, what is done already, and what is refused; the task of docs/extending.md. Other
tasks have their own tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.documents.pages import blocks
from tests.extending import files, forgetting
from tests.runs import SMALL_IMAGES, Refused, flags, image_flags, pretrain_here, to_flags
from tests.unit.data.images.stored import sample, write_images
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, write_cola
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.finetune import add_results
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.reporting.results import RESULT_FILE, Results, SeedResult, join, read_results
from trp_scale.training import pretrain as training

KEPT = ("model.", "crops.", "batch.", "logging.", "data.workers", "vision.patch")


def tuning_flags(dataset: Path, run_dir: Path, source: str, **changes: object) -> list[str]:
    """A small classification run on rendered scenes."""
    values: dict[str, object] = {name: value for name, value in SMALL_IMAGES.items() if name.startswith(KEPT)}
    values |= {"data.path": dataset, "run_dir": run_dir, "from": source, "downstream.epochs": 1.0}
    return ["--recipe", "classification_tiny", *to_flags(values, **changes)]


def test_every_seed_is_a_run_and_none_is_trained_twice(image_dataset: Path, tmp_path: Path, refused: Refused) -> None:
    run_dir = tmp_path / "tuned"
    flags = tuning_flags(image_dataset, run_dir, "scratch", seeds=2)
    assert cli.main(["finetune", *flags]) == 0
    (task,) = read_results(run_dir).tasks
    assert task.seeds == [0, 1] and task.split == "dev" and task.metric == "accuracy"
    assert task.mean == pytest.approx(sum(task.values) / 2)
    assert all(0 <= value <= 1 for value in task.values)
    metrics = [(run_dir / "classification" / f"seed_{seed}" / "metrics.jsonl").read_text() for seed in task.seeds]
    assert metrics[0] != metrics[1], "both seeds saw the same"
    steps = [json.loads(line)["step"] for line in metrics[0].splitlines() if '"grad_norm"' in line]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 2

    before = (run_dir / "classification" / "seed_0" / "environment.json").read_text()
    flags[flags.index("--seeds") + 1] = "3"
    assert cli.main(["finetune", *flags]) == 0
    (again,) = read_results(run_dir).tasks
    assert again.values[:2] == task.values and again.seeds == [0, 1, 2]
    assert (run_dir / "classification" / "seed_0" / "environment.json").read_text() == before

    results = (run_dir / "results.json").read_text()
    assert "optimizer.lr: checkpoint 0.001, now 0.5" in refused("finetune", *flags, "--optimizer.lr", "0.5")
    assert (run_dir / "results.json").read_text() == results


def test_a_run_that_patience_ends_is_measured(
    image_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(*arguments: object, **named: object) -> dict[str, object]:
        return {"loss": 1.0, "worst_task": "classification", "tasks": {"classification": {"loss": 1.0, "count": 1}}}

    monkeypatch.setattr(training, "validate", validate)
    early = {"checkpoint__best": "validation.loss", "checkpoint__patience": 1, "validation__every": 1}
    flags = tuning_flags(image_dataset, tmp_path / "tuned", "scratch", seeds=2, **early)
    for _ in range(2):
        assert cli.main(["finetune", *flags]) == 0
        (task,) = read_results(tmp_path / "tuned").tasks
        assert task.seeds == [0, 1]
        summary = json.loads((tmp_path / "tuned" / "classification" / "seed_1" / "summary.json").read_text())
        assert summary["exit_reason"].startswith("no better") and summary["steps"] == 2


def test_the_encoder_is_the_run_s_in_its_sizes_and_weights(image_dataset: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    pretrain_here(image_flags("mlo_mae_tiny", image_dataset, source, multilevel__kind="none", training__steps=1))
    arguments = parse_finetune(tuning_flags(image_dataset, tmp_path / "x", str(source), model__layers=7))
    assert arguments.config.model.layers == SMALL_IMAGES["model.layers"], "the encoder's sizes are its own"
    (checkpoint,) = (source / "checkpoints").iterdir()
    assert arguments.config.model.weights == str(checkpoint)
    averaged = parse_finetune([*tuning_flags(image_dataset, tmp_path / "x", str(source)), "--weights", "average"])
    assert averaged.config.model.weights == f"{checkpoint}@average"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"from": "nowhere"}, "--from nowhere"),
        ({"task": "cola"}, "--task cola"),
        ({"seeds": 3, "only": 3}, "--only is 3"),
        ({"downstream__task": "a/b"}, "--downstream.task is 'a/b'"),
        ({"data__validation_fraction": 0.0}, "--data.validation_fraction"),
        ({"recipe": "mae_vit_b"}, "--recipe mae_vit_b"),
        ({"training__steps": 7}, "--training.steps 7"),
        ({"optimizer__warmup_steps": 7, "downstream__warmup_share": 0.1}, "--optimizer.warmup_steps 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_flags_are_refused_by_name(
    image_dataset: Path, tmp_path: Path, refused: Refused, changes: dict[str, object], named: str
) -> None:
    flags = tuning_flags(image_dataset, tmp_path / "x", "scratch", **changes)
    if "recipe" in changes:
        flags = flags[2:]
    assert named in refused("finetune", *flags)
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").rglob("metrics.jsonl"))


def test_images_that_are_learned_from_are_no_test(image_dataset: Path, tmp_path: Path, refused: Refused) -> None:
    flags = tuning_flags(image_dataset, tmp_path / "run", "scratch", downstream__test_path=image_dataset)
    assert f"{image_dataset}: 96 of its 96" in refused("finetune", *flags)


def test_a_data_set_is_no_run_directory(image_dataset: Path, refused: Refused) -> None:
    before = sorted(image_dataset.iterdir())
    assert f"--run_dir {image_dataset}" in refused("finetune", *tuning_flags(image_dataset, image_dataset, "scratch"))
    assert sorted(image_dataset.iterdir()) == before


def test_a_recipe_of_fine_tuning_is_none_of_pre_training() -> None:
    assert cli.main(["pretrain", "--recipe", "classification_tiny"]) == 2


@pytest.mark.parametrize(("left_out", "changes"), [("run_dir", {"only": 0}), ("from", {})])
def test_missing_flags_are_named(
    image_dataset: Path, tmp_path: Path, left_out: str, changes: dict[str, object]
) -> None:
    flags = tuning_flags(image_dataset, tmp_path / "x", "scratch", **changes)
    number = flags.index(f"--{left_out}")
    with pytest.raises(RefusedError, match=f"--{left_out}"):
        parse_finetune(flags[:number] + flags[number + 2 :])


def test_results_of_other_tasks_stay(tmp_path: Path) -> None:
    def results(encoder: str, **values: float) -> Results:
        seeds = [
            SeedResult(task=t, metric="a", split="dev", lower_is_better=False, seed=0, metrics={"a": value})
            for t, value in values.items()
        ]
        return Results(recipe="glue", encoder=encoder, tasks=[join([one]) for one in seeds])

    add_results(tmp_path, results("run", rte=0.5, cola=0.3))
    add_results(tmp_path, results("run", sst2=0.9, cola=0.4))
    assert {task.task: task.mean for task in read_results(tmp_path).tasks} == {"rte": 0.5, "sst2": 0.9, "cola": 0.4}
    add_results(tmp_path, results("another", sst2=0.8))
    assert [task.task for task in read_results(tmp_path).tasks] == ["sst2"]


def test_a_refused_run_leaves_no_empty_folder(tmp_path: Path) -> None:
    unlabelled = write_images(tmp_path / "data", [[sample(0, 20, 20)]])
    assert cli.main(["finetune", *tuning_flags(unlabelled, tmp_path / "run", "scratch")]) == 2
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_dir()]


def test_runs_within_a_directory_are_named(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "tuned" / "rte" / "seed_3").mkdir(parents=True)
    (tmp_path / "tuned" / "rte" / "seed_3" / "config.yaml").touch()
    for words in (
        ["report", "--run"],
        ["export", "--to", "timm", "--output", "x", "--run"],
        ["represent", "--data", "x", "--output", "y", "--from"],
    ):
        assert f"give one: {tmp_path}/tuned/rte/seed_3\n" in refused(*words, tmp_path / "tuned")


def test_glue_names_in_any_case() -> None:
    assert GlueTaskConfig().tasks("CoLA,SST-2") == ["cola", "sst2"] and "rte" in GlueTaskConfig().tasks("All")


ONE = Path("cola") / "seed_0"


@pytest.fixture
def command(text_dataset: Path, tmp_path: Path) -> list[str]:
    """Three steps of CoLA from scratch, in tmp_path/run; the tokenizer is a copy, in tmp_path/tokenizer."""
    shutil.copytree(text_dataset / "tokenizer", tmp_path / "tokenizer")
    root = write_cola(tmp_path / "glue", 20, 10)
    changes = {"downstream.tokenizer": tmp_path / "tokenizer", "downstream.epochs": 0, "training.steps": 3}
    return ["finetune", *glue_flags(root, tmp_path / "run", "cola", "scratch", **changes)]


def steps_of(run: Path) -> int:
    return int(json.loads((run / ONE / RESULT_FILE).read_text())["settings"]["training"]["steps"])


def test_more_steps_go_on_and_fewer_are_refused(command: list[str], tmp_path: Path, refused: Refused) -> None:
    run = tmp_path / "run"
    assert cli.main([*command, "--checkpoint.every", "1"]) == 0
    assert "--training.steps is 2" in refused(*command, "--training.steps", "2")
    assert steps_of(run) == 3
    assert cli.main([*command, "--training.steps", "5"]) == 0
    assert steps_of(run) == 5 and (run / ONE / "checkpoints" / "step_00000005").is_dir()


def test_runs_of_two_commands_do_not_share_a_directory(
    command: list[str], text_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    pretrained = flags(text_dataset, tmp_path / "pretrained", training__steps=1)
    assert pretrain_here(pretrained) == 0
    before = sorted(path.name for path in (tmp_path / "pretrained").iterdir())
    assert "/pretrained contains" in refused(*command, "--run_dir", tmp_path / "pretrained")
    assert sorted(path.name for path in (tmp_path / "pretrained").iterdir()) == before
    assert cli.main(command) == 0
    assert "/run contains" in refused("pretrain", *flags(text_dataset, tmp_path / "run", training__steps=1))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_is_started_anew_takes_no_earlier_figure(command: list[str], refused: Refused) -> None:
    assert cli.main([*command, "--resume", "never"]) == 0
    assert "--resume never" in refused(*command, "--resume", "never")


def test_seeds_on_other_data_are_not_joined(command: list[str], tmp_path: Path, refused: Refused) -> None:
    assert cli.main(command) == 0
    dev = tmp_path / "glue" / "CoLA" / "dev.tsv"
    dev.write_text(dev.read_text(encoding="utf-8").replace("\t1\t", "\t0\t", 1), encoding="utf-8")
    assert "seed_1: " in refused(*command, "--seeds", "2")
    assert not (tmp_path / "run" / "cola" / "seed_1" / RESULT_FILE).exists()
    assert read_results(tmp_path / "run").tasks[0].seeds == [0]
    assert cli.main([*command, "--training.seed", "1"]) == 0, "alone it may have other data"
    assert "seed_1: " in refused(*command, "--seeds", "2")


def test_an_encoder_that_has_learned_on_is_another_one(
    command: list[str], text_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    source = tmp_path / "source"
    command[command.index("scratch")] = str(source)
    pretrain_here(flags(text_dataset, source, training__steps=1))
    assert cli.main(command) == 0
    pretrain_here(flags(text_dataset, source, training__steps=2))
    message = refused(*command, "--seeds", "2")
    assert "step_00000001, now" in message and "step_00000002" in message
    first = source / "checkpoints" / "step_00000001"
    command[command.index(str(source))] = str(first)
    assert cli.main([*command, "--seeds", "2"]) == 0, "the checkpoint itself is the encoder that it was"


def test_a_run_is_measured_by_the_tokenizer_it_has_learned_with(command: list[str], tmp_path: Path) -> None:
    assert finetune_here(command[1:]) == 0
    shutil.rmtree(tmp_path / "tokenizer")
    assert cli.main(["evaluate", "--run", str(tmp_path / "run")]) == 0
    assert read_results(tmp_path / "run" / "evaluations" / "own").tasks == read_results(tmp_path / "run").tasks


def test_a_task_of_one_s_own(image_dataset: Path, tmp_path: Path, refused: Refused) -> None:
    module, recipe = tmp_path / "brightness.py", tmp_path / "brightness.yaml"
    module.write_text(files()["brightness.py"], encoding="utf-8")
    (shown,) = (block.text for block in blocks(Path("docs/extending.md").name) if "kind: brightness" in block.text)
    recipe.write_text(shown, encoding="utf-8")
    run_dir, given = tmp_path / "run", ["--module", str(module)]
    flags = tuning_flags(image_dataset, run_dir, "scratch", downstream__epochs=0.0, training__steps=4)
    flags = [*flags, "--data.validation_fraction", "0.3", "--optimizer.warmup_steps", "0"]
    own = [*flags[2:], "--recipe", str(recipe)]
    with forgetting():
        assert cli.main(["finetune", *own, *given]) == 0
        first = read_results(run_dir).tasks[0]
        assert (first.task, first.metric, first.lower_is_better) == ("brightness", "error", True)
        assert 0 < first.values[0] < 10
        assert cli.main(["finetune", *own, *given]) == 0, "what is finished was not found"
        assert read_results(run_dir).tasks[0].values == first.values
        assert cli.main(["evaluate", "--run", str(run_dir), "--output", str(tmp_path / "out"), *given]) == 0
        assert read_results(tmp_path / "out").tasks[0].values == pytest.approx(first.values)
        looked_at = ["--from", "scratch", "--recipe", "adpe_tiny", "--image_size", "32", "--data", str(image_dataset)]
        looked_at += ["--images", "8", "--shown", "2", "--output", str(tmp_path / "seen")]
        assert cli.main(["represent", *looked_at, "--run", str(run_dir / "brightness" / "seed_0"), *given]) == 0
        drawn = json.loads((tmp_path / "seen" / "representation.json").read_text(encoding="utf-8"))
        assert drawn["pictures"][-1] == "brightness.png" and (tmp_path / "seen" / "brightness.png").is_file()
        switched = [*flags, "--downstream.kind", "brightness", "--downstream.darkest", "2", *given]
        assert "--downstream.darkest is 2.0, allowed: from 0 to below 1" in refused("finetune", *switched)
        assert "a setting of downstream.kind classification; this run's is brightness" in refused(
            "finetune", *own, "--augmentation.mixup", "1", *given
        )
    with forgetting():
        assert "downstream.kind is 'brightness'" in refused("finetune", *own)
        assert "--module" in refused("evaluate", "--run", run_dir, "--output", tmp_path / "again")
