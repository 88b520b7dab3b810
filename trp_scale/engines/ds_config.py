"""Complete a DeepSpeed configuration from the recipe, and refuse contradictions.

The recipe decides batch sizes, clipping, precision, optimizer and schedule. DeepSpeed's file decides the sharding;
other keys must agree with the recipe. Unlisted keys are refused: keys that DeepSpeed has removed, keys for decisions of
the recipe or the loop (data_efficiency, tensor_parallel, pipeline, hybrid_engine, autotuning, expert_parallel,
zenflow), and misspelt keys, which DeepSpeed ignores at the top level. Functions on the parsed JSON; DeepSpeed is not
imported.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from trp_scale.config import Config, RefusedError
from trp_scale.config.files import parse_json, read_content
from trp_scale.config.registry import near_divisors
from trp_scale.errors import MOST_PROBLEMS, listed_problems, nearest, quote, shorten

Document = dict[str, Any]

AUTO = "auto"

TOP_LEVEL = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "bf16",
        "fp16",
        "torch_autocast",
        "data_types",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "aio",
        "comet",
        "comms_logger",
        "csv_monitor",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)
"""Keys with their meaning in DeepSpeed (0.19)."""

WITHOUT_EFFECT = {
    "activation_checkpointing": "--training.activation_checkpointing does it, with torch's own, on every engine",
    "checkpoint": "checkpoints are written by the run itself (--checkpoint.every)",
    "compile": "--training.compile compiles with torch's own compiler, without DeepCompile",
}
"""DeepSpeed blocks without effect here, and the reason."""

ZERO = frozenset(
    {
        "stage",
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "compute_grad_norm",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
"""Keys of the block zero_optimization."""

FORMER_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
"""Old keys of zero_optimization, and the blocks that replace them."""

DEEPSPEED_AUTO = frozenset({"data_types.keep_in_fp32_modules"})
"""Paths with a value "auto" in DeepSpeed itself."""


LONGEST_PROBLEM = 600
"""Maximum characters of a problem: names and values come from the file."""


def read(path: Path) -> Document:
    """Parse the JSON file of --ds_config.

    Raises:
        RefusedError: it cannot be read, is no JSON object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> Document:
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if repeated:
            raise ValueError(f"key {quote(repeated[0])} is given twice")
        return dict(pairs)

    flag = f"--ds_config {path}"
    document = parse_json(read_content(path, RefusedError, source=flag), flag, pairs=unique)
    if not isinstance(document, dict):
        raise RefusedError(f"{flag} is a {type(document).__name__}; allowed: a JSON object")
    return document


def resolve(document: Mapping[str, Any], config: Config, *, world: int, accumulation: int, path: str) -> Document:
    """The configuration to give to DeepSpeed: every "auto" filled in, nothing left to a silent default of DeepSpeed's.

    Args:
        document: the parsed file; not changed.
        config: settings of the run.
        world: number of ranks that split the batch.
        accumulation: micro-batches per step on each rank.
        path: of the file, for messages.

    Raises:
        RefusedError: unknown keys, an "auto" whose value is not known here, contradictions with the recipe: all of
            them, each with its path and both values.
    """
    resolved = copy.deepcopy(dict(document))
    problems = list(islice(_wrong_shape(resolved), MOST_PROBLEMS))  # the nearest of a million keys takes hours
    if not problems:  # what follows looks into the blocks
        problems += [*_blocks(resolved, config)]
        problems += [*_check_stated_values(resolved, config, world, accumulation)]
        problems += [*_precision(resolved, config)]
        problems += [*_zero(resolved, config), *_copies(resolved, world)]
        problems += [*_remaining_autos(resolved)]
    if problems:
        listed = listed_problems([shorten(problem, LONGEST_PROBLEM) for problem in problems])
        raise RefusedError(f"{path} cannot be used with this recipe ({len(problems)} reason(s)):\n{listed}")
    return resolved


