"""Choice of the predicted pieces and their replacements (TRP 4.1.1).

Every draw is a hash of the row's state, so a mask depends on (seed, row key, masking) only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.text.dataset import GROUP_BITS, OTHER, WORD_START, Flags
from trp_scale.pretraining.pos_bert.settings import PosBertMaskingConfig

_ORDER = np.uint64(name_hash("mask: order"))
_START = np.uint64(name_hash("mask: start"))
_KIND = np.uint64(name_hash("mask: kind"))
_REPLACEMENT = np.uint64(name_hash("mask: replacement"))

_PLACE = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A masked micro-batch; unused slots have position 0 and weight 0.

    Attributes:
        tokens: [R, L] input of the model.
        positions: [R, M] ascending.
        labels: [R, M] original ids.
        groups: [R, M] group numbers, `other` in unused slots.
        weights: [R, M] 1, or 0 in unused slots.
    """

    tokens: Integers
    positions: Integers
    labels: Integers
    groups: Integers
    weights: npt.NDArray[np.float32]


class TokenMasker:
    """Draws masks.

    Args:
        length: L, pieces per sequence.
        vocab_size, mask_id, special_ids: of the tokenizer; random replacements are uniform over non-special ids.
        spare_other: never mask pieces outside the nine groups (objective.other = unmasked).
    """

    def __init__(
        self,
        settings: PosBertMaskingConfig,
        *,
        length: int,
        vocab_size: int,
        mask_id: int,
        special_ids: tuple[int, ...],
        spare_other: bool,
    ) -> None:
        if settings.limit > length:
            raise RefusedError(
                f"masking.limit: {settings.limit} found, 0 (= round(ratio x length)) to {length} allowed"
            )
        if settings.unit == "word" and settings.sampling == "stratified":
            raise RefusedError(
                "masking.unit word with masking.sampling stratified: systematic sampling draws single pieces; "
                "set --masking.sampling uniform, or --masking.unit piece"
            )
        if length > 1 << 16:
            raise RefusedError(f"sequences of {length} pieces, at most {1 << 16} allowed")
        self.limit = settings.limit or max(1, round(settings.ratio * length))
        self._settings = settings
        self._mask_id = mask_id
        self._spare_other = spare_other
        self._replacements = np.setdiff1d(np.arange(vocab_size), np.array(special_ids, dtype=np.int64))

    def mask(self, tokens: Integers, tags: npt.NDArray[np.uint8], pieces: Flags, states: Words) -> Masked:
        """Mask each row.

        Args:
            tokens: [R, L] complete sequences.
            tags: [R, L] tag bytes of the pieces.
            pieces: [R, L] True at pieces of text; special tokens and padding are False and never chosen.
            states: [R] one word per row.
        """
        groups = tags & np.uint8(GROUP_BITS)
        allowed = pieces & (groups != OTHER) if self._spare_other else pieces
        available = allowed.sum(axis=1)  # [R]
        wanted = np.maximum(np.rint(self._settings.ratio * available), 1).astype(np.int64)
        wanted = np.minimum(np.minimum(wanted, self.limit), available)

        positions, counts = self._choose(tags, groups, allowed, wanted, states)  # [R, M], [R]
        slots = np.arange(self.limit)
        used = slots < counts[:, None]  # [R, M]
        positions = np.where(used, positions, tokens.shape[1])
        positions.sort(axis=1)
        positions[~used] = 0

        lines = np.arange(len(tokens))[:, None]
        labels = tokens[lines, positions]  # [R, M]
        replaced = np.where(used, self._replace(labels, positions, states), labels)
        masked = tokens.copy()
        masked[lines, positions] = replaced  # unused slots rewrite position 0 with its own id
        return Masked(
            tokens=masked,
            positions=positions,
            labels=labels,
            groups=np.where(used, groups[lines, positions], OTHER).astype(np.int64),
            weights=used.astype(np.float32),
        )

    def _choose(
        self,
        tags: npt.NDArray[np.uint8],
        groups: npt.NDArray[np.uint8],
        allowed: Flags,
        wanted: Integers,
        states: Words,
    ) -> tuple[Integers, Integers]:
        """Return the chosen positions in the first columns of [R, M], in any order, and their number, [R]."""
        orders = mix(states ^ _ORDER)
        if self._settings.unit == "word":
            return _choose_words(tags, allowed, wanted, orders, self.limit)
        column = np.arange(allowed.shape[1], dtype=np.uint64)
        words = mix(orders[:, None] ^ column)  # [R, L]
        if self._settings.sampling == "stratified":
            starts = mix(states ^ _START)
            return _choose_stratified(words, groups, allowed, wanted, starts, self.limit)
        keys = (words & ~_PLACE) | column
        keys[~allowed] = _NEVER
        keys.sort(axis=1)
        return (keys[:, : self.limit] & _PLACE).astype(np.int64), wanted

    def _replace(self, labels: Integers, positions: Integers, states: Words) -> Integers:
        """Return the replacements [R, M]: [MASK] (80 %), a random id (10 %), the piece itself (10 %)."""
        column = positions.astype(np.uint64)
        kind = below(mix(mix(states ^ _KIND)[:, None] ^ column), 10)
        draws = mix(mix(states ^ _REPLACEMENT)[:, None] ^ column)
        random = self._replacements[below(draws, len(self._replacements))]
        return np.where(kind < 8, self._mask_id, np.where(kind == 8, random, labels))


