"""Recipes: YAML 1.2 values, refusals that name what is wrong, and the way to a dictionary and back. Cross-field checks:
each names the flag, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import (
    against_compiling,
    cautions,
    check,
    check_engine,
    dump,
    from_dict,
    known_recipes,
    load_recipe,
    to_dict,
)
from trp_scale.config.registry import make_settings
from trp_scale.config.run_flags import refuse_settings_of_others
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


def config(**changes: object) -> Config:
    """A valid configuration with `section__field=value` changes."""
    made = PosBertConfig()
    made.data.path = "data"
    for name, value in changes.items():
        section, field = name.split("__")
        assert hasattr(getattr(made, section), field)
        setattr(getattr(made, section), field, value)
    return made


def test_the_defaults_pass_and_give_no_caution() -> None:
    check(config())
    assert cautions(config()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__heads": 7}, "--model.heads is 7 and does not divide --model.hidden_size 768"),
        ({"batch__micro_size": 96}, "--batch.micro_size is 96 and does not divide --batch.global_size 256"),
        ({"data__path": ""}, "--data.path is empty"),
        ({"model__dropout": 1.0}, "--model.dropout is 1.0, allowed: from 0 to below 1"),
        ({"model__layers": 0}, "--model.layers is 0, allowed: 1 or more"),
        ({"masking__ratio": 0.0}, "--masking.ratio is 0.0, allowed: more than 0"),
        ({"optimizer__lr": float("nan")}, "--optimizer.lr is nan"),
        ({"optimizer__lr": float("inf")}, "--optimizer.lr is inf"),
        ({"optimizer__min_lr": 1.0}, "--optimizer.min_lr is 1.0, allowed: at most --optimizer.lr 0.0002"),
        ({"validation__every": 5, "data__validation_fraction": 0.0}, "nothing is held out"),
        ({"fsdp__offload_directory": "/d"}, "--fsdp.offload_directory /d needs --fsdp.offload"),
    ],
)
def test_a_setting_that_no_run_can_have_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check(config(**changes))
    assert expected in str(caught.value)
    assert "1 setting(s)" in str(caught.value)


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(RefusedError) as caught:
        check(config(model__heads=7, batch__micro_size=0, optimizer__lr=-1.0))
    assert "3 setting(s)" in str(caught.value)
    assert all(flag in str(caught.value) for flag in ("--model.heads", "--batch.micro_size", "--optimizer.lr"))


def test_what_is_rarely_meant_is_allowed_with_a_caution() -> None:
    check(config(training__steps=100))
    (caution,) = cautions(config(training__steps=100))
    assert "--optimizer.warmup_steps 10000" in caution


def test_what_speaks_against_compiling_is_named_by_its_setting() -> None:
    assert against_compiling(config()) == []
    (reason,) = against_compiling(config(training__activation_checkpointing="selective"))
    assert reason.startswith("--training.activation_checkpointing selective ")


def test_settings_of_fsdp_are_refused_on_another_engine() -> None:
    sharded = config(fsdp__shard_ranks=8)
    check_engine(sharded, "fsdp", gpu=False)
    with pytest.raises(RefusedError, match=r"--fsdp\.shard_ranks is 8 .*--engine fsdp"):
        check_engine(sharded, "ddp", gpu=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "--hooks is gradient_noise_scale, not tested with split matrices; allowed: weight_average"),
        ({"training__compile": "whole"}, "--training.compile is whole"),
        ({"training__activation_checkpointing": "full"}, "--training.activation_checkpointing is full"),
        ({"batch__micro_size": "auto"}, "--batch.micro_size is auto"),
        (
            {"megatron__tensor_parallel": 1, "megatron__sequence_parallel": True},
            "--megatron.sequence_parallel needs tensor parallelism, --megatron.tensor_parallel is 1",
        ),
    ],
)
def test_what_tensor_parallel_runs_do_not_have_is_refused(changes: dict[str, object], expected: str) -> None:
    fine = {"megatron__tensor_parallel": 2, "training__precision": "fp32", "batch__micro_size": 2}
    check_engine(config(**fine), "megatron", gpu=False)
    with pytest.raises(RefusedError) as caught:
        wrong = config(**{**fine, **changes})
        wrong.hooks = ["weight_average", *([] if changes else ["gradient_noise_scale"])]
        check_engine(wrong, "megatron", gpu=False)
    assert expected in str(caught.value)
    with pytest.raises(RefusedError, match=r"--megatron\.tensor_parallel is 2"):
        check_engine(config(**fine), "ddp", gpu=False)


def test_fp16_needs_deepspeed_and_a_gpu() -> None:
    half = config(training__precision="fp16")
    for engine, gpu, expected in (("fsdp", True, "--engine is fsdp"), ("deepspeed", False, "needs a GPU")):
        with pytest.raises(RefusedError, match=expected):
            check_engine(half, engine, gpu=gpu)
    check_engine(half, "deepspeed", gpu=True)
    check_engine(config(training__precision="bf16"), "plain", gpu=False)


@pytest.mark.parametrize(
    ("recipe", "setting", "owners"),
    [
        ("glue_tiny", "detection.width", "detection"),
        ("detection_tiny", "downstream.padding", "glue"),
        ("segmentation_tiny", "dense.max_depth", "depth"),
        ("depth_tiny", "dense.ignored", "segmentation"),
        ("depth_tiny", "augmentation.mixup", "classification"),
        ("mae_vit_b", "model.dropout", "pos_bert"),
        ("mae_vit_b", "objective.reduction", "mm_mae"),
        ("mae_vit_b", "modalities.inputs", "mm_mae"),
        ("mm_mae_tiny", "vision.tokens", "mae"),
        ("mm_mae_tiny", "masking.ratio", "mae, pos_bert"),
        ("mm_mae_tiny", "multilevel.kind", "mae"),
        ("pos_bert_tiny", "vision.patch_size", "mae, mm_mae"),
        ("pos_bert_tiny", "adversary.eps", "mae, mm_mae"),
        ("pos_bert_tiny", "multilevel.kind", "mae"),
    ],
)
def test_a_setting_of_another_run_is_refused_with_its_owners(recipe: str, setting: str, owners: str) -> None:
    """In a recipe and as a flag, with the upstreams or tasks that have it."""
    settings, section, key = load_recipe(recipe), *setting.split(".")
    document: dict[str, Any] = to_dict(settings)
    kind, run = "upstream", document.get("upstream")
    if isinstance(settings, FinetuneConfig):
        kind, run = "downstream.kind", settings.downstream.kind
    words = f"of {kind} {owners}; this run's is {run}"
    wrong = f"{setting}: a setting {words}" if section in document else f"{section}: a section {words}"
    document[section] = {**document.get(section, {}), key: 1}
    with pytest.raises(RefusedError, match=r"has 1 wrong setting\(s\)") as caught:
        from_dict(document)
    assert wrong in str(caught.value)
    with pytest.raises(RefusedError, match=f"^--{setting}: a setting {words}"):
        refuse_settings_of_others([setting], settings)


def test_a_setting_of_the_other_command_is_refused_with_the_runs_that_have_it() -> None:
    for recipe, flag, words in (
        ("glue_tiny", "masking.ratio", "a setting of runs of trp-scale pretrain (upstream mae, pos_bert) alone"),
        ("glue_tiny", "multilevel.unroll", "a setting of runs of trp-scale pretrain (upstream mae) alone"),
        ("pos_bert_tiny", "dense.region", "a setting of runs of trp-scale finetune (downstream.kind depth"),
    ):
        with pytest.raises(RefusedError) as caught:
            refuse_settings_of_others([flag], load_recipe(recipe))
        assert str(caught.value).startswith(f"--{flag}: {words}")
