"""What ends a stream of responses, what may wait for its reader, and what leaving does: the same
for every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from trtllm_bls.engines.base import RunningCalls
from trtllm_bls.engines.chat_model import _Events
from trtllm_bls.engines.triton_model import DeployedModel, GrpcChunks
from trtllm_bls.engines.trtllm_service.service_engine import ServiceChunks
from trtllm_bls.errors import EngineError, InvalidRequest, Overloaded, TrtllmBlsError
from trtllm_bls.http.generate import _Exchange
from trtllm_bls.http.limits import Refused
from trtllm_bls.pipeline.other_models import ModelStream
from trtllm_bls.settings.model_config import CHAT_EVENTS
from trtllm_bls.types import EngineRequest
from trtllm_bls.wire.grpc_client import (
    MOST_WAITING,
    MOST_WAITING_BYTES,
    GrpcError,
    ResponseStream,
    StreamEnd,
)


class Call:
    """Stands in for ``GrpcCall``: notes what its reader does with it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.on_messages: Any = None
        self.on_end: Any = None
        self.replies, self.half_closed = 0, False

    def send(self, message: bytes) -> None:
        self.id = service_pb2.ModelInferRequest.FromString(message).id

    def half_close(self) -> None:
        self.done.append("closed")

    def cancel(self) -> None:
        self.done.append("cancelled")

    def hold(self) -> None:
        self.done.append("held")

    def release(self) -> None:
        self.done.append("released")


class Channel:
    """A connection, and the pool of an engine, with one call."""

    def __init__(self) -> None:
        self.call = Call()

    def open(self, method: str, on_messages: Any, on_end: Any, traceparent: Any = None) -> Call:
        self.call.on_messages, self.call.on_end = on_messages, on_end
        return self.call

    def take(self) -> Call:
        return self.call

    def release(self, call: Any, end: StreamEnd) -> None:
        if end is StreamEnd.LAST:
            call.half_close()
        elif not call.half_closed:
            call.cancel()

    def end(self, call: Call) -> None:
        call.half_close()
        call.half_closed = True


class Engine:
    """As much of ``GrpcEngine`` as a request needs."""

    name, vocab_size = "tensorrt_llm", 100

    def __init__(self, channel: Channel) -> None:
        self.pool = channel
        self.doubts = 0
        self.calls = RunningCalls(self.name, 0, self.probe, self.doubt)

    async def probe(self) -> None:
        raise AssertionError("nobody looks for a stall")

    def doubt(self) -> None:
        self.doubts += 1

    def failure(self, error: GrpcError) -> EngineError:
        return EngineError(str(error))


INPUTS = ("input_ids", "input_lengths", "request_output_len", "streaming")
OUTPUTS = frozenset(("output_ids", "sequence_length"))


def engine_stream(channel: Channel) -> ResponseStream[Any]:
    model = DeployedModel(dict.fromkeys(INPUTS, "INT32"), OUTPUTS, {}, decoupled=True)
    request = EngineRequest(request_id="a", input_ids=(1,), max_tokens=10**6, streaming=True)
    return GrpcChunks(Engine(channel), request, model)  # type: ignore[arg-type]


def model_stream(channel: Channel) -> ResponseStream[Any]:
    return ModelStream("other", channel, b"")  # type: ignore[arg-type]


def http_stream(channel: Channel) -> ResponseStream[Any]:
    exchange = _Exchange()
    call: Any = channel.open("", exchange.on_messages, exchange.on_end)
    exchange._call = call
    call.send(b"")
    return exchange


def chat_stream(channel: Channel) -> ResponseStream[Any]:
    return _Events("other", channel, b"")  # type: ignore[arg-type]


READERS: list[Callable[[Channel], ResponseStream[Any]]] = [
    engine_stream,
    model_stream,
    http_stream,
    chat_stream,
]
readers = pytest.mark.parametrize(
    "reader", READERS, ids=["engine", "other model", "port 8000", "chat"]
)


def response(channel: Channel, *, final: bool = False, padding: int = 0, error: str = "") -> bytes:
    """One response of one token; ``padding``: bytes of another output."""
    reply = service_pb2.ModelStreamInferResponse(error_message=error)
    if error:
        return bytes(reply.SerializeToString())
    message = reply.infer_response
    message.id = channel.call.id
    message.parameters["triton_final_response"].bool_param = final
    message.outputs.add(name=CHAT_EVENTS, datatype="BYTES", shape=[1])
    packed = serialize_byte_tensor(np.array([b"[]"], np.object_)).item()
    message.raw_output_contents.append(packed)
    for name, shape in (("output_ids", [1, 1, 1]), ("sequence_length", [1, 1])):
        message.outputs.add(name=name, datatype="INT32", shape=shape)
        message.raw_output_contents.append(b"\1\0\0\0")
    if padding:
        message.outputs.add(name="padding", datatype="UINT8", shape=[padding])
        message.raw_output_contents.append(bytes(padding))
    return bytes(reply.SerializeToString())


