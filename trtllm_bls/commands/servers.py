"""One interface to both APIs: ``host:port`` is Triton's gRPC, ``http://…`` OpenAI's.

``TritonTextModel`` and ``OpenAIModel`` answer the same ``Question`` with the same events.
``OpenAIClient``, below, is HTTP/1.1 and server-sent events on ``h11``, one connection per request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import h11

from trtllm_bls import __version__
from trtllm_bls.client import BLS, Event
from trtllm_bls.client.connection import Client
from trtllm_bls.errors import (
    ConnectionFailed,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
    TrtllmBlsError,
)

Message = Mapping[str, str]  # role and content
_READY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation, or a prompt as it is. ``fields`` have their names in OpenAI's API, extensions
    as in vLLM; ``None`` in them leaves the choice to the server."""

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that say something."""
        return {name: value for name, value in self.fields.items() if value is not None}


class TritonTextModel:
    """``tensorrt_llm_bls``, or another model with its tensors, over gRPC.

    Like ``OpenAIModel`` used in one event loop. ``open`` raises ``TrtllmBlsError`` where that
    already shows what is wrong. ``ask`` has the answer as it comes, and raises what went wrong;
    closing it ends the server's work.
    """

    def __init__(self, client: Client, model: str | None = None) -> None:
        self.model = model or BLS.name
        self._client = client

    async def open(self) -> None:
        await self._client.__aenter__()
        if not self._client.retries:  # else the first request may wait for the server
            await self._client.model_ready(self.model, _READY_S)

    async def ask(self, question: Question) -> AsyncGenerator[Event, None]:
        async with self._client.stream(self.model, **_tensors(question)) as stream:
            async for event in stream:
                yield event

    async def close(self) -> None:
        await self._client.close()


def _tensors(question: Question) -> dict[str, Any]:
    given = question.given
    if given.pop("ignore_eos", False):
        given["end_id"] = -1
    if given.get("temperature") and not given.keys() & {"top_k", "top_p"}:
        given["top_p"] = 1.0  # a temperature alone stays greedy there
    if question.messages:
        given["messages"] = json.dumps(question.messages, ensure_ascii=False)
    else:
        given["text_input"] = question.prompt
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    return {"max_tokens": question.max_tokens, **given, **counts}


class OpenAIModel:
    """A model behind OpenAI's API, ours or another's."""

    def __init__(self, client: OpenAIClient, model: str | None = None) -> None:
        self.model = model or ""  # the first that the server names, once it is open
        self._client = client

    async def open(self) -> None:
        self.model = self.model or await self._client.model()

    async def ask(self, question: Question) -> AsyncGenerator[Event, None]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": question.max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **question.given}
        if question.messages:
            path, body["messages"] = "/chat/completions", question.messages
        else:
            path, body["prompt"] = "/completions", question.prompt
        ended = False
        async with aclosing(self._client.stream(path, body)) as events:
            async for event in events:
                found = _event(event)
                ended = ended or found.finish_reason is not None
                yield found
        if not ended:
            raise ConnectionFailed(f"{self._client.url}: the answer has no finish_reason")

    async def close(self) -> None:
        pass


def _event(event: Mapping[str, Any]) -> Event:
    now = time.perf_counter()
    usage = event.get("usage") or {}
    choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return Event(
        texts=(text,),
        received_at=now,
        finish_reason=choice.get("finish_reason"),
        num_input_tokens=usage.get("prompt_tokens"),
        num_output_tokens=usage.get("completion_tokens"),
    )


Server = TritonTextModel | OpenAIModel


def server_at(
    url: str, model: str | None, api_key: str | None, triton: Callable[[], Client]
) -> Server:
    """The server at ``url``; ``triton`` makes the client of Triton's gRPC port, if it is one."""
    if "://" in url:
        return OpenAIModel(OpenAIClient(url, api_key), model)
    return TritonTextModel(triton(), model)


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
        incomplete = b""
        async with aclosing(self._exchange("POST", path, data)) as parts:
            async for part in parts:
                *blocks, incomplete = (incomplete + part).replace(b"\r\n", b"\n").split(b"\n\n")
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
            # The socket closes in the loop's next turn. The chat stops the loop between answers.
            await asyncio.sleep(0)

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
