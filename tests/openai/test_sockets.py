"""``/v1/responses`` over a WebSocket, by the ``websockets`` package's client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from doubles.scripted import Script
from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import ScriptedBackend, serving
from tests.helpers.packages import import_or_skip
from tests.helpers.scripted_text import tokenizer_with_tools
from tests.helpers.waiting import eventually, join, run_async, until
from tests.openai.test_agents import Speaking, events
from trtllm_bls.openai import sockets

client = import_or_skip("websockets.sync.client")
exceptions = import_or_skip("websockets.exceptions")
wsproto = import_or_skip("wsproto.events")
frames = import_or_skip("trtllm_bls.openai.frames")
pytestmark = pytest.mark.skipif(
    sockets.socket_protocol() == "none",
    reason="uvicorn limits no message of a WebSocket: `pip install wsproto` runs it",
)

CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
Speak = Callable[..., Speaking]


@pytest.fixture
def speak() -> Iterator[Speak]:
    with ExitStack() as stack:

        def start(text: str = "Done.", script: Script | None = None, **settings: Any) -> Speaking:
            engine = SpeakingEngine(tokenizer_with_tools(), lambda prompt: text, script)
            backend = ScriptedBackend(engine, tokenizer_with_tools())
            api = stack.enter_context(serving(engine, backend, tool_parser="hermes", **settings))
            return Speaking(api, engine)

        yield start


def dial(model: Speaking, path: str = "/v1/responses", **options: Any) -> Any:
    return client.connect(f"ws://{model.api.host}:{model.api.port}{path}", **options)


def create(socket: Any, **body: Any) -> list[dict[str, Any]]:
    """All events of one response."""
    socket.send(json.dumps({"type": "response.create", "input": "Hi", "store": False, **body}))
    return rest(socket)


def rest(socket: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    ends = ("error", "response.completed", "response.failed", "response.incomplete")
    while not found or found[-1]["type"] not in ends:
        found.append(json.loads(socket.recv(timeout=60)))
    return found


def test_a_message_is_answered_by_the_events_of_the_stream(speak: Speak) -> None:
    model = speak("I look." + CALL)
    _, told = model.post("/v1/responses", {"input": "Hi", "tools": [LOOK], "stream": True})
    with dial(model) as socket:
        found = create(socket, tools=[LOOK])
    assert [event["type"] for event in found] == [event["type"] for event in events(told)]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "I look."
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_a_connection_goes_on_from_its_last_response(speak: Speak) -> None:
    """Although it is stored nowhere, so no other connection does."""
    model = speak("I look." + CALL)
    with dial(model) as socket:
        first = create(socket, input="Where?", tools=[LOOK])[-1]["response"]
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
        second = create(socket, input=[result], tools=[LOOK], previous_response_id=first["id"])
        create(socket, input="And now?", previous_response_id=second[-1]["response"]["id"])
        last = create(socket, input="Again.")[-1]["response"]
        prompt = model.engine.prompts[-2]
        places = [prompt.index(text) for text in ("Where?", "I look.", "found", "And now?")]
        assert places == sorted(places)
    with dial(model) as socket:
        (lost,) = create(socket, previous_response_id=last["id"])
        assert (lost["status"], lost["error"]["code"]) == (400, "previous_response_not_found")
        assert create(socket)[-1]["type"] == "response.completed"


def test_a_response_that_failed_ends_what_it_went_on_from(speak: Speak) -> None:
    model = speak()
    with dial(model) as socket:
        first = create(socket)[-1]["response"]["id"]
        unknown = {"type": "function_call_output", "call_id": "call_none", "output": "x"}
        (failed,) = create(socket, input=[unknown], previous_response_id=first)
        assert failed["error"]["message"].startswith("input: no tool call found")
        (lost,) = create(socket, previous_response_id=first)
        assert lost["error"]["code"] == "previous_response_not_found"
        stored = create(socket, store=True)[-1]["response"]["id"]
        assert create(socket)[-1]["type"] == "response.completed"
        assert create(socket, previous_response_id=stored)[-1]["type"] == "response.completed"


def test_what_connections_go_on_from_is_bounded() -> None:
    """Of one, and of all together, where the newest stay."""
    last, items = sockets.LastResponses(100), [{"text": "x" * 80}]
    last.keep("large", "r", items * 2)
    assert last.take("large", "r") == (None, None)
    for number in range(20):
        last.keep(str(number), "r", items)
    assert last.take("0", "r") == last.take("19", "other") == (None, None)
    assert last.take("19", "r") == (items, None) and last.take("19", "r") == (None, None)
    assert last.take("never", "") == (None, None)


def test_what_is_no_request_is_told_and_the_connection_lives_on(speak: Speak) -> None:
    model = speak(max_body_bytes=4000)
    with dial(model) as socket:
        for sent in (
            "no JSON",
            "[]",
            '{"a":' + "[" * 1900,
            '{"type":"session.update"}',
            '{"input":"Hi"}',
            b"\xff",
        ):
            socket.send(sent)
            (told,) = rest(socket)
            assert (told["status"], told["error"]["param"]) == (400, "type")
        (told,) = create(socket, background=True)
        assert told["error"]["param"] == "background"
        (told,) = create(socket, generate=False)
        assert told["error"]["param"] == "generate"
        assert create(socket)[-1]["type"] == "response.completed"
        socket.send("x" * 5000)
        with pytest.raises(exceptions.ConnectionClosedError, match="1009"):
            socket.recv(timeout=60)


def test_keys_and_foreign_pages_are_checked_before_a_connection(speak: Speak) -> None:
    model = speak(keys=(hashlib.sha256(b"secret").digest(),))
    own = {"authorization": "Bearer secret"}
    cases: list[tuple[dict[str, str], int]] = [({}, 401), ({**own, "origin": "http://evil"}, 403)]
    for headers, status in cases:
        with pytest.raises(exceptions.InvalidStatus) as refused:
            dial(model, additional_headers=headers)
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["message"]
    with dial(model, additional_headers=own) as socket:
        assert create(socket)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/responses/x"])
def test_other_paths_have_no_sockets(speak: Speak, path: str) -> None:
    with pytest.raises(exceptions.InvalidStatus) as refused:
        dial(speak(), path)
    assert refused.value.response.status_code in (200, 404, 405)


def test_without_its_library_the_path_takes_requests_alone(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer of a WebSocket is ignored."""
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.websockets.wsproto_impl", None)
    monkeypatch.delitem(sys.modules, "trtllm_bls.openai.frames", raising=False)
    model = speak()
    with pytest.raises(exceptions.InvalidStatus) as refused:
        dial(model)
    assert refused.value.response.status_code == 405
    assert model.post("/v1/responses", {"input": "Hi"})[0] == 200


