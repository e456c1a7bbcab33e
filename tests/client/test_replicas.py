"""Several engines of one model as one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.scripted_pairs import ids, read, told
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines import replicas
from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.errors import EngineError, EngineUnavailable, InvalidRequest, Overloaded
from trtllm_bls.types import (
    Adapter,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Guide,
    Sampling,
    Wants,
)

ASK = EngineRequest(request_id="r", input_ids=(5, 6, 7), max_tokens=6)
DOWN = EngineUnavailable("down")
UNREADABLE = Fault(error=ValueError("no\nmessage"), after_requests=1000, capacity=True)


def engines(count: int = 2) -> list[ScriptedEngine]:
    rule = hashed(100, first=5)
    return [ScriptedEngine(rule, Script(name=str(number))) for number in range(count)]


def together(*parts: ScriptedEngine, **options: Any) -> ReplicatedEngine:
    return ReplicatedEngine(parts, **options)


async def tokens(engine: Any, request: EngineRequest = ASK) -> list[int]:
    await engine.capacity()
    return ids(await read(engine, request))


async def test_the_least_loaded_engine_is_chosen() -> None:
    """By sequences that run there now; a request that has ended or left counts no more."""
    one, two = engines()
    engine = together(one, two)
    await engine.capacity()
    heavy = engine.generate(replace(ASK, num_return_sequences=3))
    light = [engine.generate(ASK) for _ in range(3)]
    for stream in (heavy, *light):
        await stream.wait()
    assert (len(one.requests), len(two.requests)) == (1, 3)
    await heavy.aclose()
    async with aclosing(engine.generate(ASK)) as stream:
        await stream.wait()
    assert len(one.requests) == 2
    for stream in light:
        await stream.aclose()
    await engine.close()


@pytest.mark.parametrize("error", [DOWN, Overloaded("full")])
async def test_a_request_without_tokens_is_tried_elsewhere(error: Exception) -> None:
    """Where one is down or full another answers; nothing is lost or told twice."""
    one, two = engines()
    right = await tokens(two)
    one.fault = Fault(error=error)
    engine = together(one, two)
    assert await tokens(engine) == right
    assert len(one.requests) == 1
    await engine.close()


async def test_an_engine_with_a_full_queue_keeps_its_breaker_closed() -> None:
    """It serves; the next request goes there again."""
    one, two = engines()
    engine = together(one, two)
    one.fault = Fault(error=Overloaded("full"))
    await tokens(engine)
    one.fault = None
    await tokens(engine)
    assert len(one.requests) == 2
    await engine.close()


class Filling:
    """An engine whose one answer the test fills."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.chunks = QueuedChunks()
        self.begun = asyncio.Event()

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> QueuedChunks:
        self.begun.set()
        return self.chunks

    async def awaited(self) -> None:
        """Return once a reader waits for its answer."""
        await self.begun.wait()
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


async def test_each_engine_is_tried_once_and_the_last_error_is_told() -> None:
    parts = engines(3)
    for part in parts:
        part.fault = Fault(error=DOWN)
    engine = together(*parts)
    with pytest.raises(EngineUnavailable, match="down"):
        await tokens(engine)
    assert [len(part.requests) for part in parts] == [1, 1, 1]
    await engine.close()


async def test_an_engine_that_was_lost_gets_no_requests_until_it_answers() -> None:
    """With all of them lost, the next request asks again instead of waiting for its rest to end."""
    one, two = engines()
    one.fault = Fault(error=DOWN, capacity=True)
    engine = together(one, two)
    for _ in range(3):
        assert len(await tokens(engine)) == 6
    assert not one.requests
    two.fault, one.fault = Fault(error=DOWN, capacity=True), None
    with pytest.raises(EngineUnavailable):
        await tokens(engine)
    assert len(await tokens(engine)) == 6
    assert len(one.requests) == 1
    await engine.close()


async def test_other_errors_are_the_requests_own() -> None:
    one, two = engines()
    one.fault = Fault(error=EngineError("broken"))
    engine = together(one, two)
    with pytest.raises(EngineError, match="broken"):
        await tokens(engine)
    with pytest.raises(InvalidRequest, match="request_output_len"):
        await tokens(engine, replace(ASK, max_tokens=0))
    assert len(one.requests) + len(two.requests) == 2, "neither was sent again"
    await engine.close()


