"""The program in front of Triton's HTTP port, over a Triton that is played."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from tests.helpers.waiting import run_async
from trtllm_bls.errors import Overloaded, defects
from trtllm_bls.http import generate as triton
from trtllm_bls.http.generate import TritonHttp, _Exchange
from trtllm_bls.http.limits import ClientGone
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError


class Channel:
    """One call that is answered with ``messages`` as soon as it asks."""

    def __init__(self, *messages: bytes) -> None:
        self.messages, self.ended = messages, ""

    def open(self, method: str, on_messages: Any, on_end: Any) -> Channel:
        self.on_messages = on_messages
        return self

    def send(self, message: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.on_messages, list(self.messages))

    def half_close(self) -> None:
        self.ended = "in order"

    def cancel(self) -> None:
        self.ended = "cancelled"


def test_a_response_that_cannot_be_written_is_an_error() -> None:
    """BF16 has no form in JSON. The caller must not wait for an answer that never comes."""
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.outputs.add(name="x", datatype="BF16", shape=[1])
    reply.infer_response.raw_output_contents.append(b"\0\0")
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run(stream: bool) -> None:
        channel = Channel(reply.SerializeToString())
        answering = _Exchange().run(
            cast(GrpcChannel, channel), b"", asyncio.Event().wait, send, stream, None
        )
        await asyncio.wait_for(answering, 20)
        assert channel.ended == "cancelled"

    for stream in (False, True):
        sent.clear()
        run_async(run(stream))
        assert sent[0]["status"] == 500
        body = b"".join(each.get("body", b"") for each in sent).removeprefix(b"data: ")
        assert "cannot be written as JSON" in json.loads(body)["error"]


def test_requests_that_come_at_once_ask_for_the_models_inputs_once() -> None:
    """Also where the one that asked has left; a failure is not kept."""
    asked: list[str] = []

    class Metadata(Channel):
        async def unary(self, method: str, message: bytes, timeout: float) -> bytes:
            asked.append(method)
            await asyncio.sleep(0)
            if len(asked) == 1:
                raise GrpcError("UNAVAILABLE", "loading")
            answer = service_pb2.ModelMetadataResponse(name="m")
            answer.inputs.add(name="text", datatype="BYTES", shape=[-1])
            return bytes(answer.SerializeToString())

    async def run() -> None:
        program = TritonHttp("127.0.0.1:1", "http://127.0.0.1:1")
        channel = cast(GrpcChannel, Metadata())

        def ask() -> asyncio.Task[dict[str, Any]]:
            return asyncio.create_task(program._inputs(channel, "m", ""))

        with pytest.raises(GrpcError):
            await ask()
        first, *others = [ask() for _ in range(8)]
        await asyncio.sleep(0)
        first.cancel()
        assert [list(inputs) for inputs in await asyncio.gather(*others)] == [["text"]] * 7

    run_async(run())
    assert len(asked) == 2


def test_a_caller_that_does_not_read_is_given_up() -> None:
    """What it has not read would fill the memory; the model's work is cancelled."""
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.outputs.add(name="x", datatype="BOOL", shape=[1])
    reply.infer_response.raw_output_contents.append(b"\1")
    packed = reply.SerializeToString()

    async def run() -> None:
        channel = Channel(*[packed] * 16_385)
        answering = _Exchange().run(
            cast(GrpcChannel, channel), b"", asyncio.Event().wait, ignored, False, None
        )
        with pytest.raises(ClientGone):
            await asyncio.wait_for(answering, 20)
        assert channel.ended == "cancelled"

    async def ignored(message: Any) -> None:
        pass

    run_async(run())


def test_a_version_is_asked_for_in_one_spelling() -> None:
    """Triton reads 001 as 1. What is known of a model would be kept for each spelling."""
    asked: list[str] = []

    class Metadata(Channel):
        async def unary(self, method: str, message: bytes, timeout: float) -> bytes:
            asked.append(service_pb2.ModelMetadataRequest.FromString(message).version)
            raise GrpcError("NOT_FOUND", "no such model")

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def run() -> None:
        program = TritonHttp("127.0.0.1:1", "http://127.0.0.1:1")
        program._grpc = cast(GrpcChannel, Metadata())
        path = b"/v2/models/m/versions/001/generate"
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "raw_path": path, "headers": headers}
        await program(scope, receive, send)

    run_async(run())
    assert asked == ["1"]


def test_what_triton_refuses_before_a_model_sees_it_is_no_event() -> None:
    """A stream whose request never ran is answered with a status and JSON, as by Triton itself."""
    reply = service_pb2.ModelStreamInferResponse(error_message="[request id: <id_unknown>] no x")
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        channel = Channel(reply.SerializeToString())
        await _Exchange().run(
            cast(GrpcChannel, channel), b"", asyncio.Event().wait, send, True, None
        )

    run_async(run())
    assert sent[0]["status"] == 400
    assert dict(sent[0]["headers"])[b"content-type"] == b"application/json"
    assert json.loads(sent[1]["body"])["error"].endswith("no x")


