"""The gRPC engine against a Triton of our own in this process, at the wire."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.helpers.fake_engine_server import (
    ASK,
    HANG_UP,
    HOLD,
    LINGER,
    Fail,
    Say,
    inputs,
    reaching,
    read,
    run,
)
from tests.helpers.fake_grpc_server import FakeGrpcServer, Hold, text
from tests.helpers.waiting import eventually
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    TrtllmBlsError,
    Unsupported,
)
from trtllm_bls.pipeline.other_models import ModelStream
from trtllm_bls.triton.tensors import ChunkWriter
from trtllm_bls.types import EngineChunk, EngineMetrics, Guide, Wants
from trtllm_bls.wire.contract import ENGINE
from trtllm_bls.wire.grpc_client import GrpcChannel
from trtllm_bls.wire.kserve import packed_infer_message

# --- chunks ---------------------------------------------------------------------------------


async def test_chunks_come_as_they_are_said_and_the_request_is_whole() -> None:
    """Tokens, an empty end, the id, and only outputs that somebody reads."""
    async with reaching(Say((3,)), Say((4, 5)), Say(final=True)) as (engine, triton):
        chunks = await read(engine)
        assert [(c.token_ids, c.final) for c in chunks] == [
            ((3,), False),
            ((4, 5), False),
            ((), True),
        ]
        (message,) = triton.asked
        number, _, name = message.id.partition("/")
        assert (int(number) < 2**63, name, message.model_name) == (True, "mine", "tensorrt_llm")
        outputs = ["output_ids", "sequence_length", "cached_tokens"]
        assert [o.name for o in message.outputs] == outputs
        assert inputs(message)["input_ids"] == [[7, 8]]
        assert inputs(message)["streaming"] == [[True]]
        assert message.parameters["triton_enable_empty_final_response"].bool_param


async def test_a_trace_context_goes_along() -> None:
    """As a parameter: calls are kept for several requests, so their metadata is not a request's."""
    async with reaching(Say((3,), final=True)) as (engine, triton):
        await read(engine, replace(ASK, traceparent="00-a-b-01"))
        await read(engine)
        traced, plain = triton.asked
        assert traced.parameters["traceparent"].string_param == "00-a-b-01"
        assert "traceparent" not in plain.parameters


async def test_an_end_without_outputs_is_an_end() -> None:
    """A separate empty final response, as some engines send it."""
    async with reaching(Say((3,)), Say(final=True, empty=True)) as (engine, _):
        assert [(c.token_ids, c.final) for c in await read(engine)] == [
            ((3,), False),
            ((), True),
        ]


async def test_what_was_asked_for_comes_along() -> None:
    """Scores, metrics and several sequences, by the outputs of the contract."""
    request = replace(ASK, wants=Wants(log_probs=True, generation_logits=True, perf_metrics=True))
    said = EngineChunk(
        token_ids=(3,),
        final=True,
        log_probs=(-0.5,),
        cum_log_prob=-0.5,
        generation_logits=np.ones((1, 4)),
        metrics=EngineMetrics(arrival_time_ns=5),
    )
    more = ChunkWriter(request, True, None).arrays(said)
    async with reaching(Say((3,), final=True, more=more)) as (engine, triton):
        (chunk,) = await read(engine, request)
        assert (chunk.log_probs, chunk.cum_log_prob) == ((-0.5,), -0.5)
        assert chunk.generation_logits is not None
        assert chunk.generation_logits.tolist() == [[1, 1, 1, 1]]
        assert chunk.metrics is not None and chunk.metrics.arrival_time_ns == 5
        names = {output.name for output in triton.asked[0].outputs}
        assert {"output_log_probs", "generation_logits", "arrival_time_ns"} <= names
        assert not names & {"context_logits", "sequence_index", "num_input_tokens"}


async def test_every_sequence_ends_with_the_request() -> None:
    """The wire marks the last response of all, not of each."""
    first, second = ({"sequence_index": np.array([[i]], np.int32)} for i in (0, 1))
    steps = Say((3,), more=first), Say((4,), more=second), Say((5,), more=first, final=True)
    async with reaching(*steps) as (engine, _):
        chunks = await read(engine, replace(ASK, num_return_sequences=2))
        assert [c.sequence_index for c in chunks if c.final] == [0, 1]
        assert [c.token_ids for c in chunks if c.sequence_index == 1] == [(4,), ()]


async def test_the_text_of_a_guide_is_sent_as_bytes() -> None:
    """The one type whose packing is not numpy's own."""
    guide = Guide("regex", "[ä-ü]")
    async with reaching(Say((3,), final=True)) as (engine, triton):
        await read(engine, replace(ASK, guide=guide))
        assert inputs(triton.asked[0])["guided_decoding_guide"] == "[ä-ü]"
        assert inputs(triton.asked[0])["guided_decoding_guide_type"] == "regex"
        shapes = [list(t.shape) for t in triton.asked[0].inputs if t.datatype == "BYTES"]
        assert shapes == [[1, 1]] * 2


async def test_many_streams_share_one_channel() -> None:
    """And each gets its own answer to the end."""
    async with reaching(Say((3,)), LINGER, Say((4,), final=True)) as (engine, triton):
        answers = await asyncio.gather(*(read(engine) for _ in range(50)))
        assert {tuple(c.token_ids for c in chunks) for chunks in answers} == {((3,), (4,))}
        assert triton.config_asked <= 50 and len(triton.asked) == 50


