"""The functions of `import trp_scale`: the commands', by the same code."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from transformers import BertModel

import trp_scale as trp
from tests.extending import forgetting, write_files
from tests.fixtures import small_text_config
from tests.runs import SMALL, SMALL_IMAGES, environment, essence, flags, lines, sections
from tests.unit.checkpoint import test_export as text
from tests.unit.finetuning.test_finetune import KEPT
from tests.unit.methods.test_weight_average import write_pair
from trp_scale.checkpoint.export import export
from trp_scale.cli import main as cli
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import import_name
from trp_scale.errors import exit_status_and_message
from trp_scale.reporting.results import read_results
from trp_scale.training.report import report as report_text
from trp_scale.training.rundir import CONFIG_FILE


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with forgetting():
        yield


def test_a_run_is_the_command_s(text_dataset: Path, tmp_path: Path) -> None:
    own, command = tmp_path / "own", tmp_path / "command"
    averaging = {"decay": 0.5}
    run = trp.pretrain(
        "pos_bert_tiny",
        run_dir=own,
        hooks=["weight_average"],
        **sections(
            text_dataset, training={"steps": 2}, balancer={"kind": "gradnorm", "lr": 0.1}, weight_average=averaging
        ),
    )
    changes = {"training__steps": 2, "balancer__kind": "gradnorm", "balancer__lr": 0.1}
    given = ["--hooks", "weight_average", "--weight_average.decay", "0.5"]
    assert cli.main(["pretrain", *flags(text_dataset, command, **changes), *given]) == 0
    assert load_recipe(own / CONFIG_FILE) == load_recipe(command / CONFIG_FILE)
    assert [essence(line) for line in lines(own)] == [essence(line) for line in lines(command)]
    assert (run.path, run.finished, run.reason) == (own, True, "finished") and Path(run) == own
    assert not dist.is_initialized()


def test_a_run_that_is_asked_to_stop_says_why(text_dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    run = trp.pretrain("pos_bert_tiny", run_dir=tmp_path, **sections(text_dataset))
    assert not run.finished and "STOP" in run.reason
    assert trp.pretrain("pos_bert_tiny", run_dir=tmp_path, **sections(text_dataset)).finished, "it goes on"


@pytest.mark.parametrize(
    ("recipe", "settings", "expected"),
    [
        ("pos_bert_tny", {}, "pos_bert_tiny"),
        ("glue", {}, "--recipe glue .*trp_scale.pretrain"),
        ("pos_bert_tiny", {"training": {"stepz": 2}}, "stepz: .*training.steps"),
        ("pos_bert_tiny", {"training": {"steps": "two"}}, "training.steps is 'two'"),
        ("pos_bert_tiny", {"hooks": [Path]}, "@trp_scale.component"),
        ("pos_bert_tiny", {"resume": "nowhere"}, "--resume nowhere"),
    ],
)
def test_what_the_command_refuses_is_refused(
    recipe: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(trp.RefusedError, match=expected):
        trp.pretrain(recipe, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_hooks_are_named_by_their_class_or_their_settings(text_dataset: Path, tmp_path: Path) -> None:
    """A module that is imported is kept with the run, and is needed to go on."""
    module = write_files(tmp_path / "own") / "lookahead.py"
    sys.path.insert(0, str(module.parent))
    from lookahead import Lookahead  # type: ignore[import-not-found]

    one = trp.pretrain("pos_bert_tiny", run_dir=tmp_path / "one", hooks=[Lookahead], **sections(text_dataset))
    given = Lookahead.Settings(every=2)
    two = trp.pretrain("pos_bert_tiny", run_dir=tmp_path / "two", hooks=[given], **sections(text_dataset))
    seen = [load_recipe(run.path / CONFIG_FILE) for run in (one, two)]
    assert [config.lookahead.every for config in seen] == [5, 2]  # type: ignore[attr-defined]
    assert [config.modules for config in seen] == [["lookahead"]] * 2
    assert trp.load(one).settings.model.layers == SMALL["model.layers"]


def test_a_notebook_s_component_runs_without_workers(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    hook = trp.component("hook", "cell")(type("Cell", (trp.Hook,), {"__module__": "__main__", "__init__": _made}))
    with pytest.raises(trp.RefusedError, match=r"data=\{\"workers\": 0\}"):
        trp.pretrain("pos_bert_tiny", run_dir=tmp_path, hooks=[hook], data={"workers": 1})
    assert trp.pretrain("pos_bert_tiny", run_dir=tmp_path, hooks=[hook], **sections(text_dataset)).finished


def _made(self: object, settings: trp.Settings, run: trp.RunContext) -> None: ...


def run_script(path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, env=environment(), cwd=path.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_the_script_of_the_document_runs_and_its_run_goes_on(text_dataset: Path, tmp_path: Path) -> None:
    """Its balancer is the script's own; a loader worker imports the script again."""
    script = write_files(tmp_path / "own") / "experiment.py"
    done = run_script(script, text_dataset.with_name(f"{text_dataset.name}.jsonl"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'run'}: finished, features (2, " in done.stdout and done.stdout.rstrip().endswith(", 192)")
    assert lines(tmp_path / "run")[-1]["balancer"]["kind"] == "rare"
    config = load_recipe_with(script, tmp_path / "run" / CONFIG_FILE)
    assert (config.modules, config.data.workers, config.balancer.power) == (["experiment"], 1, 0.5)
    given = ["--recipe", str(tmp_path / "run" / CONFIG_FILE), "--run_dir", str(tmp_path / "run")]
    assert cli.main(["pretrain", *given, "--training.steps", "5", "--module", str(script)]) == 0
    assert lines(tmp_path / "run")[-1]["step"] == 5


def load_recipe_with(module: Path, recipe: Path) -> Any:
    from trp_scale.config.registry import load_module

    with pytest.raises(trp.RefusedError, match="--module experiment"):
        load_recipe(recipe)
    load_module(str(module))
    return load_recipe(recipe)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text(
        "import multiprocessing, os\nimport trp_scale as trp\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=os.getpid)\n"
        "    worker.start()\n    worker.join()\n"
        "else:\n    trp.pretrain('pos_bert_tiny')\n"
    )
    assert '`if __name__ == "__main__":`' in run_script(script).stderr


@pytest.mark.parametrize("weights", ["last", "average"])
def test_an_encoder_of_text_is_that_of_the_export(tmp_path: Path, weights: Any) -> None:
    run, _ = write_pair(tmp_path, "text")
    export(run, tmp_path / "hf", weights=weights)
    encoder, peer = trp.load(run, weights=weights), BertModel.from_pretrained(tmp_path / "hf").eval()
    assert not encoder.training and encoder.tokenizer.vocab_size == text.VOCABULARY
    pieces = encoder.tokenizer(["word1 word2", "word3 word4 word5"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = peer(**pieces).last_hidden_state
        assert torch.equal(encoder(**pieces), expected) and float(expected.std()) > 0.1


@pytest.mark.parametrize(("kind", "weights"), [("images", "last"), ("images", "average"), ("modalities", "last")])
def test_an_encoder_of_images_is_that_of_the_export(tmp_path: Path, kind: str, weights: Any) -> None:
    run, _ = write_pair(tmp_path, kind)
    encoder = trp.load(run, weights=weights)
    side = encoder.image_size
    export(run, tmp_path / "timm", to="timm", image_size=side, weights=weights)
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    mean, deviation = (torch.tensor(peer.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = peer.double().forward_features(((images / 255.0 - mean) / deviation).double())
        torch.testing.assert_close(encoder.double()(images), expected, rtol=0, atol=1e-6)
    assert float(expected.std()) > 0.1 and not encoder.training and encoder.tokenizer is None
    assert trp.load(run, image_size=2 * side).image_size == 2 * side
    with pytest.raises(trp.RefusedError, match=r"torch\.uint8, \[B, 3, "):
        encoder(images.float())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(trp.RefusedError, match=str(tmp_path)):
        trp.load(tmp_path)
    run, _ = write_pair(tmp_path, "text")
    with pytest.raises(trp.RefusedError, match=r"image_size .*32"):
        trp.load(run, image_size=32)


def test_data_sets_are_the_commands(text_dataset: Path, tmp_path: Path) -> None:
    source = text_dataset.with_name(f"{text_dataset.name}.jsonl")
    config = small_text_config(source, tmp_path)
    names = ("tagger", "length", "vocab_size", "rows_per_block", "shard_bytes", "processes", "progress")
    made = trp.shard_text(tmp_path / "text", source, **{name: getattr(config, name) for name in names})
    assert made == tmp_path / "text" and same_files(made / "shards", text_dataset / "shards")
    scenes = {"embedded": True, "count": 12, "size": 32, "rows_per_block": 4, "processes": 1, "progress": False}
    images = trp.shard_images(tmp_path / "images", **scenes)
    words = [word for name, value in scenes.items() if name != "embedded" for word in (f"--{name}", str(value))]
    words = ["--output", str(tmp_path / "command"), "--embedded", *words[:-2], "--no-progress"]
    assert cli.main(["shard-images", *words]) == 0
    assert same_files(images / "shards", tmp_path / "command" / "shards")


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """Return the words that a command prints."""
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out.split()


def same_files(ours: Path, theirs: Path) -> bool:
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (ours, theirs)]
    return files[0] == files[1] and len(files[0]) > 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"lenght": 64}, "trp_scale.shard_text .*\n.*lenght: .*length"), ({"length": "64"}, "length is '64'")],
)
def test_settings_of_a_data_set_are_checked(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(trp.RefusedError, match=expected):
        trp.shard_text(tmp_path / "out", **settings)


class CalledError(Exception):
    """Raised in place of the work."""


WORK = {
    "pretrain": "trp_scale.training.pretrain:pretrain",
    "finetune": "trp_scale.finetuning.finetune:finetune",
    "evaluate": "trp_scale.evaluation.evaluate:evaluate",
    "probe": "trp_scale.evaluation.probe.command:probe",
    "report": "trp_scale.evaluation.reports:report",
    "compare": "trp_scale.evaluation.reports:compare",
    "export": "trp_scale.evaluation.reports:export",
    "plan": "trp_scale.planning.command:plan",
    "shard_text": "trp_scale.sharding.text.shard:shard_text",
    "shard_images": "trp_scale.sharding.images.shard:shard_images",
}
"""The function that command and function call, with the arguments of the command."""

SAME: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "pretrain",
        lambda data: trp.pretrain("mae_tiny", data={"path": data}, hooks=["weight_average"], module=[]),
        "--recipe mae_tiny --data.path {data} --hooks weight_average",
    ),
    (
        "finetune",
        lambda data: trp.finetune("scratch", "classification_tiny", data={"path": data}, seeds=3, run_dir="tuned"),
        "--from scratch --recipe classification_tiny --data.path {data} --seeds 3 --run_dir tuned",
    ),
    ("evaluate", lambda data: trp.evaluate(data, rows=5, robustness=[]), "--run {data} --rows 5"),
    (
        "probe",
        lambda data: trp.probe(data, data=data, method="linear", linear={"epochs": 11}, test=data),
        "--from {data} --data {data} --method linear --linear.epochs 11 --test {data}",
    ),
    ("report", lambda data: trp.report(data, pictures="drawn"), "--run {data} --pictures drawn"),
    ("report", lambda data: trp.Run(data).report(), "--run {data}"),
    ("compare", lambda data: trp.compare([data, "b"], csv=data / "c.csv"), "{data} b --csv {data}/c.csv"),
    ("export", lambda data: trp.export(data, "out", to="timm"), "--run {data} --output out --to timm"),
    (
        "plan",
        lambda data: trp.plan("mae_vit_b", gpus=16, gpu="h100", batch={"global_size": 256}),
        "--recipe mae_vit_b --gpus 16 --gpu h100 --batch.global_size 256",
    ),
    ("shard_text", lambda data: trp.shard_text("out", [data], length=64), "--output out --inputs {data} --length 64"),
    ("shard_images", lambda data: trp.shard_images("out", embedded=True), "--output out --embedded"),
]


