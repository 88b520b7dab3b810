"""Recipes that extend one another, what each resolves to, and recipes of a module of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trp_scale as trp
from tests.extending import forgetting
from tests.grids import always
from tests.unit.config import resolved as fixture
from trp_scale.cli import main as cli
from trp_scale.cli.training import recipes
from trp_scale.config import RefusedError
from trp_scale.config.loader import (
    cautions,
    check,
    data,
    known_recipes,
    list_recipes,
    load_recipe,
    resolve_recipe,
    summary,
    to_dict,
)
from trp_scale.config.recipes import RECIPES
from trp_scale.config.run_flags import parse


def write(directory: Path, **files: str) -> Path:
    """Writes NAME.yaml for each; the last one's path."""
    for name, text in files.items():
        path = directory / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        load_recipe(path)
    return str(caught.value)


@pytest.mark.parametrize("name", known_recipes())
def test_a_recipe_resolves_to_the_values_it_stands_for_and_can_be_run(name: str) -> None:
    """Whoever changes a recipe's value writes resolved.json anew, where the change is then seen."""
    config = load_recipe(name)
    assert to_dict(config) == fixture.kept(name)
    assert config.optimizer.eps == (1e-6 if config.reads == "text" else 1e-8), "BERT's for text alone"
    config.data.path = config.data.path or "data"
    check(config)
    assert cautions(config) == []


def test_sections_are_merged_lists_replaced_and_null_takes_away(tmp_path: Path) -> None:
    base = "upstream: mm_mae\noptimizer: {lr: 1e-3, beta1: 0.5}\nmodalities: {inputs: [rgb, depth]}\n"
    config = load_recipe(
        write(
            tmp_path,
            base=base + "validation: {every: 7}\ntraining: {steps: 9}\nbatch: {micro_size: 2}\n",
            mine="extends: base.yaml\noptimizer: {beta1: 0.7}\nmodalities: {inputs: [semseg]}\nvalidation: null\n"
            "batch: {micro_size: null, global_size: 64}\n",
        )
    )
    assert (config.optimizer.lr, config.optimizer.beta1, config.training.steps) == (1e-3, 0.7, 9)
    assert config.modalities.inputs == ["semseg"]
    assert (config.validation.every, config.batch.micro_size, config.batch.global_size) == (0, "auto", 64)


def test_a_section_of_another_kind_takes_nothing_of_the_extended_one(tmp_path: Path) -> None:
    base = "balancer: {kind: gradnorm, alpha: 3, scale: initial}\n"
    other = load_recipe(write(tmp_path, base=base, mine="extends: base.yaml\nbalancer: {kind: dwa}\n"))
    assert (other.balancer.kind, other.balancer.scale) == ("dwa", "none")
    same = load_recipe(write(tmp_path, base=base, mine="extends: base.yaml\nbalancer: {kind: gradnorm, alpha: 2}\n"))
    assert (same.balancer.alpha, same.balancer.scale) == (2.0, "initial")


def test_a_kind_that_is_no_component_s_is_a_setting_like_others(tmp_path: Path) -> None:
    base = "optimizer: {kind: adamw, lr: 0.5}\n"
    other = load_recipe(write(tmp_path, base=base, mine="extends: base.yaml\noptimizer: {kind: sgd}\n"))
    assert (other.optimizer.kind, other.optimizer.lr) == ("sgd", 0.5)