# --- failing --------------------------------------------------------------------------------


def failing(*steps: Any, **more: Any) -> TrtllmBlsError:
    """The error of a request to which the engine answers with ``steps``."""

    async def scenario() -> TrtllmBlsError:
        async with reaching(*steps, **more) as (engine, _):
            with pytest.raises(TrtllmBlsError) as caught:
                await read(engine)
            return caught.value

    error = run(scenario())
    assert isinstance(error, TrtllmBlsError)
    return error


@pytest.mark.parametrize("said", [(), (Say((3,)),)])
@pytest.mark.parametrize("then", [(), (Say(final=True, empty=True),)])
def test_an_error_in_the_stream_is_the_engines(said: Any, then: Any) -> None:
    """First or after tokens, and whether or not an empty end follows."""
    error = failing(*said, Fail("out of blocks\n1 0x7f /opt/lib.so"), *then)
    assert type(error) is EngineError
    assert str(error) == "out of blocks"


def test_a_refusal_of_our_own_engine_comes_back_as_what_it_was() -> None:
    """The field is named again."""
    error = failing(Fail("INVALID_ARG: top_p: 2 is too much"))
    assert isinstance(error, InvalidRequest) and error.field == "top_p"


async def test_a_failed_request_fails_no_other_that_is_about_to_start() -> None:
    """The model is asked again for what it declares, but only by requests that come later."""
    async with reaching(Fail("out of blocks")) as (engine, triton):
        await engine.capacity()
        with pytest.raises(EngineError, match="out of blocks"):
            await engine.generate(ASK).wait()
        triton.steps = (Say((3,), final=True),)
        chunks = engine.generate(ASK)  # it had asked for the limits before that failure
        await chunks.wait()
        assert [chunk.token_ids for chunk in chunks.take()] == [(3,)]
        assert triton.config_asked == 1
        await engine.capacity()
        assert triton.config_asked == 2


def test_an_end_without_a_final_response_is_an_error() -> None:
    """A text cut off must not look whole."""
    assert "without a last response" in str(failing(Say((3,)), HANG_UP))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, EngineUnavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, EngineError),
    ],
)
def test_a_broken_call_is_told_by_its_status(code: grpc.StatusCode, kind: type) -> None:
    """Only what another try may mend is unavailable."""
    error = failing(Say((3,)), code)
    assert type(error) is kind and "the wire says so" in str(error)


async def test_silence_is_no_stall_while_the_server_answers() -> None:
    """A queued request, or a long answer in one piece, sends nothing until it ends."""
    go_on = asyncio.Event()
    async with reaching(Say((3,)), go_on, Say((4,), final=True), stall=0.02) as (
        engine,
        triton,
    ):
        reading = asyncio.create_task(read(engine))
        await eventually(lambda: triton.live_asked >= 3)
        go_on.set()
        assert [chunk.token_ids for chunk in await reading] == [(3,), (4,)]


async def test_a_server_that_does_not_answer_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests fail, and their calls end."""
    monkeypatch.setattr("trtllm_bls.engines.triton_model._LIVE_PROBE_SECONDS", 0.05)
    async with reaching(Say((3,)), HOLD, stall=0.02) as (engine, triton):
        triton.frozen = True
        with pytest.raises(EngineStalled, match="does not answer"):
            await read(engine)
        await triton.cancelled.wait()


async def test_a_model_that_is_not_decoupled_answers_in_one_piece() -> None:
    """A streaming request is sent as one that is not; several sequences have no room."""
    config = model_config(ENGINE, {"decoupled": "false"})
    async with reaching(Say((3, 4), final=True), config=config) as (engine, triton):
        assert [(c.token_ids, c.final) for c in await read(engine)] == [((3, 4), True)]
        assert "streaming" not in {tensor.name for tensor in triton.asked[0].inputs}
        with pytest.raises(Unsupported, match="num_return_sequences"):
            await read(engine, replace(ASK, num_return_sequences=2))


# --- calls to other models ------------------------------------------------------------------


async def test_the_call_to_another_model_is_ended_in_order_after_its_last_response() -> None:
    """A cancel then would leak the request in Triton 24.10; a call left open would outlive it."""
    async with FakeGrpcServer([text("a"), text("b", final=True)]) as server:
        channel = GrpcChannel(server.url)
        stream = ModelStream("m", channel, packed_infer_message("m", "r", ()))
        said = [part["text_output"].item() async for part in stream]
        assert said == [b"a", b"b"]
        await eventually(lambda: server.closed, 10)
        await stream.aclose()
        await channel.close()
        assert server.cancels == 0


async def test_who_reads_another_models_answer_is_told_that_it_was_ended() -> None:
    async with FakeGrpcServer([text("a"), Hold()]) as server:
        channel = GrpcChannel(server.url)
        stream = ModelStream("m", channel, packed_infer_message("m", "r", ()))
        assert (await anext(stream))["text_output"].item() == b"a"
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(EngineUnavailable, match=r"^m: its request has ended"):
            await asyncio.wait_for(reading, 10)
        await asyncio.wait_for(server.cancelled.wait(), 10)
        await channel.close()
