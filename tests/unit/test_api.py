"""The functions of `import trp_scale`: the commands', by the same code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
from tests.runs import SMALL, environment, essence, flags, lines
from tests.unit.checkpoint import test_export as text
from tests.unit.methods.test_weights_average import write_pair
from trp_scale.checkpoint.export import export
from trp_scale.cli import main as cli
from trp_scale.config.loader import load_recipe
from trp_scale.training.rundir import CONFIG_FILE


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with forgetting():
        yield


def small(dataset: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """The sections of tests/runs.py: flags."""
    sections: dict[str, Any] = {"data": {"path": dataset}}
    for name, value in SMALL.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return sections


def test_a_run_is_the_command_s(text_dataset: Path, tmp_path: Path) -> None:
    own, command = tmp_path / "own", tmp_path / "command"
    averaging = {"decay": 0.5}
    run = trp.pretrain(
        "pos_bert_tiny",
        run_dir=own,
        hooks=["weight_average"],
        **small(
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
    run = trp.pretrain("pos_bert_tiny", run_dir=tmp_path, **small(text_dataset))
    assert not run.finished and "STOP" in run.reason
    assert trp.pretrain("pos_bert_tiny", run_dir=tmp_path, **small(text_dataset)).finished, "it goes on"


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

    one = trp.pretrain("pos_bert_tiny", run_dir=tmp_path / "one", hooks=[Lookahead], **small(text_dataset))
    given = Lookahead.Settings(every=2)
    two = trp.pretrain("pos_bert_tiny", run_dir=tmp_path / "two", hooks=[given], **small(text_dataset))
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
    assert trp.pretrain("pos_bert_tiny", run_dir=tmp_path, hooks=[hook], **small(text_dataset)).finished


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
