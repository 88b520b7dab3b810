"""Cross-field checks: each names the flag, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import against_compiling, cautions, check, check_engine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig


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
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: check_engine(half, "fsdp", gpu=True), "--engine is fsdp"),
        (lambda: check_engine(half, "deepspeed", gpu=False), "needs a GPU"),
    ]
    for call, expected in refused:
        with pytest.raises(RefusedError, match=expected):
            call()
    check_engine(half, "deepspeed", gpu=True)
    check_engine(config(training__precision="bf16"), "plain", gpu=False)
