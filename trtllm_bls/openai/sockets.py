"""WebSockets of ``/v1/responses``: one request after another over one connection.

A message of the client is answered as if HTTP had brought it, and every server-sent event is a
message of its own.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtllm_bls.http.browsers import browser_problem
from trtllm_bls.http.limits import RETRY, Refused, header
from trtllm_bls.openai.api_errors import DONE, ApiError

PATH = "/v1/responses"
SOCKET = "trtllm_bls.socket"  # of a scope: which connection the request came over
_MOST_S = 3600.0  # of one connection, as OpenAI has it
_MOST_SOCKETS = 256  # of one process; each may hold two messages
_SHUTDOWN = "websocket.shutdown"


def socket_protocol() -> Any:
    """What uvicorn is to speak WebSockets with; ``none`` without wsproto, or where an older uvicorn
    would not limit messages."""
    try:
        from uvicorn.protocols.websockets.wsproto_impl import WebsocketBuffer, WSProtocol
    except ImportError:
        return "none"

    class Draining(WSProtocol):
        """Lets the response that runs come to its end when the server shuts down."""

        buffer: WebsocketBuffer

        def shutdown(self) -> None:
            if self.handshake_complete and not self.close_sent:
                self.queue.put_nowait({"type": _SHUTDOWN})  # type: ignore[typeddict-item]
            else:
                super().shutdown()

    return Draining


def denying(send: Send) -> Send:
    """Sends an HTTP response in place of accepting a WebSocket."""
    return lambda message: send({**message, "type": f"websocket.{message['type']}"})


class LastResponses:
    """The last response of each connection, which goes on from there although it is not stored.

    ``max_bytes``: of one conversation; sixteen times as much are kept of all, the newest.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, tuple[str, bytes]] = {}

    def keep(self, socket: str, response_id: str, items: Sequence[Any]) -> None:
        """Keep the conversation up to the end of a response."""
        data = msgspec.json.encode(items)
        self.forget(socket)
        if len(data) <= self._max_bytes:
            self._kept[socket] = (response_id, data)
        while sum(len(kept) for _, kept in list(self._kept.values())) > 16 * self._max_bytes:
            self.forget(next(iter(self._kept)))

    def take(self, socket: str, response_id: str) -> list[dict[str, Any]] | None:
        """The conversation, which is forgotten: if the next response fails, nothing follows."""
        last_id, data = self._kept.get(socket, ("", b""))
        if not data or last_id != response_id:
            return None
        self.forget(socket)
        items: list[dict[str, Any]] = msgspec.json.decode(data)
        return items

    def forget(self, socket: str) -> None:
        self._kept.pop(socket, None)


class ResponsesSocket:
    """WebSockets of one path, as an ASGI application. ``answer`` is what answers its ``POST``."""

    def __init__(
        self,
        answer: ASGIApp,
        refuse: Callable[[Scope, Send, Refused], Awaitable[None]],
        last: LastResponses,
        origins: Collection[str],
    ) -> None:
        self._answer, self._refuse, self._last, self._origins = answer, refuse, last, origins
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A browser lets any page open a WebSocket to any server.
        origin = header(scope, b"origin").decode("latin-1")
        problem, headers = browser_problem("", origin, (), tuple(self._origins)), {}
        if problem is None and self._num_open >= _MOST_SOCKETS:
            problem, headers = (503, "too many WebSockets; send HTTP requests"), RETRY
        if problem is not None:
            await self._refuse(scope, denying(send), Refused(*problem, headers))
            return
        self._num_open += 1
        socket = {**scope, SOCKET: uuid.uuid4().hex}
        try:
            await receive()
            await send({"type": "websocket.accept"})
            await _Connection(socket, receive, send).serve(self._answer)
        finally:
            self._num_open -= 1
            self._last.forget(socket[SOCKET])


@dataclass
class _Connection:
    _scope: Scope
    _receive: Receive
    _send: Send
    _waiting: deque[Any] = field(default_factory=deque)  # messages
    _gone: bool = False
    _ends: bool = False  # the server shuts down
    _status: int = 200

    async def serve(self, answer: ASGIApp) -> None:
        """Answer one message after another."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _MOST_S
        while not (self._gone or (self._ends and not self._waiting)):
            if self._waiting:
                await self._turn(answer, self._waiting.popleft())
                continue
            try:
                await asyncio.wait_for(self._hear(), end - loop.time())
            except asyncio.TimeoutError:
                problem = "Responses websocket connection limit reached (60 minutes). "
                problem += "Create a new websocket connection to continue."
                code = "websocket_connection_limit_reached"
                await self._fail(ApiError(400, problem, code=code))
                break
        if not self._gone:
            with suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": 1012 if self._ends else 1000})

    async def _turn(self, answer: ASGIApp, message: Any) -> None:
        try:
            fields = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
            if msgspec.json.decode(fields.pop("type", b'""')) != "response.create":
                raise ValueError
        except (ValueError, RecursionError):  # also msgspec's
            problem = "type: a message must be a JSON object of the type 'response.create'"
            await self._fail(ApiError(400, problem, param="type"))
            return
        fields["stream"] = msgspec.Raw(b"true")
        body: bytes | None = msgspec.json.encode(fields)
        kept = [pair for pair in self._scope["headers"] if not pair[0].startswith(b"content-")]
        headers = [*kept, (b"content-type", b"application/json")]
        scope = {**self._scope, "type": "http", "method": "POST", "headers": headers}

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                sent, body = body, None
                return {"type": "http.request", "body": sent}
            while not self._gone:
                await self._hear()
            return {"type": "http.disconnect"}

        await answer(scope, receive, self._tell)

    async def _hear(self) -> None:
        """Take what comes next. While a response runs, one message may wait."""
        event = await self._receive()
        if event["type"] == _SHUTDOWN:
            self._ends = True
        elif event["type"] != "websocket.receive":
            self._gone = True
        elif self._waiting:
            await self._fail(ApiError(429, "two responses are asked for already; wait", RETRY))
        else:
            self._waiting.append(event.get("text") or event.get("bytes") or "")

    async def _tell(self, message: Message) -> None:
        """Send on what would answer the ``POST``."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            await self._say(_failure(self._status, message["body"]))
        else:
            for event in message["body"].removesuffix(DONE).split(b"\n\n"):
                await self._say(event.partition(b"data: ")[2])

    async def _fail(self, error: ApiError) -> None:
        await self._say(_failure(error.status, error.body))

    async def _say(self, frame: bytes) -> None:
        if frame and not self._gone:
            with suppress(OSError, RuntimeError):  # the connection ends, as it is told soon
                await self._send({"type": "websocket.send", "text": frame.decode()})


def _failure(status: int, body: bytes) -> bytes:
    return b'{"type":"error","status":%d,%b' % (status, body[1:])