@pytest.mark.parametrize(("name", "call", "words"), SAME, ids=[name for name, _, _ in SAME])
def test_a_function_does_the_work_of_its_command_with_its_defaults(
    name: str, call: Callable[[Path], Any], words: str, image_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def work(arguments: Any) -> Any:
        seen.append(asdict(arguments))
        raise CalledError

    module, _, function = WORK[name].partition(":")
    import_name(WORK[name])
    monkeypatch.setattr(f"{module}.{function}", work)
    with pytest.raises(CalledError):
        call(image_dataset)
    with pytest.raises(CalledError):
        cli.main([name.replace("_", "-"), *words.format(data=image_dataset).split()])
    assert seen[0] == seen[1] and set(WORK) <= set(trp.__all__)


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("no data", lambda: trp.pretrain("mae_tiny"), "pretrain --recipe mae_tiny"),
    ("no encoder", lambda: trp.finetune("", "glue_tiny"), "finetune --recipe glue_tiny"),
    ("no run", lambda: trp.evaluate("nowhere"), "evaluate --run nowhere"),
    ("no sizes", lambda: trp.probe("scratch", data="x"), "probe --from scratch --data x"),
    ("no runs", trp.report, "report"),
    ("no pictures", lambda: trp.report(images=["a.png"]), "report --images a.png"),
    ("no results", lambda: trp.compare(["nowhere"]), "compare nowhere"),
    ("no weights", lambda: trp.export("nowhere", "out"), "export --run nowhere --output out"),
    ("no such GPU", lambda: trp.plan("mae_vit_b", gpu="h10"), "plan --recipe mae_vit_b --gpu h10"),
    ("too few", lambda: trp.plan("mae_vit_b", gpus=0), "plan --recipe mae_vit_b --gpus 0"),
    ("no text", lambda: trp.shard_text("out"), "shard-text --output out"),
]