BLS = "tensorrt_llm_bls"


class Callers:
    """Clients of a program in front of ``tensorrt_llm_bls``, and the calls that reached it."""

    def __init__(self, places: int) -> None:
        self.address = "192.0.2.1"
        self.opened: list[Channel] = []
        self.refused: list[Overloaded] = []
        self._program = TritonHttp(
            "127.0.0.1:1",
            "http://127.0.0.1:1",
            places=Admission(places, 0, None),
            on_refused=self.refused.append,
        )
        self._program._grpc = cast(GrpcChannel, self)

    async def unary(self, method: str, message: bytes, timeout: float) -> bytes:
        answer = service_pb2.ModelMetadataResponse(name="m")
        answer.inputs.add(name="text_input", datatype="BYTES", shape=[-1])
        answer.inputs.add(name="stop", datatype="BOOL", shape=[1])
        return bytes(answer.SerializeToString())

    def open(self, method: str, on_messages: Any, on_end: Any) -> Channel:
        self.opened.append(Channel().open(method, on_messages, on_end))
        return self.opened[-1]

    async def ask(self, body: bytes, leaves: asyncio.Event, model: str = BLS) -> dict[str, Any]:
        """How the answer begins; the client takes 20 s to read that."""
        heads: list[dict[str, Any]] = []
        bodies = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            heads.append(message)
            await asyncio.sleep(20 if message.get("status") == 200 else 0)

        headers = [(b"content-type", b"application/json")]
        path = f"/v2/models/{model}/generate_stream".encode()
        scope = {"type": "http", "method": "POST", "raw_path": path, "headers": headers}
        await self._program({**scope, "client": (self.address, 1)}, receive, send)
        return heads[0] if heads else {}

    async def come(self, *bodies: bytes, model: str = BLS) -> list[asyncio.Event]:
        """Clients that come at once; set an event and the client leaves."""
        leaving = [asyncio.Event() for _ in bodies]
        self._asking = [
            asyncio.create_task(self.ask(body, leaves, model))
            for body, leaves in zip(bodies, leaving, strict=True)
        ]
        await turns()
        return leaving


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


ASKS = b'{"text_input": "a"}'


def test_a_request_without_a_place_is_refused_before_triton_sees_it() -> None:
    """While Triton works on those that it takes, it would be seconds until it refuses one."""

    async def run() -> None:
        callers = Callers(places=2)
        await callers.come(*[ASKS] * 4)  # nobody knows the model's inputs yet
        assert (len(callers.opened), len(callers.refused)) == (2, 2)
        head = await asyncio.wait_for(callers.ask(b"no JSON", asyncio.Event()), 5)
        assert (head["status"], dict(head["headers"])[b"retry-after"]) == (429, b"1")
        assert "(parameter max_queued_requests); try again in" in str(callers.refused[2])
        assert len(callers.opened) == 2

    run_async(run())


def test_a_place_is_free_once_the_models_work_ends() -> None:
    """Also while its caller still reads, or when it leaves. What needs no place goes on."""
    last = service_pb2.ModelStreamInferResponse()
    last.infer_response.parameters["triton_final_response"].bool_param = True
    last.infer_response.outputs.add(name="x", datatype="BOOL", shape=[1])
    last.infer_response.raw_output_contents.append(b"\1")

    async def run() -> None:
        callers = Callers(places=2)
        _, leaves = await callers.come(ASKS, ASKS)
        await callers.come(b'{"text_input": "a", "stop": true}')
        await callers.come(ASKS, model="another")
        assert len(callers.opened) == 4
        await callers.come(ASKS)
        assert len(callers.refused) == 1

        callers.opened[0].on_messages([last.SerializeToString()])
        leaves.set()
        await turns()
        assert callers.opened[1].ended == "cancelled"
        await callers.come(ASKS, ASKS, ASKS)
        assert (len(callers.opened), len(callers.refused)) == (6, 2)

    run_async(run())


def test_one_client_leaves_places_for_others() -> None:
    """It may have all while nobody else asks; then no more than half, though there is room."""

    async def run() -> None:
        callers = Callers(places=4)
        first, second, third, _ = await callers.come(*[ASKS] * 4)
        callers.address = "192.0.2.2"
        await callers.come(ASKS)
        assert (len(callers.opened), len(callers.refused)) == (4, 1)
        for leaves in (first, second):
            leaves.set()
        await turns()
        callers.address = "192.0.2.1"
        await callers.come(ASKS)
        assert (len(callers.opened), len(callers.refused)) == (4, 2)
        assert "as many of this client as may beside others" in str(callers.refused[1])
        callers.address = "192.0.2.2"
        await callers.come(ASKS, ASKS)
        assert (len(callers.opened), len(callers.refused)) == (6, 2)
        third.set()
        await turns()
        callers.address = "192.0.2.1"
        await callers.come(ASKS)
        assert len(callers.opened) == 7

    run_async(run())


