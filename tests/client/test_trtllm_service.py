"""TensorRT-LLM's gRPC service as an engine, against a server that plays it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from doubles.guided import GuidedAnswers
from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import table
from doubles.trtllm_service import Behaviour, EchoEngine, ScriptedService
from tests.helpers.fake_engine_server import run
from tests.helpers.packages import import_or_skip
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.scripted_services import (
    ANSWER,
    ASK,
    EOS,
    LONG,
    RULE,
    answered,
    playing,
    reaching,
    service_in_a_thread,
)
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import eventually
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.engines.trtllm_service.service_engine import (
    _LINGER_SECONDS,
    ServiceAnswer,
    TrtllmServiceEngine,
    service_request,
)
from trtllm_bls.errors import EngineError, EngineUnavailable
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import (
    EngineCapacity,
    FinishReason,
    Guide,
    Sampling,
    Wants,
)
from trtllm_bls.wire.grpc_client import GrpcChannel

# --- what comes back ------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("ids_per_chunk", [1, 2, 100])
@pytest.mark.parametrize(
    ("more", "tokens", "reason"),
    [
        ({}, ANSWER, FinishReason.END_ID),
        ({"max_tokens": 3}, ANSWER[:3], FinishReason.LENGTH),
        ({"end_id": 13}, ANSWER[:2], FinishReason.END_ID),
        ({"end_id": 11}, (), FinishReason.END_ID),
        ({"stop_sequences": ((13,),)}, ANSWER[:3], FinishReason.STOP),
        ({"stop_sequences": ((12, 13),)}, ANSWER[:3], FinishReason.STOP),
        ({"stop_sequences": ((12, 99), (14,))}, ANSWER[:4], FinishReason.STOP),
        (
            {"stop_sequences": ((12,), (14,)), "sampling": Sampling(min_tokens=3)},
            ANSWER[:4],
            FinishReason.STOP,
        ),
        ({"end_id": -1, "max_tokens": 7}, (*ANSWER, EOS, EOS), FinishReason.LENGTH),
    ],
)
def test_nothing_is_told_twice_and_nothing_is_lost(
    more: dict[str, Any],
    tokens: tuple[int, ...],
    reason: FinishReason,
    ids_per_chunk: int,
    streaming: bool,
) -> None:
    """Whole or in pieces, whatever the server's pieces are; without the end id, with the stop."""
    request = replace(ASK, streaming=streaming, **more)
    chunks, service = answered(request, ids_per_chunk=ids_per_chunk)
    assert tuple(ids(chunks)) == tokens
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason is reason
    assert len(service.requests) == 1


def test_the_last_chunk_tells_what_the_service_drafted() -> None:
    """From proto 0.4.19 on; earlier services tell nothing."""
    for told in (8, 0):
        chunks, _ = answered(replace(ASK, streaming=False), speculates=told)
        done = chunks[-1].speculation
        assert (done and (done.drafted, done.accepted)) == ((8, 4) if told else None)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_first_chunk_tells_what_was_cached(streaming: bool) -> None:
    """The service repeats it in every message."""
    script = Script(cached_tokens=1)
    chunks, _ = answered(replace(ASK, streaming=streaming), script=script)
    told = [chunk.cached_tokens for chunk in chunks]
    assert told == [1] + [None] * (len(told) - 1)


@pytest.mark.parametrize("variant", [{}, {"extra_log_prob": True}])
@pytest.mark.parametrize("streaming", [True, False])
def test_log_probs_belong_to_their_tokens(variant: dict[str, Any], streaming: bool) -> None:
    """By id, since some releases send one more than there are tokens; their sum is made here."""
    rows = [[0.1, 0.2, 0.3, 0.4] for _ in range(4)]
    request = replace(ASK, max_tokens=4, end_id=-1, input_ids=(0, 1), wants=Wants(log_probs=True))
    request = replace(request, streaming=streaming, stop_sequences=((3, 3, 3),))
    chunks, _ = answered(request, table(rows), **variant)
    values = [value for chunk in chunks for value in chunk.log_probs or ()]
    assert values == pytest.approx([np.log(0.4)] * 3)
    assert chunks[-1].cum_log_prob == pytest.approx(3 * np.log(0.4))


