"""An OpenAI API as the terminal programs use it: one streamed request per connection, on ``h11``.

Knows HTTP/1.1 and server-sent events; neither what is asked nor what is shown.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import h11

from trtllm_bls import __version__
from trtllm_bls.errors import (
    ConnectionFailed,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
    TrtllmBlsError,
)

_READ_BYTES = 65536
_MOST_ERROR_BYTES = 65536


class OpenAIClient:
    """``url``: the API's base, as ``http://host:9000/v1``. Raises ``SettingsError`` for another."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise SettingsError(f"--url {url}: write http://HOST:PORT/v1, or HOST:PORT for gRPC")
        self.url = url
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = host, port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = [("host", parts.netloc.rpartition("@")[2]), ("connection", "close")]
        self._headers.append(("user-agent", f"trtllm-bls/{__version__}"))
        if api_key:
            self._headers.append(("authorization", f"Bearer {api_key}"))

    async def model(self) -> str:
        """The first model that the server names."""
        async with aclosing(self._exchange("GET", "/models", b"")) as parts:
            body = b"".join([part async for part in parts])
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EngineError(f"{self.url}/models: names no model") from None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of ``POST path`` until ``[DONE]``. Leaving closes the connection.

        Raises ``InvalidRequest``, ``Overloaded`` and ``EngineError`` as the server answers,
        ``ConnectionFailed`` where it cannot be reached or ends before its last event.
        """
        data = json.dumps(body).encode()
        rest = b""
        async with aclosing(self._exchange("POST", path, data)) as parts:
            async for part in parts:
                *blocks, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for block in blocks:
                    if not block.startswith(b"data:"):
                        continue  # a comment
                    if block[5:].strip() == b"[DONE]":
                        return
                    yield self._event(block[5:])
        raise ConnectionFailed(f"{self.url}: the answer ended before its last event")

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            raise EngineError(f"{self.url}: an event is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise EngineError(f"{self.url}: an event is no object: {data[:80]!r}")
        if event.get("error"):
            raise _refusal(500, data)
        return event

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The parts of the reply's body as they come."""
        try:
            reader, writer = await asyncio.open_connection(*self._address, ssl=self._tls)
        except OSError as error:
            raise ConnectionFailed(f"{self.url}: {error.strerror or error}") from error
        http = h11.Connection(h11.CLIENT)
        headers = [*self._headers, ("content-length", str(len(body)))]
        headers.append(("content-type", "application/json"))
        request = h11.Request(method=method, target=self._path + path, headers=headers)
        try:
            parts = (request, h11.Data(data=body), h11.EndOfMessage())
            writer.write(b"".join(http.send(part) or b"" for part in parts))
            status, refused = 0, b""
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refused = (refused + bytes(event.data))[:_MOST_ERROR_BYTES]
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    break
            if status != 200:
                raise self._refused(status, refused)
        except (OSError, h11.ProtocolError) as error:
            raise ConnectionFailed(f"{self.url}: the connection broke: {error}") from error
        finally:
            writer.close()
            await asyncio.sleep(0)  # it closes in the loop's next turn, which may not come for long

    def _refused(self, status: int, body: bytes) -> TrtllmBlsError:
        refusal = _refusal(status, body)
        if status != 404 or self._path.endswith("/v1"):
            return refusal
        return SettingsError(
            f"--url {self.url}: {refusal}; an OpenAI API's base usually ends in /v1"
        )


def _refusal(status: int, body: bytes) -> TrtllmBlsError:
    """What the server says, as one of our errors."""
    message, field = f"the server answered {status}", "request"
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), str(error.get("param") or field)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if status in (429, 503):
        return Overloaded(message)
    if 400 <= status < 500:
        return InvalidRequest(field, message.removeprefix(f"{field}: "))
    return EngineError(message)
