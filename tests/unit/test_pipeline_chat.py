"""A pipeline's ``chat``: what of a request reaches the language model, and what it may say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.json_places import VALUES, changed, places
from tests.helpers.openai_server import ScriptedBackend
from tests.helpers.scripted_text import saying
from tests.helpers.tool_tokenizer import tool_tokenizer
from trtllm_bls.engines.chat_model import chat_request
from trtllm_bls.errors import SettingsError
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.pipeline import ChatRequest, StreamingModel
from trtllm_bls.pipeline.testing import LoadedModel, serving
from trtllm_bls.settings.model_config import CHAT_EVENTS, CHAT_REQUEST
from trtllm_bls.types import CacheSalt, ChatOptions, TextRequest

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = '[{"name": "add", "arguments": {"a": 1}}]'
ASKED = [{"role": "user", "content": "Hi"}]


class PassesOn(StreamingModel):
    """Answers as its language model does, with the caller's options."""

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        tools = request.tools or None
        async for step in self.llm.chat(request.messages, tools=tools, **request.options):
            yield step


def events(model: LoadedModel, request: TextRequest) -> list[dict[str, Any]]:
    """Of the answer to an API's request, but for the last."""
    ask = model.ask(**{CHAT_REQUEST: chat_request(request).decode()}).wait()
    assert ask.error is None, ask.error.message()
    (*found, end) = [each for (line,) in ask.said(CHAT_EVENTS) for each in json.loads(line)]
    assert "end" in end
    return found


def request(**more: Any) -> TextRequest:
    chat = ChatOptions(**{"tools": [ADD], **more.pop("chat", {})})
    return TextRequest(request_id="r", messages=ASKED, chat=chat, max_tokens=None, **more)


@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_demanded_call_is_a_call(choice: str) -> None:
    """Guided decoding holds the language model to it; the pipeline needs no line of its own."""
    asked = request(chat={"tool_choice": choice, "parallel_tool_calls": False})
    with serving(PassesOn, llm=[CALLED], tokenizer_dir=tool_tokenizer()) as model:
        (called,) = events(model, asked)
        (inner,) = model.llm.requests
    assert called["call"]["name"] == "add"
    assert json.loads(called["call"]["arguments"]) == {"a": 1}
    assert inner.guide is not None
    assert inner.guide.kind == "structural_tag"  # the model may reason before the call
    assert '"maxItems": 1' in (inner.guide.text or "") and '"add"' in (inner.guide.text or "")


def test_token_ids_of_a_bias_are_numbers_again() -> None:
    """As JSON they were texts."""
    asked = {"messages": ASKED, "tools": [], "options": {"token_bias": {"7": 1.5}}, "key": None}
    with serving(PassesOn, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        assert model.ask(**{CHAT_REQUEST: json.dumps(asked)}).wait().error is None
        (inner,) = model.llm.requests
    assert inner.token_bias == ((7, 1.5),)


def test_a_tool_choice_that_cannot_be_is_refused() -> None:
    for more in ({"tool_choice": "subtract"}, {"tool_choice": "required", "tools": None}):
        with serving(PassesOn, llm=[CALLED], tokenizer_dir=tool_tokenizer()) as model:
            text = chat_request(request(chat=more)).decode()
            ask = model.ask(**{CHAT_REQUEST: text}).wait()
        assert ask.error is not None
        assert ask.error.message().startswith("INVALID_ARG: tool_choice: ")


@pytest.mark.parametrize("chosen", [None, "mine"])
def test_inner_calls_have_the_callers_key_and_salt(chosen: str | None) -> None:
    """So neither drafts nor the engine's KV cache tell one key what another has sent."""
    salt = CacheSalt(chosen) if chosen else CacheSalt("own", required=False)
    asked = request(tenant="digest", cache_salt=salt)
    with serving(PassesOn, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        assert events(model, asked) == [{"text": "a"}]
        (inner,) = model.llm.requests
    assert inner.tenant == "digest"
    assert inner.cache_salt == CacheSalt(chosen or "own", required=False)


def test_calls_of_other_models_have_neither() -> None:
    class Calls(PassesOn):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            await request.infer("other", {"x": 1})
            async for _ in request.stream("other", {"x": 1}):
                pass
            yield "a"

    asked = request(tenant="digest", cache_salt=CacheSalt("own", required=False))
    with serving(Calls, models={"other": lambda inputs: {"y": 1}}) as model:
        assert events(model, asked) == [{"text": "a"}]
    assert [(list(each.inputs), each.parameters) for each in model.calls] == [(["x"], {})] * 2


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"citation": {}}, "'citation' is no event of chat; there are text, reasoning"),
        ({"text": 5}, "the event text of chat is a int"),
        ({"text": "a", "refusal": "b"}, "an event of chat has one kind"),
        ({}, "an event of chat has one kind"),
        ({"call": {"id": "1", "name": "f"}}, "the event call of chat has no text called arguments"),
        (5, "chat gave a int"),
        ("half \ud83d", "the event text of chat: '\\ud83d' at character "),
        ({"call": {"id": "1", "name": "f", "arguments": "\udc00"}}, "the event call of chat: "),
        ({"annotation": {"title": "\ud800"}}, "the event annotation of chat: "),
        ({"annotation": {"a": float("nan")}}, "the event annotation of chat is no JSON: "),
        ({"annotation": {"a": {1, 2}}}, "the event annotation of chat is no JSON: "),
    ],
)
def test_a_wrong_event_is_told_where_it_is_made(part: Any, problem: str) -> None:
    """In ``testing`` as in Triton, and not as a failure of the API's."""

    class Wrong(StreamingModel):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            yield part

    with serving(Wrong) as model:
        ask = model.ask(**{CHAT_REQUEST: chat_request(request()).decode()}).wait()
    assert ask.error is not None and problem in ask.error.message()


