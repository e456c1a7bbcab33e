"""A server to ask, whichever API it has: ``host:port`` is Triton's gRPC, ``http://…`` OpenAI's.

Owns what the two differ in; a question and the events of its answer are the same for both.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from trtllm_bls.client import BLS, Event
from trtllm_bls.client.connection import Client
from trtllm_bls.commands.openai_stream import OpenAIClient
from trtllm_bls.errors import ConnectionFailed

Message = Mapping[str, str]  # role and content


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


class Reply:
    """An answer, from what has come of it. Times are of ``time.perf_counter()``, in seconds."""

    def __init__(self) -> None:
        self.text = ""
        self.sent = time.perf_counter()
        self.first: float | None = None  # text
        self.last: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def add(self, event: Event) -> None:
        """The next response; token counts add up over an answer."""
        if event.text:
            self.text += event.text
            self.first = event.received_at if self.first is None else self.first
            self.last = event.received_at
        self.finish_reason = event.finish_reason or self.finish_reason
        if event.num_input_tokens is not None:
            self.prompt_tokens = event.num_input_tokens
        if event.num_output_tokens is not None:
            self.completion_tokens = (self.completion_tokens or 0) + event.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return None if self.first is None else self.first - self.sent

    @property
    def tokens_per_s(self) -> float | None:
        """Behind the first text."""
        if self.first is None or self.last is None or not self.completion_tokens:
            return None
        seconds = self.last - self.first
        return (self.completion_tokens - 1) / seconds if seconds > 0 else None


class Server(ABC):
    """One model of one server. Used in one event loop: ``open``, ``ask``, ``close``."""

    model: str

    @abstractmethod
    async def open(self) -> None:
        """Raises ``TrtllmBlsError`` where that already shows what is wrong."""

    @abstractmethod
    def ask(self, question: Question) -> AsyncGenerator[Event, None]:
        """The answer as it comes; closing it ends the server's work. Raises what went wrong."""

    @abstractmethod
    async def close(self) -> None: ...


class TritonTextModel(Server):
    """``tensorrt_llm_bls``, or another model with its tensors, over gRPC."""

    def __init__(self, client: Client, model: str | None = None) -> None:
        self.model = model or BLS.name
        self._client = client

    async def open(self) -> None:
        await self._client.__aenter__()

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


class OpenAIModel(Server):
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


def server_at(
    url: str, model: str | None, api_key: str | None, triton: Callable[[], Client]
) -> Server:
    """The server at ``url``; ``triton`` makes the client of Triton's gRPC port, if it is one."""
    if "://" in url:
        return OpenAIModel(OpenAIClient(url, api_key), model)
    return TritonTextModel(triton(), model)