@pytest.mark.parametrize("streaming", [True, False])
def test_the_likeliest_ids_come_with_each_token(streaming: bool) -> None:
    """As many as asked for, also where the chosen one, which the service adds, is none of them."""
    rows = [[0.1, 0.2, 0.3, 0.4] for _ in range(4)]
    wants = Wants(log_probs=True, top_log_probs=2)
    draw = Sampling(top_p=1.0, seed=5)
    request = replace(ASK, max_tokens=8, end_id=-1, input_ids=(0, 1), wants=wants, sampling=draw)
    chunks, service = answered(replace(request, streaming=streaming), table(rows))
    best = [each for chunk in chunks for each in chunk.top_log_probs or ()]
    assert [[token for token, _ in each] for each in best] == [[3, 2]] * len(ids(chunks))
    assert [value for _, value in best[0]] == pytest.approx([np.log(0.4), np.log(0.3)])
    assert not set(ids(chunks)) <= {2, 3}
    assert service.requests[0].output_config.logprobs == 2


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.5, seed=1)])
@pytest.mark.parametrize("num_reasons", [None, 1])
def test_several_sequences_end_each(
    streaming: bool, sampling: Sampling, num_reasons: int | None
) -> None:
    """Greedy ones, which the service refuses, are one that is told several times; and where it
    says of one only why it ended, the tokens show it of the others."""
    request = replace(ASK, num_return_sequences=3, sampling=sampling, streaming=streaming)
    chunks, service = answered(request, num_reasons=num_reasons)
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk.sequence_index == index]
        assert tuple(ids(mine)) == ANSWER
        assert mine[-1].final and mine[-1].finish_reason is FinishReason.END_ID
    asked = service.requests[0].sampling_config.num_return_sequences
    assert asked == (1 if sampling.is_greedy else 3)


async def test_a_server_that_ends_early_says_why() -> None:
    """Its own limit of length, which it applies in silence."""
    script = Script(max_sequence_tokens=5)
    async with reaching(RULE, script) as (engine, _):
        chunks = await read(engine, replace(ASK, max_tokens=100, end_id=-1))
        assert tuple(ids(chunks)) == ANSWER[:3]
        assert chunks[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("told", "matched", "kept"),
    [((7, 8, EOS), None, (7, 8)), ((7, 8, 99), 99, (7, 8)), ((7, 8), 99, (7, 8))],
)
def test_an_end_of_the_servers_own_is_no_token_of_the_answer(
    told: tuple[int, ...], matched: int | None, kept: tuple[int, ...]
) -> None:
    """Whether the server has left it in its last message or not."""
    answer, chunks = ServiceAnswer(replace(ASK, end_id=50, streaming=False), "r"), []
    complete = {"output_token_ids": told, "finish_reason": "stop"}
    if matched is not None:
        complete["matched_token_id"] = matched
    message = messages.GenerateResponse(request_id="r", complete=complete)
    assert answer.read([message.SerializeToString()], chunks)
    assert (chunks[0].token_ids, chunks[0].finish_reason) == (kept, FinishReason.END_ID)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_the_played_service_keeps_to_a_guide() -> None:
    """Its answers are texts of the guide; a guide that none can be kept to ends with its status."""
    import_or_skip("llguidance")
    tokenizer = load_tokenizer(DEMO / "target")
    guided = GuidedAnswers(DEMO / "target" / "tokenizer.json", tokenizer.model_vocab_size)
    engine = EchoEngine(Script(vocab_size=tokenizer.model_vocab_size), guided=guided)
    behaviour = Behaviour(eos_id=tokenizer.eos_id or 0)

    async def scenario(kind: str, guide: str) -> str:
        client = TrtllmServiceEngine(url, eos_id=tokenizer.eos_id)
        await client.capacity()
        asked = replace(ASK, max_tokens=90, end_id=tokenizer.eos_id, guide=Guide(kind, guide))
        try:
            return tokenizer.decode(ids(await read(client, asked)), skip_special_tokens=True)
        finally:
            await client.close()

    with service_in_a_thread(engine, behaviour) as (_, url):
        answer = json.loads(run(scenario("json_schema", json.dumps(SCHEMA))))
        jsonschema.validate(answer, SCHEMA)
        assert re.fullmatch("[a-f]{4}x?", run(scenario("regex", "[a-f]{4}x?")))
        assert isinstance(json.loads(run(scenario("json", ""))), dict)
        with pytest.raises(EngineError, match="is no json_schema"):
            run(scenario("json_schema", "{"))


