"""Recipes: YAML 1.2 values, refusals that name what is wrong, and the way to a dictionary and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trp_scale.config import RefusedError
from trp_scale.config.loader import dump, from_dict, known_recipes, load_recipe, to_dict
from trp_scale.config.registry import make_settings
from trp_scale.pretraining.pos_bert.settings import PosBertConfig


def write(directory: Path, text: str) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(RefusedError) as caught:
        load_recipe(write(directory, text))
    return str(caught.value)


def test_numbers_and_words_are_read_by_the_rules_of_yaml_1_2(tmp_path: Path) -> None:
    config = load_recipe(
        write(tmp_path, "optimizer: {lr: 2e-4, eps: 1.5E-8, warmup_steps: 1e3}\ntraining: {steps: 1_000}\n")
    )
    assert (config.optimizer.lr, config.optimizer.eps) == (2e-4, 1.5e-8)
    assert (config.optimizer.warmup_steps, config.training.steps) == (1000, 1000)
    assert isinstance(config.optimizer.warmup_steps, int)
    config = load_recipe(write(tmp_path, "objective: {next_sentence: off}\nbalancer: {kind: uniform, total: 1}\n"))
    assert (config.objective.next_sentence, config.balancer.total) == ("off", "1")


def test_what_a_recipe_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "hooks: []\n")) == PosBertConfig()


def test_everything_wrong_is_named_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "optimizer: {warmup_step: 3}\nbalncer: {}\nbalancer: {lr: 4}\nmodel: {layers: 1.5, dropout: yes}\n"
        "training: {deterministic: 1, precision: fp8}\ndata: 3\n",
    )
    assert str(tmp_path / "recipe.yaml") in message
    for expected in (
        "optimizer.warmup_step: unknown key; did you mean optimizer.warmup_steps?",
        "balncer: unknown key; did you mean balancer?",
        "balancer.lr: a setting of kind famo, uncertainty, gradnorm; this run's balancer.kind is minimax",
        "model.layers is 1.5",
        "model.dropout is 'yes'",
        "training.deterministic is 1",
        "training.precision is 'fp8', allowed: one of fp32, bf16, fp16",
        "data is 3",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: {lr: 1, lr: 2}\n", "'lr' is given twice"),
        ("optimizer: {lr: 1\n", "is not a YAML file"),
        ("optimizer: {lr: 1\n", 'recipe.yaml", line 2'),
        ("# nothing\n", "extends: pos_bert_base"),
        ("- 3\n", "[3] is not a section"),
        ("model: !!python/object:os.system {}\n", "is not a YAML file"),
        ("optimizer: {lr: true}\n", "optimizer.lr is True"),
        ("balancer: {reference: {verb: high}}\n", "balancer.reference.verb is 'high'"),
        ("balancer: {reference: 3}\n", "balancer.reference is 3"),
    ],
)
def test_a_malformed_recipe_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_an_unknown_recipe_names_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(RefusedError) as caught:
        load_recipe("pos_bert_bse")
    assert "did you mean pos_bert_base?" in str(caught.value)
    assert all(name in str(caught.value) for name in known_recipes())
    for path in ("recipes/x.YAML", "up.YAML", "tests/unit"):
        with pytest.raises(RefusedError, match=f"--recipe {path}: "):
            load_recipe(path)
    with pytest.raises(RefusedError, match=r"pos_bert_tiny\?"):
        load_recipe("recipes/pos_bert_tiny.yaml")


def test_dump_and_dictionary_give_the_same_settings_back(tmp_path: Path) -> None:
    config = load_recipe("pos_bert_large")
    config.objective.next_sentence = "off"
    config.balancer.reference = {"verb": 1e-5, "noun": 2.0}
    config.data.path = "books:0.7=/a,wiki:0.3=/b"
    assert load_recipe(write(tmp_path, dump(config))) == config
    assert from_dict(to_dict(config)) == config
    assert set(to_dict(config)["optimizer"]) == set(vars(config.optimizer))


@settings(max_examples=30, deadline=None)
@given(lr=st.floats(min_value=1e-30, max_value=1e30), text=st.text(st.characters(codec="utf-8"), max_size=20))
@example(lr=1.0, text="\x85")
def test_every_number_and_text_survives_the_dump(
    tmp_path_factory: pytest.TempPathFactory, lr: float, text: str
) -> None:
    config = PosBertConfig()
    config.optimizer.lr, config.data.path, config.logging.wandb_project = lr, text, str(lr)
    assert load_recipe(write(tmp_path_factory.getbasetemp(), dump(config))) == config


def test_the_papers_recipes_are_tables_4_of_trp() -> None:
    base, baseline = load_recipe("pos_bert_base"), load_recipe("bert_base")
    model, optimizer = base.model, base.optimizer
    assert (model.layers, model.hidden_size, model.heads, model.dropout) == (12, 768, 12, 0.1)
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.weight_decay) == (2e-4, 10_000, 0.01)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-6)
    assert (optimizer.schedule, optimizer.clipping) == ("linear", 0.0)
    assert (base.batch.global_size, base.training.steps, base.model.max_positions) == (256, 1_000_000, 512)
    assert (base.balancer.kind, base.balancer.alpha, base.balancer.estimate) == ("minimax", 1.0, "exact")
    # The baseline is the same run on the plain loss: every masked word counts, the ungrouped ones too.
    base.balancer, base.objective.other = make_settings("balancer", "proportional"), "task"
    assert base == baseline


def test_an_unknown_upstream_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"upstream is 'mea': no such upstream; did you mean mae\?"):
        load_recipe(write(tmp_path, "upstream: mea\n"))
