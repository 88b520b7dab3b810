"""DeepSpeed's configuration: stated once, filled in, contradictions refused with both values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.engines.ds_config import TOP_LEVEL, WITHOUT_EFFECT, ZERO, notices, read, resolve, zero_stage

SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def config(precision: str = "fp32", **optimizer: object) -> Config:
    made = load_recipe("pos_bert_base")
    made.batch.micro_size = 32
    setattr(made.training, "precision", precision)  # noqa: B010 - any text, not only the allowed ones
    for name, value in optimizer.items():
        setattr(made.optimizer, name, value)
    return made


def resolved(
    document: dict[str, Any], made: Config | None = None, *, world: int = 2, accumulation: int = 4
) -> dict[str, Any]:
    return resolve(document, made or config(), world=world, accumulation=accumulation, path="x.json")


def refusal(document: dict[str, Any], made: Config | None = None) -> str:
    with pytest.raises(RefusedError) as caught:
        resolved(document, made)
    return str(caught.value)


def words(value: object) -> list[object]:
    """All values at the ends of a document."""
    if isinstance(value, dict):
        return [end for item in value.values() for end in words(item)]
    return [end for item in value for end in words(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.stem))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_shipped_files_leave_nothing_open_and_deepspeed_reads_them(path: Path, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = config(precision)
    document = resolved(read(path), made, world=1, accumulation=8)
    assert "auto" not in words(document)
    json.dumps(document)
    seen = DeepSpeedConfig(copy.deepcopy(document))
    assert (seen.train_batch_size, seen.train_micro_batch_size_per_gpu, seen.gradient_accumulation_steps) == (
        256,
        32,
        8,
    )
    assert seen.gradient_clipping == 0.0
    assert seen.zero_allow_untested_optimizer
    assert seen.torch_autocast_enabled == (precision == "bf16")
    assert seen.float16_config.enabled == (precision == "fp16")
    assert not seen.bfloat16_config.enabled
    assert seen.zero_optimization_stage == zero_stage(document) == int(path.stem[4])


def test_there_are_the_four_files() -> None:
    assert [path.stem for path in SHIPPED] == ["zero1", "zero2", "zero3", "zero3_offload"]


def test_the_known_zero_keys_are_those_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    names = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert names >= ZERO
    assert {"optimizer", "gradient_clipping", "torch_autocast", "zero_optimization"} <= TOP_LEVEL


TRANSFORMERS = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""A complete file for ZeRO-3 as transformers' documentation has it, made to be filled in for any run."""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_usual_file_of_transformers_is_accepted(precision: str, stage: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = config(precision)
    given = copy.deepcopy(TRANSFORMERS)
    given["zero_optimization"]["stage"] = stage  # type: ignore[index]
    if stage < 2:
        del given["zero_optimization"]["offload_optimizer"], given["zero_optimization"]["offload_param"]  # type: ignore[attr-defined]
    document = resolved(given, made, world=1, accumulation=8)
    assert "auto" not in words(document) and not {"optimizer", "scheduler"} & document.keys()
    seen = DeepSpeedConfig(copy.deepcopy(document))
    assert (seen.train_batch_size, seen.gradient_clipping, seen.zero_optimization_stage) == (256, 0.0, stage)
    assert seen.float16_config.enabled == (precision == "fp16")
    assert seen.bfloat16_config.enabled == (precision == "bf16" and stage > 0)
    (notice,) = notices(given, made, path="x.json")
    assert "x.json: its scheduler block (WarmupLR) is left out" in notice
    assert "linear after 10000 steps of warm-up (--optimizer.schedule" in notice


def test_a_scheduler_block_to_be_filled_in_is_noticed_only_where_it_differs_and_its_numbers_still_count() -> None:
    filled = copy.deepcopy(TRANSFORMERS["scheduler"])
    assert notices({"scheduler": filled | {"type": "WarmupDecayLR"}}, config(), path="x.json") == []
    assert notices({"scheduler": {"type": "WarmupDecayLR"}}, config(), path="x.json") == []
    assert notices({}, config(), path="x.json") == []
    filled["params"]["warmup_num_steps"] = 500  # type: ignore[index]
    assert "scheduler.params.warmup_num_steps is 500, the recipe says 10000" in refusal({"scheduler": filled})


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        (
            {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False}},
            ["activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"],
        ),
        ({"compile": {"deepcompile": True}}, ["compile.deepcompile"]),
        ({"checkpoint": {"tag_validation": "Fail", "parallel_write": {}}}, ["checkpoint.tag_validation"]),
        ({"checkpoint": {}}, ["checkpoint"]),
    ],
)
def test_what_would_do_nothing_is_refused_by_its_path(document: dict[str, Any], paths: list[str]) -> None:
    message = refusal(document)
    for path in paths:
        assert f"  {path} would have no effect: " in message
    assert not set(WITHOUT_EFFECT) & TOP_LEVEL


