"""Clients that send too much, too slowly, in another form, or from a foreign web page."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import select
import socket
import subprocess
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from doubles.scripted import Fault, ScriptedEngine
from tests.helpers.http2_offers import CLIENTS, post_twice
from tests.helpers.openai_server import MODEL, RunningApi, ScriptedBackend
from tests.helpers.scripted_text import PROMPT, saying, tokenizer
from tests.helpers.waiting import join, until, with_room
from tests.openai.conftest import SAYS, Connect
from trtllm_bls.http import limits as guard
from trtllm_bls.http.limits import (
    BodyReader,
    ConnectionLimits,
    GuardedProtocol,
    Refused,
    ResponseWriter,
)

BODY = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 100}).encode()
JSON = "content-type: application/json\r\n"


def head(length: int | None, further: str = JSON, host: str = "localhost") -> bytes:
    """A completion's headers; without a length the body comes in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n{size}\r\n{further}\r\n"
    return lines.encode()


@dataclass
class Answer:
    status: int
    error: dict[str, Any]
    headers: str
    body: bytes = field(repr=False)


def connected(api: RunningApi) -> socket.socket:
    return socket.create_connection((api.host, api.port), timeout=60)


def read(raw: socket.socket) -> Answer:
    """One response whose length is told."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = raw.recv(65536)
        assert part, got
        got += part
    headers, _, body = got.partition(b"\r\n\r\n")
    fields = headers.decode().lower()
    length = int(fields.partition("content-length: ")[2].partition("\r\n")[0])
    while len(body) < length:
        part = raw.recv(65536)
        assert part, body
        body += part
    return Answer(int(headers.split()[1]), json.loads(body).get("error", {}), fields, body)


def is_answered(raw: socket.socket) -> bool:
    """True as soon as a response begins, and false where the connection ends without any."""
    with suppress(ConnectionError):
        return bool(raw.recv(1, socket.MSG_PEEK))
    return False


def status(raw: socket.socket) -> int | None:
    """That of one response; ``None`` where the connection ends without any."""
    return read(raw).status if is_answered(raw) else None


def ask(
    api: RunningApi, body: bytes = BODY, further: str = JSON, host: str = "localhost"
) -> Answer:
    with connected(api) as raw:
        raw.sendall(head(len(body), further, host) + body)
        return read(raw)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("further", [JSON, JSON + "connection: close\r\n"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_reads_why_its_body_is_too_large(
    connect: Connect, chunked: bool, further: str
) -> None:
    """One that sends all of 30 MB before it reads; then it is closed, or serves again."""
    api, client = connect()
    large = b"x" * (30 * 2**20)
    with connected(api) as raw:
        if chunked:
            raw.sendall(head(None, further))
            raw.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large))
        else:
            raw.sendall(head(len(large), further) + large)
        answer = read(raw)
        assert (answer.status, answer.error["message"]) == (
            413,
            "the body is larger than 4194304 bytes, which is the limit (--max-body-bytes)",
        )
        if "close" in further:
            assert raw.recv(1) == b""
        else:
            raw.sendall(head(len(BODY)) + BODY)
            assert read(raw).status == 200
    assert client.models.list().data


LIMITS = ConnectionLimits()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
LONG = b"x" * LIMITS.header_bytes


@pytest.mark.parametrize("keys", [(), (b"digest",)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\na: " + LONG + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + LONG * 20, 431),  # without an end
        (b"GET /" + b"a" * 61_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /" + LONG * 20, 414),
        (b"GET /?" + b"a" * LIMITS.url_bytes + b" HTTP/1.1\r\n\r\n", 414),
        (b"\r\n" * len(LONG), 431),
        (CHUNKED + JSON.encode() + b"\r\n2\r\n{}\r\n0\r\na: " + LONG + b"\r\n\r\n", 431),
        (CHUNKED + JSON.encode() + b"\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 2000, 431),
        (CHUNKED + JSON.encode() + b"\r\n0\r\na: " + LONG * 20, 431),
        (CHUNKED + JSON.encode() + b"\r\n2;" + LONG * 20, 431),  # what a chunk says of itself
    ],
    ids=range(11),
)
def test_what_is_no_body_has_a_limit(
    sent: bytes, status: int, whole: bool, keys: tuple[bytes, ...], connect: Connect
) -> None:
    """Headers, trailers and all else, in one read or in many, with and before a check of keys.

    Refused before the program sees the request, or in place of its answer; once, and with its
    reason.
    """
    engine = saying(SAYS)
    api, _ = connect(engine, keys=keys)
    with connected(api) as raw:
        for at in range(0, len(sent), len(sent) if whole else 4096):
            raw.sendall(sent[at : at + (len(sent) if whole else 4096)])
        answer = read(raw)
        if keys and sent.startswith(CHUNKED):  # the missing key may have been told before
            assert answer.status in (status, 401)
        else:
            assert answer.status == status and b" bytes; send " in answer.body
        raw.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1" not in raw.recv(65536)
    assert not engine.requests


def test_a_target_may_be_as_long_as_its_limit(connect: Connect) -> None:
    """It is read then: there is no such path."""
    api, _ = connect()
    with connected(api) as raw:
        target = b"/?".ljust(LIMITS.url_bytes, b"a")
        raw.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % target)
        assert raw.recv(65536).split()[1] != b"414"


def test_requests_that_wait_for_others_are_parsed_later(connect: Connect) -> None:
    """One read may hold thousands of them. All are answered in order, up to the limit of one
    connection, and no turn of the event loop parses more than a few."""
    api, _ = connect()
    asked = 0
    widest = 0
    begin = GuardedProtocol.on_message_begin

    def counted(self: GuardedProtocol) -> None:
        nonlocal asked, widest
        asked += 1
        widest = max(widest, len(self.pipeline))
        begin(self)

    with pytest.MonkeyPatch.context() as patch, connected(api) as raw:
        patch.setattr(GuardedProtocol, "on_message_begin", counted)
        sending = threading.Thread(
            target=raw.sendall, args=[b"GET /version HTTP/1.1\r\n\r\n" * 3000], daemon=True
        )
        sending.start()
        received = b""
        with suppress(ConnectionError):
            while part := raw.recv(65536):
                received += part
        join(sending)
    assert received.count(b"HTTP/1.1 200 OK") == LIMITS.requests
    assert widest < 200 and asked < LIMITS.requests + 200


async def test_a_client_that_leaves_is_noticed_though_more_requests_wait() -> None:
    """The request that runs is told, not only the last one that came; it would write to nobody."""
    told: list[str] = []
    transport: Any = SimpleNamespace(
        **dict.fromkeys(("write", "close", "pause_reading", "resume_reading"), lambda *given: None),
        set_write_buffer_limits=lambda high: None,
        get_extra_info=lambda name: None,
        is_closing=lambda: False,
    )

    async def program(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        told.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    config = uvicorn.Config(program, http=GuardedProtocol)  # type: ignore[arg-type]
    config.loaded_app = program  # type: ignore[assignment]
    state = ServerState()
    protocol = GuardedProtocol(LIMITS, config=config, server_state=state, app_state={})
    protocol.connection_made(transport)
    protocol.data_received(b"GET / HTTP/1.1\r\n\r\n" * 3)
    await turns()
    assert told == []
    protocol.connection_lost(None)
    await turns()
    assert told == ["http.disconnect"]
    assert not protocol.pipeline


def test_trailers_are_dropped(connect: Connect) -> None:
    """None of them is a header of the request, such as a key, and none is kept."""
    api, _ = connect(keys=(sha256(b"secret").digest(),))
    trailers = b"authorization: Bearer secret\r\nx-request-id: late\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(BODY), BODY, trailers)
    for key, status in (("", 401), ("authorization: Bearer secret\r\n", 200)):
        with connected(api) as raw:
            raw.sendall(head(None, JSON + key) + chunks)
            answer = read(raw)
        assert answer.status == status and "late" not in answer.headers


def test_an_unfinished_request_holds_no_more_than_the_limit() -> None:
    """Whatever it is made of: what the protocol keeps of it is counted, not what was sent."""

    def held(sent: bytes) -> int:
        loop = asyncio.new_event_loop()
        state = ServerState()
        config = uvicorn.Config(None, http=GuardedProtocol)  # type: ignore[arg-type]
        config.loaded_app = ignore  # type: ignore[assignment]
        protocol = GuardedProtocol(
            LIMITS, config=config, server_state=state, app_state={}, _loop=loop
        )
        transport: Any = SimpleNamespace(
            **dict.fromkeys(
                ("write", "close", "pause_reading", "resume_reading"), lambda *given: None
            ),
            set_write_buffer_limits=lambda high: None,
            get_extra_info=lambda name: None,
            is_closing=lambda: False,
        )
        tracemalloc.start()
        protocol.connection_made(transport)
        for at in range(0, len(sent), 65_536):
            protocol.data_received(sent[at : at + 65_536])
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        protocol._stop_timer()
        for task in state.tasks:
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return kept

    async def ignore(scope: Any, receive: Any, send: Any) -> None:
        pass

    most = 8 * LIMITS.header_bytes
    tiny, chunk = b"a: b\r\n", CHUNKED + b"\r\n1\r\nx\r\n"
    for begin, rest in (
        (b"GET / HTTP/1.1\r\n", tiny),
        (b"GET / HTTP/1.1\r\na: ", b"x"),
        (b"GET /", b"x"),
        (b"", b"\r\n"),
        (chunk + b"0\r\n", tiny),
        (chunk + b"0\r\na: ", b"x"),
        (chunk + b"1;", b"x"),
    ):
        assert held(begin + rest * (20 * LIMITS.header_bytes // len(rest))) < most, begin


def test_who_waits_for_permission_need_not_send_a_large_body(connect: Connect) -> None:
    """``Expect: 100-continue``, as curl sends it, is answered with the refusal."""
    api, _ = connect()
    with connected(api) as raw:
        raw.sendall(head(2**30, JSON + "expect: 100-continue\r\n"))
        answer = read(raw)
    assert answer.status == 413
    assert "connection: close" in answer.headers


async def test_bodies_have_a_limit_together() -> None:
    """What is over it is refused for now; a body that is no longer used makes room."""
    bodies = BodyReader(max_bytes=100, max_held_bytes=150)
    scope = {"headers": [(b"content-type", b"application/json")]}

    class SlowClient:
        """Sends 80 bytes, and after ``end`` a last one."""

        def __init__(self) -> None:
            self.end = asyncio.Event()
            self.reading = asyncio.create_task(self._read())
            self._parts = [b"x", b"x" * 80]

        async def _read(self) -> bytes:
            async with bodies.read(scope, self._receive) as body:
                return body

        async def _receive(self) -> dict[str, Any]:
            if len(self._parts) == 1:
                await self.end.wait()
            part = self._parts.pop()
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    first = SlowClient()
    second = SlowClient()
    with pytest.raises(Refused, match="too many large requests") as refused:
        await second.reading
    assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
    first.end.set()
    assert len(await first.reading) == 81
    third = SlowClient()
    third.end.set()
    assert len(await third.reading) == 81
    packed = {"headers": [*scope["headers"], (b"content-encoding", b"gzip")]}

    async def send_packed() -> dict[str, Any]:
        return {"type": "http.request", "body": gzip.compress(b"x" * 100)}

    async with bodies.read(packed, send_packed) as body:
        assert len(body) == 100
        with pytest.raises(Refused, match="too many large requests"):
            await SlowClient().reading


def body_scope(owner: str, address: str = "192.0.2.1") -> dict[str, Any]:
    """A request for a ``BodyReader``, with a key or without."""
    keyed = {"tenant": owner} if owner else {}
    headers = [(b"content-type", b"application/json")]
    return {"headers": headers, "client": (address, 1), **keyed}


class UnfinishedBody:
    """A body that is sent but for its last byte."""

    def __init__(self, bodies: BodyReader, scope: dict[str, Any], size: int) -> None:
        self.end = asyncio.Event()
        self.reading = asyncio.create_task(self._read(bodies, scope))
        self._part = b"x" * (size - 1)
        self.is_held = False

    async def _read(self, bodies: BodyReader, scope: dict[str, Any]) -> int:
        async with bodies.read(scope, self._receive) as body:
            return len(body)

    async def _receive(self) -> dict[str, Any]:
        if self._part:
            part, self._part = self._part, b""
            return {"type": "http.request", "body": part, "more_body": True}
        self.is_held = True
        await self.end.wait()
        return {"type": "http.request", "body": b"x"}

    async def finish(self) -> int:
        """Send the last byte; the size that was read."""
        self.end.set()
        return await asyncio.wait_for(self.reading, 10)

    def refused(self) -> bool:
        """True where it got 503; it is to be over."""
        error = self.reading.exception() if self.reading.done() else None
        return isinstance(error, Refused) and error.status == 503


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (body_scope("a"), body_scope("b")),
        (body_scope("", "192.0.2.1"), body_scope("", "192.0.2.2")),
        (body_scope("", "2001:db8:0:1::1"), body_scope("", "2001:db8:0:2::1")),
    ],
    ids=["keys", "addresses", "networks"],
)
async def test_unfinished_bodies_of_one_client_leave_room_for_others(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """One may hold three quarters while nobody else asks, and half of it from then on."""
    bodies = BodyReader(max_bytes=100_000, max_held_bytes=800_000)
    held = [UnfinishedBody(bodies, first, 100_000) for _ in range(32)]
    await turns()
    assert [body.refused() for body in held] == [False] * 6 + [True] * 26

    small = UnfinishedBody(bodies, second, 1000)  # there is room for small ones
    await turns()
    assert await small.finish() == 1000 and not any(body.refused() for body in held[:6])
    large = [UnfinishedBody(bodies, second, 100_000) for _ in range(3)]
    await turns()
    assert [body.refused() for body in held[:6]] == [False] * 3 + [True] * 3
    assert [await body.finish() for body in large] == [100_000] * 3

    more = [UnfinishedBody(bodies, first, 100_000) for _ in range(2)]
    await turns()
    assert [body.refused() for body in more] == [False, True]
    assert [await body.finish() for body in (*held[:3], more[0])] == [100_000] * 4


async def test_addresses_of_one_network_are_one_client() -> None:
    """An IPv6 client has 2**64 addresses; a body of any of them counts as its own."""
    bodies = BodyReader(max_bytes=100_000, max_held_bytes=800_000)
    scopes = [body_scope("", f"2001:db8:0:1::{number:x}") for number in range(6)]
    held = [UnfinishedBody(bodies, scope, 100_000) for scope in scopes]
    await turns()
    other = UnfinishedBody(bodies, body_scope("", "192.0.2.1"), 100_000)
    await turns()
    assert await other.finish() == 100_000
    assert sum(body.refused() for body in held) == 1
    for body in held:
        body.end.set()
    await turns()
    assert [body.refused() for body in held] == [True] + [False] * 4 + [True]  # half is left to it


async def turns() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


class RecordingTokenizer:
    """Tells in which threads requests were built."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name == "model_vocab_size":
            self.threads.add(threading.current_thread().name)
        return getattr(tokenizer(), name)


