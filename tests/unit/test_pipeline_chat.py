"""A pipeline's ``chat``: what of a request reaches the language model, and what it may say."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.helpers.json_places import VALUES, changed, places
from tests.helpers.openai_server import ScriptedBackend
from tests.helpers.scripted_text import saying
from tests.helpers.tool_tokenizer import tool_tokenizer
from trtllm_bls.engines.chat_model import chat_context, chat_request
from trtllm_bls.errors import SettingsError
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.pipeline import ChatRequest, StreamingModel
from trtllm_bls.pipeline.testing import Caller, LoadedModel, serving
from trtllm_bls.settings.faces import ServedPipeline
from trtllm_bls.settings.model_config import CHAT_EVENTS, CHAT_REQUEST
from trtllm_bls.types import CacheSalt, ChatOptions, Sampling, TextRequest
from trtllm_bls.wire.call_context import (
    CONTEXT_PARAMETER,
    NO_CONTEXT,
    CallContext,
    context_of,
    signed_context,
)

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
    told = asdict(chat_context(request))
    inputs = {CHAT_REQUEST: chat_request(request).decode()}
    ask = model.ask(caller=Caller(**told), **inputs).wait()
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


def test_calls_of_other_models_have_the_callers_key_and_salt_and_name_the_pipeline() -> None:
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
    for call in model.calls:
        assert (call.context.key, call.context.cache_salt) == ("digest", "key:own")
        assert call.context.models == ("model",)
        assert call.context.seconds is not None and 0 < call.context.seconds <= 600


@pytest.mark.parametrize("name", ["key", "cache_salt"])
def test_a_client_of_triton_cannot_say_who_it_is(name: str) -> None:
    """Not in the conversation, where an older server said it, and not in an unsigned parameter."""
    body = {**json.loads(chat_request(request())), name: "another's"}
    context = {"key": "another's", "cache_salt": "another's", "models": [], "seconds": 1.0}
    forged = f"{'0' * 64} {json.dumps({**context, 'session': 'another'})}"
    with serving(TellsCaller) as model:
        ask = model.ask(**{CHAT_REQUEST: json.dumps(body)}).wait()
        assert ask.error is not None
        assert f"{name} comes with a signed parameter" in ask.error.message()
        for text in (forged, forged.replace("0", "é"), "", "{}", 7):
            inputs = {CHAT_REQUEST: np.array([chat_request(request())], np.object_)}
            unsigned = model.triton.ask(inputs, CHAT_EVENTS)
            unsigned.sent_parameters = {CONTEXT_PARAMETER: text, "own": 1}
            model.model.execute([unsigned])
            assert unsigned.wait().error is None
            (told,) = json.loads(unsigned.said(CHAT_EVENTS)[0][0])
            told = json.loads(told["text"])
            assert told["key"] is told["salt"] is told["session"] is None
            assert told["parameters"] == {"own": 1}


def test_a_context_holds_for_the_model_that_it_was_signed_for() -> None:
    context = CallContext(key="digest")
    assert context_of("a", {CONTEXT_PARAMETER: signed_context("a", context)}) == context
    assert context_of("b", {CONTEXT_PARAMETER: signed_context("a", context)}) == NO_CONTEXT


class TellsCaller(StreamingModel):
    """Says what its request tells of the caller."""

    options: ClassVar = {"top_docs": int, "scale": float, "voice": str, "filters": dict}

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        told = {
            "key": request.key,
            "salt": request.cache_salt,
            "session": request.session and request.session.id,
            "options": request.options,
            "metadata": request.metadata,
            "user": request.user,
            "prompt_cache_key": request.prompt_cache_key,
            "headers": request.headers,
            "parameters": request.parameters,
        }
        yield json.dumps(told)


def test_a_pipeline_sees_what_its_caller_sent_and_nothing_else() -> None:
    """Of the fields that no API has, those that it declares."""
    caller = Caller(
        session="s", metadata={"team": "x"}, user="ann", prompt_cache_key="k", headers={"x-a": "1"}
    )
    with serving(TellsCaller) as model:
        (bare,) = model.chat(ASKED)[:1]
        own: Any = {"top_docs": 3, "scale": 1, "unknown": 5}
        (full,) = model.chat(ASKED, caller=caller, temperature=0.5, **own)[:1]
        wrong = [{"top_docs": True}, {"top_docs": "3"}, {"voice": 3}, {"filters": []}]
        for option in wrong:
            with pytest.raises(AssertionError, match=f"INVALID_ARG: {next(iter(option))}: .* is "):
                model.chat(ASKED, **option)
    assert json.loads(bare["text"])["options"] == {}
    told = json.loads(full["text"])
    assert told["options"] == {"temperature": 0.5, "top_docs": 3, "scale": 1.0}
    assert told["metadata"] == {"team": "x"} and told["headers"] == {"x-a": "1"}
    assert (told["user"], told["prompt_cache_key"], told["session"]) == ("ann", "k", "s")


def test_a_language_model_is_not_given_a_pipelines_own_options() -> None:
    """So ``**request.options`` may be passed on as it is."""

    class Declares(PassesOn):
        options: ClassVar = {"top_docs": int}

    with serving(Declares, llm=["a"]) as model:
        assert model.chat(ASKED, top_docs=3, max_tokens=5)[0] == {"text": "a"}
        (inner,) = model.llm.requests
    assert inner.max_tokens == 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": set}, "options = {'n': <class 'set'>}: write bool"),
        ({"seed": int}, "options: 'seed' is an option of every chat"),
    ],
)
def test_options_that_cannot_be_declared_fail_the_load(options: Any, problem: str) -> None:
    class Declares(PassesOn):
        pass

    Declares.options = options
    with pytest.raises(SettingsError, match=re.escape(problem)), serving(Declares):
        pass


def test_a_temperature_alone_samples_and_one_of_zero_does_not() -> None:
    with serving(PassesOn, llm=["a"]) as model:
        for temperature in (0.5, 0, 1e-9):
            model.chat(ASKED, temperature=temperature)
        model.chat(ASKED)
        sampling = [request.sampling for request in model.llm.requests]
    assert (sampling[0].temperature, sampling[0].top_p) == (0.5, 1.0)
    assert sampling[1:] == [Sampling()] * 3


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
def test_a_value_that_cannot_be_sent_is_the_pipelines_mistake(
    options: dict[str, Any],
) -> None:
    class Asks(PassesOn):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            async for step in self.llm.chat(request.messages, **options):
                yield step

    with serving(Asks, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        ask = model.ask(**{CHAT_REQUEST: chat_request(request()).decode()}).wait()
    assert ask.error is not None
    refused = f"INTERNAL: the language model refused the call: {next(iter(options))}: "
    assert ask.error.message().startswith(refused)
    assert ask.error.message().endswith(" [defect=1]")


def test_a_pipeline_is_not_named_as_the_language_model() -> None:
    """It would answer the requests that are meant for the model."""
    backend = ScriptedBackend(saying("a"))
    names: Any = {
        "model_names": ("demo",),
        "pipelines": (ServedPipeline("demo", frozenset({"chat"})),),
    }
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
