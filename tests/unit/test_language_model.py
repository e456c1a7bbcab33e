"""Options, answers and the ends of a language model's answers, as a pipeline sees them."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from tests.helpers.packages import needs
from tests.helpers.server_settings import ROOT
from tests.helpers.small_tokenizers import directory
from tests.helpers.tool_tokenizer import tool_tokenizer
from tests.helpers.waiting import eventually, until, with_room
from trtllm_bls.errors import EngineError, InvalidRequest, TrtllmBlsError
from trtllm_bls.pipeline import LLM, Request, Response, StreamingModel, Tensor
from trtllm_bls.pipeline.language_model import (
    ConversationOptions,
    Options,
    joined,
    request_fields,
)
from trtllm_bls.pipeline.testing import ScriptedLLM, serving
from trtllm_bls.types import ChatOptions, Guide, Sampling, SpeculationRequest, TextRequest, Wants

RIGHT: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 1,
    "top_p": np.float32(0.5),
    "top_k": np.int32(3),
    "stop_words": "stop",
    "bad_words": ["a", "b"],
    "stop_token_ids": [1, np.int64(2)],
    "token_bias": {5: 1.5},
    "embedding_bias": {"word": -1},
    "speculation": SpeculationRequest(num_draft_tokens=0),
    "lora_task_id": 7,
    "json_schema": {"type": "object"},
    "extras": {"lora_config": [[1, 2, 3]]},
    "log_probs": True,
    "num_return_sequences": 2,
}
WRONG = {int: "five", float: "hot", bool: "yes", str: 5}


def test_options_become_the_fields_of_a_request() -> None:
    request = TextRequest(request_id="", text="a", **request_fields(RIGHT))
    assert (request.max_tokens, request.num_return_sequences, request.text) == (5, 2, "a")
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 3)
    assert (request.stop_words, request.bad_words) == (("stop",), ("a", "b"))
    assert request.stop_token_ids == (1, 2)
    assert (request.token_bias, request.embedding_bias) == (((5, 1.5),), (("word", -1.0),))
    assert request.wants.log_probs
    assert request.adapter is not None and request.adapter.task_id == 7
    assert request.adapter.config is not None and request.adapter.config.tolist() == [[1, 2, 3]]
    assert request.guide == Guide("json_schema", '{"type": "object"}')
    assert not request.extras


@pytest.mark.parametrize("name", sorted(get_type_hints(ConversationOptions)))
def test_every_option_is_refused_by_its_name(name: str) -> None:
    """Whatever its type: a value that nothing fits, and ``None`` for all that has a default."""
    hints = get_type_hints(ConversationOptions)
    with pytest.raises(InvalidRequest, match=f"^{name}: .* is not "):
        request_fields({name: object()}, hints)
    request_fields({name: None}, hints)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_option_is_a_finite_number(value: float) -> None:
    """JSON has no other, and an engine would take it for something."""
    with pytest.raises(InvalidRequest, match=rf"^temperature: {value} is no finite number"):
        request_fields({"temperature": value}, get_type_hints(ConversationOptions))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperture": 0.3},
            "temperture is no option of a language model; did you mean temperature?",
        ),
        ({"variables": {}}, "variables is no option of a language model"),
        ({"max_tokens": "five"}, "max_tokens: 'five' is not a whole number"),
        ({"max_tokens": 5.5}, "max_tokens: 5.5 is not a whole number"),
        ({"max_tokens": True}, "max_tokens: True is not a whole number"),
        ({"stop_words": [5]}, "stop_words: 5 is not a text"),
        ({"stop_words": 5}, "stop_words: 5 is not a text or sequence of a text"),
        ({"top_p": 2}, "top_p: 2.0 is not allowed; it must be at most 1"),
        ({"num_return_sequences": 0}, "num_return_sequences: 0 is not allowed"),
        ({"regex": "a", "grammar": "b"}, "grammar: regex is another form; send one"),
        ({"extras": {"nothing": 1}}, "nothing: is no input of an engine"),
    ],
)
def test_a_mistake_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrtllmBlsError) as raised:
        request_fields(options)
    assert str(raised.value).startswith(message)


CALLS = """
from trtllm_bls.pipeline import LLM

def right(llm: LLM) -> None:
    llm.text("a", max_tokens=5, stop_words="stop", json_schema={"type": "object"})
    llm.chat([{"role": "user", "content": "a"}], tools=[], variables={"thinking": False})

def wrong(llm: LLM) -> None:
    llm.text("a", temperture=0.3)
    llm.text("a", max_tokens="five")
    llm.generate([1], variables={})
