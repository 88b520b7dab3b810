"""Checks of settings against each other; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config import Config, RefusedError
from trp_scale.config.registry import find
from trp_scale.config.settings import Section, range_problems, sections


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


def hook_problems(config: Config) -> Iterator[str]:
    """A hook that is listed twice, or before one that must come first."""
    listed = config.hooks
    for name in dict.fromkeys(name for name in listed if listed.count(name) > 1):
        yield f"--hooks has {name} more than once; allowed: each once"
    for position, name in enumerate(listed):
        late = [first for first in find("hook", name).after if first in listed[position + 1 :]]
        if late:
            yield f"--hooks has {name} before {', '.join(late)}; allowed: {name} after {', '.join(late)}"
