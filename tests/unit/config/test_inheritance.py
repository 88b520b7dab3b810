"""Recipes that extend one another: what is merged, what is replaced, what is refused, and what each resolves to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config import resolved as fixture
from trp_scale.config import RefusedError
from trp_scale.config.listing import data, list_recipes, recipes, resolve_recipe, summary
from trp_scale.config.loader import known_recipes, load_recipe, to_dict
from trp_scale.config.recipes import RECIPES


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


def test_every_recipe_is_among_the_resolved_ones() -> None:
    assert sorted(json.loads(fixture.FILE.read_text(encoding="utf-8"))["recipes"]) == known_recipes()


@pytest.mark.parametrize("name", known_recipes())
def test_a_recipe_resolves_to_the_values_it_stands_for(name: str) -> None:
    """Whoever changes a recipe's value writes resolved.json anew, where the change is then seen."""
    assert to_dict(load_recipe(name)) == fixture.kept(name)


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
        ("extends: mine.yaml\n", "take one `extends:` out"),
        ("extends: bert_base\noptimizer: {lr: null}\ntraining: null\nnothing: null\n", "nothing: unknown key"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(write(tmp_path, mine=text))


def test_a_circle_names_its_files(tmp_path: Path) -> None:
    files = {"a": "extends: b.yaml\n", "b": "extends: c.yaml\n", "c": "extends: a.yaml\n"}
    message = refusal(write(tmp_path, **files))
    assert "c.yaml extends" in message
    assert all(f"{name}.yaml" in message for name in files)


@pytest.mark.parametrize("mine", ["", "optimizer: {ls: null}\n", "optimizer: null\n"])
def test_a_wrong_setting_is_told_of_the_file_it_stands_in(tmp_path: Path, mine: str) -> None:
    path = write(tmp_path, base="optimizer: {ls: 1}\n", mine=f"extends: base.yaml\n{mine}")
    assert f"{tmp_path / 'base.yaml'} has 1 wrong setting(s)" in refusal(path)


@pytest.mark.parametrize("name", known_recipes())
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
        sentence = summary(RECIPES / f"{name}.yaml")
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