# --- leaving --------------------------------------------------------------------------------

# An answer that stands still is not over before somebody ends it.
SILENT = Fault(error=None, after_tokens=2)


@pytest.mark.parametrize("silent", [False, True])
async def test_leaving_aborts_first_and_does_not_wait(silent: bool) -> None:
    """Also from a server whose aborted streams never end; nothing runs on."""
    async with reaching(LONG, silent_abort=silent) as (engine, service):
        service.engine.fault = SILENT
        streams = [engine.generate(replace(ASK, max_tokens=800)) for _ in range(6)]
        for stream in streams:
            await stream.wait()
        for stream in streams:
            await stream.aclose()
        await eventually(lambda: service.live == 0)
        assert len(service.aborted) == 6


class SlowToBegin(ScriptedService):
    """Abort finds a request only some time after its call has arrived; here, after an Abort."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.arrived, self._asked = asyncio.Event(), asyncio.Event()

    async def _generate(self, message: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.arrived.set()
        await self._asked.wait()
        async for response in super()._generate(message, context):
            yield response

    async def _abort(self, message: Any, context: Any) -> Any:
        answer = await super()._abort(message, context)
        self._asked.set()
        await eventually(lambda: self.live or self.aborted)
        return answer


async def test_a_request_that_an_abort_did_not_find_is_aborted_again() -> None:
    """It has begun when its call is cancelled, and would run to its end."""
    service = SlowToBegin(ScriptedEngine(LONG), Behaviour(eos_id=EOS))
    service.engine.fault = Fault(error=None)  # one with an answer is not aborted twice
    url = f"127.0.0.1:{await service.start()}"
    engine = TrtllmServiceEngine(url, eos_id=EOS)
    await engine.capacity()
    stream = engine.generate(replace(ASK, max_tokens=800))
    await service.arrived.wait()
    await stream.aclose()
    await eventually(lambda: service.aborted)
    await eventually(lambda: service.live == 0)
    await engine.close()
    await service.stop()


class SlowToAbort(ScriptedService):
    """As on a host with more work than cores."""

    async def _abort(self, message: Any, context: Any) -> Any:
        await asyncio.sleep(3)
        return await super()._abort(message, context)


async def test_a_call_is_not_cancelled_before_a_slow_server_has_aborted_it() -> None:
    """Otherwise half of the requests would run on."""
    service = SlowToAbort(ScriptedEngine(LONG), Behaviour(eos_id=EOS))
    service.engine.fault = SILENT
    url = f"127.0.0.1:{await service.start()}"
    engine = TrtllmServiceEngine(url, eos_id=EOS)
    await engine.capacity()
    streams = [engine.generate(replace(ASK, max_tokens=800)) for _ in range(4)]
    for stream in streams:
        await stream.wait()
        await stream.aclose()
    await eventually(lambda: len(service.aborted) == 4)
    await eventually(lambda: service.live == 0)
    await engine.close()
    await service.stop()


@pytest.mark.parametrize(
    "more", [{"end_id": 14}, {"stop_sequences": ((13, 14),)}], ids=["end_id", "stop"]
)
async def test_an_end_that_the_server_does_not_know_ends_its_work(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the time that a server has to end by itself is for those that know of the end."""
    monkeypatch.setattr("trtllm_bls.engines.trtllm_service.service_engine._LINGER_SECONDS", 600)
    async with reaching(LONG) as (engine, service):
        service.engine.fault = Fault(error=None, after_tokens=9)  # after that end
        chunks = await read(engine, replace(ASK, max_tokens=800, **more))
        assert chunks[-1].final
        await eventually(lambda: service.live == 0)
        assert len(service.aborted) == 1


