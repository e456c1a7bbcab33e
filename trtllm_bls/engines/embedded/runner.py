"""One model and its KV slots: a step's segments in, logits of the wanted rows out.

All rows of a step go through the model as one sequence of T tokens. In its attention, which is
ours (registered with transformers under a name of its own, so that engines in one process do not
meet), the rows are parted again into groups, each over the slots it may see.
Owns the forward pass; must not know of requests, text or sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trtllm_bls.types import Array

_numbers = itertools.count()


class Slots:
    """``count`` KV slots of ``length`` tokens: which tokens each one holds, their keys and values,
    and who may take it. Layers are made on first use, as only then head counts and sizes are known.

    A finished sequence leaves its tokens in the slot, so that the next request with the same
    beginning computes only what is new. Rejected drafts need no undoing: keys and values fit the
    tokens written here, and the next claim keeps no more of them than it shares. Slots start as
    zeros and never hold anything but finite numbers (``scrub``): a masked NaN would still leak
    through attention's weighted sum.
    """

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.length = length
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._tokens = np.zeros((count, length), dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._left_at = np.zeros(count, dtype=np.int64)  # a counter, not a clock
        self._departures = 0
        self.free = set(range(count))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self._tensors())

    def claim(self, prompt: Sequence[int], *, reuse: bool) -> tuple[int, int]:
        """Take a free slot; returns it, and how many tokens of the prompt it holds already.

        It is the one that shares the longest beginning, else the one idle longest, into which a
        beginning that another slot holds is copied. The last prompt token is never reused, since
        its logits are needed.
        """
        wanted = np.asarray(prompt[:-1], dtype=np.int32)
        differs = np.ones((len(self._tokens), len(wanted) + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, : len(wanted)], wanted, out=differs[:, :-1])
        shared = np.minimum(differs.argmax(axis=1), self._lengths)  # tokens, by slot
        source = max(
            range(len(shared)),
            key=lambda slot: (shared[slot], slot in self.free, -self._left_at[slot]),
        )
        reused = int(shared[source]) if reuse else 0
        slot = min(self.free, key=lambda slot: (self._left_at[slot], slot))
        # A slot with far more than what is shared serves its own conversation better untouched.
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
        """The slot now holds ``tokens`` from ``start`` on, and nothing after them."""
        self._lengths[slot] = start + len(tokens)
        self._tokens[slot, start : self._lengths[slot]] = tokens

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv heads, length, size] for rows [1, kv heads, T, size]."""
        if index not in self._layers:
            self._layers[index] = self._zeros(key), self._zeros(value)
        return self._layers[index]

    def scrub(self, slot: int) -> None:
        """Empty a slot that may hold non-finite numbers."""
        self._lengths[slot] = 0
        with torch.inference_mode():
            for tensor in self._tensors():
                tensor[slot].zero_()

    def release(self, slot: int) -> None:
        """The slot is free; what it holds stays for reuse."""
        self._departures += 1
        self._left_at[slot] = self._departures
        self.free.add(slot)

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers.values() for tensor in pair]

    def _zeros(self, like: Tensor) -> Tensor:
        shape = (len(self._tokens), like.shape[1], self.length, like.shape[3])
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=self._device)
        # numpy's zeros are the kernel's own: pages of slots never used are never committed.
        flat = np.zeros(int(np.prod(shape)) * like.element_size(), dtype=np.uint8)
        return torch.from_numpy(flat).view(like.dtype).view(shape)


class Segment(NamedTuple):
    """Consecutive tokens of one slot, from position ``start``; logits of the last ``keep``."""

    slot: int
    start: int
    tokens: Sequence[int]
    keep: int

    @property
    def end(self) -> int:
        """How many tokens the slot holds after this step."""
        return self.start + len(self.tokens)


class Runner:
    """Runs steps on the thread that calls; ``close`` frees the model.

    ``windowed``: whether any layer ever asked for a sliding window. ``threads``: of torch's pool.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self.slots = Slots(0, 0, device)
        self.vocab_size = 0  # known after the first step
        self.windowed = False
        self.threads = 1
        self._groups: list[_Group] = []
        self._places: tuple[Tensor, ...] = ()  # slot and position of each row, [T]
        name = f"trtllm_bls_{next(_numbers)}"
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    def allocate(self, slots: int, length: int) -> None:
        """Drop all slots for ``slots`` new ones of ``length`` tokens."""
        self.slots = Slots(slots, length, self._device)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [sum of ``keep``, vocab], fp32, of the last rows of each segment, in order."""
        placed: list[tuple[int, Segment]] = []  # with the row of the step it begins at
        tokens: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            placed.append((len(tokens), segment))
            tokens += segment.tokens
            wanted += range(len(tokens) - segment.keep, len(tokens))
        self._groups = _grouped(placed, self._device)
        slots = np.repeat([s.slot for s in segments], [len(s.tokens) for s in segments])
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        self._places = tuple(torch.from_numpy(each).to(self._device) for each in (slots, positions))
        with torch.inference_mode():
            logits: Tensor = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=self._places[1].unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=self._device),
            ).logits[0]
        for segment in segments:
            self.slots.write(segment.slot, segment.start, segment.tokens)
        self.vocab_size = logits.shape[-1]
        return logits.float()

    def close(self) -> None:
        """Free the slots and the model; transformers keeps the name and this empty object."""
        self._model = None
        self.allocate(0, 0)

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, heads, T, size]
        key: Tensor,  # [1, kv heads, T, size]
        value: Tensor,  # [1, kv heads, T, value size]
        attention_mask: Tensor | None,  # None: the groups know better
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Store the rows' keys and values; returns the attention output [1, T, heads, size]."""
        slots, positions = self._places
        keys, values = self.slots.layer(int(module.layer_idx), key, value)
        keys[slots, :, positions] = key[0].transpose(0, 1)
        values[slots, :, positions] = value[0].transpose(0, 1)
        self.windowed |= asked.get("sliding_window") is not None
        # One row more, for what a padded group computes without need.
        out = query.new_empty(query.shape[2] + 1, query.shape[1], value.shape[-1])
        for group in self._groups:
            out[group.rows] = group.attend(query[0], keys, values, asked)
        return out[:-1].unsqueeze(0), None


