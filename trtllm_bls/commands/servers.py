"""A server to ask, whichever API it has: ``host:port`` is Triton's gRPC, ``http://…`` OpenAI's.

Owns what the two differ in; a question and the events of its answer are the same for both.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from trtllm_bls.client import BLS, Event
from trtllm_bls.client.connection import Client
from trtllm_bls.commands.openai_stream import OpenAIClient
from trtllm_bls.errors import ConnectionFailed

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