def test_a_large_body_is_read_beside_the_event_loop(connect: Connect) -> None:
    """Whose streams would wait for it; a small one is not worth a thread."""
    engine, recording = saying(SAYS), RecordingTokenizer()
    backend = ScriptedBackend(engine, tokenizer=recording)  # type: ignore[arg-type]
    api, _ = connect(engine, backend=backend)
    assert ask(api).status == 200
    (loop,) = recording.threads
    assert ask(api, BODY[:-1] + b', "user": "%b"}' % (b"x" * 300_000)).status == 200
    assert len(recording.threads - {loop}) == 1


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


MANY: list[tuple[dict[str, Any], str | None]] = [
    (chat(messages=chat()["messages"] * 8193), "messages"),
    (chat(tools=[{"function": {"name": "f"}}] * 513), "tools"),
    (completion(prompt=[1] * (2**20 + 1)), "prompt"),
    (completion(prompt=[[1] * (2**20 + 1)]), "prompt[0]"),
    (completion(prompt=["a"] * 256, n=5), "n"),
    (completion(prompt=["a"] * 257), "prompt"),
    (completion(bad_words=["a"] * 1025), "bad_words"),
    (completion(logit_bias={str(n): 1 for n in range(4097)}), "logit_bias"),
    (completion(**{f"key{n}": 1 for n in range(256)}), None),
    (completion(further=[[]] * 100_001), None),
]