@pytest.mark.parametrize(("call", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_function_refuses_with_the_words_of_its_command(
    call: Callable[[], Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trp.RefusedError) as refused:
        call()
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {exit_status_and_message(refused.value)[1]}\n"


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: trp.pretrain("mae_tiny", run_dri="x"), "run_dri.*run_dir"),
        (lambda: trp.pretrain("mae_tiny", trainng={}), "trainng.*training"),
        (lambda: trp.finetune("scratch", "glue_tiny", seds=3), "seds.*seeds"),
        (lambda: trp.finetune("scratch", "glue_tiny", optimizer={"lrr": 3}), "optimizer.lrr.*optimizer.lr"),
        (lambda: trp.evaluate(".", spilt="dev"), "spilt.*split"),
        (lambda: trp.probe(".", linear={"epoch": 1}), "linear.epoch.*linear.epochs"),
        (lambda: trp.report(picture="x"), "picture.*pictures"),
        (lambda: trp.compare([], htm="x"), "htm.*html"),
        (lambda: trp.export(".", "x", image_sise=3), "image_sise.*image_size"),
        (lambda: trp.plan("mae_tiny", gpuss=3), "gpuss.*gpus"),
        (lambda: trp.plan("mae_tiny", dry_run=True), "dry_run"),
        (lambda: trp.plan("mae_tiny", run_dir="x"), "run_dir"),
        (lambda: trp.finetune("scratch", "glue_tiny", print_config=True), "print_config"),
        (lambda: trp.finetune("scratch", "glue_tiny", seeds="3"), "seeds is '3'"),
    ],
)
def test_a_wrong_keyword_is_refused_with_the_nearest_name(call: Callable[[], Any], nearest: str) -> None:
    with pytest.raises(trp.RefusedError, match=nearest):
        call()


