"""The command line of a run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from trp_scale.config import PretrainConfig, RefusedError, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings, sections
from trp_scale.config.run_flags import Arguments, check_pretrain, make_arguments, parse, parse_run
from trp_scale.config.schema import setting_name
from trp_scale.finetuning.arguments import FinetuneArguments
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

TINY = ["--recipe", "pos_bert_tiny"]


def test_the_recipe_is_the_default_and_flags_change_it() -> None:
    arguments = parse([*TINY, "--training.steps", "8", "--optimizer.warmup_steps=2", "--balancer.kind", "uniform"])
    expected = load_recipe("pos_bert_tiny")
    expected.training.steps, expected.optimizer.warmup_steps = 8, 2
    expected.balancer = make_settings("balancer", "uniform")
    assert arguments.config == expected
    assert (arguments.recipe, arguments.resume, arguments.run_dir) == ("pos_bert_tiny", "auto", None)


def test_every_field_can_be_given_as_section_field_value() -> None:
    values = {int: "7", float: "0.25", str: "words", bool: "true"}
    argv = list(TINY)
    for section, settings in sections(PosBertConfig()).items():
        for field, of in get_type_hints(type(settings)).items():
            default = getattr(settings, field)
            if isinstance(default, dict):
                words = ["verb", "0.5"]
            else:
                words = default if isinstance(default, list) else [values.get(of, str(default))]
            argv += [f"--{section}.{setting_name(field)}", *words]
    # Sevens everywhere agree with each other (7 heads of width 1, one micro-batch of 7) but for these three.
    argv += ["--optimizer.min_lr", "0.1", "--model.max_positions", "64", "--logging.profile", "7:7"]
    argv += ["--training.epochs", "0", "--optimizer.base_lr", "0"]  # they would set other settings
    argv += ["--model.weights", ""]  # whose sizes would be read
    config = parse(argv).config
    assert config.balancer.reference == {"verb": 0.5}
    assert (config.logging.wandb_project, config.training.compile, config.optimizer.lr) == ("words", "auto", 0.25)
    assert config.model.layers == config.checkpoint.keep == 7


def test_a_path_is_a_recipe_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {path: somewhere}\ntraining: {steps: 5}\n", encoding="utf-8")
    arguments = parse(["--recipe", str(tmp_path / "mine.yaml")])
    assert arguments.config.training.steps == 5
    assert arguments.recipe_name() == "mine"


@pytest.mark.parametrize(
    ("given", "value"), [([], True), (["true"], True), (["True"], True), (["false"], False), (["False"], False)]
)
def test_switches(given: list[str], value: bool) -> None:
    arguments = parse([*TINY, "--logging.wandb", *given, "--training.deterministic", *given])
    assert arguments.config.logging.wandb is value
    assert arguments.config.training.deterministic is value


@pytest.mark.parametrize("given", [["--local_rank=1"], ["--local_rank", "1"]])
def test_the_local_rank_that_deepspeed_passes_is_accepted(given: list[str]) -> None:
    assert parse([*given, *TINY]).config == load_recipe("pos_bert_tiny")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--balancer.knd", "--balancer.kind"),
        ("--balncer.alpha", "--balancer.alpha"),
        ("--training.step", "--training.steps"),
        ("--run_dirr", "--run_dir"),
    ],
)
def test_a_misspelt_flag_names_the_nearest(flag: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*TINY, flag, "3"])
    assert caught.value.code == 2
    assert nearest in capsys.readouterr().err


def test_a_value_of_the_wrong_type_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--training.steps", "many"], ["--balancer.scale", "non"], ["--logging.wandb", "maybe"]):
        with pytest.raises(SystemExit) as caught:
            parse([*TINY, *argv])
        assert caught.value.code == 2
        assert argv[0] in capsys.readouterr().err


def test_ranks_other_than_the_first_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse([*TINY, "--balancer.knd", "3"])
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "--recipe is missing; allowed: adpe_"),
        (["--recip", "pos_bert_tiny"], "is --recip meant for it"),
        ([*TINY, "--engine", "deepspeed"], "--engine deepspeed needs --ds_config"),
        ([*TINY, "--ds_config", "nowhere.json"], "--ds_config nowhere.json"),
        ([*TINY, "--ds_config", __file__, "--engine", "fsdp"], "is for DeepSpeed, but --engine is fsdp"),
        ([*TINY, "--resume", "nowhere"], "--resume nowhere: "),
        ([*TINY, "--vision.patch_size", "1"], "--vision.patch_size: a setting of upstream mae, mm_mae; this run's is "),
    ],
)
def test_flags_that_cannot_be_are_refused(argv: list[str], expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(argv)
    assert expected in str(caught.value)


def test_the_engine_follows_from_the_flags_and_the_world() -> None:
    assert Arguments().choose_engine(1) == "plain"
    assert Arguments().choose_engine(2) == "ddp"
    large = PosBertConfig(model=TextModelConfig(layers=24, hidden_size=2048, intermediate_size=8192))
    assert large.model.block_parameters == 24 * (4 + 8) * 2048**2 > 10**9
    assert Arguments(config=large).choose_engine(1) == "plain"
    assert Arguments(config=large).choose_engine(2) == "fsdp"
    assert Arguments(ds_config=Path("x.json")).choose_engine(1) == "deepspeed"
    assert Arguments(engine="fsdp").choose_engine(1) == "fsdp"
    with pytest.raises(RefusedError, match="--engine plain"):
        Arguments(engine="plain").choose_engine(2)


def test_help_explains_each_field_with_the_recipes_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*TINY, "--help-all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, section in sections(PosBertConfig()).items():
        for field in dataclasses.fields(section):
            assert f"--{name}.{setting_name(field.name)} " in text
    assert "--hooks " in text and "--modules" not in text
    words = " ".join(text.replace("│", " ").split())
    steps = load_recipe("pos_bert_tiny").training.steps
    assert f"Total number of optimizer steps. (default: {steps})" in words
    assert "--run_dir DIR Directory of all files of the run" in words


def test_reading_the_command_line_does_not_import_torch_or_deepspeed() -> None:
    code = (
        "import sys; from trp_scale.config.run_flags import parse; parse(['--recipe', 'pos_bert_tiny']); "
        "print(sorted({'torch', 'deepspeed', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_mixture_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mixture.txt"
    path.write_text("books:2=/a,wiki:1=/b\n")
    assert parse([*TINY, "--data.path", str(path)]).config.data.path == "books:2=/a,wiki:1=/b"
    assert parse([*TINY, "--data.path", "/c/missing.txt"]).config.data.path == "/c/missing.txt"


def test_a_base_rate_sets_the_learning_rate() -> None:
    config = parse([*TINY, "--optimizer.base_lr", "1.5e-4", "--batch.global_size", "4096"]).config
    assert config.optimizer.lr == pytest.approx(1.5e-4 * 4096 / 256)
    assert list(config.describe_derived(rows=0)) == ["--optimizer.base_lr 0.00015: learning rate 0.0024"]


@pytest.mark.parametrize(
    ("name", "derived", "value"),
    [("optimizer.base_lr", "optimizer.lr", "0.25"), ("training.epochs", "training.steps", "7")],
)
def test_a_setting_that_sets_another_excludes_its_flag(name: str, derived: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        parse([*TINY, f"--{name}", "2", f"--{derived}", value])
    assert f"--{name}" in str(caught.value) and f"--{derived}" in str(caught.value)
    section, field = name.split(".")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: pos_bert_tiny\n{section}: {{{field}: 2}}\n", encoding="utf-8")
    config = parse(["--recipe", str(recipe), f"--{derived}", value]).config
    assert getattr(getattr(config, section), field) == 0
    assert getattr(getattr(config, section), derived.partition(".")[2]) == float(value)


def test_epochs_are_of_pretraining_only() -> None:
    with pytest.raises(RefusedError, match=r"--training\.epochs"):
        parse_run(
            ["--recipe", "glue_tiny", "--training.epochs", "2"], FinetuneArguments, FinetuneConfig, prog="finetune"
        )


def test_python_refuses_both_settings_of_a_pair_too() -> None:
    settings = {"training": {"epochs": 1, "steps": 5}}
    with pytest.raises(RefusedError, match=r"--training\.epochs is 1 .*--training\.steps"):
        make_arguments({"recipe": "pos_bert_tiny", **settings}, Arguments, PretrainConfig, prog="pretrain")
    values = {"recipe": "pos_bert_tiny", "optimizer": {"base_lr": 0.5}}
    arguments = check_pretrain(make_arguments(values, Arguments, PretrainConfig, prog="pretrain"))
    assert arguments.config.optimizer.lr == 0.5 * arguments.config.batch.global_size / 256
