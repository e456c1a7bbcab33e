"""How an engine's chunks are grouped on their way changes no answer."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.random_cases import cut_anywhere, run_cases
from tests.helpers.scripted_text import Collected, asking, orchestrator, tokenizer
from tests.helpers.virtual_time import run_skipping_waits
from tests.helpers.waiting import run_async
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    Sampling,
    TextChunk,
    TextRequest,
    Wants,
)

ALL = Wants(log_probs=True, context_logits=True, generation_logits=True, perf_metrics=True)
REASONS = (None, FinishReason.END_ID, FinishReason.LENGTH, FinishReason.STOP)


class Grouped(ChunkStream):
    """Chunks that arrive in given groups."""

    def __init__(self, groups: Sequence[list[EngineChunk]]) -> None:
        self._groups = iter(groups)
        self._arrived: list[EngineChunk] = []

    async def wait(self) -> None:
        await asyncio.sleep(0)
        self._arrived = self._arrived or next(self._groups, [])

    def take(self) -> list[EngineChunk]:
        arrived, self._arrived = self._arrived, []
        return arrived

    async def aclose(self) -> None:
        pass


@dataclass
class Delivers:
    """An engine that gives the same groups of chunks to any request."""

    groups: list[list[EngineChunk]]
    ahead: bool = False  # of its reader, without waiting for it
    name: str = "delivers"

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity(max_sequence_tokens=400)

    def generate(self, request: EngineRequest) -> ChunkStream:
        return TaskChunks(self._fill) if self.ahead else Grouped(self.groups)

    async def _fill(self, chunks: QueuedChunks) -> None:
        for group in self.groups:
            chunks.put(group)
            await asyncio.sleep(0)

    async def close(self) -> None:
        pass


class Slow(Collected):
    """A sink that is seldom ready."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def ready(self) -> None:
        for _ in range(self._chance.choice([0, 1, 5, 40])):
            await asyncio.sleep(0)


# --- random answers -------------------------------------------------------------------------------


def random_sequence(chance: random.Random, index: int, scored: bool) -> list[EngineChunk]:
    """One sequence as an engine may tell it: any cuts, an end id or not, figures now and then."""
    text = "".join(chance.choices("ab c🙂ä\nxy", k=chance.randint(0, 14)))
    ids = list(tokenizer().encode_word(text)) if text else []
    if chance.random() < 0.3:
        ids.insert(chance.randint(0, len(ids)), tokenizer().eos_id or 0)
    chunks = []
    for number, cut in enumerate(cut_anywhere(chance, len(ids), 3)):
        new = tuple(ids[cut])
        chunk = EngineChunk(token_ids=new, sequence_index=index)
        if scored:
            chunk = replace(
                chunk,
                log_probs=tuple(-token / 64 for token in new),
                cum_log_prob=-1.0,
                context_logits=np.ones((2, 2)) if number == 0 or chance.random() < 0.5 else None,
                generation_logits=np.array([[token, index] for token in new]).reshape(-1, 2),
                metrics=EngineMetrics(arrival_time_ns=7) if chance.random() < 0.5 else None,
            )
        chunks.append(chunk)
    last = EngineChunk(token_ids=(), sequence_index=index)
    if chunks and chance.random() < 0.5:
        last = chunks.pop()
    return [*chunks, replace(last, final=True, finish_reason=chance.choice(REASONS))]


def interleaved(chance: random.Random, parts: list[list[EngineChunk]]) -> Iterator[EngineChunk]:
    left = [collections.deque(part) for part in parts]
    while left := [part for part in left if part]:
        yield chance.choice(left).popleft()


def random_request(chance: random.Random) -> TextRequest:
    stream = chance.random() < 0.7
    words = ["".join(chance.choices("ab c🙂ä\n", k=chance.randint(1, 3))) for _ in range(3)]
    return asking(
        stream=stream,
        max_tokens=chance.choice([1, 3, 8, 100]),
        num_return_sequences=chance.randint(1, 3),
        stop_words=tuple(dict.fromkeys(words[: chance.choice([0, 0, 1, 3])])),
        include_stop=chance.random() < 0.3,
        exclude_input_in_output=chance.random() < 0.7,
        sampling=Sampling(min_tokens=chance.choice([None, None, 2, 5])),
        stream_interval=chance.choice([1, 1, 2, 5]),
        wants=ALL if chance.random() < 0.5 else Wants(),
    )


