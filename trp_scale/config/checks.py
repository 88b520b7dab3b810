"""Checks of settings against each other; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config import Config, PretrainConfig, RefusedError
from trp_scale.config.registry import find
from trp_scale.config.settings import Section, given, range_problems, sections


def check(config: Config) -> None:
    """Refuse settings that no run can have, all of them in one message.

    Raises:
        RefusedError: naming each flag, the value found and the values allowed.
    """
    problems = list(general_problems(config))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise RefusedError(f"{len(problems)} setting(s) cannot be used:\n{listed}")


def general_problems(config: Config) -> Iterator[str]:
    """Yield problems that pre-training and fine-tuning runs share."""
    yield from range_problems(config)
    for section in sections(config).values():
        if isinstance(section, Section):
            yield from section.problems(config)
    yield from config.problems()
    yield from hook_problems(config)


def cautions(config: Config, steps_per_epoch: int = 0) -> list[str]:
    """Return warnings about allowed but rarely intended settings, for the log.

    Args:
        steps_per_epoch: global batches that the training rows make; 0 = not known yet.
    """
    lines: list[str] = []
    for section in sections(config).values():
        if isinstance(section, Section):
            lines += section.cautions(config, steps_per_epoch)
    return [*lines, *config.cautions()]


def against_compiling(config: Config) -> list[str]:
    """Return the reasons not to compile with `training.compile auto`."""
    parts = [section for section in sections(config).values() if isinstance(section, Section)]
    return [*(reason for part in parts for reason in part.against_compiling(config)), *config.against_compiling()]


def check_engine(config: Config, engine: str, *, gpu: bool) -> None:
    """Refuse what the chosen engine or machine does not have.

    Raises:
        RefusedError: fp16 without DeepSpeed or without a GPU, a snapshot of a GPU's memory without a GPU, bf16 weights
            or gradients that DeepSpeed's file has to say, settings of FSDP2 for another engine.
    """
    if engine != "fsdp" and (settings := given(config.fsdp)):
        name, value = next(iter(settings.items()))
        raise RefusedError(f"--fsdp.{name} is {value} and the engine {engine}; allowed: --engine fsdp, or without it")
    if engine != "megatron" and (settings := given(config.megatron)):
        name, value = next(iter(settings.items()))
        raise RefusedError(
            f"--megatron.{name} is {value} and the engine {engine}; allowed: --engine megatron, or without it"
        )
    if engine == "megatron":
        check_megatron(config)
    if config.logging.memory_snapshot and not gpu:
        raise RefusedError("--logging.memory_snapshot needs a GPU, this machine shows none; allowed: without it")
    for name, key in (("weights", "bf16.enabled"), ("gradients", "communication_data_type")):
        if engine == "deepspeed" and getattr(config.training, name) != "fp32":
            raise RefusedError(
                f"--training.{name} is bf16 and DeepSpeed's own file says this; allowed: --training.{name} fp32 and "
                f"{key} in --ds_config, or --engine ddp or fsdp"
            )
    if config.training.precision != "fp16":
        return
    if engine != "deepspeed":
        raise RefusedError(
            f"--training.precision fp16 needs DeepSpeed's loss scaler, --engine is {engine}; "
            "allowed: bf16, fp32, or --ds_config FILE"
        )
    if not gpu:
        raise RefusedError("--training.precision fp16 needs a GPU, this machine shows none; allowed: bf16, fp32")


def check_megatron(config: Config) -> None:
    """Refuse what tensor parallel runs do not have yet.

    Raises:
        RefusedError: naming each flag, the value found and what is allowed.
    """
    training, problems = config.training, []
    if not isinstance(config, PretrainConfig):
        problems.append("it pre-trains and does not fine-tune; allowed: --engine ddp or fsdp")
    if others := [name for name in config.hooks if name != "weight_average"]:
        problems.append(f"--hooks is {' '.join(others)}, not tested on cut matrices; allowed: weight_average, or none")
    if training.compile not in ("none", "auto"):
        problems.append(f"--training.compile is {training.compile}; allowed: none, auto")
    if training.activation_checkpointing != "none":
        problems.append(
            f"--training.activation_checkpointing is {training.activation_checkpointing}, which is not tested; "
            "allowed: none"
        )
    if config.megatron.sequence_parallel and config.megatron.tensor_parallel == 1:
        problems.append(
            "--megatron.sequence_parallel needs ranks that share matrices, --megatron.tensor_parallel is 1; allowed: "
            "at least 2"
        )
    if config.batch.micro_size == "auto":
        problems.append("--batch.micro_size is auto, whose trial is of one rank; allowed: a number")
    if problems:
        raise RefusedError("--engine megatron: " + "; ".join(problems))


def hook_problems(config: Config) -> Iterator[str]:
    """A hook that is listed twice, or before one that must come first."""
    listed = config.hooks
    for name in dict.fromkeys(name for name in listed if listed.count(name) > 1):
        yield f"--hooks has {name} more than once; allowed: each once"
    for position, name in enumerate(listed):
        late = [first for first in find("hook", name).after if first in listed[position + 1 :]]
        if late:
            yield f"--hooks has {name} before {', '.join(late)}; allowed: {name} after {', '.join(late)}"