JSON = (b"content-type", b"application/json")
INFER = b"/v2/models/m/infer"
BODY = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}]}'
BINARY = BODY.replace(b'"data":[1]', b'"parameters":{"binary_data_size":3}').replace(b"[1]", b"[3]")


class Triton:
    """Its HTTP port, played: it keeps what it was sent, and says ``answer`` or hangs up."""

    def __init__(self, answer: bytes = b"") -> None:
        self._answer = answer
        self.sent = b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sent = await reader.readuntil(b"\r\n\r\n")
        length = self.sent.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        self.sent += await reader.readexactly(int(length or 0))
        writer.write(self._answer)
        writer.close()

    async def ask(
        self,
        method: str,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        *parts: bytes | None,
        **options: Any,
    ) -> dict[str, Any]:
        """How the answer to a client begins, with its body; ``None`` is a client that leaves."""
        told: dict[str, Any] = {"body": b""}
        events = list(parts) or [b""]

        async def send(message: Any) -> None:
            told.update({**message, "body": told["body"] + message.get("body", b"")})

        async def receive() -> Any:
            if not events:
                return await asyncio.Event().wait()
            part = events.pop(0)
            if part is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": part, "more_body": bool(events)}

        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            program = TritonHttp("", f"http://127.0.0.1:{port}", **options)
            scope = {"type": "http", "method": method, "raw_path": path, "headers": headers}
            await asyncio.wait_for(program({**scope, "query_string": b"a=b"}, receive, send), 20)
            await program.close()
        return told


