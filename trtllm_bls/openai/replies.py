"""One HTTP exchange as ASGI messages: the body read within a limit, one reply, however it ends."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Scope, Send

from trtllm_bls.http_guard import BODY_SEND, BODY_WRITE, header
from trtllm_bls.openai.errors import ApiError

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
)


class Reply:
    """The reply to one request: one JSON body, or events."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = header(scope, b"x-request-id")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.begun = False
        self._send = send
        # Middleware looks at how a reply begins; for each event it would only cost time. Taken from
        # the scope, to which they refer: it would stay until a garbage collection.
        self._send_events: Send = scope.pop(BODY_SEND, send)
        self.write: Callable[[bytes], bool] = scope.pop(BODY_WRITE, lambda data: False)
        # HTTP/1.0 has no chunks, which uvicorn would write all the same: its events come together.
        self._collected: list[bytes] | None = [] if scope["http_version"] == "1.0" else None

    async def json(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole reply; ``body`` may be JSON already."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        pairs = [(key.encode(), value.encode()) for key, value in (headers or {}).items()]
        pairs += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
        ]
        await self._start(status, pairs)
        await self._send({"type": "http.response.body", "body": data})

    async def error(self, error: ApiError) -> None:
        """The error as the reply, or as the last event where the reply has begun."""
        if self.begun:
            await self.events(error.event, end=True)
        else:
            await self.json(error.body, error.status, error.headers)

    async def events(self, data: bytes, end: bool = False) -> None:
        """Some events, the first with the headers; waits while the client does not read."""
        if self._collected is not None:
            self.begun = True
            self._collected.append(data)
            if not end:
                return
            data = b"".join(self._collected)
            await self._start(200, [*_STREAM, (b"content-length", b"%d" % len(data))])
        elif not self.begun:
            await self._start(200, list(_STREAM))
        await self._send_events({"type": "http.response.body", "body": data, "more_body": not end})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        headers.append((b"x-request-id", self.request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
