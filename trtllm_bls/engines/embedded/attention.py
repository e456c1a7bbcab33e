"""The KV slots of one model, and attention over them for rows of many sequences at once.

``attend`` is what a transformers model calls in place of its own attention: all rows of a step
arrive as one sequence of length T, and the plan of the step says which rows belong to which slot.
Layers are made on first use, since only the call itself tells head counts and head sizes.
Owns keys, values and masks; must not know of requests, text or sampling.

Slots start as zeros and never hold anything but finite numbers (``scrub``): a masked NaN would
still leak through the weighted sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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


class _Block(NamedTuple):
    """Rows ``first`` to ``first + length`` of the step, all of one slot."""

    first: int
    length: int
    segment: Segment


@dataclass
class _Plan:
    """Where each of the T rows of a step goes. Masks are shared by all layers of the step."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    singles: list[_Block]  # one row each, in one padded view of the slots
    blocks: list[_Block]
    masks: dict[tuple[int, int | None, int], Tensor]


class _How(NamedTuple):
    """What the layer asks for beside plain causal attention."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]


class SlotCache:
    """Keys and values, per layer [slots, kv heads, length, head size]."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.windowed = False  # whether any layer ever asked for a sliding window
        self._slots, self._length, self._device = slots, length, device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._plan: _Plan | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self._tensors())

    def begin(self, segments: Sequence[Segment]) -> Tensor:
        """Plan a step; the rows are the segments' tokens in order. Returns positions [T]."""
        blocks, first = [], 0
        for segment in segments:
            blocks.append(_Block(first, len(segment.tokens), segment))
            first += len(segment.tokens)
        slots = np.repeat([s.slot for s in segments], [len(s.tokens) for s in segments])
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        singles = [block for block in blocks if block.length == 1]
        if not _worth_padding(singles):
            singles = []
        self._plan = _Plan(
            slots=torch.from_numpy(slots).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
            singles=singles,
            blocks=blocks if not singles else [block for block in blocks if block.length > 1],
            masks={},
        )
        return self._plan.positions

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, heads, T, size]
        key: Tensor,  # [1, kv heads, T, size]
        value: Tensor,  # [1, kv heads, T, value size]
        attention_mask: Tensor | None,  # None: the plan knows better
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Store the rows' keys and values; returns the attention output [1, T, heads, size]."""
        plan = self._plan
        assert plan is not None, "attend is only called within a step"
        keys, values = self._layer(int(module.layer_idx), key, value)
        keys[plan.slots, :, plan.positions] = key[0].transpose(0, 1)
        values[plan.slots, :, plan.positions] = value[0].transpose(0, 1)
        scale = asked.get("scaling")
        how = _How(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=asked.get("sliding_window"),
            softcap=asked.get("softcap"),
            sinks=asked.get("s_aux"),
        )
        self.windowed |= how.window is not None
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])  # [T, heads, size]
        if plan.singles:
            self._attend_singles(plan, query[0], keys, values, how, out)
        for block in plan.blocks:
            self._attend_block(plan, block, query[0], keys, values, how, out)
        return out.unsqueeze(0), None

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot to another."""
        with torch.inference_mode():
            for tensor in self._tensors():
                tensor[target, :, :length] = tensor[source, :, :length]

    def scrub(self, slot: int) -> None:
        """Zero a slot that may hold non-finite numbers."""
        with torch.inference_mode():
            for tensor in self._tensors():
                tensor[slot].zero_()

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers.values() for tensor in pair]

    def _layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._layers:
            self._layers[index] = self._zeros(key), self._zeros(value)
        return self._layers[index]

    def _zeros(self, like: Tensor) -> Tensor:
        shape = (self._slots, like.shape[1], self._length, like.shape[3])
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=self._device)
        # numpy's zeros are the kernel's own: pages of slots never used are never committed.
        flat = np.zeros(int(np.prod(shape)) * like.element_size(), dtype=np.uint8)
        return torch.from_numpy(flat).view(like.dtype).view(shape)

    def _attend_singles(
        self, plan: _Plan, query: Tensor, keys: Tensor, values: Tensor, how: _How, out: Tensor
    ) -> None:
        """All one-token rows in one padded call; a slot in the view without a row is wasted."""
        used = [block.segment.slot for block in plan.singles]
        rows = [block.first for block in plan.singles]
        low, high = min(used), max(used) + 1
        longest = max(block.segment.end for block in plan.singles)
        heads, kv_heads = query.shape[0], keys.shape[1]
        dense = used == list(range(low, high)) and rows == list(range(rows[0], rows[0] + len(rows)))
        if dense:
            packed = query[:, rows[0] : rows[0] + len(rows)].transpose(0, 1)
        else:
            packed = query.new_zeros(high - low, heads, query.shape[2])
            places = [slot - low for slot in used]
            packed[places] = query[:, rows].transpose(0, 1)
        packed = packed.reshape(high - low, kv_heads, heads // kv_heads, -1)
        mask = plan.masks.get((-1, how.window, 1))
        if mask is None:
            mask = _single_mask(plan.singles, low, high, longest, how.window).to(query)
            plan.masks[-1, how.window, 1] = mask
        got = _attention(
            packed, keys[low:high, :, :longest], values[low:high, :, :longest], mask, how
        ).reshape(high - low, heads, -1)
        out[rows] = got if dense else got[places]

    def _attend_block(
        self,
        plan: _Plan,
        block: _Block,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: _How,
        out: Tensor,
    ) -> None:
        """Consecutive rows of one slot; the query heads of one kv head become more rows of it."""
        first, count, segment = block
        kv_heads = keys.shape[1]
        groups = query.shape[0] // kv_heads
        mask = plan.masks.get((first, how.window, groups))
        if mask is None:
            mask = _block_mask(segment, how.window).to(query).repeat(groups, 1)
            plan.masks[first, how.window, groups] = mask
        packed = query[:, first : first + count].reshape(1, kv_heads, groups * count, -1)
        slot, end = segment.slot, segment.end
        got = _attention(
            packed, keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end], mask, how
        )
        out[first : first + count] = got.reshape(query.shape[0], count, -1).transpose(0, 1)


def _worth_padding(singles: list[_Block]) -> bool:
    """Whether one padded view reads at most a few times what the rows need."""
    if len(singles) < 2:
        return False
    used = [block.segment.slot for block in singles]
    ends = [block.segment.end for block in singles]
    return (max(used) + 1 - min(used)) * max(ends) <= 4 * sum(ends)


def _single_mask(
    singles: list[_Block], low: int, high: int, longest: int, window: int | None
) -> Tensor:
    """Additive mask [slots, 1, 1, longest]; a slot without a row sees its first token only."""
    ends = np.ones((high - low, 1), dtype=np.int64)
    for block in singles:
        ends[block.segment.slot - low] = block.segment.end
    seen = np.arange(longest)[None, :]
    allowed = seen < ends
    if window is not None:
        allowed &= seen >= ends - window
    return torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))[:, None, None, :]


def _block_mask(segment: Segment, window: int | None) -> Tensor:
    """Additive causal mask [rows, tokens in the slot]."""
    own = np.arange(segment.start, segment.end)[:, None]
    seen = np.arange(segment.end)[None, :]
    allowed = seen <= own
    if window is not None:
        allowed &= seen > own - window
    return torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: _How) -> Tensor:
    """Attention of [slots, kv heads, rows, size] over [slots, kv heads, tokens, size]."""
    if how.softcap is None and how.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=how.scale)
    scores = torch.matmul(query, keys.transpose(2, 3)) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = (scores + mask).float()
    if how.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)
    slots, kv_heads, rows, _ = scores.shape
    per_row = how.sinks.view(kv_heads, -1).repeat_interleave(
        rows * kv_heads // how.sinks.shape[0], dim=1
    )
    sinks = per_row[None, :, :, None].expand(slots, kv_heads, rows, 1).to(scores)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
