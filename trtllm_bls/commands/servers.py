"""One interface to both APIs: ``TritonTextModel`` and ``OpenAIModel`` answer the same conversation
with the same events. ``server_at`` opens either.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import httpx

from trtllm_bls.client import BLS, Client, Event
from trtllm_bls.commands.terminal import open_client
from trtllm_bls.errors import (
    ConnectionFailed,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
    TrtllmBlsError,
)

_READY_S = 10.0

# Of a conversation, each with its role and content.
Messages = Sequence[Mapping[str, str]]


class TritonTextModel:
    """``tensorrt_llm_bls``, or another model with its tensors, over gRPC.

    ``ask`` has the answer as it comes, and raises what went wrong; closing it ends the server's
    work. ``fields`` have their names in OpenAI's API, which are the tensors' names too.
    """

    def __init__(self, client: Client, model: str) -> None:
        self.model = model
        self._client = client

    async def ask(
        self, messages: Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        conversation = json.dumps(messages, ensure_ascii=False)
        given: dict[str, Any] = {"messages": conversation, "max_tokens": max_tokens}
        given |= {"return_num_input_tokens": True, "return_num_output_tokens": True, **fields}
        if fields.get("temperature") and not fields.keys() & {"top_k", "top_p"}:
            given["top_p"] = 1.0  # a temperature alone stays greedy there
        async with self._client.stream(self.model, **given) as stream:
            async for event in stream:
                yield event


class OpenAIModel:
    """A model behind OpenAI's API, ours or another's.

    ``ask`` raises ``InvalidRequest``, ``Overloaded`` and ``EngineError`` as the server answers,
    ``ConnectionFailed`` where it cannot be reached or ends before its last event.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, model: str) -> None:
        self.model = model
        self._http = http
        self._url = url

    async def first_model(self) -> str:
        """The first model that the server names."""
        async with aclosing(self._exchange("GET", "models")) as parts:
            body = b"".join([part async for part in parts])
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EngineError(f"{self._url}/models: names no model") from None

    async def ask(
        self, messages: Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        body["messages"] = messages
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        incomplete, ended = b"", False
        async with aclosing(self._exchange("POST", "chat/completions", json.dumps(body))) as parts:
            # Not httpx's ``aiter_lines``: it also splits at U+2028, which JSON may hold as it is.
            async for part in parts:
                *blocks, incomplete = (incomplete + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for data in (block[5:] for block in blocks if block.startswith(b"data:")):
                    if data.strip() == b"[DONE]":
                        if ended:
                            return
                        raise ConnectionFailed(f"{self._url}: the answer has no finish_reason")
                    event = self._event(data)
                    ended = ended or event.finish_reason is not None
                    yield event
        raise ConnectionFailed(f"{self._url}: the answer ended before its last event")

    def _event(self, data: bytes) -> Event:
        now = time.perf_counter()
        try:
            event = json.loads(data)
            if event.get("error"):
                raise _refusal(500, data)
            usage = event.get("usage") or {}
            choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
            text = (choice.get("delta") or {}).get("content") or ""
        except (ValueError, AttributeError):
            raise EngineError(f"{self._url}: an event cannot be read: {data[:80]!r}") from None
        return Event(
            texts=(text,),
            received_at=now,
            finish_reason=choice.get("finish_reason"),
            num_input_tokens=usage.get("prompt_tokens"),
            num_output_tokens=usage.get("completion_tokens"),
        )

    async def _exchange(
        self, method: str, path: str, body: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The parts of the response's body as they come; leaving closes the connection."""
        try:
            async with self._http.stream(method, path, content=body) as response:
                if response.status_code == 200:
                    async for part in response.aiter_bytes():
                        yield part
                    return
                refusal = _refusal(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            raise ConnectionFailed(f"{self._url}: {error}") from error
        if response.status_code == 404 and not self._url.rstrip("/").endswith("/v1"):
            mend = "an OpenAI API's base usually ends in /v1"
            raise SettingsError(f"--url {self._url}: {refusal}; {mend}")
        raise refusal


def _refusal(status: int, body: bytes) -> TrtllmBlsError:
    """What the server says, as one of our errors."""
    message, field = f"the server answered {status}", "request"
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        error = json.loads(body)["error"]
        message, field = str(error["message"]), str(error.get("param") or field)
    if status in (429, 503):
        return Overloaded(message)
    if 400 <= status < 500:
        return InvalidRequest(field, message.removeprefix(f"{field}: "))
    return EngineError(message)


Server = TritonTextModel | OpenAIModel


@asynccontextmanager
async def server_at(url: str, model: str | None, given: Mapping[str, Any]) -> AsyncIterator[Server]:
    """The server at ``url``, with the API key, the TLS and the retries that a command was given.

    ``host:port`` is Triton's gRPC, ``http://HOST:PORT/v1`` an OpenAI API's base. The default of
    ``model`` is ``tensorrt_llm_bls``, or the first that an API names. Opening raises
    ``TrtllmBlsError`` where that already shows what is wrong. For use in one event loop.
    """
    if "://" not in url:
        async with open_client(url, given) as client:
            served = TritonTextModel(client, model or BLS.name)
            if not client.retries:  # else the first request may wait for the server
                await client.model_ready(served.model, _READY_S)
            yield served
        return
    # A compressed stream would arrive in larger pieces.
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if given["api_key"]:
        headers["authorization"] = f"Bearer {given['api_key']}"
    try:
        base = httpx.URL(url)
        usable = base.scheme in ("http", "https") and base.host and (base.port or 0) < 65536
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise SettingsError(f"--url {url}: write http://HOST:PORT/v1, or HOST:PORT for gRPC")
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        verify=ssl.create_default_context(),
        trust_env=False,  # no proxy stands between the clock and the server
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    ) as http:
        api = OpenAIModel(http, url, model or "")
        api.model = model or await api.first_model()
        yield api