@skipping_waits
async def test_an_engine_that_answers_again_gets_requests_again() -> None:
    """It is asked without any request, ever more rarely, for half a minute at most."""
    one, two = engines()
    engine = together(one, two)
    await engine.capacity()
    one.fault = Fault(error=DOWN)
    await tokens(engine)
    one.fault = Fault(error=DOWN, capacity=True)
    await asyncio.sleep(100)
    await tokens(engine)
    assert len(one.requests) == 1, "the one that failed"
    one.fault = None
    await asyncio.sleep(30)
    await tokens(engine)
    assert len(one.requests) == 2
    await engine.close()


@skipping_waits
async def test_an_engine_whose_limits_cannot_be_read_rests_as_one_that_is_down() -> None:
    """Whether it is asked first, beside its requests or while it rests; and it comes back."""
    one, two = engines()
    engine = together(one, two)
    one.fault = UNREADABLE
    await assert_resting(engine, one)
    await assert_back(engine, one)

    await asyncio.sleep(2)  # it is not asked beside each request
    one.fault = UNREADABLE
    await tokens(engine)
    await assert_resting(engine, one)
    await assert_back(engine, one)

    one.fault = Fault(error=DOWN)
    await tokens(engine)
    one.fault = UNREADABLE
    await asyncio.sleep(100)
    await assert_resting(engine, one)
    await assert_back(engine, one)

    await asyncio.sleep(2)
    one.fault = two.fault = UNREADABLE
    await tokens(engine)
    with pytest.raises(EngineUnavailable, match=r"^0: asking for its capacity failed: ValueError"):
        await tokens(engine)
    await engine.close()


async def assert_resting(engine: ReplicatedEngine, part: ScriptedEngine) -> None:
    before = len(part.requests)
    await tokens(engine)
    assert len(part.requests) == before


async def assert_back(engine: ReplicatedEngine, part: ScriptedEngine) -> None:
    """Within the longest rest, once its fault is over."""
    part.fault = None
    before = len(part.requests)
    await asyncio.sleep(31)
    await tokens(engine)
    assert len(part.requests) == before + 1


