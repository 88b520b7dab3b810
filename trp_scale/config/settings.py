"""Declaration of settings with ranges, and the base classes of sections. `--help` imports this module: no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trp_scale.config.schema import Range, range_problems
from trp_scale.errors import RefusedError


def setting(default: Any, **bounds: float) -> Any:
    """Declare a field of a settings dataclass.

    Args:
        default: a value, or a function without arguments for a list or dict.
        bounds: at_least, above, at_most, below.
    """
    metadata = {"range": Range(**bounds) if bounds else None}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Section:
    """Section of a recipe. The string under a field is its help; `setting` declares its range."""

    def problems(self, config: Any) -> Iterator[str]:
        """Yield invalid combinations of settings: each line names the flag, its value and the allowed values."""
        return iter(())

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        """Yield warnings about allowed but rarely intended settings.

        Args:
            config: all settings.
            steps_per_epoch: number of global batches in the training rows; 0 = not known yet.
        """
        return iter(())

    def against_compiling(self, config: Any) -> Iterator[str]:
        """Yield reasons not to compile with `training.compile auto`, such as shapes that change between steps."""
        return iter(())

    def against_capturing(self, config: Any) -> Iterator[str]:
        """Yield reasons why micro-batches cannot be captured (`training.capture`), such as reads on the host."""
        return iter(())


@dataclass(kw_only=True)
class Settings(Section):
    """Section of one component."""

    kind: str = ""
    """Name of the component; set by the registry."""


def near_divisors(whole: int, wanted: int) -> str:
    """Return the four divisors of a number that are nearest to `wanted`, for messages."""
    allowed = [part for part in range(1, whole + 1) if whole % part == 0]
    return ", ".join(map(str, sorted(sorted(allowed, key=lambda part: abs(part - wanted))[:4])))


def non_default_values(section: Section) -> dict[str, Any]:
    """Return the settings of a section that differ from their defaults."""
    default = type(section)()
    values = {field_.name: getattr(section, field_.name) for field_ in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def sections(config: Any) -> Mapping[str, Any]:
    """Return the sections of a run or command, by name."""
    return {
        field_.name: value
        for field_ in dataclasses.fields(config)
        if dataclasses.is_dataclass(value := getattr(config, field_.name))
    }


def find_problems(settings: Any) -> Iterator[str]:
    """Yield the numbers outside their ranges and the problems of each section of a run or command."""
    yield from range_problems(settings, "--")
    for name, section in sections(settings).items():
        yield from range_problems(section, f"--{name}.")
    for section in sections(settings).values():
        if isinstance(section, Section):
            yield from section.problems(settings)


def check_settings(settings: Any, error: type[RefusedError] = RefusedError) -> None:
    """Refuse a command's settings; the message lists all problems."""
    if problems := list(find_problems(settings)):
        raise error("\n".join(problems))