def test_a_request_that_ended_is_not_aborted() -> None:
    _, service = answered()
    assert service.aborted == []


class CountsAborts(ScriptedService):
    """Also those that find nothing."""

    aborts = 0

    async def _abort(self, message: Any, context: Any) -> Any:
        self.aborts += 1
        return await super()._abort(message, context)


async def test_a_request_that_the_server_ended_is_left_alone() -> None:
    """Also after the time that the server has for it: a timer of that time ends after theirs."""
    service = CountsAborts(ScriptedEngine(RULE, None), Behaviour(eos_id=EOS))
    engine = TrtllmServiceEngine(f"127.0.0.1:{await service.start()}", eos_id=EOS)
    assert (await read(engine, ASK))[-1].final
    await asyncio.sleep(_LINGER_SECONDS)
    await engine.close()  # waits for each Abort
    await service.stop()
    assert service.aborts == 0


async def test_a_request_that_an_abort_ended_is_not_aborted_again() -> None:
    """Though it had not answered."""
    script = Script(prefill_seconds=100)
    service = CountsAborts(ScriptedEngine(RULE, script), Behaviour(eos_id=EOS))
    engine = TrtllmServiceEngine(f"127.0.0.1:{await service.start()}", eos_id=EOS)
    await engine.capacity()
    stream = engine.generate(ASK)
    await eventually(lambda: service.live == 1)
    await stream.aclose()
    await engine.close()  # waits for each Abort
    await service.stop()
    assert service.aborts == 1


async def test_closing_aborts_what_runs() -> None:
    async with playing(LONG) as (service, url):
        service.engine.fault = SILENT
        engine = TrtllmServiceEngine(url)
        await engine.capacity()
        stream = engine.generate(replace(ASK, max_tokens=800))
        await stream.wait()
        await engine.close()
        await eventually(lambda: service.live == 0)
        assert len(service.aborted) == 1


async def test_a_call_that_is_cancelled_alone_leaks_half_of_the_time() -> None:
    """Of the played server, as of the real one: what aborting first is for."""
    async with playing(LONG) as (service, url):
        service.engine.fault = SILENT
        connection = GrpcChannel(url)
        packed, _ = service_request(replace(ASK, max_tokens=800), "id", EOS, EngineCapacity())
        message = messages.GenerateRequest.FromString(packed)
        for number in range(4):
            message.request_id = str(number)
            arrived = asyncio.Event()
            call = connection.open(
                messages.SERVICE + "Generate", lambda _, seen=arrived: seen.set(), print
            )
            call.send(message.SerializeToString())
            call.half_close()
            await arrived.wait()
            call.cancel()
        await eventually(lambda: service.live == 2)
        assert service.aborted == []
        await connection.close()


@pytest.mark.parametrize("resume", [False, True])
async def test_two_services_stand_in_for_each_other(resume: bool) -> None:
    """One that goes down loses no request that has no token, and with ``resume`` none at all."""
    script = Script(step_seconds=0.002)
    async with playing(LONG, script) as (one, url), playing(LONG, script) as (two, other):
        parts = [TrtllmServiceEngine(each, eos_id=EOS) for each in (url, other)]
        engine = ReplicatedEngine(parts, resume=resume)
        await engine.capacity()
        one.engine.fault = SILENT  # else its answer may be over before it goes down
        stream = engine.generate(replace(ASK, max_tokens=60))
        await stream.wait()
        first = stream.take()
        await one.stop()
        if resume:
            rest = [chunk async for chunk in stream]
            assert ids([*first, *rest]) == list(range(10, 70))
        else:
            with pytest.raises(EngineUnavailable):
                async for _ in stream:
                    pass
        await engine.capacity()
        assert len(ids(await read(engine, replace(ASK, max_tokens=60)))) == 60
        assert two.requests
        await engine.close()
