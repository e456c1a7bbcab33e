"""One request from words to words, over a real tokenizer and a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from doubles.generated import GeneratedChunks
from doubles.scripted import Fault, Script, ScriptedEngine
from tests.helpers.scripted_text import (
    PROMPT,
    Collected,
    ask,
    asking,
    ending,
    orchestrator,
    prompt_ids,
    reciting_ids,
    saying,
    text_of,
    tokenizer,
    tokenizer_of_two_ends,
)
from tests.helpers.waiting import run_async
from trtllm_bls.engines.base import ChunkStream
from trtllm_bls.errors import EngineError, EngineUnavailable
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Sampling,
    Wants,
)

STOP, LENGTH, END_ID = FinishReason.STOP, FinishReason.LENGTH, FinishReason.END_ID
SENTENCE = "It wasn't fun: 世界 🙂!\n"


# --- text -----------------------------------------------------------------------------------


def test_a_whole_answer_comes_in_one_chunk() -> None:
    """The engine is asked for it whole, too."""
    engine = saying(SENTENCE)
    (chunk,) = ask(engine)
    assert chunk.text == SENTENCE and chunk.ending is not None
    assert chunk.ending.finish_reason is END_ID
    assert chunk.ending.prompt_tokens == len(prompt_ids())
    assert not engine.requests[0].streaming


@pytest.mark.parametrize(
    ("more", "in_pieces"),
    [
        ({}, True),
        ({"num_return_sequences": 2}, True),
        ({"wants": Wants(log_probs=True)}, False),
        ({"stop_words": ("&",)}, True),  # whatever the deployment says
    ],
)
def test_an_answer_that_shows_the_engines_progress_is_the_same(
    more: dict[str, Any], in_pieces: bool
) -> None:
    """One chunk per sequence; only where a stream of the engine's has all that was asked for."""
    engine, plain = saying(SENTENCE), saying(SENTENCE)
    assert ask(engine, asking(**more), defaults=Defaults(engine_shows_progress=False)) == ask(
        plain, asking(**more)
    )
    assert engine.requests[0].streaming is in_pieces


def test_a_stream_has_a_chunk_per_certain_text_and_says_the_same() -> None:
    """Characters of several tokens come whole; every chunk but the last has text."""
    chunks = ask(saying(SENTENCE), asking(stream=True))
    assert text_of(chunks) == SENTENCE and len(chunks) > 5
    assert all(chunk.text for chunk in chunks[:-1])


def test_streamed_or_not_the_text_is_the_same() -> None:
    """Whatever the stops, the limits and the text."""
    chance = random.Random(3)
    for _ in range(40):
        text = "".join(chance.choices("ab c🙂ä\n", k=12))
        start = chance.randrange(10)
        request = asking(
            max_tokens=chance.randint(1, 20),
            stop_words=chance.choice([(), (text[start : start + 2],), ("zz", "c")]),
            include_stop=chance.random() < 0.5,
            sampling=Sampling(min_tokens=chance.choice([None, 4])),
        )
        whole = ask(saying(text), request)
        streamed = ask(saying(text), replace(request, stream=True))
        assert text_of(whole) == text_of(streamed), request
        assert ending(whole) == ending(streamed), request


def test_the_prompt_is_shown_when_asked_for_without_special_tokens() -> None:
    """As the caller wrote it, in front of the answer; a stream never repeats it."""
    request = asking(exclude_input_in_output=False)
    assert text_of(ask(saying(" brown"), request)) == PROMPT + " brown"
    assert text_of(ask(saying(" brown"), replace(request, stream=True))) == " brown"


def test_special_tokens_are_shown_to_those_who_want_them() -> None:
    """The request's word goes before the deployment's."""
    ids = (*tokenizer().encode_word("hi"), tokenizer().encode_word("<|user|>")[0])
    shown = "hi<|user|>"
    off = Defaults(skip_special_tokens=False)
    assert text_of(ask(reciting_ids(ids))) == "hi"
    assert text_of(ask(reciting_ids(ids), defaults=off)) == shown
    assert text_of(ask(reciting_ids(ids), asking(skip_special_tokens=False))) == shown
    assert text_of(ask(reciting_ids(ids), asking(skip_special_tokens=True), defaults=off)) == "hi"


