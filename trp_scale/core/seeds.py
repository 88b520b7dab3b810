"""Randomness that follows from (seed, a name): the same on every rank, engine and split of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def tensor_seed(seed: int, name: str) -> int:
    """63-bit seed of one tensor."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def reseed(device: torch.device, seed: int) -> None:
    """Seed what draws on the CPU and on this device. torch.manual_seed seeds all kinds of device that torch knows: on a
    machine without a GPU each call is 3 ms, and is remembered for a GPU that may be started later."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def per_member_rng(device: torch.device, member: int) -> Iterator[None]:
    """Use a member-specific RNG inside the context; restore the shared state on exit.

    Its seed is one number more of the generator on the host, so it follows from the last `reseed` and from what was
    drawn since; nobody waits for a device.
    """
    seed = int(torch.randint(1 << 62, (), generator=torch.default_generator))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        reseed(device, tensor_seed(seed, f"member/{member}"))
        yield