def notices(document: Mapping[str, Any], config: Config, *, path: str) -> list[str]:
    """Return the settings of the file that the run overrides, in words; arguments as for `resolve`."""
    block = document.get("scheduler")
    if not _is_template(block) or not list(scheduler_differences({"type": block.get("type", AUTO)}, config)):
        return []
    settings = config.optimizer
    return [
        f"{path}: its scheduler block ({block['type']}) is left out: the schedule is the recipe's, {settings.schedule} "
        f"after {settings.warmup_steps} steps of warm-up (--optimizer.schedule, --optimizer.warmup_steps)"
    ]


def zero_stage(document: Mapping[str, Any]) -> int:
    return int(document.get("zero_optimization", {}).get("stage", 0))


def _wrong_shape(document: Document) -> Iterator[str]:
    for key, block in document.items():
        if key in WITHOUT_EFFECT:
            paths = [f"{key}.{name}" for name in block] if isinstance(block, dict) and block else [key]
            yield from (f"{path} would have no effect: {WITHOUT_EFFECT[key]}; take it out" for path in paths)
        elif key not in TOP_LEVEL:
            yield f"{key}: unknown or not supported{nearest(key, TOP_LEVEL)}"
    for name in ("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types"):
        if not isinstance(document.get(name, {}), dict):
            yield f"{name} is {quote(document[name])}; allowed: a block"
    zero = document.get("zero_optimization", {})
    for key in list(zero) if isinstance(zero, dict) else ():
        if (instead := FORMER_OFFLOADS.get(key)) is not None:
            if zero.pop(key) is not False:
                yield f'zero_optimization.{key} is a former key; allowed: false, or {instead}: {{"device": "cpu"}}'
        elif key not in ZERO:
            close = nearest(key, ZERO).replace("did you mean ", "did you mean zero_optimization.")
            yield f"zero_optimization.{key}: unknown or not supported{close}"
        elif key.startswith("offload_") and not isinstance(zero[key] or {}, dict):
            yield f"zero_optimization.{key} is {quote(zero[key])}; allowed: a block"
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage is {quote(stage)}; allowed: 0, 1, 2, 3"


def _blocks(document: Document, config: Config) -> Iterator[str]:
    """Compare and remove the optimizer and scheduler blocks: the optimizer is ours, and DeepSpeed would silently ignore
    the block."""
    if "optimizer" in document:
        yield from optimizer_differences(document.pop("optimizer"), config)
    if "scheduler" in document:
        block = document.pop("scheduler")
        if _is_template(block):
            block = {name: value for name, value in block.items() if name != "type"}
        yield from scheduler_differences(block, config)


