"""Which tokens each KV slot holds, and which slot a new prompt should take.

A finished sequence leaves its tokens in the slot, so that the next request with the same
beginning computes only what is new. Pure bookkeeping: knows neither model nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trtllm_bls.messages import Array


class Claim(NamedTuple):
    """A slot for a prompt; its first ``reused`` tokens need not be computed.

    ``copy_from``: the slot whose first ``reused`` tokens are to be copied in first.
    """

    slot: int
    reused: int
    copy_from: int | None


class SlotTable:
    """Tokens per slot, and which slots are taken. Only the engine's thread touches it.

    Rejected drafts need no undoing: a slot's keys and values fit the tokens written here, and
    the next claim keeps no more of them than it shares.
    """

    def __init__(self, slots: int, length: int) -> None:
        self._tokens = np.zeros((slots, length), dtype=np.int32)
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._left_at = np.zeros(slots, dtype=np.int64)  # a counter, not a clock
        self._free = set(range(slots))
        self._departures = 0

    @property
    def has_free(self) -> bool:
        """Whether a claim can be made."""
        return bool(self._free)

    def claim(self, prompt: Sequence[int], *, reuse: bool) -> Claim:
        """Take a free slot: the one that shares the longest beginning, else the one idle longest.

        The last prompt token is never reused, since its logits are needed.
        """
        shared = self._shared(np.asarray(prompt[:-1], dtype=np.int32))
        source = max(range(len(shared)), key=lambda slot: self._rank(slot, int(shared[slot])))
        reused = int(shared[source]) if reuse else 0
        idle = min(self._free, key=lambda slot: (self._left_at[slot], slot))
        # A slot with far more than what is shared serves its own conversation better untouched.
        spare = source in self._free and (idle == source or 2 * reused >= self._lengths[source])
        slot = source if reused and spare else idle
        self._free.discard(slot)
        self._lengths[slot] = reused
        if reused and slot != source:
            self._tokens[slot, :reused] = self._tokens[source, :reused]
            return Claim(slot, reused, source)
        return Claim(slot, reused, None)

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """The slot now holds ``tokens`` from ``start`` on, and nothing after them."""
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        self._lengths[slot] = end

    def forget(self, slot: int) -> None:
        """Nothing the slot holds may be reused."""
        self._lengths[slot] = 0

    def release(self, slot: int) -> None:
        """The slot is free; what it holds stays for reuse."""
        self._departures += 1
        self._left_at[slot] = self._departures
        self._free.add(slot)

    def _shared(self, prompt: Array) -> Array:
        """Per slot, the length of the common beginning with ``prompt``."""
        if not len(prompt):
            return np.zeros_like(self._lengths)
        wrong = self._tokens[:, : len(prompt)] != prompt
        first_wrong = np.where(wrong.any(axis=1), wrong.argmax(axis=1), len(prompt))
        return np.minimum(first_wrong, self._lengths)

    def _rank(self, slot: int, shared: int) -> tuple[int, bool, int]:
        return shared, slot in self._free, -int(self._left_at[slot])