def test_accumulated_chunks_hold_all_so_far() -> None:
    """Each is a prefix of the next; not streamed, the text is the same."""
    defaults = Defaults(accumulate=True)
    texts = [c.text for c in ask(saying(SENTENCE), asking(stream=True), defaults=defaults)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == text_of(ask(saying(SENTENCE), defaults=defaults)) == SENTENCE


def test_scores_asked_for_belong_to_the_text() -> None:
    """One log-prob and one row of logits per token; the prompt's logits on every chunk."""
    wants = Wants(log_probs=True, generation_logits=True, context_logits=True)
    for stream in (False, True):
        chunks = ask(saying("a b c"), asking(wants=wants, stream=stream))
        count = ending(chunks)[2]
        assert chunks[-1].log_probs is not None and len(chunks[-1].log_probs) == count
        assert sum(len(chunk.generation_logits or ()) for chunk in chunks) == count
        assert all(chunk.context_logits is not None for chunk in chunks)


# --- the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_engines_work_at_once(stream: bool) -> None:
    """The engine may know nothing of it: the stop lies across its tokens."""
    engine = saying("a quick brown fox")
    chunks = ask(engine, asking(stop_words=("ck bro",), stream=stream))
    assert text_of(chunks) == "a qui" and ending(chunks)[:2] == (STOP, "ck bro")
    assert engine.cancelled == [engine.requests[0].request_id]
    assert engine.live == 0
    request = asking(stop_words=("ck bro",), include_stop=True, stream=stream)
    assert text_of(ask(engine, request)) == "a quick bro"


def test_a_length_limit_does_not_cancel() -> None:
    """The engine ends there by itself, and a cancel would only race with that."""
    engine = saying("one two three four")
    chunks = ask(engine, asking(max_tokens=2, stream=True))
    assert ending(chunks)[::2] == (LENGTH, 2)
    assert engine.cancelled == []


def test_an_engine_that_stops_by_itself_is_not_cancelled() -> None:
    """It was told the stop's tokens, so its last chunk is the one that completes it."""
    engine = saying("one two! three")
    chunks = ask(engine, asking(stop_words=("!",), stream=True))
    assert text_of(chunks) == "one two" and ending(chunks)[:2] == (STOP, "!")
    assert engine.cancelled == []


def test_every_end_id_of_the_model_ends_the_text() -> None:
    """An engine takes one; the others it gets as stop sequences, and they are not shown."""
    words = tokenizer_of_two_ends()
    extra = words.end_ids[1]
    engine = reciting_ids((*words.encode_word("one"), extra, *words.encode_word("two")))
    chunks = ask(engine, asking(stop_words=("x",)), other=words)
    assert text_of(chunks) == "one" and ending(chunks)[0] is END_ID
    assert engine.requests[0].end_id == words.end_ids[0]
    assert engine.requests[0].stop_sequences == (words.encode_word("x"), (extra,))
    assert engine.cancelled == []


def test_min_tokens_keeps_stops_from_the_engine() -> None:
    """An engine would stop before the minimum; we do not."""
    engine = saying("one! two! three!")
    chunks = ask(engine, asking(stop_words=("!",), sampling=Sampling(min_tokens=6)))
    assert text_of(chunks) == "one! two" and ending(chunks)[:2] == (STOP, "!")
    assert engine.requests[0].stop_sequences == ()


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_id_the_engine_was_not_told_ends_its_work(stream: bool) -> None:
    """With min_tokens only we watch for it, so only we can end the work, streamed or not."""
    words = tokenizer_of_two_ends()
    engine = reciting_ids((*words.encode_word("one"), words.end_ids[1], *words.encode_word("two")))
    request = asking(sampling=Sampling(min_tokens=1), stream=stream)
    chunks = ask(engine, request, other=words)
    assert text_of(chunks) == "one" and ending(chunks)[0] is END_ID
    assert engine.cancelled == [engine.requests[0].request_id]


def test_a_callers_end_id_is_the_only_one() -> None:
    """-1 means none at all: only the limit ends."""
    comma = tokenizer().encode_word(",")[0]
    assert text_of(ask(saying("one, two"), asking(end_id=comma))) == "one"
    chunks = ask(saying("one"), asking(end_id=-1, max_tokens=9))
    assert ending(chunks)[::2] == (LENGTH, 9)


def test_the_longest_sequence_is_a_length() -> None:
    """An engine that does not say why has reached its longest sequence."""
    longest = len(prompt_ids()) + 2
    engine = saying("one two three", max_sequence_tokens=longest, tells_reason=False)
    assert ending(ask(engine, asking(stream=True)))[::2] == (LENGTH, 2)


# --- several sequences ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_several_sequences_end_each_once(stream: bool) -> None:
    """They are told apart by index; none is lost when another ends."""
    drawn = (*[0.0] * 260, *[1 / 340] * 340, *[0.0] * 400)
    engine = ScriptedEngine(lambda _: drawn, Script(vocab_size=1000))
    sampling = Sampling(top_p=0.9, seed=1)
    request = asking(num_return_sequences=3, max_tokens=6, stream=stream, sampling=sampling)
    chunks = ask(engine, request)
    assert sorted(c.sequence_index for c in chunks if c.ending is not None) == [0, 1, 2]
    texts = [text_of(chunks, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts == [text_of(ask(engine, replace(request, stream=not stream)), i) for i in range(3)]
    assert {c.ending.completion_tokens for c in chunks if c.ending is not None} == {6}
    assert (len(chunks) > 3) == stream


class Uneven:
    """Two sequences, of which one reaches its stop three steps before the other."""

    name = "uneven"

    def __init__(self) -> None:
        self.steps = 0
        self.closed = False

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> ChunkStream:
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        ids = tokenizer().encode_word
        try:
            for first, second in [("a", "a"), ("!", "b"), ("c", "c"), ("d", "!"), ("e", "e")]:
                self.steps += 1
                for index, text in enumerate((first, second)):
                    yield EngineChunk(token_ids=ids(text), sequence_index=index)
        finally:
            self.closed = True

    async def close(self) -> None: ...


def test_the_work_ends_when_the_last_sequence_has_stopped() -> None:
    """Not before: another still runs; and not later."""
    engine = Uneven()
    chunks = ask(engine, asking(num_return_sequences=2, stop_words=("!",), stream=True))
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("a", "abc")
    assert (engine.steps, engine.closed) == (4, True)
    assert [chunk.sequence_index for chunk in chunks if chunk.ending is not None] == [0, 1]


class Punctual(Uneven):
    """It knows the stop: its last chunk completes it."""

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        yield EngineChunk(token_ids=tokenizer().encode_word("a!"), final=True)
        self.closed = True  # read to the end, not left


def test_an_engine_that_has_ended_is_not_left() -> None:
    """A cancel around the final response does harm, and this one could end nothing."""
    engine = Punctual()
    assert text_of(ask(engine, asking(stop_words=("!",), stream=True))) == "a"
    assert engine.closed


def test_an_engine_that_ends_without_a_word_is_an_error() -> None:
    """A text cut off must not look whole."""
    with pytest.raises(EngineError, match="uneven ended its stream before its last chunk"):
        ask(Uneven(), asking(num_return_sequences=2))


# --- closing and failing --------------------------------------------------------------------


def test_a_reader_that_leaves_after_any_chunk_ends_the_engines_work() -> None:
    """Cancelled before, between or after the chunks: nothing lives on."""

    async def leave(chunks: int) -> int:
        engine = saying("one two")
        left = asyncio.Event()
        sink = Collected(lambda _: left.set() if len(sink.chunks) >= chunks else None)
        reading = asyncio.create_task(orchestrator(engine).run(asking(stream=True), sink))
        if chunks:
            leaving = asyncio.create_task(left.wait())
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
        reading.cancel()
        await asyncio.wait({reading})
        assert engine.live == 0
        return len(sink.chunks)

    assert [run_async(leave(count)) for count in range(20)][-1] < 19


def test_a_cancelled_reader_ends_the_engines_work() -> None:
    """Also while the engine says nothing."""

    async def run() -> None:
        engine = saying("one two")
        engine.fault = Fault(after_tokens=1)
        got = asyncio.Event()
        sink = Collected(lambda _: got.set())
        reader = asyncio.create_task(orchestrator(engine).run(asking(stream=True), sink))
        await got.wait()
        assert engine.live == 1
        reader.cancel()
        await asyncio.wait({reader})
        assert engine.live == 0 and len(engine.cancelled) == 1

    run_async(run())


def test_an_engines_error_comes_after_the_text_it_had_said() -> None:
    """What left stays, and the error is raised as it is."""
    engine = saying("one two three")
    engine.fault = Fault(error=EngineUnavailable("gone"), after_tokens=2)
    sink = Collected()
    with pytest.raises(EngineUnavailable, match="gone"):
        run_async(orchestrator(engine).run(asking(stream=True), sink))
    said = text_of(sink.chunks)
    assert said and "one two three".startswith(said)
    assert engine.live == 0


def test_an_engine_that_cannot_tell_its_limits_is_not_asked_for_more() -> None:
    """Its error is the answer."""
    engine = saying("one")
    engine.fault = Fault(error=EngineUnavailable("gone"), capacity=True)
    with pytest.raises(EngineUnavailable):
        ask(engine)
    assert engine.requests == []