@pytest.mark.parametrize(("body", "param"), MANY)
def test_counts_are_checked_before_work(
    connect: Connect, body: dict[str, Any], param: str | None
) -> None:
    """With the field's name, where one is to blame."""
    api, _ = connect()
    path = "chat/completions" if "messages" in body else "completions"
    with connected(api) as raw:
        data = json.dumps(body).encode()
        raw.sendall(head(len(data)).replace(b"completions", path.encode()) + data)
        answer = read(raw)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "\n" not in answer.error["message"]


def test_brackets_in_text_are_no_lists(connect: Connect) -> None:
    """A program's text has many."""
    api, _ = connect()
    text = json.dumps('[{"a\\' * 60_000).encode()
    assert ask(api, BODY[:-1] + b', "user": %b}' % text).status == 200


# --- time and number ------------------------------------------------------------------------------


def test_headers_have_a_time(connect: Connect) -> None:
    """A client that sent some is told so, one that sent none is cut off; also after a request."""

    def attempt(header_s: float) -> bool | None:
        api, _ = connect(limits=ConnectionLimits(header_s=header_s))
        with connected(api) as silent, connected(api) as slow, connected(api) as second:
            with suppress(ConnectionError):
                slow.sendall(b"POST")
                second.sendall(head(len(BODY)) + BODY)
            if (whole := status(second)) is None:
                return None
            assert whole == 200
            second.sendall(b"POST")
            assert status(second) == 408
            if (begun := status(slow)) is None:
                return None
            assert begun == 408
            assert silent.recv(1) == b""
            return True

    with_room(attempt, 0.2, 2.0, 20.0)


