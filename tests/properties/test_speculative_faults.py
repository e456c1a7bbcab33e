"""Drafting may fail in any way at any time: the answer stays, and nothing is left running."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import product

import pytest

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.scripted_pairs import (
    GREEDY,
    VOCAB,
    Pair,
    TellsLess,
    hashed_pair,
    ids,
    pair,
    read,
    told,
)
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.speculative.progress import Progress
from trtllm_bls.speculative.rounds import AskDraft, Decode, DraftFailure, SpeculativeRounds, Verify
from trtllm_bls.types import (
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Guide,
    Sampling,
    SpeculationRequest,
)

BROKEN = EngineError("broken")
ERRORS = (
    BROKEN,
    EngineUnavailable("gone"),
    Overloaded("Maximum queue size of 8 is reached"),
    InvalidRequest("input_ids", "too long"),
    ZeroDivisionError("of any kind"),
    None,
)
KINDS = {InvalidRequest: "refused", type(None): "deadline"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("overlap", [False, True])
@skipping_waits
async def test_a_draft_that_fails_at_any_point_costs_nothing_but_speed(
    error: Exception | None, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Error, refusal or silence, at any request and token: the plain answer, and it is told."""
    caplog.set_level(logging.WARNING, "trtllm_bls.speculation")
    plain = told(await read(hashed_pair().target, ask(max_tokens=10)))
    for source, request, token in product(
        (DraftSource.MODEL, DraftSource.MIXED), range(3), range(3)
    ):
        engines = hashed_pair(rate=0.5)
        engines.draft.fault = Fault(error=error, after_requests=request, after_tokens=token)
        engine = engines.speculative(num_draft_tokens=3, draft_source=source, overlap=overlap)
        assert told(await read(engine, ask(max_tokens=10))) == plain
        assert engines.live == (0, 0)
        if not overlap:  # a draft ahead is often cancelled before its fault shows
            assert len(engines.draft.requests) <= request + 1
        if engine.stats.draft_failures:
            assert engine.stats.fallback == KINDS.get(type(error), "error")
            assert engine.stats.draft_failures == 1
    assert "decoding plainly" in caplog.text


@skipping_waits
async def test_a_silent_draft_is_waited_for_once() -> None:
    """Its deadline is paid by one request; the next ones leave it alone for a while."""
    loop = asyncio.get_running_loop()
    engines = hashed_pair()
    engines.draft.fault = Fault()
    for waited in (0.25, 0.0, 0.0):
        begun = loop.time()
        engine = engines.speculative(num_draft_tokens=2, draft_deadline_s=0.25)
        async with aclosing(engine.generate(ask(max_tokens=8))) as stream:
            assert [engines.draft.live async for _ in stream] == [0] * 8
        assert loop.time() - begun == pytest.approx(waited)
    engines.draft.fault = None
    await asyncio.sleep(5.0)
    engine = engines.speculative(num_draft_tokens=2)
    await read(engine, ask(max_tokens=8))
    assert engine.stats.rounds > 0


@skipping_waits
async def test_a_draft_of_another_vocabulary_is_never_asked() -> None:
    """Its ids mean other words: drafting is off for good, and says why."""
    engines = pair(hashed(6), hashed(6), Script(vocab_size=VOCAB + 1))
    for why in ("vocabulary", None):
        engine = engines.speculative(num_draft_tokens=2)
        plain = await read(engines.target, ask())
        assert told(await read(engine, ask())) == told(plain)
        assert engine.stats.fallback == why
        await asyncio.sleep(60.0)
    assert engines.draft.requests == []


@skipping_waits
async def test_ids_that_the_target_does_not_know_are_not_sent() -> None:
    """A draft that does not tell its vocabulary may guess outside the target's."""
    engines = pair(hashed(6), hashed(6))
    guess = Script(name="draft", vocab_size=99)
    engines.draft = TellsLess(lambda c: VOCAB if len(c) % 2 else 1, guess, "vocab_size")
    engine = engines.speculative(num_draft_tokens=3)
    plain = await read(engines.target, ask(max_tokens=20))
    assert told(await read(engine, ask(max_tokens=20))) == told(plain)
    assert engine.stats.draft_failures == 0 < engine.stats.rounds


@skipping_waits
async def test_a_target_that_refuses_drafts_decodes_plainly() -> None:
    """It may not be built for them; the request never fails for that."""
    engines = pair(lambda _: 1, lambda _: 1)
    takes_one = Script(vocab_size=VOCAB, max_draft_tokens=1)
    engines.target = TellsLess(lambda _: 1, takes_one, "max_draft_tokens")
    engine = engines.speculative(num_draft_tokens=4, draft_source=DraftSource.MIXED)
    assert ids(await read(engine, ask())) == [1] * 12
    assert (engine.stats.fallback, engine.stats.rounds) == ("refused", 0)
    assert [request.draft is not None for request in engines.target.requests].count(True) == 1