def test_connections_are_limited(speak: Speak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKETS", 1)
    model = speak()
    with dial(model):
        with pytest.raises(exceptions.InvalidStatus) as refused:
            dial(model)
        assert refused.value.response.status_code == 503

    def is_let_in() -> bool:
        with suppress(exceptions.InvalidStatus), dial(model):
            return True
        return False

    until(is_let_in)


def test_an_hour_ends_a_connection(speak: Speak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKET_S", 0.05)
    with dial(speak()) as socket:
        (told,) = rest(socket)
        assert told["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(exceptions.ConnectionClosedOK):
            socket.recv(timeout=60)


LONG = "word " * 400


def slow() -> Script:
    return Script(vocab_size=tokenizer_with_tools().vocab_size, step_seconds=0.01)


def hold_after_a_token(engine: SpeakingEngine) -> threading.Event:
    """Let its answers end only when the event that is returned is set."""
    release = threading.Event()
    step = engine._step
    steps = 0

    async def step_after_release(due: float, num_rows: int) -> float:
        nonlocal steps
        steps += 1
        if steps > 1:
            await eventually(release.is_set)
        return await step(due, num_rows)

    engine._step = step_after_release  # type: ignore[method-assign]
    return release


def test_leaving_frees_the_engine(speak: Speak) -> None:
    model = speak(LONG, slow())
    with dial(model) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "Hi"}))
        until(lambda: model.engine.live == 1)
    until(lambda: model.engine.live == 0)
    assert model.engine.cancelled


def test_one_request_waits_for_the_one_that_runs(speak: Speak) -> None:
    model = speak("word " * 30, slow())
    release = hold_after_a_token(model.engine)
    with dial(model) as socket:
        asked = json.dumps({"type": "response.create", "input": "Hi"})
        socket.send(asked)
        found = [json.loads(socket.recv(timeout=60)) for _ in range(3)]
        socket.send(asked)
        socket.send(asked)
        while found[-1]["type"] != "error":
            found.append(json.loads(socket.recv(timeout=60)))
        release.set()
        while sum(event["type"] == "response.completed" for event in found) < 2:
            found.append(json.loads(socket.recv(timeout=60)))
        assert [event["status"] for event in found if event["type"] == "error"] == [429]


def test_a_shutdown_waits_for_the_response_that_runs() -> None:
    engine = SpeakingEngine(tokenizer_with_tools(), lambda prompt: "word " * 40, slow())
    backend = ScriptedBackend(engine, tokenizer_with_tools())
    with ExitStack() as stack:
        api = stack.enter_context(serving(engine, backend))
        model = Speaking(api, engine)
        socket = stack.enter_context(dial(model))
        socket.send(json.dumps({"type": "response.create", "input": "Hi"}))
        until(lambda: engine.live == 1)
        leaving = threading.Thread(target=stack.pop_all().close, daemon=True)
        api.call(15, None)
        assert rest(socket)[-1]["type"] == "response.completed"
        with pytest.raises(exceptions.ConnectionClosedError, match="1012"):
            socket.recv(timeout=60)
        leaving.start()
        join(leaving)


# --- frames ---------------------------------------------------------------------------------------


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A client's frame of up to 125 bytes; its mask is 0."""
    return bytes([opcode | 0x80 * fin, 0x80 | len(payload)]) + bytes(4) + payload


POLICY_VIOLATION = (1008).to_bytes(2, "big")
PING, TEXT, MORE = frame(9), frame(1, fin=False), frame(0, fin=False)
REQUEST = json.dumps({"type": "response.create", "input": "Hi", "store": False}).encode()


