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
from trtllm_bls.http.budgets import (
    CONTINUED_BYTES,
    LONG_JSON_BYTES,
    SOCKET_REFUSALS,
    SOCKET_S,
    SOCKETS,
)
from trtllm_bls.http.limits import RETRY, Refused, header
from trtllm_bls.http.shares import NoShare, PerMinute, Share, Shares, expire, holder_of, timeout
from trtllm_bls.openai.api_errors import DONE, ApiError

PATH = "/v1/responses"
SOCKET = "trtllm_bls.socket"  # of a scope: which connection the request came over
_TRY_LATER = 1013  # closes a connection whose place another client needs
SHUTDOWN = "websocket.shutdown"  # an event that the server's protocol adds to those of ASGI


def socket_protocol() -> Any:
    """The class that speaks WebSockets for uvicorn.

    ``none`` without wsproto, or where an older uvicorn would not limit messages.
    """
    try:
        from trtllm_bls.openai.frames import BoundedSocket
    except ImportError:
        return "none"
    return BoundedSocket


def denying(send: Send) -> Send:
    """Sends an HTTP response in place of accepting a WebSocket."""
    return lambda message: send({**message, "type": f"websocket.{message['type']}"})


class LastResponses:
    """The last response of each connection, which goes on from there although it is not stored.

    ``max_bytes``: of one conversation; sixteen times as much are kept of all, the newest.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, tuple[str, bytes, str | None]] = {}

    def keep(
        self, socket: str, response_id: str, items: Sequence[Any], session: str | None = None
    ) -> None:
        """Keep the conversation up to the end of a response, and which session it is."""
        data = msgspec.json.encode(items)
        self.forget(socket)
        if len(data) <= self._max_bytes:
            self._kept[socket] = (response_id, data, session)
        while (
            sum(len(kept) for _, kept, _ in list(self._kept.values()))
            > CONTINUED_BYTES * self._max_bytes
        ):
            self.forget(next(iter(self._kept)))

    def take(self, socket: str, response_id: str) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Take the conversation and its session; if the next response fails, nothing follows."""
        last_id, data, session = self._kept.get(socket, ("", b"", None))
        if not data or last_id != response_id:
            return None, None
        self.forget(socket)
        items: list[dict[str, Any]] = msgspec.json.decode(data)
        return items, session

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
        self._answer = answer
        self._refuse = refuse
        self._last = last
        self._origins = tuple(origins)
        self._places = Shares(SOCKETS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            share = self._share(scope)
        except Refused as error:
            await self._refuse(scope, denying(send), error)
            return
        socket = {**scope, SOCKET: uuid.uuid4().hex}
        try:
            await receive()
            await send({"type": "websocket.accept"})
            await _Connection(socket, receive, send, share).serve(self._answer)
        finally:
            share.release()
            self._last.forget(socket[SOCKET])

    def _share(self, scope: Scope) -> Share:
        """The connection's place among all WebSockets. Raises ``Refused``."""
        # A browser lets any page open a WebSocket to any server.
        origin = header(scope, b"origin").decode("latin-1")
        if problem := browser_problem("", origin, (), self._origins):
            raise Refused(*problem)
        try:
            return self._places.take(holder_of(scope), 1)
        except NoShare:
            raise Refused(503, "too many WebSockets; send HTTP requests", RETRY) from None


@dataclass
class _Connection:
    _scope: Scope
    _receive: Receive
    _send: Send
    _share: Share  # may be revoked while the connection waits for a message
    _waiting: deque[Any] = field(default_factory=deque)  # messages
    _refusals: PerMinute = field(default_factory=lambda: PerMinute(SOCKET_REFUSALS))
    _gone: bool = False
    _ends: bool = False  # the server shuts down
    _close_code: int = 1000
    _status: int = 200

    async def serve(self, answer: ASGIApp) -> None:
        """Answer one message after another."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SOCKET_S
        while not (self._gone or (self._ends and not self._waiting)):
            if self._waiting:
                await self._turn(answer, self._waiting.popleft())
                continue
            try:
                await self._wait(end - loop.time())
            except asyncio.TimeoutError:
                if self._close_code == _TRY_LATER:
                    break
                problem = "Responses websocket connection limit reached (60 minutes). "
                problem += "Create a new websocket connection to continue."
                code = "websocket_connection_limit_reached"
                await self._fail(ApiError(400, problem, code=code))
                break
        if not self._gone:
            close_code = 1012 if self._ends else self._close_code
            with suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": close_code})

    async def _wait(self, seconds: float) -> None:
        """Wait for the next message, for so long, or until another client needs the place."""

        def revoke() -> None:
            self._close_code = _TRY_LATER
            expire(limit)

        try:
            async with timeout(seconds) as limit:
                self._share.on_revoke = revoke
                await self._hear()
        finally:
            self._share.on_revoke = None

    async def _turn(self, answer: ASGIApp, message: Any) -> None:
        body: bytes | None
        if len(message) > LONG_JSON_BYTES:
            body = await asyncio.to_thread(_request_body, message)
        else:
            body = _request_body(message)
        if body is None:
            problem = "type: a message must be a JSON object of the type 'response.create'"
            await self._refuse(ApiError(400, problem, param="type"))
            return
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
        if event["type"] == SHUTDOWN:
            self._ends = True
        elif event["type"] != "websocket.receive":
            self._gone = True
        elif self._waiting:
            await self._refuse(ApiError(429, "two responses are asked for already; wait", RETRY))
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

    async def _refuse(self, error: ApiError) -> None:
        """Refuse a message; a client that sends many such messages loses its connection."""
        if not self._refusals.is_over():
            await self._fail(error)
            return
        with suppress(OSError, RuntimeError):
            await self._send({"type": "websocket.close", "code": 1008})
        self._gone = True

    async def _fail(self, error: ApiError) -> None:
        await self._say(_failure(error.status, error.body))

    async def _say(self, frame: bytes) -> None:
        if frame and not self._gone:
            with suppress(OSError, RuntimeError):  # the connection ends, as it is told soon
                await self._send({"type": "websocket.send", "text": frame.decode()})


def _request_body(message: str | bytes) -> bytes | None:
    """The body of the ``POST`` that a message stands for; ``None`` where it is no request."""
    try:
        fields = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
        if msgspec.json.decode(fields.pop("type", b'""')) != "response.create":
            return None
    except (ValueError, RecursionError):  # also msgspec's
        return None
    fields["stream"] = msgspec.Raw(b"true")
    return msgspec.json.encode(fields)


def _failure(status: int, body: bytes) -> bytes:
    return b'{"type":"error","status":%d,%b' % (status, body[1:])