@skipping_waits
async def test_a_request_whose_drafts_are_refused_stops_no_others() -> None:
    """A draft model that fails gets a pause; a refusal is of that request alone."""
    engines = hashed_pair()
    for error, pauses in ((InvalidRequest("input_ids", "too long"), False), (BROKEN, True)):
        engines.draft.fault = Fault(error=error)
        await read(engines.speculative(num_draft_tokens=2), ask())
        engines.draft.fault = None
        engine = engines.speculative(num_draft_tokens=2)
        await read(engine, ask())
        assert (engine.stats.rounds == 0) is pauses


def test_no_ngram_is_drafted_where_rounds_are_dear() -> None:
    """A match is learned from all the same, and begins no pause of the draft model's."""
    shared = SpeculationShared()
    for times, length, seconds in (
        (shared.verify_times, 1, 1.0),
        (shared.overhead_times, 0, 99.0),
        (shared.plain_times, 0, 1.0),
    ):
        times.add(length, seconds)
    options = SpeculationOptions(draft_source=DraftSource.NGRAM)
    for prompt in ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 1, 2, 3)):
        rounds = SpeculativeRounds(ask(prompt), options, shared, has_draft_model=False)
        assert isinstance(rounds.next(0.0), Decode)
        assert shared.pauses == 0


@skipping_waits
async def test_a_full_queue_in_the_middle_of_an_answer_is_waited_for() -> None:
    """It refuses new requests, of which each round is one; the answer has begun."""
    engines = hashed_pair()
    plain = await read(engines.target, ask())
    begun = len(engines.target.requests) + 2
    engines.target.fault = Fault(error=Overloaded("full"), after_requests=begun)
    asyncio.get_running_loop().call_later(3.0, setattr, engines.target, "fault", None)
    assert told(await read(engines.speculative(num_draft_tokens=2), ask())) == told(plain)
    assert len(engines.target.requests) > begun + 5, "it was asked again and again"


class HalfScored(ScriptedEngine):
    """A draft model whose logits lack a row."""

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        async with aclosing(super()._chunks(request)) as chunks:
            async for chunk in chunks:
                assert chunk.generation_logits is not None
                yield replace(chunk, generation_logits=chunk.generation_logits[:-1])


@skipping_waits
async def test_a_draft_with_too_few_logits_is_verified_by_its_ids() -> None:
    """Which is as lossless."""
    engines = hashed_pair(words=VOCAB)
    engines.draft = HalfScored(engines.draft._rule, engines.draft.script)
    engine = engines.speculative(num_draft_tokens=2, use_draft_logits=True)
    await read(engine, ask(sampling=Sampling(top_k=5, top_p=0.9, seed=3)))
    drafts = [asked.draft for asked in engines.target.requests if asked.draft]
    assert drafts and all(draft.logits is None for draft in drafts)
    assert engine.stats.fallback is None


def test_the_first_drafts_time_is_no_measure() -> None:
    """The draft model reads the prompt for it."""
    shared = SpeculationShared()
    options = SpeculationOptions(num_draft_tokens=2)
    rounds = SpeculativeRounds(ask(), options, shared, has_draft_model=True)
    assert isinstance(rounds.next(0.0), Verify)
    rounds.verified(EngineChunk(token_ids=(7,)), 0.0)
    for seconds in (9.0, 0.5):
        assert isinstance(rounds.next(0.0), AskDraft)
        rounds.drafted(Draft(token_ids=(4, 5)), seconds)
        assert isinstance(rounds.next(0.0), Verify)
        rounds.verified(EngineChunk(token_ids=(4, 5, 6)), 0.0)
    assert shared.draft_times.at(2) == 0.5


def test_ngrams_need_not_beat_a_draft_model_that_has_failed() -> None:
    """Its speed, which is as good as infinite until it is measured, counts no longer."""
    shared = SpeculationShared()
    shared.verify_times.add(2, 0.02)
    options = SpeculationOptions(draft_source=DraftSource.MIXED)
    request = ask((1, 2, 3, 4, 1, 2, 3))
    rounds = SpeculativeRounds(request, options, shared, has_draft_model=True)
    assert isinstance(first := rounds.next(0.0), Verify) and first.request.draft is None
    rounds.verified(EngineChunk(token_ids=(4,)), 0.1)
    assert isinstance(rounds.next(0.1), AskDraft)
    rounds.drafted(DraftFailure("error", "broken"), 0.1)
    assert isinstance(second := rounds.next(0.1), Verify)
    assert second.request.draft is not None