def test_a_file_extends_a_recipe_of_the_package_and_a_path_is_meant_from_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path, mine="extends: pos_bert_tiny\ntraining: {steps: 5}\n")
    config = load_recipe(write(tmp_path / "below", deeper="extends: ../mine.yaml\noptimizer: {lr: 1}\n"))
    expected = load_recipe("pos_bert_tiny")
    expected.training.steps, expected.optimizer.lr = 5, 1.0
    assert config == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: pos_bert_bse\n", "mine.yaml extends pos_bert_bse: unknown recipe; did you mean pos_bert_base?"),
        ("extends: none.yaml\n", "mine.yaml extends none.yaml: there is no such file"),
        ("extends: [bert_base]\n", "mine.yaml extends ['bert_base']; allowed: the name of one recipe"),
        ("extends:\n", "mine.yaml extends None; allowed: the name of one recipe"),
        ("extends: bert_base\noptimizer: {lr: null}\ntraining: null\nnothing: null\n", "nothing: unknown key"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(write(tmp_path, mine=text))


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    assert len(refusal(write(tmp_path, mine=f"extends: {'a' * 3000}\n"))) < 4000


def test_a_circle_names_its_files(tmp_path: Path) -> None:
    files = {"a": "extends: b.yaml\n", "b": "extends: c.yaml\n", "c": "extends: a.yaml\n"}
    message = refusal(write(tmp_path, **files))
    assert "c.yaml extends" in message
    assert all(f"{name}.yaml" in message for name in files)


@pytest.mark.parametrize("mine", ["", "optimizer: {ls: null}\n", "optimizer: null\n"])
def test_a_wrong_setting_is_told_of_the_file_it_stands_in(tmp_path: Path, mine: str) -> None:
    path = write(tmp_path, base="optimizer: {ls: 1}\n", mine=f"extends: base.yaml\n{mine}")
    assert f"{tmp_path / 'base.yaml'} has 1 wrong setting(s)" in refusal(path)


@pytest.mark.parametrize("name", always(known_recipes(), "adpe_vit_l", "glue", "mlo_mae_tiny", "pos_modern_tiny"))
def test_a_resolved_recipe_is_a_recipe_of_the_same_settings(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, again="\n".join(resolve_recipe(RECIPES / f"{name}.yaml")))
    assert load_recipe(path) == load_recipe(name)


def test_a_resolved_recipe_tells_where_each_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes(["adpe_vit_l"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {
        "layers: 24 # adpe_vit_l",
        "eps: 20.0 # adpe_vit_b",
        "positions: relative # mae_plus_rpe_vit_b",
        "tokens: all # mae_plus_vit_b",
        "patch_size: 16 # mae_vit_b",
        "seed: 0 # default",
    } <= lines


def test_a_value_taken_away_comes_from_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, mine="extends: pos_bert_tiny\noptimizer: {lr: null}\nbalancer: {kind: dwa}\n")
    lines = [" ".join(line.split()) for line in resolve_recipe(path)]
    assert any(line.startswith("lr: ") and line.endswith("# default") for line in lines)
    assert f"kind: dwa # {path}" in lines
    assert "temperature: 2.0 # default" in lines


def test_every_recipe_is_listed_with_the_sentence_at_its_head() -> None:
    lines = list(list_recipes())
    heads = [line for line in lines if not line.startswith("  ")]
    assert heads == ["trp-scale pretrain --recipe", "trp-scale finetune --recipe"]
    assert sorted(line.split()[0] for line in lines if line not in heads) == known_recipes()
    for name in known_recipes():
        sentence = summary(name)
        assert 20 <= len(sentence) <= 120, sentence
        assert any(name in line and sentence in line for line in lines)


def test_every_recipe_says_what_it_is_trained_on_or_extends_one_that_does(tmp_path: Path) -> None:
    for name in known_recipes():
        assert 4 <= len(data(name)) <= 60, name
    assert data("mm_mae_vit_b_s50_800") == "ImageNet-S50 with pseudo labels of depth and segmentation"
    assert data("adpe_vit_l") == "ImageNet-1k"
    text = "# Mine, on other Data: many.\n#\n# Data: 1.5 M photographs\n# of birds. 12 GB.\nextends: adpe_vit_b\n"
    assert data(str(write(tmp_path, mine=text))) == "1.5 M photographs of birds"
    assert data(str(write(tmp_path, mine="# Data: said without an end\nextends: adpe_vit_b\n"))) == "ImageNet-1k"


MODULE = """
import trp_scale as trp

trp.recipe("short", {"extends": "pos_bert_tiny", "training": {"steps": 7}}, "Seven steps")
trp.recipe("shorter", "shorter.yaml")
"""
FILE = "# Three steps. No more.\nextends: short\ntraining:\n  steps: 3\n"


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shorter.yaml").write_text(FILE)
    (tmp_path / "own_recipes.py").write_text(MODULE)
    with forgetting():
        yield str(tmp_path / "own_recipes.py")


def test_they_are_listed_shown_and_taken(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "--module", module]) == 0
    listed = capsys.readouterr().out
    assert "Seven steps" in listed.split("trp-scale finetune")[0] and "Three steps\n" in listed
    assert cli.main(["recipes", "shorter", "--module", module]) == 0
    shown = capsys.readouterr().out
    assert "own_recipes:short extends pos_bert_tiny" in shown.splitlines()[0]
    steps = next(line for line in shown.splitlines() if line.strip().startswith("steps: 3"))
    assert steps.endswith("shorter.yaml")
    config = parse(["--recipe", "short", "--module", module]).config
    assert (config.training.steps, config.model.layers) == (7, load_recipe("pos_bert_tiny").model.layers)
    assert parse(["--recipe", "shorter", "--module", module]).config.training.steps == 3
    assert trp.known_recipes()["short"] == "Seven steps"


def test_one_that_is_wrong_is_named_where_it_stands(module: str, tmp_path: Path) -> None:
    (tmp_path / "shorter.yaml").write_text("extends: short\ntraining:\n  stepz: 3\n")
    with pytest.raises(RefusedError, match=r"shorter.yaml .*\n.*stepz"):
        parse(["--recipe", "shorter", "--module", module])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("pos_bert_tiny", {}, "'pos_bert_tiny'"), ("a/b", {}, "'a/b'"), ("mine", "nowhere.yaml", r"nowhere\.yaml")],
)
def test_what_cannot_be_registered_is_refused(
    name: str, settings: dict[str, int] | str, expected: str, module: str
) -> None:
    with pytest.raises(RefusedError, match=expected):
        trp.recipe(name, settings)


def test_a_name_of_another_module_is_refused(module: str) -> None:
    parse(["--recipe", "short", "--module", module])
    with pytest.raises(RefusedError, match="own_recipes"):
        trp.recipe("short", {})
