"""What a pipeline is told of who asks, over every API: what was sent, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
import pytest
from websockets.sync.client import connect

from tests.helpers.openai_server import RunningApi, ScriptedBackend
from tests.helpers.openai_server import serving as openai_serving
from tests.helpers.scripted_text import saying
from trtllm_bls.engines.chat_model import chat_context, chat_request
from trtllm_bls.settings.faces import ServedPipeline
from trtllm_bls.types import Ending, FinishReason, TextChunk, TextRequest

KEY = hashlib.sha256(b"key")
ASKED: Any = [{"role": "user", "content": "Hi"}]


@dataclass
class RecordedPipeline:
    """Answers everything with a word, and keeps the requests."""

    requests: list[TextRequest] = field(default_factory=list)

    async def run(
        self, request: TextRequest, sink: Any, on_prompt: Callable[[int], None] = bool
    ) -> None:
        self.requests.append(request)
        await sink.ready()
        ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
        sink.send(TextChunk(json.dumps([{"text": "Hello"}]), ending=ending))

    @property
    def last(self) -> dict[str, Any]:
        """What the pipeline would be sent, and the session."""
        request = self.requests[-1]
        context = chat_context(request)
        return {**json.loads(chat_request(request)), "session": context.session, "key": context.key}


class Backend(ScriptedBackend):
    pipeline: RecordedPipeline

    def chat_pipelines(self, names: Iterable[str]) -> dict[str, Any]:
        return dict.fromkeys(names, self.pipeline)


@pytest.fixture(scope="module")
def pipeline() -> RecordedPipeline:
    return RecordedPipeline()


@pytest.fixture(scope="module")
def api(pipeline: RecordedPipeline) -> Iterator[RunningApi]:
    backend = Backend(saying("a"))
    backend.pipeline = pipeline
    agent = ServedPipeline("agent", frozenset({"chat"}))
    own: Any = {"pipelines": (agent,), "pipeline_headers": ("x-team",)}
    with openai_serving(backend.engine, backend, keys=(KEY.digest(),), **own) as running:
        yield running


@pytest.fixture
def client(api: RunningApi) -> openai.OpenAI:
    headers = {"X-Team": "red", "X-Other": "no"}
    return openai.OpenAI(
        base_url=f"{api.url}/v1", api_key="key", max_retries=0, default_headers=headers
    )


def test_a_chat_brings_what_the_caller_sent(
    client: openai.OpenAI, pipeline: RecordedPipeline
) -> None:
    """Fields that the API does not have as well: the pipeline may declare them."""
    client.chat.completions.create(
        model="agent",
        messages=ASKED,
        metadata={"team": "x"},
        user="ann",
        prompt_cache_key="k",
        temperature=0,
        extra_body={"top_docs": 3},
    )
    told = pipeline.last
    assert told["options"] == {"temperature": 0}
    assert told["metadata"] == {"team": "x"}
    assert (told["user"], told["prompt_cache_key"]) == ("ann", "k")
    assert told["headers"] == {"x-team": "red"}
    assert told["further"] == {"top_docs": 3}
    assert (told["key"], told["session"]) == (KEY.hexdigest(), None)


def test_what_was_not_sent_is_absent(client: openai.OpenAI, pipeline: RecordedPipeline) -> None:
    """No option has a default that the caller did not choose."""
    client.chat.completions.create(model="agent", messages=ASKED)
    told = pipeline.last
    assert told["options"] == told["metadata"] == told["further"] == {}
    assert told["user"] is told["prompt_cache_key"] is told["session"] is None
    client.chat.completions.create(
        model="agent", messages=ASKED, top_p=1, temperature=1, presence_penalty=0, seed=7
    )
    sent = {"top_p": 1.0, "temperature": 1.0, "presence_penalty": 0.0, "seed": 7}
    assert pipeline.last["options"] == sent


def test_a_newer_name_of_the_user_comes_first(
    client: openai.OpenAI, pipeline: RecordedPipeline
) -> None:
    new: Any = {"safety_identifier": "digest", "user": "ann"}
    client.chat.completions.create(model="agent", messages=ASKED, **new)
    assert pipeline.last["user"] == "digest"
    client.responses.create(model="agent", input="Hi", metadata={"a": "b"}, **new)
    assert (pipeline.last["user"], pipeline.last["metadata"]) == ("digest", {"a": "b"})


def test_messages_bring_the_users_id(api: RunningApi, pipeline: RecordedPipeline) -> None:
    messages = anthropic.Anthropic(base_url=api.url, api_key="key").messages
    messages.create(
        model="agent",
        max_tokens=5,
        messages=ASKED,
        metadata={"user_id": "ann"},
        extra_body={"temperature": 0.5},
    )
    told = pipeline.last
    assert (told["user"], told["metadata"]) == ("ann", {"user_id": "ann"})
    sent = {"max_tokens": 5, "temperature": 0.5, "fits_max_tokens": True}  # as the API means it
    assert told["options"] == sent


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("metadata", ["a"], "metadata: must be an object"),
        ("prompt_cache_key", 7, "prompt_cache_key: must be a text"),
        ("safety_identifier", 7, "safety_identifier: must be a text"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(
    client: openai.OpenAI, name: str, value: Any, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as raised:
        client.chat.completions.create(model="agent", messages=ASKED, extra_body={name: value})
    assert raised.value.param == name


def test_the_session_is_that_of_the_chain(
    client: openai.OpenAI, pipeline: RecordedPipeline
) -> None:
    """The id of the first response, however long the chain; another chain has another."""
    first = client.responses.create(model="agent", input="Hi")
    assert pipeline.last["session"] == first.id
    last = first
    for _ in range(3):
        last = client.responses.create(model="agent", input="on", previous_response_id=last.id)
        assert pipeline.last["session"] == first.id
    other = client.responses.create(model="agent", input="Hi")
    assert pipeline.last["session"] == other.id != first.id


def test_the_session_is_the_clients_conversation(
    client: openai.OpenAI, pipeline: RecordedPipeline
) -> None:
    """Which is for pipelines alone: the language model's conversations are not kept here."""
    for conversation in ("conv_1", {"id": "conv_1"}):
        own: Any = {"conversation": conversation}
        response = client.responses.create(model="agent", input="Hi", **own)
        assert pipeline.last["session"] == "conv_1"
        assert response.conversation is not None and response.conversation.id == "conv_1"
    with pytest.raises(
        openai.BadRequestError, match="conversation: is not supported by a language model"
    ):
        client.responses.create(model="scripted", input="Hi", conversation="conv_1")


def test_a_websocket_keeps_the_session_of_responses_that_are_not_stored(
    api: RunningApi, pipeline: RecordedPipeline
) -> None:
    url = api.url.replace("http", "ws") + "/v1/responses"
    headers = {"Authorization": "Bearer key"}
    ids: list[str] = []
    with connect(url, additional_headers=headers) as socket:
        for _ in range(3):
            request: dict[str, Any] = {"type": "response.create", "model": "agent", "input": "Hi"}
            request["store"] = False
            if ids:
                request["previous_response_id"] = ids[-1]
            socket.send(json.dumps(request))
            for message in socket:
                event = json.loads(message)
                if event["type"] == "response.completed":
                    ids.append(event["response"]["id"])
                    break
            assert pipeline.last["session"] == ids[0]


def test_a_language_model_is_asked_as_before(api: RunningApi) -> None:
    """It samples as OpenAI's do, and fields that it does not know have no effect."""
    body = {"model": "scripted", "messages": ASKED, "metadata": [1], "top_docs": 3}
    headers = {"Authorization": "Bearer key"}
    answer = httpx.post(f"{api.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert api.engine.requests[-1].sampling.temperature == 1.0
