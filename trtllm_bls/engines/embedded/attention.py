"""Attention of one step: its rows' keys and values are stored in the slots, and its rows attend.

The rows of a step are parted into groups, each over the slots that its rows may see. The query
heads that share a key-value head become further rows of it, so that keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtllm_bls.engines.embedded.slots import Slots


class Segment(NamedTuple):
    """Consecutive tokens of one slot, from position ``start``; logits of the last ``keep``."""

    slot: int
    start: int
    tokens: Sequence[int]
    keep: int

    @property
    def end(self) -> int:
        """Number of tokens that the slot holds after this step."""
        return self.start + len(self.tokens)


class AttentionKind(NamedTuple):
    """A layer's additions to plain causal attention; ``sinks`` is [heads]."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> AttentionKind:
        """Read the arguments that transformers' modules pass to an attention function."""
        names = ("scaling", "sliding_window", "softcap", "s_aux")
        return cls(*map(arguments.get, names))


class RowGroup:
    """Rows that attend together: as many of each slot.

    ``rows``: their places in the step, slot by slot; -1 where a slot has no row and one is due.
    ``slots``: a slice where they are neighbours, which saves a copy of their keys. ``length``:
    the places of a slot that are seen. ``positions`` [slots, rows per slot].
    """

    def __init__(
        self, rows: slice | Tensor, slots: slice | Tensor, length: int, positions: Tensor
    ) -> None:
        self.rows = rows
        self._slots = slots
        self._length = length
        self._positions = positions
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
        """Query [T, heads, size] over a layer's slots to [rows of the group, heads, value size]."""
        slots, count = self._positions.shape
        heads = query.shape[1]
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        rows = query[self.rows].reshape(slots, count, kv_heads, shared, -1)
        packed = rows.permute(0, 2, 3, 1, 4).reshape(slots, kv_heads, shared * count, -1)
        seen_keys = keys[:, :, : self._length][self._slots]
        seen_values = values[:, :, : self._length][self._slots]
        out = _attention(packed, seen_keys, seen_values, self._mask(shared, kind, query), kind)
        rows = out.reshape(slots, kv_heads, shared, count, -1).permute(0, 3, 1, 2, 4)
        return rows.reshape(slots * count, heads, -1)

    def _mask(self, shared: int, kind: AttentionKind, query: Tensor) -> Tensor:
        """Additive [slots, 1, shared * rows per slot, length], made once for all layers."""
        key = (kind.window, shared)
        if key not in self._masks:
            places = torch.arange(self._length, device=query.device)
            positions = self._positions[:, :, None]
            hidden = places > positions
            if kind.window is not None:
                hidden |= places <= positions - kind.window
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask[:, None].repeat(1, 1, shared, 1)
        return self._masks[key]


class StepAttention:
    """Stores the rows' keys and values, and attends. ``places``: slot and position of each row."""

    def __init__(
        self, slots: Slots, places: tuple[Tensor, Tensor], groups: Sequence[RowGroup]
    ) -> None:
        self._slots = slots
        self._places = places
        self._groups = groups

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Query [T, heads, size], key and value [T, kv heads, size] to [T, heads, value size]."""
        keys, values = self._slots.layer(layer, key, value)
        slots, positions = self._places
        keys[slots, :, positions] = key
        values[slots, :, positions] = value
        if len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._groups[0].attend(query, keys, values, kind)
        # One row more takes the results of rows that only pad a group.
        out = query.new_empty(len(query) + 1, query.shape[1], value.shape[-1])
        for group in self._groups:
            out[group.rows] = group.attend(query, keys, values, kind)
        return out[:-1]


def flat_step(
    slots: Slots, segments: Sequence[Segment], device: torch.device
) -> tuple[Tensor, Tensor, StepAttention]:
    """Tokens and positions [T] of a step of these segments, one after the other; its attention."""
    tokens: list[int] = []
    positions: list[int] = []
    row_slots: list[int] = []
    for segment in segments:
        tokens += segment.tokens
        positions += range(segment.start, segment.end)
        row_slots += [segment.slot] * len(segment.tokens)
    inputs = torch.tensor([tokens, positions, row_slots], device=device)
    attend = StepAttention(slots, (inputs[2], inputs[1]), _grouped(segments, device))
    return inputs[0], inputs[1], attend


def _grouped(segments: Sequence[Segment], device: torch.device) -> list[RowGroup]:
    """Group all one-row segments where that pays; every other segment is a group of its own."""
    # Segments of one row, and longer ones, each with the number of its first row in the step.
    singles: list[tuple[int, Segment]] = []
    longer: list[tuple[int, Segment]] = []
    row = 0
    for segment in segments:
        if len(segment.tokens) == 1:
            singles.append((row, segment))
        else:
            longer.append((row, segment))
        row += len(segment.tokens)
    slots = [segment.slot for _, segment in singles]
    ends = [segment.end for _, segment in singles]
    groups: list[RowGroup] = []
    # One padded view of the slots, unless it reads several times as much as the rows need.
    if len(singles) > 1 and (max(slots) + 1 - min(slots)) * max(ends) <= 4 * sum(ends):
        groups.append(_group(singles, device))
        singles = []
    for part in (*singles, *longer):
        groups.append(_group([part], device))
    return groups


def _group(parts: list[tuple[int, Segment]], device: torch.device) -> RowGroup:
    """Make a group of segments with equally many tokens, each with its first row."""
    slots = [segment.slot for _, segment in parts]
    low = min(slots)
    high = max(slots) + 1
    count = len(parts[0][1].tokens)
    rows = np.full((high - low, count), -1)
    positions = np.zeros((high - low, count), np.int64)
    length = 0
    for row, segment in parts:
        rows[segment.slot - low] = np.arange(row, row + count)
        positions[segment.slot - low] = np.arange(segment.start, segment.end)
        length = max(length, segment.end)
    flat = rows.ravel()
    places: slice | Tensor = torch.from_numpy(flat).to(device)
    if bool((np.diff(flat) == 1).all()):  # a view is enough, instead of a copy
        places = slice(int(flat[0]), int(flat[-1]) + 1)
    return RowGroup(places, slice(low, high), length, torch.from_numpy(positions).to(device))


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: AttentionKind
) -> Tensor:
    """Attend with [slots, kv heads, rows, size] to [slots, kv heads, places, size]."""
    if kind.softcap is None and kind.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=kind.scale)
    scores = torch.matmul(query, keys.transpose(2, 3)) * (kind.scale or query.shape[-1] ** -0.5)
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    scores = (scores + mask).float()
    if kind.sinks is not None:  # one more place to look at, which holds no value
        slots, kv_heads, rows, _ = scores.shape
        sinks = kind.sinks.to(scores).view(1, kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(rows // sinks.shape[2], dim=2)
        scores = torch.cat([scores, sinks.expand(slots, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