def test_an_empty_file_gets_everything_that_deepspeed_would_default() -> None:
    document = resolved({}, config(clipping=0.5))
    assert document == {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    }
    assert resolved({})["gradient_clipping"] == 0.0  # off, and not DeepSpeed's 1.0


def test_the_given_document_is_not_changed() -> None:
    document = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    before = copy.deepcopy(document)
    resolved(document)
    assert document == before


def test_sizes_follow_the_width_of_the_model() -> None:
    names = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"]
    zero = resolved({"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}})["zero_optimization"]
    assert all(zero[name] == 12 * 768 * 768 for name in names)
    assert resolved({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}})["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1000,
    }


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train_batch_size": 512}, "train_batch_size is 512, the recipe says 256 (--batch.global_size)"),
        ({"train_micro_batch_size_per_gpu": 8}, "is 8, the recipe says 32 (--batch.micro_size)"),
        ({"gradient_accumulation_steps": 2}, "is 2, the recipe says 4 (256 / (32 x 2 ranks)"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, the recipe says 0.0 (--optimizer.clipping)"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, the recipe says fp32 (--training.precision)"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, the recipe says fp32"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is true, the recipe says fp32"),
        ({"prescale_gradients": True}, "prescale_gradients is true, only False is allowed"),
        ({"gradient_allreduce_op": "sum"}, "only 'mean' is allowed"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "master weights are fp32"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb', the recipe says adamw (--optimizer.kind)"),
        ({"optimizer": {"params": {"lr": 1e-4}}}, "optimizer.params.lr is 0.0001, the recipe says 0.0002"),
        ({"optimizer": {"params": {"betas": [0.9, 0.98]}}}, "betas is [0.9, 0.98], the recipe says [0.9, 0.999]"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "decoupled decay"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "is 1.0, the recipe says 0.0 (--optimizer.clipping)"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "optimizer.params.momentum is not known"),
        ({"scheduler": {"type": "WarmupLR"}}, "is 'WarmupLR' = constant, the recipe says linear"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle', the recipe says linear"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 500}}},
            "warmup_num_steps is 500, the recipe says 10000 (--optimizer.warmup_steps)",
        ),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "log"}}}, "fixed: linear warm-up"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
        ({"zero_optimization": True}, "zero_optimization is True; allowed: a block"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "allowed: none, cpu"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": "auto"}}, 'zero_optimization.sub_group_size is "auto"'),
        ({"tensorboard": {"job_name": ["a", "auto"]}}, 'tensorboard.job_name.1 is "auto"'),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "is 2 at stage 2, where it has no effect"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, "zero_hpz_partition_size is 0; allowed: "),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "auto"}}, 'zero_hpz_partition_size is "auto"'),
        ({"train_batchsize": 256}, "train_batchsize: unknown or not supported; did you mean train_batch_size?"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'allowed: false, or offload_optimizer: {"device"'),
        ({"zero_optimization": {"stages": 2}}, "did you mean zero_optimization.stage?"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency: unknown or not supported"),
    ],
)
def test_a_contradiction_is_refused_with_both_values(document: dict[str, Any], expected: str) -> None:
    message = refusal(document)
    assert message.startswith("x.json cannot be used with this recipe (1 reason(s))")
    assert expected in message


