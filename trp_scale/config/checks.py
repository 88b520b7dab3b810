"""Checks of settings against each other and against the engine. Each message names the flag to change.

engines/settings.py declares the engines of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from trp_scale.config import Config, RefusedError
from trp_scale.config.registry import Section, Settings, find, find_problems, names, non_default_values, sections


def check(config: Config) -> None:
    """Refuse invalid settings; the message lists every flag with its value and the allowed values. Raises RefusedError:
    at least one setting is invalid."""
    problems = list(general_problems(config))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise RefusedError(f"{len(problems)} setting(s) cannot be used:\n{listed}")


def general_problems(config: Config) -> Iterator[str]:
    """Yield the problems that pre-training and fine-tuning runs share."""
    yield from find_problems(config)
    yield from config.problems()
    yield from hook_problems(config)


def cautions(config: Config, steps_per_epoch: int = 0) -> list[str]:
    """Return warnings about allowed but rarely intended settings, for the log. `steps_per_epoch`: number of global
    batches in the training rows; 0 = not known yet."""
    return [
        *(line for part in _config_sections(config) for line in part.cautions(config, steps_per_epoch)),
        *config.cautions(),
    ]


def against_compiling(config: Config) -> list[str]:
    """Return the reasons not to compile with `training.compile auto`."""
    reasons = [reason for part in _config_sections(config) for reason in part.against_compiling(config)]
    return [*reasons, *config.against_compiling()]


def against_capturing(config: Config, engine: str, ranks: int) -> list[str]:
    """Return the reasons why the micro-batches of a run cannot be captured (`training.capture`). `ranks`: ranks that
    split the batch."""
    reasons = [reason for part in _config_sections(config) for reason in part.against_capturing(config)]
    return [*engine_rules(engine).capture_problems(config, ranks), *reasons, *config.against_capturing()]


def _config_sections(config: Config) -> list[Section]:
    """Return the sections of a run that declare cautions and reasons."""
    return [section for section in sections(config).values() if isinstance(section, Section)]


def hook_problems(config: Config) -> Iterator[str]:
    """Yield hooks that are listed twice, or before a hook that must precede them."""
    listed = config.hooks
    for name in dict.fromkeys(name for name in listed if listed.count(name) > 1):
        yield f"--hooks has {name} more than once; allowed: each once"
    for position, name in enumerate(listed):
        late = [first for first in find("hook", name).after if first in listed[position + 1 :]]
        if late:
            yield f"--hooks has {name} before {', '.join(late)}; allowed: {name} after {', '.join(late)}"


@dataclass(kw_only=True)
class EngineRules(Settings):
    """Declaration of an engine, registered as `@component("engine", NAME, "module:Class")`.

    Attributes:
        section: settings section that only this engine reads; empty if none.
        one_process: runs in one process, without a process group.
        reads_ds_config: needs --ds_config; other engines refuse it.
        scales_loss: has a loss scaler, so that it can train in fp16.
        shards_everything: shards weights, gradients and moments over the ranks of a copy.
        layouts: "module:Class" of the planner's layouts; empty if a plan cannot predict its cost.
    """

    section: ClassVar[str] = ""
    one_process: ClassVar[bool] = False
    reads_ds_config: ClassVar[bool] = False
    scales_loss: ClassVar[bool] = False
    shards_everything: ClassVar[bool] = False
    layouts: ClassVar[str] = ""

    def refusals(self, config: Any) -> Iterator[str]:
        """Yield settings that this engine refuses: flag, value and allowed values."""
        return iter(())

    def capture_problems(self, config: Any, ranks: int) -> Iterator[str]:
        """Yield reasons why this engine cannot capture micro-batches (`training.capture`) on `ranks` data ranks."""
        yield f"the engine {self.kind} does not support it"

    def keeps_states_in_files(self, config: Any) -> bool:
        """Return whether weights and moments are stored in files and may exceed memory."""
        return False

    def join_groups(self, config: Any, environment: Any) -> None:
        """Create the process groups that the engine needs; collective."""
        if not self.one_process:
            environment.ensure_process_group()


def engine_rules(name: str) -> EngineRules:
    """Return the declaration of an engine. Raises RefusedError: no engine has this name."""
    rules: EngineRules = find("engine", name, "--engine").settings()
    return rules


def distributed_engines() -> list[str]:
    """Return the names of the engines that run on several ranks."""
    return [name for name in names("engine") if not engine_rules(name).one_process]


def check_engine(config: Any, engine: str, *, gpu: bool) -> None:
    """Refuse settings that the chosen engine or machine does not support. Raises RefusedError: settings of another
    engine, settings that the engine refuses, fp16 without a loss scaler or GPU, a memory snapshot without a GPU."""
    rules = engine_rules(engine)
    for other in names("engine"):
        section = engine_rules(other).section
        if other != engine and section and (settings := non_default_values(getattr(config, section))):
            name, value = next(iter(settings.items()))
            raise RefusedError(
                f"--{section}.{name} is {value} and the engine {engine}; allowed: --engine {other}, or without it"
            )
    if problems := list(rules.refusals(config)):
        raise RefusedError(f"--engine {engine}: " + "; ".join(problems))
    if config.logging.memory_snapshot and not gpu:
        raise RefusedError("--logging.memory_snapshot needs a GPU and this machine has none; leave it out")
    if config.training.precision != "fp16":
        return
    if not rules.scales_loss:
        raise RefusedError(
            f"--training.precision fp16 needs DeepSpeed's loss scaler, --engine is {engine}; "
            "allowed: bf16, fp32, or --ds_config FILE"
        )
    if not gpu:
        raise RefusedError("--training.precision fp16 needs a GPU and this machine has none; allowed: bf16, fp32")