def test_chat_has_been_closed_when_its_failure_is_told() -> None:
    closed: list[bool] = []

    class Wrong(StreamingModel):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            try:
                yield 5
            finally:
                closed.append(True)

    with serving(Wrong) as model:
        text = np.array([chat_request(request())], np.object_)
        ask = model.triton.ask({CHAT_REQUEST: text}, CHAT_EVENTS)
        when_sent: list[bool] = []
        ask.on_send = lambda response: when_sent.extend(closed)
        model.model.execute([ask])
        ask.wait()
    assert when_sent == [True]


def test_a_model_with_chat_has_no_rows() -> None:
    config = json.dumps({"name": "m", "max_batch_size": 1, "parameters": {}})
    arguments = {"model_config": config, "model_name": "m", "model_repository": "."}
    with pytest.raises(SettingsError, match="max_batch_size: 1: a model with chat needs 0"):
        PassesOn().initialize(arguments, object())


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": float("nan")},
        {"temperature": float("inf")},
        {"token_bias": {1: float("nan")}},
        {"json_schema": {"a": object()}},
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_by_its_name(options: dict[str, Any]) -> None:
    class Asks(PassesOn):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            async for step in self.llm.chat(request.messages, **options):
                yield step

    with serving(Asks, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        ask = model.ask(**{CHAT_REQUEST: chat_request(request()).decode()}).wait()
    assert ask.error is not None
    assert ask.error.message().startswith(f"INVALID_ARG: {next(iter(options))}: ")


def test_a_pipeline_is_not_named_as_the_language_model() -> None:
    """It would answer the requests that are meant for the model."""
    backend = ScriptedBackend(saying("a"))
    names: Any = {"model_names": ("demo",), "pipelines": ("demo",)}
    with pytest.raises(SettingsError, match="demo is a pipeline of this server, too; choose"):
        create_app(backend, ApiSettings(**names))


@pytest.mark.parametrize("more", [{}, {"cache_salt": CacheSalt("a"), "token_bias": ((5, 1.0),)}])
def test_what_no_api_of_ours_sends_is_a_mistake_of_its_sender(more: dict[str, Any]) -> None:
    """Any client of Triton may send the tensor: with JSON of every other form, or with none."""
    asked = request(stop_words=("never",), prediction="so", **more)
    body = json.loads(chat_request(asked))
    texts = ["", "{", "[]", "7", '"x"', "null", "[" * 1000, '{"messages": NaN}', '{"a": "\\ud83d"}']
    for place in places(body):
        texts += [json.dumps(changed(body, place, value)) for value in VALUES]
    with serving(PassesOn, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        assert model.ask(**{CHAT_REQUEST: json.dumps(body)}).wait().error is None
        errors = [model.ask(**{CHAT_REQUEST: text}).wait().error for text in texts]
    told = [error.message() for error in errors if error is not None]
    assert [line for line in told if not line.startswith("INVALID_ARG: ")] == []
    assert 60 < len(told) < len(texts)
