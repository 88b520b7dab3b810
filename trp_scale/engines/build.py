"""Build an engine by its registered name; its module is imported then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config
from trp_scale.config.checks import engine_rules
from trp_scale.config.registry import find
from trp_scale.core.engine import Engine, EngineError
from trp_scale.distributed.groups import Group
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
    """Build the engine that is registered as `name`.

    Args:
        module: the whole model on the CPU, the same on all ranks.
        data_group: ranks that split the batch.
        ds_document: DeepSpeed's configuration from the file `ds_path`; "auto" values are filled in here.

    Raises:
        EngineError: the engine cannot run here.
    """
    arguments: dict[str, Any] = {"device": device, "data_group": data_group}
    if engine_rules(name).reads_ds_config:
        from trp_scale.data.sources import check_partition
        from trp_scale.engines.ds_config import resolve

        if ds_document is None:
            raise EngineError(f"--engine {name} needs --ds_config FILE, such as ds_configs/zero2.json")
        accumulation = check_partition(config.batch.global_size, config.batch.micro_rows, data_group.size)
        world, path = data_group.size, ds_path or "--ds_config"
        arguments["document"] = resolve(ds_document, config, world=world, accumulation=accumulation, path=path)
    engine: Engine = find("engine", name).load()(module, config, **arguments)
    return engine


OF_THE_FIRST = ("optimizer", "scheduler", "gradient_clipping")
"""Keys of a DeepSpeed configuration that repeat the recipe's settings of the run's own optimizer."""


def build_second_engine(name: str, module: nn.Module, config: Config, **settings: Any) -> Engine:
    """Build a second engine of the same kind, for example for a masking network; `settings` as for build_engine. Its
    forwards read fp32 weights, unless DeepSpeed's file enables bf16.

    Args:
        module: module with the property `layers`, its sharding units.
        config: the run's settings, with `optimizer` of this engine and a `batch` that gives its number of
            micro-batches in DeepSpeed.
    """
    config = replace(config, training=replace(config.training, weights="fp32"))
    if not hasattr(module, "tensor_plan"):  # small: each rank of a tensor group has the whole module and all tokens
        module.tensor_plan = TensorPlan()  # type: ignore[assignment]
        config = replace(config, megatron=replace(config.megatron, sequence_parallel=False))
    if document := settings.get("ds_document"):
        settings["ds_document"] = {key: value for key, value in document.items() if key not in OF_THE_FIRST}
    return build_engine(name, module, config, **settings)