def groupings(chance: random.Random, chunks: list[EngineChunk]) -> list[list[list[EngineChunk]]]:
    """One at a time, all at once, and by chance."""
    cuts = cut_anywhere(chance, len(chunks), 5)
    by_chance = [chunks[cut] for cut in cuts if chunks[cut]]
    return [[[chunk] for chunk in chunks], [chunks], by_chance]


# --- what a caller has in the end -----------------------------------------------------------------


def outcome(chunks: list[TextChunk], accumulate: bool, index: int) -> dict[str, Any]:
    own = [chunk for chunk in chunks if chunk.sequence_index == index]
    assert [chunk.ending is not None for chunk in own] == [False] * (len(own) - 1) + [True]
    last = own[-1]
    context = last.context_logits
    return {
        "text": last.text if accumulate else "".join(chunk.text for chunk in own),
        "ending": last.ending,
        "log_probs": last.log_probs,
        "cum_log_prob": last.cum_log_prob,
        "rows": [list(row) for chunk in own for row in chunk.generation_logits or ()],
        "context": None if context is None else context.tolist(),
        "metrics": last.metrics,
    }


async def answer(
    engine: Delivers, request: TextRequest, accumulate: bool, sink: Collected
) -> list[dict[str, Any]]:
    made = orchestrator(engine, Defaults(accumulate=accumulate))
    await made.run(request, sink)
    sequences = range(request.num_return_sequences)
    if not request.stream:
        assert len(sink.chunks) == len(sequences)
    return [outcome(sink.chunks, accumulate, index) for index in sequences]


def test_the_answer_is_the_same_however_its_chunks_are_grouped() -> None:
    """Text, endings, counts, stops and scores; to a sink that is always ready and to a slow one."""
    seen: collections.Counter[Any] = collections.Counter()

    async def compare(chance: random.Random) -> None:
        request, accumulate = random_request(chance), chance.random() < 0.3
        scored = request.wants is ALL
        parts = [
            random_sequence(chance, index, scored) for index in range(request.num_return_sequences)
        ]
        chunks = list(interleaved(chance, parts))
        singly, *others = groupings(chance, chunks)
        expected = await answer(Delivers(singly), request, accumulate, Collected())
        for groups in others:
            assert await answer(Delivers(groups), request, accumulate, Collected()) == expected
        ahead = Delivers(others[-1], ahead=True)
        assert await answer(ahead, request, accumulate, Slow(chance)) == expected
        if request.exclude_input_in_output:
            turned = replace(request, stream=not request.stream)
            assert await answer(Delivers(singly), turned, accumulate, Collected()) == expected
        seen.update(found["ending"].finish_reason for found in expected)
        seen["scored"] += any(found["rows"] for found in expected)

    def case(chance: random.Random) -> None:
        run_async(compare(chance))

    run_cases(case, 1000)
    assert all(seen[reason] > 50 for reason in REASONS if reason) and seen["scored"] > 100


def test_a_slow_sink_has_no_more_chunks_than_turns() -> None:
    """Each time that it is ready it gets what has arrived, one chunk for each sequence."""

    class Turns(Slow):
        served: set[int] | None = None  # sequences that had their chunk of this turn

        async def ready(self) -> None:
            await super().ready()
            self.served = set()

        def send(self, chunk: TextChunk) -> None:
            assert self.served is not None, "sent while the sink was not ready"
            assert chunk.sequence_index not in self.served
            self.served.add(chunk.sequence_index)
            super().send(chunk)

    async def compare(chance: random.Random) -> None:
        request = replace(random_request(chance), stream=True)
        count = request.num_return_sequences
        parts = [random_sequence(chance, index, scored=False) for index in range(count)]
        groups = [[chunk] for chunk in interleaved(chance, parts)]
        await answer(Delivers(groups, ahead=True), request, False, Turns(chance))

    run_cases(lambda chance: run_async(compare(chance)), 100)


def test_a_sink_that_fails_where_chunks_arrive_fails_its_request() -> None:
    """Not whoever brought the chunks; at once, though the engine may say nothing more."""

    def fail(chunk: TextChunk) -> None:
        raise ZeroDivisionError

    class Silent(Delivers):
        async def _fill(self, chunks: QueuedChunks) -> None:
            await super()._fill(chunks)
            await asyncio.Event().wait()

    engine = Silent([[EngineChunk(token_ids=(5,))]], ahead=True)
    with pytest.raises(ZeroDivisionError):
        run_skipping_waits(orchestrator(engine).run(asking(stream=True), Collected(fail)))