def test_blank_lines_do_not_hold_a_connection(connect: Connect) -> None:
    """After a request they are allowed before the next, which has to follow."""

    def attempt(header_s: float) -> bool | None:
        api, _ = connect(limits=ConnectionLimits(header_s=header_s))
        with connected(api) as raw:
            with suppress(ConnectionError):
                raw.sendall(head(len(BODY)) + BODY)
            if (first := status(raw)) is None:
                return None
            assert first == 200
            raw.sendall(b"\r\n")
            assert status(raw) == 408
            return True

    with_room(attempt, 0.2, 2.0, 20.0)


def test_what_is_no_http_after_a_request_does_not_get_into_its_answer(connect: Connect) -> None:
    """The connection ends in the middle of the stream, with nothing of ours in it."""
    engine = saying(SAYS)
    engine.fault = Fault(after_tokens=3)  # the stream has no end
    api, _ = connect(engine)
    body = BODY[:-1] + b', "stream": true}'
    with connected(api) as raw:
        raw.sendall(head(len(body)) + body)
        got = raw.recv(65536)
        raw.sendall(b"what is this\r\n\r\n")
        while part := raw.recv(65536):
            got += part
    assert got.count(b"HTTP/1.1") == 1 and b"data: " in got


def test_what_is_no_http_before_an_answer_is_not_told_in_its_place(connect: Connect) -> None:
    """The client would take the refusal for the answer to the request before."""
    api, _ = connect(saying(SAYS, step_seconds=0.5))
    with connected(api) as raw:
        raw.sendall(head(len(BODY)) + BODY + b"what is this\r\n\r\n")
        assert raw.recv(65536) == b""


