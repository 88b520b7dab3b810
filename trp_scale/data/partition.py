"""How a global batch is split over ranks and micro-batches."""

from __future__ import annotations

from trp_scale.config import RefusedError

GLOBAL_BATCH = ("batch.global_size", "batch.micro_size")
"""Settings of the two sizes, of the batches that the weights learn from."""


def check_partition(global_size: int, micro_size: int, world: int, *, flags: tuple[str, str] = GLOBAL_BATCH) -> int:
    """Accumulation steps: global_size / (micro_size x world).

    Args:
        flags: settings that the two sizes come from, for the message.

    Raises:
        RefusedError: not a whole number; the message lists the worlds and micro-batches that do divide.
    """
    for name, value in ((flags[0], global_size), (flags[1], micro_size), ("world size", world)):
        if value < 1:
            raise RefusedError(f"{name}: {value} found, at least 1 allowed")
    steps, rest = divmod(global_size, micro_size * world)
    if rest == 0:
        return steps
    ranks = _listed(_divisors(global_size // micro_size)) if global_size % micro_size == 0 else "none"
    micros = _listed(_divisors(global_size // world)) if global_size % world == 0 else "none"
    raise RefusedError(
        f"global batch {global_size} does not divide over {world} ranks x micro-batch {micro_size}: "
        f"ranks that do: {ranks}; micro-batches that do on {world} ranks: {micros} "
        f"(--{flags[0]}, --{flags[1]})"
    )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