@skipping_waits
async def test_each_reason_to_rest_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is asked."""
    caplog.set_level(logging.WARNING, "trtllm_bls")  # another test may have set it to INFO
    one, two = engines()
    engine = together(one, two)
    await engine.capacity()
    one.fault = Fault(error=DOWN)
    await tokens(engine)
    one.fault = UNREADABLE
    await asyncio.sleep(100)
    await engine.close()
    rest = "; no request goes there until it answers again"
    failed = r"0: asking for its capacity failed: ValueError('no\nmessage')"
    assert caplog.messages == [f"down{rest}", f"{failed}{rest}"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(min_tokens=5), Sampling(top_p=0.9, seed=7)]
)
async def test_a_begun_request_goes_on_elsewhere_only_where_that_is_asked_for(
    sampling: Sampling, resume: bool
) -> None:
    """Greedy or seeded, from prompt and answer so far, within its own length; numbers that were
    drawn are not drawn again."""
    one, two = engines()
    request = replace(ASK, sampling=sampling)
    right = await tokens(two, request)
    one.fault = Fault(error=DOWN, after_tokens=2)
    engine = together(one, two, resume=resume)
    if resume:
        begun = await tokens(engine, request)
        rest = two.requests[-1]
        assert begun == right
        assert rest.input_ids == (*ASK.input_ids, *right[:2])
        assert (rest.max_tokens, rest.sampling.seed) == (4, sampling.seed and 9)
        left = 3 if sampling.min_tokens else 0
        assert rest.sampling.min_tokens == left, "absent, an engine may take it for 1"
    else:
        with pytest.raises(EngineUnavailable):
            await tokens(engine, request)
    await engine.close()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_tokens": 3}, FinishReason.LENGTH),
        ({"stop_sequences": ((9,),)}, FinishReason.STOP),
        ({"end_id": 9}, FinishReason.END_ID),
    ],
)
async def test_a_whole_answer_is_ended_rather_than_resumed(
    more: dict[str, Any], reason: FinishReason
) -> None:
    """Its last token tells why, where its engine is lost before it does."""
    one, two = filling = [Filling("one"), Filling("two")]
    engine = ReplicatedEngine(filling, resume=True)
    await engine.capacity()
    one.chunks.put([EngineChunk(token_ids=(7, 8)), EngineChunk(token_ids=(9,))])
    one.chunks.fail(DOWN)
    assert told(await read(engine, replace(ASK, **more))) == ([7, 8, 9], reason)
    assert not two.begun.is_set()
    await engine.close()


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": Sampling(top_p=0.9)},
        {"sampling": Sampling(top_p=0.9, seed=7, top_p_decay=0.5)},
        {"num_return_sequences": 2},
        {"stop_sequences": ((3, 4),)},
        {"wants": Wants(log_probs=True)},
        {"adapter": Adapter(task_id=7)},
        {"guide": Guide("json")},
    ],
)
async def test_what_needs_more_than_its_tokens_is_not_resumed(more: dict[str, Any]) -> None:
    """A drawn request without a seed, say, or sums that another engine would begin anew."""
    one, two = engines()
    one.fault = Fault(error=DOWN, after_tokens=2)
    engine = together(one, two, resume=True)
    with pytest.raises(EngineUnavailable):
        await tokens(engine, replace(ASK, **more))
    assert not two.requests
    await engine.close()


async def test_leaving_ends_the_engines_work() -> None:
    one, two = engines()
    engine = together(one, two)
    await engine.capacity()
    stream = engine.generate(replace(ASK, max_tokens=1000))
    await stream.wait()
    await stream.aclose()
    assert (one.live, two.live) == (0, 0)
    await engine.close()
    await asyncio.sleep(0)


def turns(conversation: int, count: int) -> EngineRequest:
    """A conversation that has come to so many turns of 40 tokens."""
    said = tuple(5 + (conversation * 31 + place) % 90 for place in range(40 * count))
    return replace(ASK, input_ids=said)


async def test_a_conversation_stays_with_its_engine() -> None:
    """With ``affinity``: each turn goes where the turns before it were, while eight take turns."""
    parts = engines(3)
    engine = together(*parts, affinity=True)
    await engine.capacity()
    for turn in range(1, 5):
        streams = [engine.generate(turns(each, turn)) for each in range(8)]
        for stream in streams:
            await stream.wait()
        for stream in streams:
            await stream.aclose()
    seen = [{request.input_ids[:32] for request in part.requests} for part in parts]
    assert sorted(map(len, seen)) == [2, 3, 3]
    assert len(set.union(*seen)) == 8
    await engine.close()


async def test_an_engine_that_is_much_busier_is_left() -> None:
    """Until then a known prompt stays; a prompt without a whole block goes to the least busy."""
    parts = engines()
    engine = together(*parts, affinity=True)
    await engine.capacity()
    streams = [engine.generate(turns(0, 2)) for _ in range(3)]
    assert sorted(engine.sequences().values()) == [0, 3]
    streams += [engine.generate(turns(0, 2)) for _ in range(5)]
    busy, other = engine.sequences().values()
    assert busy + other == 8 and abs(busy - other) <= 3
    streams += [engine.generate(ASK) for _ in range(abs(busy - other))]
    assert len(set(engine.sequences().values())) == 1
    for stream in streams:
        await stream.aclose()
    assert engine.sequences() == {"0": 0, "1": 0}
    await engine.close()


async def test_a_known_prompt_stays_up_to_a_quarter_more() -> None:
    """Beside 40 sequences on the other engine it is kept at 50, and leaves at 51."""
    parts = engines()
    engine = together(*parts, affinity=True)
    await engine.capacity()
    streams = [
        engine.generate(turns(conversation, 1)) for _ in range(40) for conversation in (0, 1)
    ]
    assert list(engine.sequences().values()) == [40, 40]
    streams += [engine.generate(turns(0, 1)) for _ in range(11)]
    assert sorted(engine.sequences().values()) == [40, 51]
    streams.append(engine.generate(turns(0, 1)))
    assert sorted(engine.sequences().values()) == [41, 51]
    for stream in streams:
        await stream.aclose()
    await engine.close()


async def test_a_lost_engine_is_chosen_for_no_prompt() -> None:
    """Its conversations go on at another, and stay there."""
    parts = engines()
    engine = together(*parts, affinity=True)
    await engine.capacity()
    await read(engine, turns(0, 1))
    parts[0].fault = Fault(error=DOWN)
    for turn in range(1, 4):
        assert ids(await read(engine, turns(0, turn)))
    assert len(parts[1].requests) == 3
    await engine.close()


async def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of prompts stays small."""
    monkeypatch.setattr(replicas, "_REMEMBERED_BLOCKS", 4)
    engine = together(*engines(), affinity=True)
    await engine.capacity()
    for conversation in range(6):
        await read(engine, turns(conversation, 2))
    assert len(engine._by_beginning) == 4
    await engine.close()