def test_a_draft_begun_early_is_of_no_use_if_it_ends_with_the_targets_token() -> None:
    """It guessed that token alone, so the draft model is asked for what follows."""
    shared = SpeculationShared()
    options = SpeculationOptions(num_draft_tokens=2, overlap=True)
    rounds = SpeculativeRounds(ask(), options, shared, has_draft_model=True)
    assert isinstance(rounds.next(0.0), Verify)
    rounds.verified(EngineChunk(token_ids=(7,)), 0.0)
    assert isinstance(rounds.next(0.0), AskDraft)
    rounds.drafted(Draft(token_ids=(4, 5)), 0.0)
    assert isinstance(verify := rounds.next(0.0), Verify) and verify.early is not None
    rounds.verified(EngineChunk(token_ids=(4, 5, 6)), 0.0)
    assert rounds.next(0.0) == AskDraft(None)
    rounds.drafted(Draft(token_ids=(6,)), 0.0)
    assert isinstance(again := rounds.next(0.0), AskDraft) and again.request is not None
    assert (rounds.stats.overlap_used, rounds.stats.overlap_wasted) == (0, 1)


@pytest.mark.parametrize(("answered", "ended"), [((7, 8), True), ((7, 8, 9, 7), False)])
def test_an_engine_that_ignores_a_draft_ends_where_it_says_less_than_was_asked(
    answered: tuple[int, ...], ended: bool
) -> None:
    """It decodes as many tokens as the draft has, and one more."""
    progress = Progress(ask(end_id=3))
    assert progress.take_round((1, 2, 4), answered, None) == (0, len(answered))
    assert (progress.finish is FinishReason.END_ID) is ended


def test_a_draft_leaves_room_for_the_next_prompt() -> None:
    """Which holds all of its round."""
    capacity = EngineCapacity(max_prompt_tokens=10)
    assert [Progress(ask((1,) * n, 50), capacity).max_draft for n in (5, 9, 12)] == [4, 0, 0]


@skipping_waits
async def test_an_end_id_is_never_drafted() -> None:
    """Nothing can follow it; here the text itself proposes it."""
    engines = pair(lambda _: 4, lambda _: 4)
    engine = engines.speculative(num_draft_tokens=3, draft_source=DraftSource.NGRAM)
    await read(engine, ask((1, 2, 3, 4, 9, 5, 1, 2, 3), max_tokens=4, end_id=9))
    drafts = [request.draft for request in engines.target.requests if request.draft]
    assert drafts[0] == Draft(token_ids=(4,))


@skipping_waits
async def test_no_draft_is_longer_than_the_target_takes() -> None:
    """The engine's own maximum counts, also for a caller who asks for more."""
    engines = hashed_pair(rate=1.0, max_draft_tokens=3, max_sequence_tokens=40)
    await read(engines.speculative(num_draft_tokens=9), ask(max_tokens=60))
    asked = [request for request in engines.target.requests if request.draft]
    drafts = [request.draft for request in asked if request.draft]
    assert max(len(draft.token_ids) for draft in drafts) == 3
    for request, draft in zip(asked, drafts, strict=True):  # as the engine counts
        tokens = len(request.input_ids) + request.max_tokens + len(draft.token_ids)
        assert tokens <= 40


@skipping_waits
async def test_a_draft_model_with_a_shorter_memory_stops_where_it_ends() -> None:
    """Beyond the draft model's longest sequence the target goes on alone; no failure is counted."""
    rule = hashed(6)
    engines = pair(rule, rule, Script(vocab_size=VOCAB, max_sequence_tokens=12))
    engine = engines.speculative(num_draft_tokens=4)
    assert len(ids(await read(engine, ask(max_tokens=20)))) == 20
    assert (engine.stats.draft_failures, engines.draft.cancelled) == (0, [])


@pytest.mark.parametrize("after", range(4))
@skipping_waits
async def test_the_targets_failure_is_the_requests(after: int) -> None:
    """At any request: the error goes to the caller, and the draft's work ends."""
    engines = hashed_pair()
    engines.target.fault = Fault(error=EngineStalled("silent"), after_requests=after)
    with pytest.raises(EngineStalled):
        await read(engines.speculative(num_draft_tokens=2, overlap=True), ask())
    assert engines.live == (0, 0)
    assert len(engines.target.requests) == after + 1  # and is not tried again


@skipping_waits
async def test_a_broken_target_is_not_taken_to_refuse_drafts_only() -> None:
    """The plain request that follows fails as well, and so does the caller's."""
    engines = hashed_pair()
    engines.target.fault = Fault(error=BROKEN, after_requests=1)
    with pytest.raises(EngineError, match="broken"):
        await read(engines.speculative(num_draft_tokens=2), ask())