@dataclass
class _Group:
    """Rows that are attended together: as many of each slot, of consecutive slots."""

    rows: slice | Tensor  # of the step, slot by slot; -1 where a slot has no row and one is due
    seen: tuple[slice, slice, slice]  # of a layer: slots, all heads, tokens
    positions: Array  # [slots, rows per slot]; 0 for rows that are not there
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, asked: Mapping[str, Any]
    ) -> Tensor:
        """Query [heads, T, size] over whole layers to [rows of the group, heads, value size].

        The query heads that share a kv head are further rows of it.
        """
        (slots, count), kv_heads, heads = self.positions.shape, keys.shape[1], query.shape[0]
        shared, window = heads // kv_heads, asked.get("sliding_window")
        mask = self.masks.get((window, shared))
        if mask is None:
            mask = self.masks[window, shared] = self._mask(window, shared).to(query)
        parted = query[:, self.rows].reshape(kv_heads, shared, slots, count, -1)
        packed = parted.permute(2, 0, 1, 3, 4).reshape(slots, kv_heads, shared * count, -1)
        got = _attention(packed, keys[self.seen], values[self.seen], mask, asked)
        parted = got.reshape(slots, kv_heads, shared, count, -1).permute(0, 3, 1, 2, 4)
        return parted.reshape(slots * count, heads, -1)

    def _mask(self, window: int | None, shared: int) -> Tensor:
        """Additive [slots, 1, shared * rows per slot, tokens]; all layers of a step use it."""
        own, seen = self.positions[:, :, None], np.arange(self.positions.max() + 1)
        allowed = seen <= own
        if window is not None:
            allowed &= seen > own - window
        mask = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))
        return mask[:, None, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)


def _grouped(placed: list[tuple[int, Segment]], device: torch.device) -> list[_Group]:
    """One group for all one-row segments where that pays, and one for each other segment."""
    single = [(first, segment) for first, segment in placed if len(segment.tokens) == 1]
    slots, ends = [s.slot for _, s in single], [s.end for _, s in single]
    # One padded view of the slots, unless it reads several times what the rows need.
    if len(single) > 1 and (max(slots) + 1 - min(slots)) * max(ends) <= 4 * sum(ends):
        several = [_group([part], device) for part in placed if len(part[1].tokens) > 1]
        return [_group(single, device), *several]
    return [_group([part], device) for part in placed]


def _group(parts: list[tuple[int, Segment]], device: torch.device) -> _Group:
    """``parts``: segments of one length, each after its first row."""
    low, high = min(s.slot for _, s in parts), max(s.slot + 1 for _, s in parts)
    count = len(parts[0][1].tokens)
    rows, positions = np.full((high - low, count), -1), np.zeros((high - low, count), np.int64)
    for first, segment in parts:
        rows[segment.slot - low] = np.arange(first, first + count)
        positions[segment.slot - low] = np.arange(segment.start, segment.end)
    first, flat = int(rows[0, 0]), rows.ravel()
    dense = bool((np.diff(flat) == 1).all())  # then a view does, instead of a copy
    where = slice(first, first + len(flat)) if dense else torch.from_numpy(flat).to(device)
    seen = slice(low, high), slice(None), slice(max(segment.end for _, segment in parts))
    return _Group(where, seen, positions)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, asked: Mapping[str, Any]
) -> Tensor:
    """Attention of [slots, kv heads, rows, size] over [slots, kv heads, tokens, size].

    ``asked``: what the layer wants beside plain causal attention, in transformers' names.
    """
    scale, softcap, sinks = (asked.get(name) for name in ("scaling", "softcap", "s_aux"))
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, keys.transpose(2, 3)) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is not None:  # [heads]; one more place to look at, which holds no value
        slots, kv_heads, rows, _ = scores.shape
        sinks = sinks.to(scores).view(1, kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(rows // sinks.shape[2], dim=2)
        scores = torch.cat([scores, sinks.expand(slots, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