def raw_socket(model: Speaking) -> socket.socket:
    """A WebSocket whose frames the test writes itself."""
    raw = socket.create_connection((model.api.host, model.api.port), timeout=60)
    lines = ("GET /v1/responses HTTP/1.1", "host: localhost", "upgrade: websocket")
    lines += ("connection: upgrade", "sec-websocket-version: 13")
    lines += ("sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", "", "")
    raw.sendall("\r\n".join(lines).encode())
    head = b""
    while b"\r\n\r\n" not in head:
        part = raw.recv(1)
        assert part, head
        head += part
    assert head.startswith(b"HTTP/1.1 101")
    return raw


def until_closed(raw: socket.socket, flood: bytes) -> bytes:
    """Send ``flood``, as far as the server reads it; everything that it sends."""

    def send() -> None:
        with suppress(OSError):
            raw.sendall(flood)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    received = b""
    while part := raw.recv(65536):
        received += part
        if POLICY_VIOLATION in received:
            break
    raw.close()
    join(sending)
    return received


def test_a_message_may_have_as_many_frames_as_its_limit() -> None:
    """The last one ends it, and the next message counts anew."""
    connection = frames.PacedConnection()
    for _ in range(2):
        for left in reversed(range(frames.FRAMES_A_MESSAGE)):
            fragment = wsproto.TextMessage(data="x", frame_finished=True, message_finished=not left)
            connection._count(fragment)


@pytest.mark.parametrize(
    ("flood", "reason"),
    [
        (PING * 1_000_000, b"more than 100 pings and pongs in a minute"),
        (frame(10) * 1_000_000, b"more than 100 pings and pongs in a minute"),
        (TEXT + MORE * 400_000, b"a message of more than 1024 frames"),
        (frame(1, b"x") * 400_000, b"response.create"),
    ],
    ids=["pings", "pongs", "fragments", "messages"],
)
def test_frames_are_counted_and_others_have_their_turns(
    speak: Speak, flood: bytes, reason: bytes
) -> None:
    """A flood of them ends its connection alone, after few of them; no task waits for it."""
    model = speak()
    num_events = 0
    count = frames.PacedConnection._count

    def counted(self: Any, event: Any) -> None:
        nonlocal num_events
        num_events += 1
        count(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames.PacedConnection, "_count", counted)
        received = until_closed(raw_socket(model), flood)
    assert reason in received and POLICY_VIOLATION in received
    assert num_events < 1100
    with dial(model) as other:
        assert create(other)[-1]["type"] == "response.completed"


def test_a_read_of_many_frames_is_worked_on_in_turns() -> None:
    """64 frames, or one whole message; then the event loop has others run."""
    connection, opened = frames.PacedConnection(), wsproto.AcceptConnection()
    lines = ("GET / HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: upgrade")
    lines += ("sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", "", "")
    connection.receive_data("\r\n".join(lines).encode())
    assert [type(event).__name__ for event in connection.events()] == ["Request"]
    connection.send(opened)
    connection.receive_data(PING * 90 + frame(1, b"a") + frame(1, b"b"))
    counts = []
    while connection.has_more or not counts:
        counts.append(len(list(connection.events())))
    assert counts == [64, 27, 1, 0]


def test_a_request_between_pings_and_in_many_frames_is_answered(speak: Speak) -> None:
    """Other programs split their messages as they like."""
    parts = [TEXT, *(frame(0, bytes([byte]), fin=False) for byte in REQUEST), frame(0)]
    with raw_socket(speak()) as raw:
        raw.sendall(b"".join(part + PING * (index < 80) for index, part in enumerate(parts)))
        received = b""
        while b"response.completed" not in received:
            part = raw.recv(65536)
            assert part, received
            received += part
    assert received.count(b"\x8a\x00") >= len(parts[:80])


def test_one_client_leaves_sockets_for_others() -> None:
    """Where all are taken, the client with most of them loses an idle one to another client."""
    served: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    async def refuse(scope: Any, send: Any, error: Any) -> None:
        served.append(f"{scope['tenant']} {error.status}")

    async def run() -> None:
        closed: list[tuple[str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sockets, "SOCKETS", 4)
            program = sockets.ResponsesSocket(answer, refuse, sockets.LastResponses(9), ())

        def connect(owner: str) -> asyncio.Task[None]:
            events = [{"type": "websocket.connect"}]

            async def receive() -> Any:
                return events.pop() if events else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                if message["type"] == "websocket.close":
                    closed.append((owner, message["code"]))

            scope = {"type": "websocket", "headers": [], "tenant": owner}
            return asyncio.create_task(program(scope, receive, send))

        tasks = [connect("a") for _ in range(5)]
        await turns()
        assert served == ["a 503"]
        tasks += [connect("b") for _ in range(3)]
        await turns()
        assert closed == [("a", 1013)] * 2 and served == ["a 503", "b 503"]
        tasks.append(connect("a"))
        await turns()
        assert served[2:] == ["a 503"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_async(run())


async def turns() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)