def test_an_answer_goes_on_though_the_next_request_is_slow(connect: Connect) -> None:
    """Only what has been asked in full counts."""

    def attempt(header_s: float) -> str | None:
        step_seconds = max(0.05, header_s / 6)  # the answer takes 17 of them
        engine = saying(SAYS, step_seconds=step_seconds)
        api, _ = connect(engine, limits=ConnectionLimits(header_s=header_s))
        with connected(api) as raw:
            with suppress(ConnectionError):
                raw.sendall(head(len(BODY)) + BODY)
                # With the first the second would have no time of its own.
                until(lambda: engine.requests or select.select([raw], [], [], 0)[0])
                raw.sendall(b"\r\n")
            if not is_answered(raw):
                return None
            with http.client.HTTPResponse(raw) as answer:  # a refusal may be behind it by now
                answer.begin()
                return str(json.load(answer)["choices"][0]["text"])

    assert with_room(attempt, 0.1, 1.0, 10.0) == SAYS


def test_bodies_have_a_time(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the client is told."""
    monkeypatch.setattr(guard, "DISCARD_S", 60.0)  # it sends the remainder, however late
    api, _ = connect(body_s=0.2)
    with connected(api) as raw:
        raw.sendall(head(len(BODY)) + BODY[:5])
        answer = read(raw)
        assert (answer.status, answer.error["message"]) == (
            408,
            "the body did not come within 0.2 s",
        )
        raw.sendall(BODY[5:])
        assert raw.recv(1) == b""


def test_a_refused_client_that_sends_no_more_is_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some time to read why, and to send what nobody reads."""
    monkeypatch.setattr(guard, "DISCARD_S", 0.2)
    api, _ = connect(body_s=0.2, limits=ConnectionLimits(body_s=0.2))
    with connected(api) as raw:
        raw.settimeout(20)
        raw.sendall(head(len(BODY)) + BODY[:5])
        assert read(raw).status == 408
        assert raw.recv(1) == b""


def test_idle_connections_are_closed(connect: Connect) -> None:
    """After an answer."""
    api, _ = connect(limits=ConnectionLimits(idle_s=0.2))
    with connected(api) as raw:
        raw.sendall(head(len(BODY)) + BODY)
        assert read(raw).status == 200
        assert raw.recv(1) == b""


def test_a_connection_serves_so_many_requests(connect: Connect) -> None:
    """The last answer says that it is closed, so that no client is surprised."""
    api, _ = connect(limits=ConnectionLimits(requests=2))
    with connected(api) as raw:
        for closes in (False, True):
            raw.sendall(head(len(BODY)) + BODY)
            assert ("connection: close" in read(raw).headers) == closes
        assert raw.recv(1) == b""


def test_slow_clients_do_not_keep_others_out(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they hold all connections a new client is refused at once, and then served."""
    monkeypatch.setattr(guard, "DISCARD_S", 0.2)

    def attempt(header_s: float) -> bool | None:
        api, client = connect(limits=ConnectionLimits(connections=20, header_s=header_s))
        with ExitStack() as stack:
            slow = [stack.enter_context(connected(api)) for _ in range(20)]
            for raw in slow:
                with suppress(ConnectionError):
                    raw.sendall(b"P")
            late = stack.enter_context(connected(api))
            if not is_answered(late):
                return None  # it was let in, as one before it had lost its place by then
            answer = read(late)
            assert answer.status == 503 and "retry-after: 1" in answer.headers
            late.sendall(head(len(BODY)) + BODY)  # is not answered by a reset
            if (begun := status(slow[0])) is None:
                return None
            assert begun == 408
            slow.pop().close()
            until(lambda: answers(client))
            return True

    with_room(attempt, 1.0, 10.0, 30.0)


def answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model=MODEL, prompt=PROMPT).choices)
    except openai.APIError:
        return False


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_that_is_not_said_to_be_json_is_refused(connect: Connect, kind: str) -> None:
    """A browser sends those from any page without asking the server first."""
    api, _ = connect()
    answer = ask(api, further=f"content-type: {kind}\r\n" if kind else "")
    problem = f"not {kind or 'of no type'}; send Content-Type: application/json"
    assert answer.status == 415
    assert answer.error["message"] == f"the body must be JSON, {problem}"


def test_curl_needs_the_header(connect: Connect) -> None:
    """Without it a line says what to add."""
    url = f"{connect()[0].url}/v1/completions"

    def curl(*words: str) -> Any:
        done = subprocess.run(
            ["curl", "-s", *words, url, "-d", BODY.decode()], capture_output=True, timeout=240
        )
        return json.loads(done.stdout)

    assert "send Content-Type: application/json" in curl()["error"]["message"]
    assert curl("-H", "Content-Type: application/json")["choices"][0]["text"] == SAYS


@pytest.mark.parametrize("client", CLIENTS)
def test_programs_that_offer_http2_are_answered(
    connect: Connect, client: str, tmp_path: Path
) -> None:
    """Others' programs, which send the body with the offer."""
    api, _ = connect()
    answers = post_twice(client, f"{api.url}/v1/completions", json.loads(BODY), tmp_path)
    assert [answer["choices"][0]["text"] for answer in answers] == [SAYS, SAYS]


UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_http2_is_ignored(connect: Connect, chunked: bool, pause: bool) -> None:
    """The request is read as it is, and the connection serves again."""
    api, _ = connect()
    with connected(api) as raw:
        for _ in range(2):
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
            first = head(None if chunked else len(BODY), JSON + UPGRADE)
            if pause:
                raw.sendall(first)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(len(data)):
                    raw.sendall(data[at : at + 1])
            else:
                raw.sendall(first + data)
            assert read(raw).status == 200


def test_a_proxys_method_is_refused(connect: Connect) -> None:
    """CONNECT, which changes the protocol too."""
    api, _ = connect()
    with connected(api) as raw:
        raw.sendall(b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost:1\r\n\r\n")
        assert read(raw).status == 400


def test_a_byte_order_mark_is_no_part_of_the_body(connect: Connect) -> None:
    """Some editors write one."""
    assert ask(connect()[0], b"\xef\xbb\xbf" + BODY).status == 200


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_bodies_are_read_within_the_same_limit(
    connect: Connect, name: str, pack: Callable[[bytes], bytes]
) -> None:
    """Other packings are refused with those that are read."""
    api, _ = connect()
    packed = JSON + f"content-encoding: {name}\r\n"
    assert ask(api, pack(BODY), packed).status == 200
    assert ask(api, pack(b" " * 5 * 2**20), packed).status == 413
    for wrong in (BODY, pack(BODY)[:-4], pack(BODY) + b"x"):
        answer = ask(api, wrong, packed)
        assert answer.status == 400 and name in answer.error["message"]
    refused = ask(api, BODY, JSON + "content-encoding: br\r\n")
    assert (refused.status, refused.error["message"]) == (
        415,
        "Content-Encoding 'br' is not supported; send gzip or deflate",
    )
    assert "accept-encoding: gzip, deflate" in refused.headers


def test_an_empty_list_of_tools_is_none(connect: Connect) -> None:
    """The prompt is the one without tools."""
    engine: ScriptedEngine = saying(SAYS)
    _, client = connect(engine)
    messages: Any = chat()["messages"]
    for tools in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}):
        assert client.chat.completions.create(model=MODEL, messages=messages, **tools).choices
    first, *others = (request.input_ids for request in engine.requests)
    assert others == [first, first]
    with pytest.raises(openai.BadRequestError, match="only allowed with tools"):
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=[], tool_choice="required"
        )


