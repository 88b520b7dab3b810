"""Declarations of the package's engines. This module does not import torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trp_scale.config import Config, PretrainConfig
from trp_scale.config.registry import EngineRules, component


@component("engine", "plain", "trp_scale.engines.plain:PlainEngine")
@dataclass(kw_only=True)
class PlainRules(EngineRules):
    """One process with whole weights, gradients and moments."""

    one_process = True
    captures = True
    layouts = "trp_scale.planning.layouts:PlainLayout"


@component("engine", "ddp", "trp_scale.engines.ddp:DdpEngine")
@dataclass(kw_only=True)
class DdpRules(EngineRules):
    """Whole weights and moments on each rank; gradients are summed."""

    captures = True
    layouts = "trp_scale.planning.layouts:DdpLayout"


@component("engine", "fsdp", "trp_scale.engines.fsdp:FsdpEngine")
@dataclass(kw_only=True)
class FsdpRules(EngineRules):
    """FSDP2: weights, gradients and moments are sharded."""

    section = "fsdp"
    shards_everything = True
    layouts = "trp_scale.planning.layouts:FsdpLayout"

    def refusals(self, config: Config) -> Iterator[str]:
        if config.fsdp.offload and config.optimizer.kind == "muon":
            yield "--optimizer.kind is muon, which computes on the GPU, with --fsdp.offload; allowed: adamw, lamb, sgd"

    def keeps_states_in_files(self, config: Config) -> bool:
        return bool(config.fsdp.offload_directory)

    def capture_problems(self, config: Config, ranks: int) -> Iterator[str]:
        batch = config.batch
        if config.fsdp.offload:
            yield "--fsdp.offload copies weights on the host"
        if batch.micro_size == "auto" or batch.micro_size * ranks != batch.global_size:
            yield (
                f"FSDP2 is captured with one micro-batch in a step; --batch.micro_size is {batch.micro_size}, allowed: "
                f"{batch.global_size // ranks}"
            )


@component("engine", "megatron", "trp_scale.engines.megatron:MegatronEngine")
@dataclass(kw_only=True)
class MegatronRules(EngineRules):
    """Tensor parallel with megatron-core."""

    section = "megatron"
    layouts = "trp_scale.planning.layouts:MegatronLayout"

    def refusals(self, config: Config) -> Iterator[str]:
        training = config.training
        if not isinstance(config, PretrainConfig):
            yield "it does not fine-tune; allowed: --engine ddp or fsdp"
        if config.optimizer.kind == "muon":
            yield "--optimizer.kind is muon, which needs whole matrices; allowed: adamw, lamb, sgd"
        if others := [name for name in config.hooks if name != "weight_average"]:
            yield f"--hooks is {' '.join(others)}, not tested with split matrices; allowed: weight_average, or none"
        if training.compile not in ("none", "auto"):
            yield f"--training.compile is {training.compile}; allowed: none, auto"
        if (way := training.activation_checkpointing) != "none":
            yield f"--training.activation_checkpointing is {way}, which is not tested; allowed: none"
        if config.megatron.sequence_parallel and config.megatron.tensor_parallel == 1:
            yield (
                "--megatron.sequence_parallel needs tensor parallelism, --megatron.tensor_parallel is 1; "
                "allowed: at least 2"
            )
        if config.batch.micro_size == "auto":
            yield "--batch.micro_size is auto, which tries one rank only; allowed: a number"

    def against_compiling(self, config: Config) -> Iterator[str]:
        yield "megatron-core's layers are not compiled"

    def join_groups(self, config: Config, environment: Any) -> None:
        from trp_scale.engines.megatron import megatron_groups

        super().join_groups(config, environment)
        ranks, local_world = config.megatron.tensor_parallel, environment.info.local_world
        environment.data, _ = megatron_groups(ranks, local_world=local_world)


@component("engine", "deepspeed", "trp_scale.engines.deepspeed:DeepSpeedEngine")
@dataclass(kw_only=True)
class DeepSpeedRules(EngineRules):
    """DeepSpeed, with its own configuration file."""

    reads_ds_config = True
    scales_loss = True
    layouts = "trp_scale.planning.zero:DeepSpeedLayout"

    def refusals(self, config: Config) -> Iterator[str]:
        for name, key in (("weights", "bf16.enabled"), ("gradients", "communication_data_type")):
            if getattr(config.training, name) != "fp32":
                yield (
                    f"--training.{name} is bf16, but DeepSpeed's file decides this; allowed: --training.{name} fp32 "
                    f"and {key} in --ds_config, or --engine ddp or fsdp"
                )

    def build(
        self, module: Any, config: Config, *, ds_document: Any = None, ds_path: str = "", **arguments: Any
    ) -> Any:
        """Build the engine; its configuration gets the recipe's values where it has "auto"."""
        from trp_scale.core.engine import EngineError
        from trp_scale.data.sources import check_partition
        from trp_scale.engines.ds_config import resolve

        if ds_document is None:
            raise EngineError(f"--engine {self.kind} needs --ds_config FILE, such as ds_configs/zero2.json")
        world, path = arguments["data_group"].size, ds_path or "--ds_config"
        accumulation = check_partition(config.batch.global_size, config.batch.micro_rows, world)
        document = resolve(ds_document, config, world=world, accumulation=accumulation, path=path)
        return super().build(module, config, document=document, **arguments)
