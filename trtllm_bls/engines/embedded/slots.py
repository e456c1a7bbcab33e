"""KV slots: the tokens that each one holds, their keys and values, and the choice of a free one.

Must not know of models or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Slots:
    """``count`` KV slots of ``length`` tokens, with the keys and values of each token.

    Layers are made on first use, as only then head counts and sizes are known. Each slot has one
    more place, ``length``, which no row ever sees: rows that only pad a step of static shape store
    their keys and values there.

    A finished sequence leaves its tokens in the slot, so that the next request with the same
    beginning computes only its new tokens. Rejected drafts need no undoing: keys and values fit the
    tokens written here, and the next claim keeps no more of them than it shares. Slots start as
    zeros and never hold anything but finite numbers (``scrub``): a masked NaN would still leak
    through attention's weighted sum.
    """

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.count = count
        self.length = length
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._tokens = np.zeros((count, length), dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._released_at = np.zeros(count, dtype=np.int64)  # counts releases, not seconds
        self._num_releases = 0
        self.free = set(range(count))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self._tensors())

    def claim(self, prompt: Sequence[int], *, reuse: bool) -> tuple[int, int]:
        """Take a free slot, and return it with the number of prompt tokens that it holds already.

        It is the slot that shares the longest beginning; else the one idle longest, and a beginning
        that another slot holds is copied into it. The last prompt token is never reused, since its
        logits are needed.
        """
        prefix = np.asarray(prompt[:-1], dtype=np.int32)
        differs = np.ones((len(self._tokens), len(prefix) + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, : len(prefix)], prefix, out=differs[:, :-1])
        shared = np.minimum(differs.argmax(axis=1), self._lengths)  # tokens, by slot
        source = max(
            range(len(shared)),
            key=lambda slot: (shared[slot], slot in self.free, -self._released_at[slot]),
        )
        reused = 0
        if reuse:
            reused = int(shared[source])
        slot = min(self.free, key=lambda slot: (self._released_at[slot], slot))
        # A slot that holds far more than it shares serves its own conversation better untouched.
        if reused and source in self.free and 2 * reused >= self._lengths[source]:
            slot = source
        self._lengths[slot] = reused
        if reused and slot != source:
            self._tokens[slot, :reused] = self._tokens[source, :reused]
            with torch.inference_mode():
                for tensor in self._tensors():
                    tensor[slot, :, :reused] = tensor[source, :, :reused]
        self.free.discard(slot)  # last: a copy that fails leaves the slot free
        return slot, reused

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Store ``tokens`` of a slot from ``start`` on, with nothing after them."""
        self._lengths[slot] = start + len(tokens)
        self._tokens[slot, start : self._lengths[slot]] = tokens

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [slots, kv heads, length + 1, size] of a layer.

        Its first rows [T, kv heads, size] tell the sizes.
        """
        if index not in self._layers:
            zeros = []
            for like in (key, value):
                shape = (self.count, like.shape[1], self.length + 1, like.shape[2])
                if self._device.type == "cpu":
                    # numpy's zeros are the kernel's own: pages never used are never committed.
                    flat = np.zeros(int(np.prod(shape)) * like.element_size(), dtype=np.uint8)
                    zeros.append(torch.from_numpy(flat).view(like.dtype).view(shape))
                else:
                    zeros.append(torch.zeros(shape, dtype=like.dtype, device=self._device))
            self._layers[index] = zeros[0], zeros[1]
        return self._layers[index]

    def scrub(self, slot: int) -> None:
        """Empty a slot that may hold non-finite numbers."""
        self._lengths[slot] = 0
        with torch.inference_mode():
            for tensor in self._tensors():
                tensor[slot].zero_()

    def release(self, slot: int) -> None:
        """Free the slot; its tokens stay for reuse."""
        self._num_releases += 1
        self._released_at[slot] = self._num_releases
        self.free.add(slot)

    def _tensors(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self._layers.values()))
