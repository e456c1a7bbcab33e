"""TensorRT-LLM's gRPC service as an engine, against a server that plays it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles.scripted import Fault, Script
from doubles.scripted_tokens import reciting, table
from doubles.trtllm_service import Behaviour
from tests.helpers.fake_engine_server import Triton, run
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.scripted_services import EOS, playing, reaching
from tests.helpers.waiting import eventually
from trtllm_bls.engines.grpc_transport import Connection
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.trtllm_service import ServiceSettings, TrtllmServiceEngine, messages
from trtllm_bls.engines.trtllm_service.requests import service_request
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Unsupported,
)
from trtllm_bls.messages import (
    Draft,
    EngineChunk,
    EngineLimits,
    EngineRequest,
    FinishReason,
    Sampling,
    Wants,
)

ANSWER = (11, 12, 13, 14, 15)
RULE = reciting(ANSWER, 2, then=EOS)
ASK = EngineRequest(request_id="r", input_ids=(5, 6), max_tokens=9, end_id=EOS)
LONG = reciting(range(10, 900), 2, then=EOS)
NO_LIMITS = EngineLimits()


def sent(request: EngineRequest) -> Any:
    """The message that becomes of a request."""
    return service_request(request, "id", EOS, NO_LIMITS).message


def answered(
    request: EngineRequest = ASK, rule: Any = RULE, **behaviour: Any
) -> tuple[list[EngineChunk], Any]:
    """The chunks, and the service that sent them."""

    async def scenario() -> Any:
        async with reaching(rule, **behaviour) as (engine, service):
            return await read(engine, request), service

    return run(scenario())  # type: ignore[no-any-return]


# --- what is sent ---------------------------------------------------------------------------


def test_greedy_is_said_aloud() -> None:
    """A service request that says nothing samples; temperature alone stays greedy, as ever."""
    for sampling in (Sampling(), Sampling(temperature=1.5), Sampling(top_p=0.0), Sampling(top_k=0)):
        config = sent(replace(ASK, sampling=sampling)).sampling_config
        assert (config.top_k, config.HasField("top_p")) == (1, False)


def test_sampling_fields_keep_their_names_and_neutral_ones_stay_out() -> None:
    drawn = Sampling(top_p=0.9, top_k=0, seed=2**64 - 1, temperature=0.5, top_p_reset_id=7)
    config = sent(replace(ASK, sampling=drawn)).sampling_config
    assert not config.HasField("top_k")
    assert (config.seed, config.temperature, config.top_p_reset_ids) == (2**64 - 1, 0.5, 7)
    assert round(config.top_p, 6) == 0.9
    neutral = Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    names = {
        field.name for field, _ in sent(replace(ASK, sampling=neutral)).sampling_config.ListFields()
    }
    assert names == {"beam_width", "num_return_sequences", "top_k"}


@pytest.mark.parametrize(
    ("request_", "ignore_eos", "stop_ids", "include"),
    [
        (ASK, False, [], False),
        (replace(ASK, end_id=-1), True, [], False),
        (replace(ASK, end_id=None), True, [], False),
        (replace(ASK, end_id=13), True, [], False),
        (replace(ASK, stop_sequences=((13,),)), False, [13], True),
        (replace(ASK, stop_sequences=((13,), (14, 15))), False, [13], True),
        (replace(ASK, end_id=12, stop_sequences=((13,),)), True, [], False),
        (replace(ASK, stop_sequences=((13,),), sampling=Sampling(min_tokens=4)), False, [], False),
    ],
)
def test_ends_are_sent_as_far_as_the_service_knows_them(
    request_: EngineRequest, ignore_eos: bool, stop_ids: list[int], include: bool
) -> None:
    """Its own end id; stops of one id, which stay in the answer; the rest is watched for here."""
    message = sent(request_)
    assert message.ignore_eos is ignore_eos
    assert list(message.stop_token_ids) == stop_ids
    assert message.include_stop_token_in_output is include


def test_guides_and_adapters_are_sent() -> None:
    def guided(**extras: Any) -> Any:
        given = {name: np.array([value]) for name, value in extras.items()}
        return sent(replace(ASK, extras=given))

    schema = guided(guided_decoding_guide_type=b"json_schema", guided_decoding_guide=b"{}")
    assert (schema.guided_decoding.guide_type, schema.guided_decoding.guide) == (2, "{}")
    plain = guided(guided_decoding_guide_type=b"json").guided_decoding
    assert plain.guide_type == 1 and plain.guide  # an empty guide would be ignored
    assert guided(lora_task_id=7).lora_config.task_id == 7
    assert not guided(lora_task_id=0).HasField("lora_config")
    with pytest.raises(InvalidRequest, match="guided_decoding_guide_type: 'xml' is unknown"):
        guided(guided_decoding_guide_type=b"xml", guided_decoding_guide=b"<a>")
    with pytest.raises(InvalidRequest, match="guided_decoding_guide: is missing"):
        guided(guided_decoding_guide_type=b"regex")


def test_the_callers_trace_goes_along() -> None:
    """As metadata of the call, where tracers of gRPC look: the messages have no field for it."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    _, service = answered(replace(ASK, traceparent=trace))
    assert service.traces == [trace]
    _, service = answered()
    assert service.traces == [None]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("draft_input_ids", {"draft": Draft(token_ids=(1,))}),
        ("embedding_bias", {"embedding_bias": ((1, 2.0),)}),
        ("return_context_logits", {"wants": Wants(context_logits=True)}),
        ("return_generation_logits", {"wants": Wants(generation_logits=True)}),
        ("return_perf_metrics", {"wants": Wants(perf_metrics=True)}),
        ("bad_words_list", {"bad_sequences": ((1, 2),)}),
        ("beam_width", {"sampling": Sampling(beam_width=2)}),
        ("min_tokens", {"end_id": 13, "sampling": Sampling(min_tokens=3)}),
        ("lora_weights", {"extras": {"lora_weights": np.zeros((1, 1))}}),
        ("cache_salt", {"extras": {"cache_salt": np.zeros(1)}}),
    ],
)
def test_what_the_service_cannot_honour_is_refused_by_name(
    field: str, more: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported, match=f"^{field}: "):
        sent(replace(ASK, **more))


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
    if not streaming:
        assert len(chunks) == 1


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