@readers
async def test_the_last_response_is_noticed_as_it_arrives(reader: Any) -> None:
    """Its call is closed in order, whatever a reader that lags behind does afterwards."""
    channel = Channel()
    stream = reader(channel)
    channel.call.on_messages([response(channel), response(channel, final=True)])
    assert channel.call.done == ["closed"]
    await stream.aclose()
    assert channel.call.done == ["closed"]


@readers
async def test_a_reader_that_leaves_before_the_last_response_cancels(reader: Any) -> None:
    """Once, however often it leaves; what arrives then is dropped."""
    channel = Channel()
    stream = reader(channel)
    on_messages, late = channel.call.on_messages, response(channel, final=True)
    for _ in range(2):
        await stream.aclose()
    on_messages([late])
    assert channel.call.done == ["cancelled"]
    assert not stream.take()


@readers
async def test_a_reader_that_is_bytes_behind_holds_the_server_back(reader: Any) -> None:
    """The server may send again as soon as the reader has taken what waits; nothing is lost."""
    channel = Channel()
    stream = reader(channel)
    padding, sent = 2**20, 0
    while not channel.call.done:
        channel.call.on_messages([response(channel, padding=padding)])
        sent += 1
        assert sent * padding <= MOST_WAITING_BYTES + 2 * padding
    assert channel.call.done == ["held"]
    await stream.wait()
    assert len(stream.take()) == sent
    assert channel.call.done == ["held", "released"]
    channel.call.on_messages([response(channel, final=True)])
    await stream.wait()
    assert len(stream.take()) >= 1
    assert channel.call.done == ["held", "released", "closed"]


@readers
async def test_a_reader_that_is_too_many_responses_behind_is_given_up(reader: Any) -> None:
    """What waited is dropped, the work ends, and the reader is told."""
    channel = Channel()
    stream = reader(channel)
    on_messages, message = channel.call.on_messages, response(channel)
    for _ in range(MOST_WAITING + 1):
        on_messages([message])
    assert channel.call.done == ["cancelled"]
    with pytest.raises(Overloaded, match=f"more than {MOST_WAITING} responses behind"):
        await stream.wait()


@readers
@pytest.mark.parametrize("damage", [b"\xff\xff", b"\x12\x03\x2a\x01\x61"])
async def test_a_response_that_cannot_be_read_ends_the_stream(reader: Any, damage: bytes) -> None:
    """What came before it is still taken."""
    channel = Channel()
    stream = reader(channel)
    channel.call.on_messages([response(channel), damage])
    assert channel.call.done == ["cancelled"]
    await stream.wait()
    assert len(stream.take()) == 1
    with pytest.raises((EngineError, Refused), match=r"read|id|written as JSON"):
        await stream.wait()
    await stream.wait()
    assert not stream.take()


@readers
async def test_an_error_in_place_of_a_response_ends_the_stream(reader: Any) -> None:
    """In the words of the model."""
    channel = Channel()
    stream = reader(channel)
    channel.call.on_messages([response(channel), response(channel, error="out of memory")])
    await stream.wait()
    assert len(stream.take()) == 1
    with pytest.raises((EngineError, Refused), match="out of memory"):
        await stream.wait()


@readers
@pytest.mark.parametrize("error", [None, GrpcError("UNAVAILABLE", "connection lost")])
async def test_a_call_that_ends_without_a_last_response_fails(
    reader: Any, error: GrpcError | None
) -> None:
    """With status OK, too: a text that stops short must not look complete."""
    channel = Channel()
    stream = reader(channel)
    channel.call.on_messages([response(channel)])
    channel.call.on_end(error)
    await stream.wait()
    assert len(stream.take()) == 1
    with pytest.raises((TrtllmBlsError, Refused)):
        await stream.wait()


def service_stream(channel: Channel) -> ResponseStream[Any]:
    engine = Mock(calls=Engine(channel).calls, channel=channel)
    request = EngineRequest(request_id="a", input_ids=(1,), max_tokens=10, streaming=True)
    return ServiceChunks(engine, request, "a", b"", ends_known=True)


@pytest.mark.parametrize("reader", [engine_stream, service_stream])
async def test_what_arrives_from_an_engine_ends_its_silence(reader: Any) -> None:
    """Else a busy engine would be asked, and its requests ended, as if it had stalled."""
    channel = Channel()
    stream = reader(channel)
    stream._calls.silent_looks = 4
    channel.call.on_messages([])
    assert stream._calls.silent_looks == 0


async def test_a_callers_mistake_does_not_doubt_the_engine() -> None:
    """Only a failure has the next request ask what the engine can do."""
    for error, doubts in ((InvalidRequest("end_id", "no"), 0), (EngineError("gone"), 1)):
        channel, engine = Channel(), Engine(Channel())
        model = DeployedModel(dict.fromkeys(INPUTS, "INT32"), OUTPUTS, {}, decoupled=True)
        request = EngineRequest(request_id="a", input_ids=(1,), max_tokens=9, streaming=True)
        stream: Any = GrpcChunks(engine, request, model)  # type: ignore[arg-type]
        stream.fail(error)
        assert engine.doubts == doubts
        assert channel.call.done == []