def _choose_stratified(
    words: Words, groups: npt.NDArray[np.uint8], allowed: Flags, wanted: Integers, starts: Words, limit: int
) -> tuple[Integers, Integers]:
    """Choose by systematic sampling: sort pieces by group, randomly within a group; take every (n / k)-th from a random
    start.

    For n pieces, k of them wanted, and u uniform in 0..n-1, piece j is chosen if (j k + u) mod n < k. This chooses
    exactly k pieces, each with probability k / n as in uniform sampling. A group of m pieces gets floor or ceil of
    m k / n of them; uniform sampling has a hypergeometric spread.
    """
    position = np.arange(words.shape[1], dtype=np.uint64)
    group = groups.astype(np.uint64) << np.uint64(60)  # groups are at most 9, so keys are below _NEVER
    keys = np.where(allowed, group | (words >> np.uint64(20) << np.uint64(16)) | position, _NEVER)
    keys.sort(axis=1)
    available = allowed.sum(axis=1)[:, None]
    start = below(starts, available[:, 0])[:, None]
    column = np.arange(words.shape[1])
    chosen = (column < available) & ((column * wanted[:, None] + start) % np.maximum(available, 1) < wanted[:, None])
    positions = np.where(chosen, (keys & _PLACE).astype(np.int64), words.shape[1])
    positions.sort(axis=1)
    return positions[:, :limit], wanted


def _choose_words(
    tags: npt.NDArray[np.uint8], allowed: Flags, wanted: Integers, orders: Words, limit: int
) -> tuple[Integers, Integers]:
    """Choose whole words in random order until the wanted number of pieces is reached.

    The last word is left out if it exceeds the limit. If the first word alone exceeds it, its first `limit` pieces are
    chosen. A row may get more pieces than wanted, but never more than the limit. The first piece of a word has the tag
    WORD_START.
    """
    rows, length = allowed.shape
    before = np.zeros_like(allowed)
    before[:, 1:] = allowed[:, :-1]
    first = allowed & (((tags & WORD_START) != 0) | ~before)  # the first piece of a segment always begins a word
    number = np.maximum(first.cumsum(axis=1) - 1, 0)  # [R, L] word of each piece
    draws = mix(orders[:, None] ^ number.astype(np.uint64)) >> np.uint64(32) << np.uint64(32)
    position = np.arange(length, dtype=np.uint64)
    keys = np.where(allowed, draws | number.astype(np.uint64) << np.uint64(16) | position, _NEVER)
    keys.sort(axis=1)  # words in random order, their pieces from left to right
    word = ((keys >> np.uint64(16)) & _PLACE).astype(np.int64)

    column = np.arange(length)
    inside = column < allowed.sum(axis=1)[:, None]
    begins = np.ones_like(allowed)
    begins[:, 1:] = word[:, 1:] != word[:, :-1]
    start = np.maximum.accumulate(np.where(begins, column, 0), axis=1)  # [R, L] pieces before the word
    index = number + np.arange(rows)[:, None] * length
    sizes = np.bincount(index[allowed], minlength=rows * length).reshape(rows, length)
    stop = start + np.take_along_axis(sizes, np.where(inside, word, 0), axis=1)
    chosen = inside & (start < wanted[:, None]) & ((stop <= limit) | ((start == 0) & (column < limit)))
    positions = np.where(chosen, (keys & _PLACE).astype(np.int64), 0)  # chosen words come first
    return positions[:, :limit], chosen.sum(axis=1)