def test_a_server_that_ends_early_says_why() -> None:
    """Its own limit of length, which it applies in silence."""

    async def scenario() -> None:
        script = Script(max_sequence_tokens=5)
        async with reaching(RULE, script) as (engine, _):
            chunks = await read(engine, replace(ASK, max_tokens=100, end_id=-1))
            assert tuple(ids(chunks)) == ANSWER[:3]
            assert chunks[-1].finish_reason is FinishReason.LENGTH

    run(scenario())


# --- leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True])
def test_leaving_aborts_first_and_does_not_wait(silent: bool) -> None:
    """Also from a server whose aborted streams never end; nothing runs on."""

    async def scenario() -> None:
        script = Script(step_seconds=0.002)
        async with reaching(LONG, script, silent_abort=silent) as (engine, service):
            streams = [engine.generate(replace(ASK, max_tokens=800)) for _ in range(6)]
            for stream in streams:
                await stream.wait()
            for stream in streams:
                await stream.aclose()
            await eventually(lambda: service.live == 0)
            assert len(service.aborted) == 6

    run(scenario())


@pytest.mark.parametrize(
    "more", [{"end_id": 14}, {"stop_sequences": ((13, 14),)}], ids=["end_id", "stop"]
)
def test_an_end_that_the_server_does_not_know_ends_its_work(more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with reaching(LONG, Script(step_seconds=0.002)) as (engine, service):
            chunks = await read(engine, replace(ASK, max_tokens=800, **more))
            assert chunks[-1].final
            await eventually(lambda: service.live == 0)
            assert len(service.aborted) == 1

    run(scenario())


def test_a_request_that_ended_is_not_aborted() -> None:
    _, service = answered()
    assert service.aborted == []


def test_closing_aborts_what_runs() -> None:
    async def scenario() -> None:
        async with playing(LONG, Script(step_seconds=0.002)) as (service, url):
            engine = TrtllmServiceEngine(url)
            await engine.limits()
            stream = engine.generate(replace(ASK, max_tokens=800))
            await stream.wait()
            await engine.close()
            await eventually(lambda: service.live == 0)
            assert len(service.aborted) == 1

    run(scenario())


def test_a_call_that_is_cancelled_alone_leaks_half_of_the_time() -> None:
    """Of the played server, as of the real one: what aborting first is for."""

    async def scenario() -> None:
        async with playing(LONG, Script(step_seconds=0.002)) as (service, url):
            connection = Connection(url)
            asked = service_request(replace(ASK, max_tokens=800), "id", EOS, NO_LIMITS)
            for number in range(4):
                asked.message.request_id = str(number)
                arrived = asyncio.Event()
                call = connection.open(
                    messages.SERVICE + "Generate", lambda _, seen=arrived: seen.set(), print
                )
                call.send(asked.message.SerializeToString())
                call.half_close()
                await arrived.wait()
                call.cancel()
            await eventually(lambda: service.live == 2)
            assert service.aborted == []
            await connection.close()

    run(scenario())


@pytest.mark.parametrize("resume", [False, True])
def test_two_services_stand_in_for_each_other(resume: bool) -> None:
    """One that goes down loses no request that has no token, and with ``resume`` none at all."""

    async def scenario() -> None:
        script = Script(step_seconds=0.002)
        async with playing(LONG, script) as (one, url), playing(LONG, script) as (two, other):
            settings = ServiceSettings(eos_id=EOS)
            parts = [TrtllmServiceEngine(each, settings) for each in (url, other)]
            engine = ReplicatedEngine(parts, resume=resume)
            await engine.limits()
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
            await engine.limits()
            assert len(ids(await read(engine, replace(ASK, max_tokens=60)))) == 60
            assert two.requests
            await engine.close()

    run(scenario())


# --- errors ---------------------------------------------------------------------------------


def test_an_error_before_the_first_token_and_one_after() -> None:
    async def scenario() -> None:
        async with reaching(RULE) as (engine, service):
            for after in (0, 3):
                service.engine.fault = Fault(
                    error=EngineError("it broke\nhere"), after_tokens=after
                )
                chunks: list[EngineChunk] = []
                with pytest.raises(EngineError, match=r"^it broke$"):
                    async for chunk in engine.generate(ASK):
                        chunks.append(chunk)
                assert tuple(ids(chunks)) == ANSWER[:after]
            service.engine.fault = None
            assert tuple(ids(await read(engine, ASK))) == ANSWER

    run(scenario())


def test_a_prompt_that_is_too_long_is_the_callers_mistake() -> None:
    """The service tells it as an internal error, by its text."""
    request = replace(ASK, input_ids=tuple(range(40)))
    with pytest.raises(InvalidRequest, match=r"^input_ids: .*maximum context length is 32 tokens"):
        answered(request, max_seq_len=32, settings={"max_sequence_tokens": 100})
    with pytest.raises(InvalidRequest, match=r"^input_ids: 40 tokens; at most 31"):
        answered(request, max_seq_len=32)


def test_a_stream_without_its_end_is_an_error() -> None:
    """Unless the tokens themselves show that it had ended."""
    with pytest.raises(EngineError, match="without a last message"):
        answered(replace(ASK, streaming=False), breaks_off=True)
    chunks, _ = answered(replace(ASK, max_tokens=3), breaks_off=True)
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_a_server_that_is_down_is_unavailable_and_comes_back() -> None:
    async def scenario() -> None:
        async with playing(RULE) as (_, url):
            port = int(url.rpartition(":")[2])
            engine = TrtllmServiceEngine(url, ServiceSettings(eos_id=EOS))
            assert tuple(ids(await read_again(engine))) == ANSWER
        with pytest.raises(EngineUnavailable):
            await read(engine, ASK)
        with pytest.raises(EngineUnavailable):
            await engine.limits()
        async with playing(RULE, port=port):
            assert tuple(ids(await read_again(engine))) == ANSWER
            await engine.close()

    async def read_again(engine: Any) -> list[EngineChunk]:
        await engine.limits()
        return await read(engine, ASK)

    run(scenario())


def test_a_server_that_is_not_healthy_is_not_ready() -> None:
    """By its own account; what it says of it is told."""
    with pytest.raises(EngineUnavailable, match="not healthy: RuntimeError: out of memory"):
        answered(health="RuntimeError: out of memory\nTraceback")


def test_another_grpc_server_is_named_as_such() -> None:
    async def scenario() -> None:
        async with Triton() as triton:
            engine = TrtllmServiceEngine(triton.url)
            with pytest.raises(EngineUnavailable, match="another gRPC service answers there"):
                await engine.limits()
            await engine.close()

    run(scenario())


@pytest.mark.parametrize("health", ["RuntimeError: dead", "OK"])
def test_silence_is_asked_about(health: str) -> None:
    """A server that is not healthy any more has its requests ended; one that is may be slow."""

    async def scenario() -> None:
        settings = {"stall_seconds": 0.05}
        async with reaching(RULE, settings=settings) as (engine, service):
            service.engine.fault = Fault(error=None, after_tokens=2)
            stream: Awaitable[Any] = read(engine, ASK)
            task = asyncio.ensure_future(stream)
            await eventually(lambda: service.live == 1)
            service.behaviour = Behaviour(eos_id=EOS, health=health)
            if health == "OK":
                await eventually(lambda: service.health_checks > 3)
                assert not task.done()
                task.cancel()
                await asyncio.wait({task})
            else:
                with pytest.raises(EngineStalled, match="dead"):
                    await task
            await eventually(lambda: service.live == 0)

    run(scenario())


def test_a_service_that_falls_ill_is_refused_without_a_request_to_it() -> None:
    """It is asked for its health all the time; what runs there goes on."""

    async def refused(engine: Any) -> bool:
        try:
            await engine.limits()
        except EngineUnavailable as error:
            return "it is not healthy: NOT_OK" in str(error)
        return False

    async def scenario() -> None:
        async with reaching(RULE) as (engine, service):
            service.engine.fault = Fault(error=None, after_tokens=2)
            running = engine.generate(ASK)
            await running.wait()
            service.behaviour = replace(service.behaviour, health="NOT_OK")
            await eventually(lambda: refused(engine))
            assert service.live == 1
            service.behaviour = replace(service.behaviour, health="OK")
            assert not await refused(engine)
            await running.aclose()

    run(scenario())


# --- what the server tells of itself ----------------------------------------------------------


@pytest.mark.parametrize(
    ("max_seq_len", "settings", "longest"),
    [
        (0, {}, None),  # 1024 twice, which nothing enforces
        (4096, {}, 4096),
        (4096, {"max_sequence_tokens": 2000}, 2000),
        (0, {"max_sequence_tokens": 2000}, 2000),
    ],
)
def test_limits_come_from_the_settings_or_the_server(
    max_seq_len: int, settings: dict[str, Any], longest: int | None
) -> None:
    async def scenario() -> None:
        async with reaching(RULE, settings=settings, max_seq_len=max_seq_len) as (engine, _):
            limits = await engine.limits()
            assert limits.max_sequence_tokens == longest
            assert limits.max_draft_tokens == 0

    run(scenario())


@pytest.mark.parametrize(
    ("version", "warned"),
    [("1.3.0rc29", False), ("1.3.0", False), ("1.3.0rc4", True), ("1.2.0", True), ("", True)],
)
def test_an_old_server_is_warned_about(
    version: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answered(version=version)
    assert ("in silence" in caplog.text) is warned


def test_the_proto_has_the_fields_that_are_used() -> None:
    """A field that is present is told from one that is not, and lists are packed."""
    message = messages.GenerateRequest()
    assert not message.sampling_config.HasField("top_k")
    message.sampling_config.top_k = 0
    assert message.sampling_config.HasField("top_k")
    message.tokenized.input_token_ids.extend([1, 2, 3])
    assert message.tokenized.SerializeToString() == b"\x12\x03\x01\x02\x03"
    complete = messages.GenerateResponse()
    complete.complete.matched_token_id = 0
    assert complete.WhichOneof("response") == "complete"
    assert complete.complete.WhichOneof("matched_stop") == "matched_token_id"
