"""WebSockets of ``/v1/responses``: one request after another over one connection.

A message of the client is answered as the body of a ``POST``, and every server-sent event becomes a
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
SOCKET = "trtllm_bls.socket"  # key of a scope: the id of the connection
_TRY_LATER = 1013  # closes a connection whose place another client needs
SHUTDOWN = "websocket.shutdown"  # an event that the server's protocol adds to those of ASGI


def socket_protocol() -> Any:
    """Return the class that speaks WebSockets for uvicorn.

    It is ``none`` without wsproto, or where an older uvicorn would not limit messages.
    """
    try:
        from trtllm_bls.openai.frames import BoundedSocket
    except ImportError:
        return "none"
    return BoundedSocket


def denying(send: Send) -> Send:
    """Return a ``send`` for an HTTP response that refuses a WebSocket."""
    return lambda message: send({**message, "type": f"websocket.{message['type']}"})


class LastResponses:
    """The last response of each connection, whose next request may go on from it without a store.

    ``max_bytes``: the limit of one conversation. All together may have sixteen times as much; the
    oldest are forgotten.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By connection: the response's id, the conversation as JSON, and the session.
        self._responses: dict[str, tuple[str, bytes, str | None]] = {}

    def keep(
        self, socket: str, response_id: str, items: Sequence[Any], session: str | None = None
    ) -> None:
        """Keep the conversation up to the end of a response, and the conversation's session."""
        data = msgspec.json.encode(items)
        self.forget(socket)
        if len(data) <= self._max_bytes:
            self._responses[socket] = (response_id, data, session)
        while self._num_bytes() > CONTINUED_BYTES * self._max_bytes:
            self.forget(next(iter(self._responses)))

    def _num_bytes(self) -> int:
        # A copy, as other threads take conversations meanwhile.
        return sum(len(data) for _, data, _ in list(self._responses.values()))

    def take(self, socket: str, response_id: str) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Take the conversation and its session; if the next response fails, nothing follows."""
        last_id, data, session = self._responses.get(socket, ("", b"", None))
        if not data or last_id != response_id:
            return None, None
        self.forget(socket)
        items: list[dict[str, Any]] = msgspec.json.decode(data)
        return items, session

    def forget(self, socket: str) -> None:
        self._responses.pop(socket, None)


class ResponsesSocket:
    """WebSockets of one path, as an ASGI application; ``answer`` is that of the path's ``POST``."""

    def __init__(
        self,
        answer: ASGIApp,
        refuse: Callable[[Scope, Send, Refused], Awaitable[None]],
        last_responses: LastResponses,
        origins: Collection[str],
    ) -> None:
        self._answer = answer
        self._refuse = refuse
        self._last_responses = last_responses
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
            self._last_responses.forget(socket[SOCKET])

    def _share(self, scope: Scope) -> Share:
        """Take the connection's place among all WebSockets. Raises ``Refused``."""
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
    _is_disconnected: bool = False
    _is_shutdown: bool = False  # the server shuts down
    _close_code: int = 1000
    _status: int = 200

    async def serve(self, answer: ASGIApp) -> None:
        """Answer one message after another."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SOCKET_S
        while not (self._is_disconnected or (self._is_shutdown and not self._waiting)):
            if self._waiting:
                await self._run(answer, self._waiting.popleft())
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
        if not self._is_disconnected:
            close_code = self._close_code
            if self._is_shutdown:
                close_code = 1012
            with suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": close_code})

    async def _wait(self, seconds: float) -> None:
        """Wait ``seconds`` for the next message, or until another client needs the place."""

        def revoke() -> None:
            self._close_code = _TRY_LATER
            expire(limit)

        try:
            async with timeout(seconds) as limit:
                self._share.on_revoke = revoke
                await self._receive_next()
        finally:
            self._share.on_revoke = None

    async def _run(self, answer: ASGIApp, message: Any) -> None:
        """Answer a message, which stands for the body of a ``POST``."""
        body: bytes | None
        if len(message) > LONG_JSON_BYTES:
            body = await asyncio.to_thread(_request_body, message)
        else:
            body = _request_body(message)
        if body is None:
            problem = "type: a message must be a JSON object of the type 'response.create'"
            await self._refuse(ApiError(400, problem, param="type"))
            return
        headers = [pair for pair in self._scope["headers"] if not pair[0].startswith(b"content-")]
        headers.append((b"content-type", b"application/json"))
        scope = {**self._scope, "type": "http", "method": "POST", "headers": headers}

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                event = {"type": "http.request", "body": body}
                body = None
                return event
            while not self._is_disconnected:
                await self._receive_next()
            return {"type": "http.disconnect"}

        await answer(scope, receive, self._send_answer)

    async def _receive_next(self) -> None:
        """Receive the next event. While a response runs, one message may wait."""
        event = await self._receive()
        if event["type"] == SHUTDOWN:
            self._is_shutdown = True
        elif event["type"] != "websocket.receive":
            self._is_disconnected = True
        elif self._waiting:
            await self._refuse(ApiError(429, "two responses are asked for already; wait", RETRY))
        else:
            self._waiting.append(event.get("text") or event.get("bytes") or "")

    async def _send_answer(self, message: Message) -> None:
        """Send the answer to the ``POST`` as messages."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            await self._send_text(_failure(self._status, message["body"]))
        else:
            for event in message["body"].removesuffix(DONE).split(b"\n\n"):
                await self._send_text(event.partition(b"data: ")[2])

    async def _refuse(self, error: ApiError) -> None:
        """Refuse a message; a client that sends many such messages loses its connection."""
        if not self._refusals.is_over():
            await self._fail(error)
            return
        with suppress(OSError, RuntimeError):
            await self._send({"type": "websocket.close", "code": 1008})
        self._is_disconnected = True

    async def _fail(self, error: ApiError) -> None:
        await self._send_text(_failure(error.status, error.body))

    async def _send_text(self, frame: bytes) -> None:
        if frame and not self._is_disconnected:
            with suppress(OSError, RuntimeError):  # the connection has ended; an event follows
                await self._send({"type": "websocket.send", "text": frame.decode()})


def _request_body(message: str | bytes) -> bytes | None:
    """Return the body of the ``POST`` that a message stands for; ``None`` for other messages."""
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