@pytest.mark.parametrize(
    ("headers", "parts", "status"),
    [
        ({b"content-length": b"%d" % len(BODY)}, [BODY], 503),  # forwarded: this Triton hangs up
        ({b"content-length": b"99"}, [], 413),
        ({b"transfer-encoding": b"chunked"}, [BODY, b" " * 40], 413),
        ({b"content-length": b"2", b"content-type": b"text/plain; x"}, [b"{}"], 415),
        ({b"content-length": b"2", b"content-type": JSON[1] + b"X"}, [b"{}"], 415),
        ({b"content-length": b"%d" % len(BODY)}, [BODY[:4], None], None),  # the caller leaves
    ],
)
def test_a_body_that_is_forwarded_has_limits(
    headers: dict[bytes, bytes],
    parts: list[bytes | None],
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told before it is read where its length says so; also of a body that Triton would ignore."""
    monkeypatch.setattr(triton, "TENSOR_BYTES", 90)
    told = run_async(Triton().ask("POST", INFER, list(headers.items()), *parts))
    assert told.get("status") == status
    if status is not None:
        assert list(json.loads(told["body"])) == ["error"]


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nserver: x\r\n\r\n{}"


@pytest.mark.parametrize("length", [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")])
def test_a_body_where_none_belongs_is_refused(length: tuple[bytes, bytes]) -> None:
    """Triton is not asked, whichever header announces the body."""
    program = Triton()
    answer = run_async(program.ask("GET", b"/v2/health/ready", [length], b"{}"))
    assert (answer["status"], program.sent) == (400, b"")
    assert "takes no body" in json.loads(answer["body"])["error"]


def test_triton_sees_nothing_that_this_program_did_not_write() -> None:
    """No query, and of the headers the trace alone; the JSON, its type and length are ours."""
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    headers = [
        (b"host", b"evil.example"),
        (b"content-type", b"Application/JSON ; charset=x"),
        (b"content-length", b"%d" % (len(BINARY) + 3)),
        (b"content-encoding", b"identity"),
        (b"accept-encoding", b"br"),
        (b"authorization", b"Bearer secret"),
        (b"cookie", b"secret"),
        (b"traceparent", trace),
        (b"inference-header-content-length", b"%d" % len(BINARY)),
        (b"triton_grpc_error", b"true"),
        (b"closed by serve", b"closed by serve"),
    ]

    async def run() -> None:
        server = Triton(ANSWER)
        told = await server.ask("POST", INFER, headers, BINARY[:9], BINARY[9:] + b"\0\1\2")
        assert (told["status"], told["body"]) == (200, b"{}")
        assert told["headers"] == [(b"content-length", b"2")]
        head, _, body = server.sent.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        assert line == b"POST /v2/models/m/infer HTTP/1.1"
        size = len(body) - 3
        assert {*map(bytes.lower, fields)} == {
            *(b"accept-encoding: identity", b"traceparent: " + trace),
            *(b"content-type: application/octet-stream", b"content-length: %d" % len(body)),
            b"inference-header-content-length: %d" % size,
            next(each.lower() for each in fields if each.lower().startswith(b"host: 127.0.0.1:")),
        }
        assert json.loads(body[:size]) == json.loads(BINARY) and body[size:] == b"\0\1\2"

    run_async(run())


def test_an_invalid_trace_is_left_out() -> None:
    """As W3C's text asks for; Triton would give its bytes to a model."""
    server = Triton(ANSWER)
    run_async(server.ask("POST", INFER, [(b"traceparent", b"\xff")], BODY))
    assert b"traceparent" not in server.sent


STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
FAILED = "Failed to process the request(s) for model instance 'm_0', message: no"
ERRORS = [
    (f"[request id: <id_unknown>] {STOPPING}", 503),
    (f"[request id: {FAILED}] {STOPPING}", 503),
    ("[request id: 1] Request for unknown model: 'm' has no available versions", 503),
    ("Request for unknown model: 'm', version 1 is not at ready state", 503),
    ("in ensemble 'ensemble', Server not ready", 503),
    ("UNAVAILABLE: the server is shutting down; ask another one", 503),
    ("UNAVAILABLE: full; try again in about 3 s [retry_after_s=3]", 429),
    ("[request id: 1] Exceeds maximum queue size", 429),
    ("[request id: 1] Request for unknown model: 'm' is not found", 404),
    (f"[request id: 1] {FAILED}", 502),
    (f"in ensemble 'ensemble', [request id: 1] {FAILED}", 502),
    ("INTERNAL: the engine failed", 502),
    ("INVALID_ARG: text_input: is missing", 400),
    (f"[request id: {STOPPING}] unexpected inference input 'x' for model 'm'", 400),
    (f"INVALID_ARG: text_input: {STOPPING!r} is not allowed", 400),
]


@pytest.mark.parametrize(("text", "status"), ERRORS)
def test_an_error_is_told_by_its_kind(text: str, status: int) -> None:
    """On a stream, which loses Triton's status, and from Triton's HTTP port; what a client writes
    into an error changes nothing."""
    reply = service_pb2.ModelStreamInferResponse(error_message=text).SerializeToString()
    for stream in (False, True):
        told: list[dict[str, Any]] = []

        async def send(message: Any, told: list[dict[str, Any]] = told) -> None:
            told.append(message)

        async def run(stream: bool = stream, send: Any = send) -> None:
            channel = cast(GrpcChannel, Channel(reply))
            await _Exchange().run(channel, b"", asyncio.Event().wait, send, stream, None)

        run_async(run())
        assert told[0]["status"] == status
        assert (b"retry-after" in dict(told[0]["headers"])) == (status in (429, 503))
    body = json.dumps({"error": text}).encode()
    size = len(body)
    answer = b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (size, body)
    head = run_async(Triton(answer).ask("POST", INFER, [JSON], BODY))
    # Triton's own port says itself what is not found.
    assert head["status"] == (400 if status == 404 else status)
    assert json.loads(head["body"])["error"] == text
    assert (b"retry-after" in dict(head["headers"])) == (status in (429, 503))


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [(503, b"", 503), (500, b'{"error":"x"}', 502), (404, b'{"error":"x"}', 404), (400, b"", 400)],
)
def test_a_status_of_tritons_port_is_one_of_ours(status: int, body: bytes, told: int) -> None:
    """500 is a defect of this package alone; a server that stops says when to try again."""
    answer = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
    head = run_async(Triton(answer).ask("POST", INFER, [JSON], BODY))
    assert head["status"] == told
    assert (b"retry-after" in dict(head["headers"])) == (told == 503)


def test_generate_without_grpc_is_forwarded() -> None:
    """Its body is no infer, and stays what it is."""

    async def run() -> None:
        server = Triton(ANSWER)
        path = b"/v2/models/m/generate"
        head = await server.ask("POST", path, [JSON], b'{"text_input": "a"}')
        assert head["status"] == 200
        assert json.loads(server.sent.partition(b"\r\n\r\n")[2]) == {"text_input": "a"}

    run_async(run())


def test_infer_is_answered_unless_it_is_closed() -> None:
    """Triton sees nothing of it then."""
    server = Triton(ANSWER)
    head = run_async(server.ask("POST", INFER, [JSON], BODY, opens_infer=False))
    assert head["status"] == 403 and server.sent == b""


def test_a_defect_is_told_as_500_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its text, which the log has."""
    monkeypatch.setattr(triton, "match_route", lambda *given: 1 / 0)
    defects.clear()
    told = run_async(Triton().ask("GET", b"/v2", []))
    assert told["status"] == 500 and b"unexpected ZeroDivisionError" in told["body"]
    assert list(defects) == ["ZeroDivisionError"] and "division by zero" in caplog.text
    defects.clear()