# --- browsers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost", "", 200),
        ("LOCALHOST.:9000", "", 200),
        ("127.0.0.1:9000", "", 200),
        ("[::1]:9000", "", 200),
        ("10.0.0.1", "", 200),
        ("api.example:443", "", 200),
        ("localhost:9000", "http://localhost:9000", 200),
        ("localhost:9000", "https://page.example", 200),
        ("evil.example", "", 421),
        ("evil.example:9000", "http://evil.example:9000", 421),
        ("[", "", 421),
        ("localhost:9000", "http://localhost:9001", 403),
        ("localhost:9000", "http://evil.example", 403),
        ("localhost:9000", "null", 403),
        ("localhost:9000", "http://[", 403),
    ],
)
def test_foreign_pages_do_not_reach_a_server_of_this_machine(
    connect: Connect, host: str, origin: str, status: int
) -> None:
    """Neither by their origin nor by a name that was made to mean this machine."""
    engine = saying(SAYS)
    api, _ = connect(
        engine, allowed_hosts=("api.example",), allowed_origins=("https://page.example",)
    )
    further = JSON + (f"origin: {origin}\r\n" if origin else "")
    answer = ask(api, further=further, host=host)
    assert answer.status == status
    assert len(engine.requests) == (status == 200)
    if status != 200:
        code = {421: "unknown_host", 403: "foreign_origin"}[status]
        assert answer.error["code"] == code
        option = {421: "--allowed-host", 403: "--allow-origin"}[status]
        assert option in answer.error["message"]


