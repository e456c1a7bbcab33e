"""Whose mistake a failed request is: the caller's where the caller sent the value, else not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TrtllmBlsError,
    Unsupported,
    from_wire,
)
from trtllm_bls.openai.api_errors import ApiError, api_error
from trtllm_bls.pipeline import ChatRequest, Request, Response, StreamingModel, Tensor
from trtllm_bls.pipeline.testing import LoadedModel, serving

ASKED = [{"role": "user", "content": "Hi"}]
NO_ADAPTER = Unsupported("lora_task_id", "7 is not in the cache")
LONG = PromptTooLong("input_ids", 50, 39)


class Calls(StreamingModel):
    """Does what ``way`` says, in ``chat`` and in ``answer``."""

    inputs = (Tensor("prompt", "STRING"),)
    outputs = (Tensor("said", "STRING"),)
    way: Callable[[Any, Any], Any]

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        await type(self).way(self, request)
        await response.send({"said": "done"})

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        await type(self).way(self, request)
        yield "done"


async def passes_on(model: Calls, request: Any) -> None:
    if isinstance(request, ChatRequest):
        await model.llm.chat(request.messages, **request.options).answers()
    else:
        await model.llm.text(request.text("prompt")).answers()


async def chooses(model: Calls, request: Any) -> None:
    own: Any = {"max_tokens": 5, "top_k": 3, "lora_task_id": 7}
    if isinstance(request, ChatRequest):
        await model.llm.chat(ASKED, **{**request.options, **own}).answers()
    else:
        await model.llm.text(f"Say: {request.text('prompt')}", **own).answers()


async def chooses_wrongly(model: Calls, request: Any) -> None:
    model.llm.text("Hi", max_tokens=-1)


async def has_a_limit(model: Calls, request: Any) -> None:
    await asyncio.wait_for(asyncio.Event().wait(), 0.01)


async def limits_a_call(model: Calls, request: Any) -> None:
    await request.infer("slow", {}, timeout_s=0.01)


async def limits_a_stream(model: Calls, request: Any) -> None:
    await anext(request.stream("slow", {}, timeout_s=0.01))


async def cancels_itself(model: Calls, request: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def catches(model: Calls, request: Any) -> None:
    """As a router does, which tries another model."""
    with pytest.raises(EngineError):
        await passes_on(model, request)


async def misuses(model: Calls, request: Any) -> None:
    await request.infer("slow", {}, outptus=[])


async def slow(inputs: object) -> None:
    await asyncio.Event().wait()


def failed(way: Any, script: Any = (), **options: Any) -> ApiError:
    """The error of the OpenAI API for a chat that fails."""

    class Case(Calls):
        pass

    Case.way = staticmethod(way)
    with (
        serving(Case, llm=script, models={"slow": slow}) as model,
        pytest.raises(AssertionError) as raised,
    ):
        model.chat(ASKED, **options)
    text = str(raised.value).partition(": ")[2]
    return api_error(from_wire(text), "messages", None)


@pytest.mark.parametrize(
    ("script", "options", "param"),
    [
        ([Unsupported("runtime_top_k", "3 is not here")], {"top_k": 3}, "top_k"),
        ([InvalidRequest("stop_words_list", "too many")], {"stop_words": ["a"]}, "stop"),
        ([InvalidRequest("messages", "the template takes no such role")], {}, "messages"),
        ([InvalidRequest("guided_decoding_guide", "no")], {"regex": "a"}, "response_format"),
        ([], {"max_tokens": -1}, "max_tokens"),
        ([], {"temperature": "hot"}, "temperature"),
    ],
)
def test_what_the_caller_sent_is_the_callers_mistake(
    script: Any, options: dict[str, Any], param: str
) -> None:
    error = failed(passes_on, script, **options)
    assert (error.status, error.param) == (400, param)


def test_a_conversation_that_is_too_long_is_told_as_clients_know_it() -> None:
    """Also where the pipeline has added to it: the caller can shorten its own."""
    error = failed(passes_on, [LONG])
    assert (error.status, error.code, error.too_long) == (
        400,
        "context_length_exceeded",
        (50, 39),
    )


@pytest.mark.parametrize(
    ("way", "script", "options"),
    [
        (chooses, [NO_ADAPTER], {}),
        (chooses, [Unsupported("runtime_top_k", "3 is not here")], {}),
        (chooses, [InvalidRequest("top_k", "no")], {"top_k": 300}),
        (chooses, [InvalidRequest("guided_decoding_guide", "no")], {}),
        (chooses_wrongly, [], {}),
        (misuses, [], {}),
    ],
)
def test_what_the_pipeline_chose_is_its_own_mistake(
    way: Any, script: Any, options: dict[str, Any]
) -> None:
    """Even where the caller sent the same field with another value."""
    error = failed(way, script, **options)
    assert (error.status, error.param) == (500, None)


@pytest.mark.parametrize("way", [has_a_limit, limits_a_call, limits_a_stream])
def test_a_time_limit_of_the_pipelines_own_is_a_matter_of_time(way: Any) -> None:
    error = failed(way)
    assert (error.status, error.code) == (504, "timeout")


def test_a_pipeline_that_cancels_itself_is_no_server_that_stops() -> None:
    error = failed(cancels_itself)
    assert error.status == 500 and "shutting down" not in error.message


@pytest.mark.parametrize(
    ("refused", "status"),
    [(EngineError("broken"), 502), (EngineUnavailable("gone"), 429), (Overloaded("full"), 429)],
)
def test_an_engines_failure_is_the_engines(refused: TrtllmBlsError, status: int) -> None:
    assert failed(passes_on, [refused]).status in (status, 503)


@pytest.mark.parametrize(
    "refused",
    [NO_ADAPTER, LONG, InvalidRequest("x", "odd"), Overloaded("full"), EngineError("broken")],
)
def test_whatever_the_engine_refuses_is_an_engine_error_in_answer(
    refused: TrtllmBlsError,
) -> None:
    class Case(Calls):
        way = staticmethod(catches)

    with serving(Case, llm=[refused]) as model:
        assert model.ask(prompt="Hi").wait().error is None
        assert model.chat(ASKED)[0] == {"text": "done"}


def message_of(model: LoadedModel, prompt: str) -> str:
    error = model.ask(prompt=prompt).wait().error
    assert error is not None
    return error.message()


def test_a_prompt_that_is_an_input_is_refused_by_the_inputs_name() -> None:
    """One that the pipeline made of it is not."""

    class PassesOn(Calls):
        way = staticmethod(passes_on)

    class Makes(Calls):
        way = staticmethod(chooses)

    too_long = "50 tokens; at most 39 are allowed so that one new token fits"
    with serving(PassesOn, llm=[LONG]) as model:
        told = f"INVALID_ARG: prompt: {too_long} [tokens=50 max_tokens=39]"
        assert message_of(model, "Hi") == told
    with serving(Makes, llm=[LONG]) as model:
        told = f"INTERNAL: the language model refused the call: input_ids: {too_long} [defect=1]"
        assert message_of(model, "Hi") == told