"""


@needs("mypy")
def test_mypy_finds_the_mistakes(tmp_path: Path) -> None:
    """In strict mode, line by line."""
    (tmp_path / "calls.py").write_text(CALLS)
    words = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    done = subprocess.run(
        [*words, str(tmp_path / "calls.py")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = [
        line.split(":", 3)[1:]
        for line in done.stdout.splitlines()
        if "calls.py" in line and " note: " not in line
    ]
    assert [int(line[0]) for line in lines] == [9, 10, 11], done.stdout
    for line, name in zip(lines, ("temperture", "max_tokens", "variables"), strict=True):
        assert name in line[2]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = ["<think>", "hm", "</think>", "I add. ", "<tool_call>", '{"name": "add", ']
SAID += ['"arguments": {"a": 1}}', "</tool_call>"]


class Agent(StreamingModel):
    """One turn with a call, and one with its result."""

    inputs = (Tensor("question", "STRING", required=True),)
    outputs = (Tensor("said", "STRING"),)

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        messages = [{"role": "user", "content": request.text("question")}]
        steps = self.llm.chat(messages, tools=[TOOL])
        said = [step async for step in steps]
        (call,) = [call for step in said for call in step.calls]
        messages += [steps.message, call.result(str(call.arguments["a"] + 1))]
        (answer,) = await self.llm.chat(messages, tools=[TOOL]).answers()
        thought = "".join(step.reasoning for step in said)
        text = "".join(step.text for step in said)
        await response.send({"said": f"{thought}|{text}|{call.name}|{answer.text}"})


def test_calls_and_reasoning_are_parsed_and_go_into_the_next_turn() -> None:
    where = tool_tokenizer()
    with serving(Agent, llm=[SAID, ["It is ", "2."]], tokenizer_dir=where) as model:
        ask = model.ask(question="what?").wait()
    assert ask.said("said") == [[b"hm|I add.|add|It is 2."]]
    _, second = model.llm.requests
    messages = second.messages or ()
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert messages[2] == {**messages[2], "content": "2", "name": "add"}


class Continues(Agent):
    """An answer whose beginning is in the conversation."""

    async def answer(self, request: Request, response: Response) -> None:
        messages = [{"role": "user", "content": request.text("question")}]
        messages.append({"role": "assistant", "content": "It is"})
        (answer,) = await self.llm.chat(messages, continue_final_message=True).answers()
        await response.send({"said": answer.text})


def test_an_answer_that_is_continued_has_no_generation_prompt() -> None:
    """The header of a new answer would end the answer that the model should continue."""
    with serving(Continues, llm=[" 2."], tokenizer_dir=tool_tokenizer()) as model:
        ask = model.ask(question="what?").wait()
    assert ask.said("said") == [[b" 2."]]
    (request,) = model.llm.requests
    assert request.chat.continue_final_message
    assert not request.chat.add_generation_prompt


class Many(Agent):
    """Several sequences of one request, another language model, and no token of a third."""

    async def load(self, deployment: Any) -> None:
        self.llm, self.other = deployment.llm(), deployment.llm("judge")

    async def answer(self, request: Request, response: Response) -> None:
        drafts = await self.llm.text("a", num_return_sequences=2).answers()
        (best,) = await self.other.text("".join(each.text for each in drafts)).answers()
        await response.send({"said": f"{[each.text for each in drafts]} {best.text}"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop_words": ["lo w"]}, "hel|stop|lo w"),
        ({"stop_words": "world", "include_stop": True}, "hello world|stop|world"),
        ({"stop_words": "worldly"}, "hello world|end_id|None"),
        ({"max_tokens": 2}, "hello |length|None"),
    ],
)
def test_a_script_ends_as_a_language_model_does(options: dict[str, Any], said: str) -> None:
    """By a stop word across pieces and by length; else a test would pass for nothing."""
    assert end_of_a_script(["hello", " ", "world"], options) == said


def test_a_script_ends_by_time_as_a_language_model_does() -> None:
    """With what was said before."""
    texts = ("", "hello", "hello ")  # where the time was up before it waited

    def attempt(timeout_s: float) -> str | None:
        said = end_of_a_script(["hello", " ", "world", None], {"timeout_s": timeout_s})
        return None if said in [f"{text}|timeout|None" for text in texts] else said

    assert with_room(attempt, 0.05, 0.5, 5.0, 15.0) == "hello world|timeout|None"


def end_of_a_script(script: list[Any], options: dict[str, Any]) -> str:
    """Return the text of its answer, and why it ended."""

    class Asks(Agent):
        async def answer(self, request: Request, response: Response) -> None:
            step = joined([each async for each in self.llm.text("a", **options)])
            await response.send({"said": f"{step.text}|{step.finish_reason}|{step.stop_reason}"})

    with serving(Asks, llm=script) as model:
        ask = model.ask(question="what?").wait()
    ((said,),) = ask.said("said")
    return str(said.decode())


def test_a_script_has_no_log_probabilities() -> None:
    class Asks(Agent):
        async def answer(self, request: Request, response: Response) -> None:
            await self.llm.text("a", log_probs=True).answers()

    with serving(Asks, llm=["a"]) as model:
        ask = model.ask(question="what?").wait()
    assert ask.error is not None and "log_probs: a script of" in ask.error.message()


def test_several_sequences_and_several_models() -> None:
    scripts = {"": [["a", "b"], ["c"]], "judge": lambda request: [f"best of {request.text}"]}
    with serving(Many, llm=scripts) as model:
        ask = model.ask(question="?").wait()
    assert ask.said("said") == [[b"['ab', 'c'] best of abc"]]


class Kept(Agent):
    """Keeps its request and an answer beyond the end."""

    async def answer(self, request: Request, response: Response) -> None:
        self.request, self.steps = request, self.llm.text("a")
        await response.send({"said": ""})


def test_what_outlives_its_request_is_refused_and_told() -> None:
    with serving(Kept, llm=["a", None]) as model:
        model.ask(question="?").wait()
        kept: Any = model.model
        until(lambda: not kept.request.streams)

        async def late() -> None:
            with pytest.raises(EngineError, match="left before its end"):
                async for _ in kept.steps:
                    pass
            with pytest.raises(TrtllmBlsError, match="after the request had ended"):
                await kept.request.infer("other", {})
            with pytest.raises(TrtllmBlsError, match="after the request had ended"):
                kept.request.stream("other", {})

        asyncio.run_coroutine_threadsafe(late(), kept._server.loop).result(20)
    told = [line for level, line in model.triton.lines if level == "warn"]
    assert len([line for line in told if "after the request had ended" in line]) == 2


@pytest.mark.parametrize("way", ["break", "drop", "unread", "task"])
async def test_an_answer_that_nobody_refers_to_is_ended(way: str) -> None:
    """No garbage collection is needed for that."""
    scripted = ScriptedLLM(["a", "b", None])
    llm = LLM(scripted, None)
    gc.disable()
    try:
        if way == "break":
            async for _ in llm.text("a"):
                break
        elif way == "drop":
            steps = llm.text("a")
            await anext(steps)
            del steps
        elif way == "unread":
            llm.text("a")
        else:
            task = asyncio.create_task(llm.text("a").answers())
            await eventually(lambda: scripted.live == 1)
            task.cancel()
            await asyncio.wait({task})
            del task
        await eventually(lambda: len(scripted.requests) == 1 and scripted.live == 0)
    finally:
        gc.enable()


async def test_a_failure_of_an_answer_that_was_left_is_nobodys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted = ScriptedLLM([EngineError("lost")])
    steps = LLM(scripted, None).text("a")
    await eventually(lambda: len(scripted.requests) == 1 and scripted.live == 0)
    del steps
    await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records


class NoModel(StreamingModel):
    """A pipeline around other models alone."""

    inputs = (Tensor("x", "STRING", required=True),)
    outputs = (Tensor("y", "STRING"),)

    async def answer(self, request: Request, response: Response) -> None:
        await response.send({"y": request["x"]})


def test_a_pipeline_without_a_language_model_loads_no_tokenizer() -> None:
    with serving(NoModel) as model:
        assert model.ask(x="a\0").wait().said("y") == [[b"a\0"]]


UNCHANGED = """
import gc, sys
from trtllm_bls.pipeline import StreamingModel, Tensor, testing