def test_former_keys_that_are_false_are_taken_out() -> None:
    former = {"stage": 2, "cpu_offload": False, "cpu_offload_params": False}
    assert resolved({"zero_optimization": former})["zero_optimization"].keys() & former.keys() == {"stage"}


def test_all_contradictions_are_listed_at_once() -> None:
    message = refusal({"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"params": {"lr": 1, "eps": 1}}})
    assert "4 reason(s)" in message
    assert all(name in message for name in ("train_batch_size", "bf16.enabled", "params.lr", "params.eps"))


def test_blocks_that_agree_with_the_recipe_are_taken_out() -> None:
    adamw = {"type": "AdamW", "params": {"lr": 2e-4, "betas": ["auto", 0.999], "eps": 1e-6, "weight_decay": "auto"}}
    decay = {"warmup_num_steps": 10_000, "warmup_max_lr": 2e-4, "total_num_steps": "auto", "warmup_min_lr": 0}
    document = resolved({"optimizer": adamw, "scheduler": {"type": "WarmupDecayLR", "params": decay}})
    assert "optimizer" not in document
    assert "scheduler" not in document


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_autocast_where_the_file_has_it_and_bf16_weights_elsewhere(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    document = resolved(
        {**zero, "torch_autocast": {"enabled": "auto", "dtype": "auto"}, "bf16": {"enabled": "auto"}}, config("bf16")
    )
    assert document["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert document["bf16"] == {"enabled": False}
    document = resolved({**zero, "fp16": {"enabled": "auto"}}, config("bf16"))
    assert document["bf16"] == {"enabled": True}
    assert document["fp16"] == {"enabled": False}
    assert "torch_autocast" not in document
    message = refusal({**zero, "torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, config("bf16"))
    assert "only one of them can be" in message


def test_bf16_at_stage_0_keeps_fp32_master_weights() -> None:
    document = resolved({"bf16": {"enabled": "auto"}}, config("bf16"))
    assert document["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert document["bf16"] == {"enabled": False}
    assert "has no fp32 master weights" in refusal({"bf16": {"enabled": True}}, config("bf16"))


@pytest.mark.parametrize(
    ("stage", "precision", "dtype"),
    [(0, "bf16", "fp32"), (1, "bf16", "bf16"), (2, "bf16", "fp32"), (3, "fp16", "fp32"), (1, "fp32", "fp32")],
)
def test_the_type_of_gradient_sums(stage: int, precision: str, dtype: str) -> None:
    document = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "auto"}}
    assert resolved(document, config(precision))["data_types"]["grad_accum_dtype"] == dtype


def test_copies_of_hpz_are_of_as_many_ranks_each() -> None:
    def document(ranks: int) -> dict[str, Any]:
        return {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": ranks}}

    with pytest.raises(RefusedError, match=r"is 3.*the 4.*allowed: 1.*2.*4"):
        resolved(document(3), world=4, accumulation=2)
    for ranks in (1, 2, 4, 8):  # on fewer ranks than a node has they share one copy
        resolved(document(ranks), world=4, accumulation=2)


def test_offloading_allows_torchs_optimizer() -> None:
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert resolved(document)["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in resolved({"zero_optimization": {"stage": 3}})


def test_deepspeeds_own_adam_on_the_host_is_had_where_the_file_asks_for_it() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert resolved({"zero_optimization": zero, "zero_force_ds_cpu_optimizer": True})["zero_force_ds_cpu_optimizer"]
    assert "no optimizer is offloaded" in refusal({"zero_force_ds_cpu_optimizer": True})
    document = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": True}
    assert "the recipe says lamb" in refusal(document, config(kind="lamb"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"bf16": 1, "bf16": 2}', "'bf16' is given twice"),
        ("{", ": not JSON"),
        ("[]", "is a list; allowed: a JSON object"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError) as caught:
        read(tmp_path / "x.json")
    assert expected in str(caught.value)
    with pytest.raises(RefusedError, match="not found"):
        read(tmp_path / "y.json")
