"""Seeds from (seed, name): equal on every rank and engine, and for every split of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def tensor_seed(seed: int, name: str) -> int:
    """Return the 63-bit seed of a tensor."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def reseed(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of this device. torch.manual_seed seeds all device types: without a GPU each
    call takes 3 ms, and is stored for a later start of a GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def per_member_rng(device: torch.device, member: int) -> Iterator[None]:
    """Context with a member-specific RNG; restores the shared state on exit.

    Its seed is the next number of the CPU's generator, so it depends only on the last `reseed` and the numbers drawn
    since; nothing waits for a device.
    """
    seed = int(torch.randint(1 << 62, (), generator=torch.default_generator))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        reseed(device, tensor_seed(seed, f"member/{member}"))
        yield