def test_a_star_lets_pages_of_every_origin_in(connect: Connect) -> None:
    """``--allow-origin '*'``; names of this machine still count."""
    api, _ = connect(allowed_hosts=(), allowed_origins=("*",))
    further = JSON + "origin: http://any.example\r\n"
    assert ask(api, further=further, host="localhost:9000").status == 200
    assert ask(api, further=further, host="evil.example").status == 421


def test_without_the_guard_any_name_is_answered(connect: Connect) -> None:
    """As of a server that others are meant to reach."""
    api, _ = connect()
    assert ask(api, further=JSON + "origin: http://evil.example\r\n", host="any").status == 200


def test_published_clients_pass_the_guard(connect: Connect) -> None:
    """The openai package over an address of this machine; readiness has a path of its own."""
    api, client = connect(allowed_hosts=())
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices
    done = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{api.url}/health/ready"],
        capture_output=True,
        timeout=240,
    )
    assert done.stdout == b"200"


@pytest.mark.parametrize(
    ("paused", "disconnected", "chunked", "written"),
    [
        (False, False, True, True),
        (True, False, True, False),  # else a client that does not read would fill the memory
        (False, True, True, False),
        (False, False, False, False),
    ],
)
def test_a_part_is_written_at_once_where_the_client_reads(
    paused: bool, disconnected: bool, chunked: bool, written: bool
) -> None:
    """Otherwise the caller has to wait until there is room."""
    sent: list[bytes] = []
    flow: Any = SimpleNamespace(write_paused=paused)
    cycle: Any = SimpleNamespace(
        disconnected=disconnected,
        chunked_encoding=chunked,
        transport=SimpleNamespace(write=sent.append),
    )
    assert ResponseWriter(flow, cycle).write(b"text") is written
    assert sent == [b"4\r\ntext\r\n"] * written


@pytest.mark.parametrize("tls", [False, True])
async def test_what_is_written_leaves_before_the_turn_of_the_loop_ends(tls: bool) -> None:
    """Otherwise the first token of one stream leaves with the tokens of all. Over TLS the limit
    stays: 0 would pause writing for good."""
    limits: list[int] = []
    transport: Any = SimpleNamespace(
        get_extra_info=lambda name: tls if tls and name == "sslcontext" else None,
        set_write_buffer_limits=lambda high: limits.append(high),
    )
    config = uvicorn.Config(lambda: None, http=GuardedProtocol)  # type: ignore[arg-type]
    protocol = GuardedProtocol(LIMITS, config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(transport)
    protocol._stop_timer()
    assert limits == [0] * (not tls)
