"""CUDA graphs of steps: a step's operations are recorded once, and replayed by one call.

A small model spends its step on starting some hundred operations from Python. A graph starts them
all at once, but has the shapes it was recorded with. So the segments of a step are sorted into
batches of a few shapes: ``sequences`` of ``rows`` tokens each, which see ``length`` places, each
rounded up to a power of two. What only fills a batch up stores its keys in a place of its slot that
nobody sees. Longer pieces of prompts run without a graph, since they keep the GPU busy anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trtllm_bls.engines.embedded.attention import (
    RowGroup,
    Segment,
    StepAttention,
    flat_step,
)
from trtllm_bls.engines.embedded.llama import Llama
from trtllm_bls.engines.embedded.slots import Slots

_MAX_SEGMENT_ROWS = 64  # in a graph
_MAX_GRAPH_ROWS = 512
_SHORTEST_LENGTH = 256  # places


class Shape(NamedTuple):
    """The shape of a graph: sequences, rows of each, places seen in each slot."""

    sequences: int
    rows: int
    length: int


class _Recording(NamedTuple):
    """A graph and its memory. ``replay`` computes ``output`` from ``inputs``.

    ``inputs`` [sequences, 2 * rows + 2]: tokens, positions, slot, and the place of a kept row.
    ``output``: where a sequence has one row, logits [sequences, vocab] of the kept rows in order;
    else hidden rows [sequences * rows, H].
    """

    inputs: Tensor
    output: Tensor
    replay: Callable[[], object]


class Graphs:
    """Runs the steps of ``llama`` over ``slots``; graphs are recorded when first needed."""

    def __init__(self, llama: Llama, slots: Slots, device: torch.device) -> None:
        self._llama = llama
        self._slots = slots
        self._device = device
        self._pool: tuple[int, int] | None = None
        self._recordings: dict[Shape, _Recording] = {}

    def logits(self, segments: Sequence[Segment]) -> Tensor:
        """Compute logits [sum of ``keep``, vocab] of the last rows of each segment, in order."""
        batches = self._batches(segments)
        if len(batches) == 1 and batches[0] == list(range(len(segments))):
            return self._run(segments)
        logits: list[Tensor] = []
        first_rows: dict[int, int] = {}  # by segment
        num_rows = 0
        for batch in batches:
            logits.append(self._run([segments[index] for index in batch]))
            for index in batch:
                first_rows[index] = num_rows
                num_rows += segments[index].keep
        order: list[int] = []
        for index, segment in enumerate(segments):
            order += range(first_rows[index], first_rows[index] + segment.keep)
        return torch.cat(logits)[torch.tensor(order, device=self._device)]

    def _batches(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Part segments, by index, into those that run together."""
        batches: list[list[int]] = []
        for index in sorted(range(len(segments)), key=lambda index: len(segments[index].tokens)):
            rows = _power(len(segments[index].tokens))
            if batches:
                batch_rows = _power(len(segments[batches[-1][0]].tokens))
                has_room = _power(len(batches[-1]) + 1) * rows <= _MAX_GRAPH_ROWS
                if (batch_rows == 1) == (rows == 1) and has_room:
                    batches[-1].append(index)
                    continue
            batches.append([index])
        return batches

    def _run(self, segments: Sequence[Segment]) -> Tensor:
        """Compute the logits of the kept rows of one batch, in order."""
        longest = max(len(segment.tokens) for segment in segments)
        if longest > _MAX_SEGMENT_ROWS:
            return self._eager(segments)
        num_slots = self._slots.count
        count = min(_power(len(segments)), num_slots)
        length = _power(max(_SHORTEST_LENGTH, *(segment.end for segment in segments)))
        shape = Shape(count, _power(longest), min(length, self._slots.length))
        inputs = np.zeros((count, 2 * shape.rows + 2), np.int64)
        inputs[:, shape.rows : -2] = self._slots.length  # the place that nobody sees
        kept_rows: list[int] = []
        for place, segment in enumerate(segments):
            if count == num_slots:
                place = segment.slot
            num_tokens = len(segment.tokens)
            inputs[place, :num_tokens] = segment.tokens
            inputs[place, shape.rows : shape.rows + num_tokens] = range(segment.start, segment.end)
            inputs[place, -2] = segment.slot
            end = place * shape.rows + num_tokens
            kept_rows += range(end - segment.keep, end)
        if shape.rows == 1:
            inputs[: len(kept_rows), -1] = kept_rows
        if shape not in self._recordings:
            self._recordings[shape] = self._recording(shape)
        recording = self._recordings[shape]
        recording.inputs.copy_(torch.from_numpy(inputs))
        recording.replay()
        if shape.rows == 1:
            return recording.output[: len(kept_rows)].clone()  # the next replay overwrites it
        return self._llama.logits(recording.output[torch.tensor(kept_rows, device=self._device)])

    def _eager(self, segments: Sequence[Segment]) -> Tensor:
        kept_rows: list[int] = []
        end = 0
        for segment in segments:
            end += len(segment.tokens)
            kept_rows += range(end - segment.keep, end)
        tokens, positions, attend = flat_step(self._slots, segments, self._device)
        hidden = self._llama.hidden(tokens, positions, attend)
        return self._llama.logits(hidden[torch.tensor(kept_rows, device=self._device)])

    def _recording(self, shape: Shape) -> _Recording:
        """Record a step of that shape."""
        rows = shape.rows
        inputs = torch.zeros(
            (shape.sequences, 2 * rows + 2), dtype=torch.int64, device=self._device
        )
        inputs[:, rows:-2] = self._slots.length

        def step() -> Tensor:
            positions = inputs[:, rows:-2]
            slots = inputs[:, -2]
            group_slots: slice | Tensor = slots
            if shape.sequences == self._slots.count:
                # A sequence's place in the batch is its slot, so all slots are read as they lie.
                slots = torch.arange(shape.sequences, device=self._device)
                group_slots = slice(None)
            group = RowGroup(slice(None), group_slots, shape.length, positions)
            places = (slots.repeat_interleave(rows), positions.flatten())
            attend = StepAttention(self._slots, places, [group])
            hidden = self._llama.hidden(inputs[:, :rows].flatten(), places[1], attend)
            if rows > 1:
                return hidden
            return self._llama.logits(hidden[inputs[:, -1]])

        return _Recording(inputs, *self._record(step))

    def _record(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record a step. Returns its output, and the call that computes it again."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries prepare themselves in their first call, which cannot be recorded
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        return output, graph.replay


def _power(count: int) -> int:
    """Return the least power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()