@skipping_waits
async def test_a_target_that_does_not_tell_its_limits_fails() -> None:
    """As it would for a plain request."""
    engines = hashed_pair()
    engines.target.fault = Fault(error=BROKEN, after_requests=99, capacity=True)
    limits = engines.speculative()
    with pytest.raises(EngineError):
        await limits.capacity()


# --- leaving ----------------------------------------------------------------------------------


def slow_pair() -> Pair:
    """Each step of either engine takes time, so that a reader can go in the middle of any."""
    rule = hashed(6)
    draft = Script(vocab_size=VOCAB, step_seconds=0.002)
    return pair(rule, hashed(6), draft, step_seconds=0.02)


@pytest.mark.parametrize("source", DraftSource)
@pytest.mark.parametrize("overlap", [False, True])
@skipping_waits
async def test_closing_after_any_chunk_ends_both_engines_work(
    source: DraftSource, overlap: bool
) -> None:
    """As the orchestrator does on a stop string."""
    for count, chunks in product((None, 0, 3), range(1, 6)):
        engines = slow_pair()
        engine = engines.speculative(num_draft_tokens=count, draft_source=source, overlap=overlap)
        async with aclosing(engine.generate(ask(max_tokens=40))) as stream:
            reader = aiter(stream)
            for _ in range(chunks):
                await anext(reader)
        assert (*engines.live, engines.shared.in_flight) == (0, 0, 0)
        assert len(asyncio.all_tasks()) == 1


class WorksInATask(ScriptedEngine):
    """A scripted engine that works on where a reader's wait is cancelled, until it is closed."""

    def generate(self, request: EngineRequest) -> ChunkStream:
        async def work(chunks: QueuedChunks) -> None:
            async with aclosing(self._chunks(request)) as made:
                async for chunk in made:
                    chunks.put([chunk])

        return TaskChunks(work)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [ScriptedEngine, WorksInATask])
@skipping_waits
async def test_cancelling_at_any_time_ends_both_engines_work(
    kind: type[ScriptedEngine], overlap: bool
) -> None:
    """Before, in and between drafting and verifying, and while a silent draft is waited for."""
    times = random.Random(4)
    for attempt in range(60):
        engines = slow_pair()
        engines.target = kind(engines.target._rule, engines.target.script)
        if attempt % 3 == 0:
            engines.draft.fault = Fault(after_requests=attempt % 4)
        engine = engines.speculative(num_draft_tokens=attempt % 5 or None, overlap=overlap)
        reader = asyncio.create_task(read(engine, ask(max_tokens=200)))
        await asyncio.sleep(times.uniform(0.0, 0.3))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (*engines.live, engines.shared.in_flight) == (0, 0, 0)
        assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling": replace(GREEDY, beam_width=2)}, "beam_width"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"sampling": replace(GREEDY, top_p_min=0.1)}, "runtime_top_p_min"),
        ({"sampling": replace(GREEDY, top_p_decay=0.9)}, "runtime_top_p_decay"),
        ({"sampling": replace(GREEDY, top_p_reset_id=3)}, "runtime_top_p_reset_ids"),
        ({"draft": Draft(token_ids=(1,))}, "draft_input_ids"),
        ({"guide": Guide("json_schema", "{}")}, "guided_decoding_guide_type"),
        ({"extras": {"prompt_table_extra_ids": b""}}, "prompt_table_extra_ids"),
    ],
)
@skipping_waits
async def test_what_rounds_cannot_keep_is_refused_by_name(
    fields: dict[str, object], name: str
) -> None:
    """Before any work is done; the name is the wire's."""
    engines = hashed_pair()
    with pytest.raises(InvalidRequest, match=name) as refusal:
        asked = SpeculationRequest(num_draft_tokens=2)
        await read(engines.speculative(), ask(speculation=asked, **fields))
    assert refusal.value.field == name
    assert engines.target.requests == []


@skipping_waits
async def test_a_prompt_with_a_table_of_its_own_is_not_shown_to_the_draft() -> None:
    """Ids beyond the vocabulary mean nothing to it; n-grams still work."""
    engines = hashed_pair()
    extras = {"prompt_embedding_table": b"", "prompt_vocab_size": b""}
    engine = engines.speculative(num_draft_tokens=2, draft_source=DraftSource.MIXED)
    await read(engine, ask((1, 2, 3, 4, 1, 2, 3), extras=extras))
    assert engines.draft.requests == []
    assert engine.stats.ngram_drafted > 0
    assert all(request.extras == extras for request in engines.target.requests)
