"""Counter hash on 64-bit words: the only source of randomness in the data.

The generators of numpy and torch may change between versions, and their state must be saved. A hash of (seed, purpose,
names) has no state and gives the draw of any row directly. These functions are part of the format of a run: a change
alters every order, mask and pair, and breaks every resume (`tests/unit/data/test_hashing.py` freezes their outputs).

The mixing function is the output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit
words. A stream is a chain: state = mix(state xor next part). Different parts never collide in one link.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = (np.uint64(shift) for shift in (27, 30, 31, 32))
_MASK = (1 << 64) - 1

PLACE_BITS = 24
"""Low bits of a sort word that hold the index; they keep the order of equal hashes. Up to 2^24 entries."""


def mix(values: Words) -> Words:
    """Return splitmix64 of each word; `values` has at least one dimension and does not change."""
    words: Words = values + _GAMMA  # unsigned: wraps
    words ^= words >> _30
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words


def mix_integer(value: int) -> int:
    """`mix` of one Python integer."""
    word = (value + int(_GAMMA)) & _MASK
    word = ((word ^ (word >> 30)) * int(_FIRST)) & _MASK
    word = ((word ^ (word >> 27)) * int(_SECOND)) & _MASK
    return word ^ (word >> 31)


def name_hash(name: str) -> int:
    """First 8 bytes of blake2b of the name, little-endian: identity of a block, a source or a purpose."""
    return int.from_bytes(hashlib.blake2b(name.encode()).digest()[:8], "little")


def stream(seed: int, *parts: int | str) -> int:
    """Hash (seed, parts) to a word; strings enter by `name_hash`, negative integers as their 64-bit complement."""
    state = mix_integer(seed & _MASK)
    for part in parts:
        state = mix_integer(state ^ (name_hash(part) if isinstance(part, str) else part & _MASK))
    return state


def below(words: Words, bound: Integers | int) -> Integers:
    """Map words to integers in [0, bound) by their upper half; bound < 2^31. The bias is below bound / 2^32."""
    upper: Integers = (words >> _32).astype(np.int64)
    scaled: Integers = upper * bound
    return scaled >> 32


def permutation(state: int, identities: Words) -> Integers:
    """Sort 0..n-1 by the upper 40 bits of mix(state xor identity); equal values keep their order.

    A sort of words with the index in their low bits is a stable argsort, and several times faster than numpy's.

    Raises:
        RefusedError: more than 2^24 identities.
    """
    count = len(identities)
    if count > 1 << PLACE_BITS:
        raise RefusedError(
            f"{count} blocks or rows to shuffle, at most {1 << PLACE_BITS} allowed; lower --data.blocks_per_group"
        )
    low = np.uint64((1 << PLACE_BITS) - 1)
    words: Words = (mix(identities ^ np.uint64(state)) & ~low) | np.arange(count, dtype=np.uint64)
    words.sort()
    places: Integers = (words & low).astype(np.int64)
    return places