class Model(StreamingModel):
    inputs = (Tensor("x", "STRING"),)
    outputs = (Tensor("y", "STRING"),)
    async def load(self, deployment):
        self.llm = deployment.llm()
    async def answer(self, request, response):
        await response.send({"y": self.llm.decode(self.llm.encode("the fox"))})

before = gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()
with testing.serving(Model, tokenizer_dir=sys.argv[1]) as model:
    assert model.ask().wait().said("y") == [[b"the fox"]]
    assert model.model.llm.tokenizer.convert_tokens_to_ids
assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == before
from transformers.utils import is_torch_available
from importlib.util import find_spec
assert is_torch_available() == (find_spec("torch") is not None), "torch is hidden"
"""


def test_nothing_of_a_users_process_is_changed() -> None:
    words = [sys.executable, "-c", UNCHANGED, str(directory("byte-level"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_field_of_a_request_is_an_option() -> None:
    """Or it is not for a pipeline."""
    known = set(get_type_hints(ConversationOptions)) | {"tools"}
    own = {"text", "prompt_ids", "messages", "chat", "stream", "text_ids", "api", "tenant"}
    own |= {"markup", "cache_salt", "guide", "adapter"}  # of which options make the latter two
    own |= {"traceparent", "request_id", "sampling", "wants", "return_tokens", "return_drafted"}
    own |= {"exclude_input_in_output", "beam_width", "early_stopping", "add_generation_prompt"}
    own |= {"perf_metrics", "num_input_tokens", "num_output_tokens", "caller"}
    there_are = {
        f.name for kind in (TextRequest, Sampling, Wants, ChatOptions) for f in fields(kind)
    }
    assert there_are - own <= known
    assert set(Options.__annotations__) <= known
