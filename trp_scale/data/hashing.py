"""All randomness of the data: a counter hash on 64-bit words, never a generator.

numpy's and torch's generators may change their streams between versions, and a generator has a state that someone must
carry. A hash of (seed, purpose, names of things) has neither, and gives the draw of any row without those before it.
The functions here are part of the stored format of a run: changing one changes every order, mask and pair, and breaks
every resume (`tests/unit/data/test_hashing.py` freezes their outputs).

The mixing function is the output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit
words. A stream is a chain of it: state = mix(state xor next part); different parts never collide in one link of it.
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
"""Low bits of a sort word that hold the place, so that equal hashes keep their order: up to 2^24 things."""


def mix(values: Words) -> Words:
    """splitmix64 of each word; `values` has at least one dimension and is not changed."""
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
    """First 8 bytes of blake2b of the name, little-endian: the identity of a block, of a source, of a purpose."""
    return int.from_bytes(hashlib.blake2b(name.encode()).digest()[:8], "little")


def stream(seed: int, *parts: int | str) -> int:
    """A word for (seed, parts); strings enter by `name_hash`. Negative integers count as their 64-bit complement."""
    state = mix_integer(seed & _MASK)
    for part in parts:
        state = mix_integer(state ^ (name_hash(part) if isinstance(part, str) else part & _MASK))
    return state


def below(words: Words, bound: Integers | int) -> Integers:
    """Integers in [0, bound) from the upper half of each word; bound < 2^31. Biased by less than bound / 2^32."""
    upper: Integers = (words >> _32).astype(np.int64)
    scaled: Integers = upper * bound
    return scaled >> 32


def permutation(state: int, identities: Words) -> Integers:
    """The places 0..n-1 in the order of the upper 40 bits of mix(state xor identity); equal ones keep their order.

    Sorting words that carry their place in the low bits is a stable argsort, and several times faster than one.

    Raises:
        RefusedError: more than 2^24 identities.
    """
    count = len(identities)
    if count > 1 << PLACE_BITS:
        raise RefusedError(
            f"{count} things to order at once, at most {1 << PLACE_BITS} allowed; lower --data.blocks_per_group"
        )
    low = np.uint64((1 << PLACE_BITS) - 1)
    words: Words = (mix(identities ^ np.uint64(state)) & ~low) | np.arange(count, dtype=np.uint64)
    words.sort()
    places: Integers = (words & low).astype(np.int64)
    return places