def _is_template(block: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a scheduler block has "auto" values, as in the standard files of transformers; its type is then
    ignored."""
    params = block.get("params") if isinstance(block, Mapping) else None
    return isinstance(params, Mapping) and AUTO in params.values()


def _check_stated_values(document: Document, config: Config, world: int, accumulation: int) -> Iterator[str]:
    batch = config.batch
    derived = (
        f"{batch.global_size} / ({batch.micro_rows} x {world} ranks), from --batch.global_size and --batch.micro_size"
    )
    stated: dict[str, tuple[object, str]] = {
        "train_batch_size": (batch.global_size, "--batch.global_size"),
        "train_micro_batch_size_per_gpu": (batch.micro_rows, "--batch.micro_size"),
        "gradient_accumulation_steps": (accumulation, derived),
        # Always written: DeepSpeed's default clips at 1.0.
        "gradient_clipping": (config.optimizer.clipping, "--optimizer.clipping"),
    }
    for name, (value, flag) in stated.items():
        yield from _agree(document, name, value, name, f"the recipe says {value!r} ({flag})")
    # The loop's losses are shares of the global loss; the engine undoes only a mean over ranks.
    for name, value in (
        ("gradient_allreduce_op", "mean"),
        ("prescale_gradients", False),
        ("gradient_predivide_factor", 1.0),
    ):
        if name in document:
            yield from _agree(document, name, value, name, f"only {value!r} is allowed: the engine depends on it")
    document["zero_allow_untested_optimizer"] = True  # torch's AdamW is not in DeepSpeed's list
    if document.get("steps_per_print") == AUTO:
        del document["steps_per_print"]  # metrics.jsonl has these figures


def _precision(document: Document, config: Config) -> Iterator[str]:
    """Enable one of fp32, torch_autocast, bf16 and fp16, and write the others as disabled."""
    precision, stage = config.training.precision, document.get("zero_optimization", {}).get("stage", 0)
    # At stage 0 DeepSpeed's bf16 has no fp32 master weights and fails with fp32 accumulation: use autocast.
    autocast = precision == "bf16" and (
        document.get("torch_autocast", {}).get("enabled") in (AUTO, True)
        or (stage == 0 and document.get("bf16", {}).get("enabled", AUTO) == AUTO)
    )
    enabled = {"torch_autocast": autocast, "bf16": precision == "bf16" and not autocast, "fp16": precision == "fp16"}
    for name, on in enabled.items():
        if on or name in document:
            block = document.setdefault(name, {})
            reason = f"the recipe says {precision} (--training.precision)"
            if autocast and name == "bf16":
                reason = "torch_autocast is enabled, and only one of them can be"
            yield from _agree(block, "enabled", on, f"{name}.enabled", reason)
    if autocast:
        block = document["torch_autocast"]
        yield from _agree(
            block, "dtype", "bfloat16", "torch_autocast.dtype", "the recipe says bf16 (--training.precision)"
        )
        # DeepSpeed's default reduces the gradients of linear layers in bf16; the other engines reduce in fp32.
        block.setdefault("lower_precision_safe_modules", [])
    elif document.get("torch_autocast", {}).get("dtype") == AUTO:
        del document["torch_autocast"]["dtype"]
    if enabled["bf16"] and stage == 0:
        yield (
            "bf16.enabled is true at zero_optimization.stage 0, where DeepSpeed has no fp32 master weights; allowed: "
            '"auto" (uses autocast), or stage 1, 2 or 3'
        )
    for block_name in ("bf16", "fp16"):
        name = f"{block_name}_master_weights_and_grads"
        if document.get(block_name, {}).get(name):
            yield f"{block_name}.{name} is true; allowed: false (master weights are fp32, see --training.precision)"
    if document.get("data_types", {}).get("grad_accum_dtype") == AUTO:
        # fp32 sums over micro-batches, except at stage 1 with bf16 weights, where another optimizer class would be
        # used.
        low = {"bf16": "bf16", "fp16": "fp16"}[precision] if enabled["bf16"] or enabled["fp16"] else "fp32"
        document["data_types"]["grad_accum_dtype"] = low if stage < 2 else "fp32"


def _zero(document: Document, config: Config) -> Iterator[str]:
    zero = document.setdefault("zero_optimization", {"stage": 0})
    zero.setdefault("stage", 0)
    block_weights = 12 * config.model.hidden_size**2  # the weights of one transformer block
    sizes = {
        # One block at a time: large enough for the network, and the memory of one layer.
        "reduce_bucket_size": block_weights,
        "allgather_bucket_size": block_weights,
        "stage3_prefetch_bucket_size": block_weights,
        # Free gathered weights unless the next block needs them; DeepSpeed's 1e9 keeps a whole encoder.
        "stage3_max_reuse_distance": block_weights,
        "stage3_max_live_parameters": 4 * block_weights,
        # Keep biases and norms on every rank: they are many and small.
        "stage3_param_persistence_threshold": 10 * config.model.hidden_size,
    }
    for name, value in sizes.items():
        if zero.get(name) == AUTO:
            zero[name] = value
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    weights_in_fp32 = not any(document.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if zero["stage"] in (1, 2) and config.optimizer.clipping == 0.0 and weights_in_fp32 and not offloads:
        # The engine computes the norm before the step; DeepSpeed's second norm would wait for the device.
        zero.setdefault("compute_grad_norm", False)
    if zero.get("stage3_gather_16bit_weights_on_model_save") == AUTO:
        zero["stage3_gather_16bit_weights_on_model_save"] = False  # DeepSpeed saves nothing here
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            yield f"zero_optimization.{name}.device is {quote(device)}; allowed: none, cpu (checkpoints read host RAM)"
    yield from _host_adam(document, config, offloads=offloads)


def _host_adam(document: Document, config: Config, *, offloads: bool) -> Iterator[str]:
    """Use DeepSpeed's C++ Adam, which is compiled at the first start, only if the file selects it. Without the key
    DeepSpeed would refuse any other optimizer on the host."""
    name = "zero_force_ds_cpu_optimizer"
    wanted = document.get(name, AUTO)
    if wanted == AUTO:
        document.pop(name, None)
        if offloads:
            document[name] = False
    elif wanted is True and not offloads:
        yield f"{name} is true and no optimizer is offloaded; allowed: with zero_optimization.offload_optimizer, false"
    elif wanted is True and config.optimizer.kind != "adamw":
        yield f"{name} is true, the recipe says {config.optimizer.kind} (--optimizer.kind); allowed: adamw, or false"


def _copies(document: Document, world: int) -> Iterator[str]:
    """Check hpZ: a second copy of the weights in each group of ranks."""
    zero, name = document["zero_optimization"], "zero_hpz_partition_size"
    ranks = zero.get(name, 1)
    if ranks == AUTO:
        return  # _remaining_autos names it
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        words = "allowed: the number of ranks that share a copy, such as those of a node; 1"
        yield f"zero_optimization.{name} is {quote(ranks)}; {words}"
    elif ranks > 1 and zero["stage"] != 3:
        yield f"zero_optimization.{name} is {ranks} at stage {zero['stage']}, where it has no effect; allowed: stage 3"
    elif world % min(ranks, world):
        yield (
            f"zero_optimization.{name} is {ranks} and does not divide the {world} ranks of this run; allowed: "
            f"{near_divisors(world, ranks)}"
        )


def _agree(block: Document, name: str, value: object, path: str, reason: str) -> Iterator[str]:
    """Set `value` if the block has "auto" or no value; yield a problem if it has a different value."""
    setting = block.get(name, AUTO)
    if setting != AUTO and not same(setting, value):
        yield f"{path} is {shorten(json.dumps(setting))}, {reason}"
        return
    block[name] = value


def _remaining_autos(value: object, path: str = "") -> Iterator[str]:
    """Yield the paths that still have "auto": DeepSpeed would use a default there."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _remaining_autos(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _remaining_autos(item, f"{path}.{index}")
    elif value == AUTO and path not in DEEPSPEED_AUTO:
        yield f'{path} is "auto", which cannot be resolved; write a value'


def same(value: object, stated: object) -> bool:
    """Whether a JSON value equals a recipe's value; numbers up to their decimal notation, "auto" in a list."""
    if isinstance(value, list) and isinstance(stated, list) and len(value) == len(stated):
        return all(item == AUTO or same(item, expected) for item, expected in zip(value, stated, strict=True))
    if isinstance(value, bool) or isinstance(stated, bool):
        return value is stated
    if isinstance(value, (int, float)) and isinstance(stated, (int, float)):
        return math.isclose(value, stated, rel_tol=1e-9)
    return value == stated


def optimizer_differences(block: object, config: Config, path: str = "optimizer") -> Iterator[str]:
    """Yield a problem for each value of the block that differs from the recipe; "auto" and missing values agree."""
    settings = config.optimizer
    stated: dict[str, tuple[object, str]] = {
        "lr": (settings.lr, "--optimizer.lr"),
        "weight_decay": (settings.weight_decay, "--optimizer.weight_decay"),
        "max_grad_norm": (settings.clipping, "--optimizer.clipping"),
    }
    if settings.kind == "sgd":
        stated["momentum"] = (0.0, "fixed: plain gradient descent")
    else:
        stated["eps"] = (settings.eps, "--optimizer.eps")
        stated["bias_correction"] = (True, "fixed: the bias of the moments is corrected")
        stated["betas"] = ([settings.beta1, settings.beta2], "--optimizer.beta1, --optimizer.beta2")
    if settings.kind == "adamw":
        stated["amsgrad"] = (False, "fixed: plain AdamW")
        stated["adam_w_mode"] = (True, "fixed: decoupled decay")
    kinds = {kind: kind for kind in ("adamw", "lamb", "muon", "sgd")} | {"adam": "adamw"}
    recipe, implementation = (settings.kind, "--optimizer.kind"), ("torch_adam", "fused", "foreach", "betas")
    yield from _block_differences(block, kinds, recipe, stated, implementation, path)


def scheduler_differences(block: object, config: Config, path: str = "scheduler") -> Iterator[str]:
    """Yield a problem for each value of the learning-rate schedule that differs from the recipe."""
    settings, steps = config.optimizer, config.training.steps
    stated: dict[str, tuple[object, str]] = {
        "warmup_num_steps": (settings.warmup_steps, "--optimizer.warmup_steps"),
        "warmup_max_lr": (settings.lr, "--optimizer.lr"),
        "warmup_min_lr": (0.0, "fixed: warm-up starts at 0"),
        "warmup_min_ratio": (0.0, "fixed: warm-up starts at 0"),
        "warmup_type": ("linear", "fixed: linear warm-up"),
        "total_num_steps": (steps, "--training.steps"),
        "cos_min_ratio": (settings.min_lr / settings.lr if settings.lr else 0.0, "--optimizer.min_lr / --optimizer.lr"),
    }
    kinds = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    recipe = settings.schedule, "--optimizer.schedule"
    yield from _block_differences(block, kinds, recipe, stated, ("last_batch_iteration",), path)


def _block_differences(
    block: object,
    kinds: Mapping[str, str],
    recipe: tuple[str, str],
    stated: Mapping[str, tuple[object, str]],
    others: tuple[str, ...],
    path: str,
) -> Iterator[str]:
    """Yield the problems of a block with type and params.

    Args:
        kinds: the recipe's name of each type, by its name in lower-case letters.
        recipe: the recipe's value of the type, and its flag.
        stated: the recipe's value of each parameter, and its flag.
        others: parameters without an effect on results.
    """
    if not isinstance(block, Mapping):
        yield f"{path} is {quote(block)}; allowed: a block with type and params"
        return
    yield from _unknown_names(block, ("type", "params", "legacy_fusion"), path)
    kind = str(block.get("type", AUTO))
    if kind != AUTO and (meaning := kinds.get(kind.lower(), "")) != recipe[0]:
        meant = f" = {meaning}" if meaning not in ("", kind.lower()) else ""
        yield f"{path}.type is {quote(block['type'])}{meant}, the recipe says {recipe[0]} ({recipe[1]})"
        return
    params = block.get("params", {})
    if not isinstance(params, Mapping):
        yield f"{path}.params is {quote(params)}; allowed: a block"
        return
    yield from _unknown_names(params, (*stated, *others), f"{path}.params")
    for name, (value, flag) in stated.items():
        setting = params.get(name, AUTO)
        if setting != AUTO and not same(setting, value):
            yield f"{path}.params.{name} is {quote(setting)}, the recipe says {value!r} ({flag})"


def _unknown_names(block: Mapping[str, Any], known: tuple[str, ...], path: str) -> Iterator[str]:
    for name in block:
        if name not in known:
            yield f"{path}.{name} is not known; allowed: {', '.join(known)}"