@pytest.fixture(scope="module")
def pretrained(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> trp.Run:
    run_dir = tmp_path_factory.mktemp("pretrained") / "run"
    return trp.pretrain("mae_tiny", run_dir=run_dir, **sections(image_dataset, SMALL_IMAGES, validation={"every": 4}))


def test_the_metrics_of_a_run_are_columns(pretrained: trp.Run) -> None:
    columns, stored = pretrained.metrics(), lines(pretrained.path)
    steps = [line["step"] for line in stored if "tasks" in line]
    assert columns["step"] == steps and {len(column) for column in columns.values()} == {len(steps)}
    assert columns["tasks/reconstruction/loss"] == [line["tasks"]["reconstruction"]["loss"] for line in stored]
    held_out = columns["validation/loss"]
    assert math.isfinite(held_out[-1]) and math.isnan(held_out[0])
    opened = trp.Run(str(pretrained.path))  # type: ignore[arg-type]
    assert opened == pretrained and opened.finished


def test_steps_after_a_rollback_replace_those_before(tmp_path: Path) -> None:
    def line(step: int, loss: float) -> str:
        task = {"loss": loss, "weight": 1.0, "count": 1}
        return json.dumps({"step": step, "loss": loss, "tasks": {"a": task}}) + "\n"

    held_out = json.dumps({"step": 2, "validation": {"loss": 7.0, "tasks": {}}}) + "\n"
    text = line(1, 1.0) + line(2, 2.0) + line(3, 3.0) + line(2, 4.0) + held_out
    (tmp_path / "metrics.jsonl").write_text(text)
    columns = trp.Run(tmp_path).metrics()
    assert (columns["step"], columns["loss"]) == ([1, 2], [1.0, 4.0])
    assert columns["validation/loss"][1] == 7.0 and not trp.Run(tmp_path).finished


def test_a_report_is_the_command_s_and_a_page_in_a_notebook(
    pretrained: trp.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    report = pretrained.report()
    assert printed(capsys, "report", "--run", pretrained.path) == str(report).split()
    assert report_text(pretrained.path).strip() in str(report)
    assert report.worst_task == "reconstruction" and set(report.losses) == {"reconstruction"}
    page = report._repr_html_()
    assert page is not None and page.startswith("<iframe srcdoc=") and page.count('"') == 8, "escaped"


def test_what_is_measured_has_scores_and_the_command_s_table(
    pretrained: trp.Run, image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {name: value for name, value in SMALL_IMAGES.items() if name.startswith(KEPT)}
    shared = {**sections(image_dataset, values, downstream={"epochs": 1.0}), "seeds": 2}
    tuned = trp.finetune(pretrained, "classification_tiny", run_dir=tmp_path / "tuned", **shared)
    assert read_results(tuned.path) == tuned.results and tuned.finished and Path(tuned) == tmp_path / "tuned"
    assert tuned.scores == {"classification": tuned.results.tasks[0].mean} and tuned.worst_task == "classification"
    again = trp.finetune(pretrained, "classification_tiny", run_dir=tmp_path / "tuned", **shared)
    assert again == tuned, "nothing is trained twice"
    first = trp.finetune(pretrained, "classification_tiny", run_dir=tmp_path / "tuned", only=0, **shared)
    assert first.path == tuned.path / "classification" / "seed_0" and not first.written
    assert first.results.tasks[0].values == tuned.results.tasks[0].values[:1]

    measured = trp.evaluate(tuned, predictions=tmp_path / "predictions", baseline=tuned)
    assert measured.scores == tuned.scores and all(path.is_file() for path in measured.predictions)
    output = [f"--predictions={tmp_path / 'predictions'}", f"--baseline={tuned.path}"]
    assert printed(capsys, "evaluate", "--run", tuned.path, *output) == str(measured).split()
    assert repr(measured) == str(measured)
    losses = trp.evaluate(pretrained)
    assert losses.scores.keys() == {"reconstruction"} and losses.path == pretrained.path / "evaluations" / "own"

    compared = trp.compare([tuned, measured], csv=tmp_path / "table.csv")
    words = ["compare", tuned.path, measured.path, "--csv", tmp_path / "table.csv"]
    assert printed(capsys, *words) == str(compared).split()
    table = compared.table
    assert table["mean"] == [*tuned.scores.values()] * 2 and table["difference"] == [None, 0.0]
    assert table["seeds"] == [[0, 1]] * 2 and (tmp_path / "table.csv").read_text().startswith(",".join(table))


def test_a_stopped_call_says_why_and_the_same_call_goes_on(image_dataset: Path, tmp_path: Path) -> None:
    values = {name: value for name, value in SMALL_IMAGES.items() if name.startswith(KEPT)}
    settings = {**sections(image_dataset, values, downstream={"epochs": 1.0}), "run_dir": tmp_path}
    (tmp_path / "STOP").touch()
    stopped = trp.finetune("scratch", "classification_tiny", **settings)
    assert not stopped.finished and "STOP" in stopped.reason and stopped.scores == {} and stopped.worst_task is None
    assert trp.finetune("scratch", "classification_tiny", **settings).finished


def test_runs_of_pretraining_are_compared_by_their_final_figures(
    pretrained: trp.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = trp.compare(pretrained)
    assert printed(capsys, "compare", pretrained.path) == str(compared).split()
    report, table = pretrained.report(), compared.table
    assert table["reconstruction"] == [report.losses["reconstruction"]] and table["end"] == ["finished"]


def test_a_probe_an_export_and_a_plan_have_what_the_commands_print(
    pretrained: trp.Run, image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = trp.probe(
        pretrained, data=image_dataset, method="knn", workers=0, cache=tmp_path, run_dir=tmp_path / "probed"
    )
    assert list(probed.scores.values()) == [read_results(probed.path).tasks[0].mean]
    exported = trp.export(pretrained, tmp_path / "exported", to="timm", image_size=32)
    assert exported.checkpoint.parent.parent == pretrained.path
    assert sum(parameter.numel() for parameter in eval(exported.call).parameters()) > 0
    planned = trp.plan("mae_tiny", gpus=2, gpu="h100", engine="ddp", predict="2,4")
    words = ["plan", "--recipe", "mae_tiny", "--gpus", "2", "--gpu", "h100", "--engine", "ddp", "--predict", "2,4"]
    assert printed(capsys, *words) == str(planned).split()
    assert planned.best.fits and planned.best.days > 0 and list(planned.curve) == [2, 4]
