"""Chooses an engine by name; the only place that does. DeepSpeed is imported only when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config
from trp_scale.core.engine import Engine, EngineError
from trp_scale.distributed.groups import Group
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.tensor_plan import TensorPlan


def build_engine(
    name: str,
    module: nn.Module,
    config: Config,
    *,
    device: torch.device,
    data_group: Group,
    ds_document: dict[str, Any] | None = None,
    ds_path: str = "",
) -> Engine:
    """The engine `name` holding `module`.

    Args:
        name: plain, ddp, fsdp, megatron or deepspeed.
        module: the model, whole, on the CPU, the same on all ranks.
        config: settings of the run.
        device: where to train.
        data_group: ranks that split the batch.
        ds_document: DeepSpeed's configuration as read from its file, for deepspeed only; "auto"s are filled in here.
        ds_path: where it was read from, for messages.

    Raises:
        EngineError: the engine cannot run here; the message says what to change.
    """
    if name == "plain":
        return PlainEngine(module, config, device=device, data_group=data_group)
    if name == "ddp":
        from trp_scale.engines.ddp import DdpEngine

        return DdpEngine(module, config, device=device, data_group=data_group)
    if name == "fsdp":
        from trp_scale.engines.fsdp import FsdpEngine

        return FsdpEngine(module, config, device=device, data_group=data_group)
    if name == "megatron":
        from trp_scale.engines.megatron import MegatronEngine

        return MegatronEngine(module, config, device=device, data_group=data_group)
    if name == "deepspeed":
        from trp_scale.data.train_source import check_partition
        from trp_scale.engines.deepspeed import DeepSpeedEngine
        from trp_scale.engines.ds_config import resolve

        if ds_document is None:
            raise EngineError("--engine deepspeed needs --ds_config FILE, such as ds_configs/zero2.json")
        accumulation = check_partition(config.batch.global_size, config.batch.micro_rows, data_group.size)
        document = resolve(
            ds_document, config, world=data_group.size, accumulation=accumulation, path=ds_path or "--ds_config"
        )
        return DeepSpeedEngine(module, config, device=device, data_group=data_group, document=document)
    raise EngineError(f"engine {name!r} is not known; plain, ddp, fsdp, megatron and deepspeed are")


OF_THE_FIRST = ("optimizer", "scheduler", "gradient_clipping")
"""Keys of a DeepSpeed configuration that repeat what the recipe says of the run's own optimizer."""


def build_second_engine(
    name: str,
    module: nn.Module,
    config: Config,
    *,
    device: torch.device,
    data_group: Group,
    ds_document: dict[str, Any] | None = None,
    ds_path: str = "",
) -> Engine:
    """An engine of the same kind beside the run's own, such as a masking network's. Its forwards read fp32 weights, but
    for bf16 that DeepSpeed's file asks for.

    Args:
        config: the run's settings, but in `optimizer` those of this engine; `batch` says into how many micro-batches
            DeepSpeed believes its steps to be split.
        ds_document: the run's DeepSpeed configuration; what it says of an optimizer is about the run's own.
    Other arguments and errors as in build_engine; `module` has the property `layers`, its units of sharding, and may
    consist of them alone.
    """
    config = replace(config, training=replace(config.training, weights="fp32"))
    if not hasattr(module, "tensor_plan"):  # small: each rank of a tensor group holds it whole, and all of its tokens
        module.tensor_plan = TensorPlan()  # type: ignore[assignment]
        config = replace(config, megatron=replace(config.megatron, sequence_parallel=False))
    document = ds_document and {key: value for key, value in ds_document.items() if key not in OF_THE_FIRST}
    return build_engine(
        name, module, config, device=device, data_group=data_group, ds_document=document, ds_path=ds_path
    )
