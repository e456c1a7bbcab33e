"""The Responses and Messages APIs, as the ``openai`` and ``anthropic`` packages read them."""

from __future__ import annotations

import asyncio
import gc
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from click.testing import CliRunner
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from doubles.scripted import Fault, Script
from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import MODEL, RunningApi, ScriptedBackend, serving
from tests.helpers.scripted_text import tokenizer
from tests.helpers.waiting import until
from trtllm_bls.cli import main
from trtllm_bls.errors import EngineError, PromptTooLong, from_wire, to_wire
from trtllm_bls.http.keys import read_keys
from trtllm_bls.openai import generating
from trtllm_bls.openai.api_errors import ApiError, api_error
from trtllm_bls.openai.conversation import ChatModel, Transcript
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse, error_answer
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import decode
from trtllm_bls.orchestrator.chat_turn import ChatTurns
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.types import Adapter, Ending, FinishReason, TextChunk

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "agent_requests.json").read_text()
)
WEATHER = {
    "name": "get_weather",
    "description": "the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ütliberg"}}\n</tool_call>'
THOUGHT = "<think>\nSomewhere in Switzerland.\n</think>\n\n"


@pytest.fixture
def speak() -> Iterator[Any]:
    """Starts a server whose model says the given text."""
    with ExitStack() as stack:

        def start(text: str, script: Script | None = None, **settings: Any) -> Speaking:
            engine = SpeakingEngine(tokenizer(), lambda prompt: text, script)
            formats = {"tool_parser": "hermes", "reasoning_parser": "think"}
            api = stack.enter_context(serving(engine, **formats, **settings))
            return Speaking(api, engine)

        yield start


class Speaking:
    """A running API, its engine, and a client of each kind, made when a test asks for it."""

    def __init__(self, api: RunningApi, engine: SpeakingEngine) -> None:
        self.api, self.engine = api, engine

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.api.url}/v1", api_key="any", max_retries=0)

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.api.url, api_key="any", max_retries=0)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        data, headers = (
            json.dumps(body).encode(),
            {"content-type": "application/json"} | (headers or {}),
        )
        asked = urllib.request.Request(f"{self.api.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each with its type in both places."""
    found = []
    for lines in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        kind, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


def strictly(kind: Any, found: list[dict[str, Any]]) -> None:
    """Each event is one of the package's types, with all of its fields."""
    adapter = TypeAdapter(kind)
    for event in found:
        adapter.validate_python(event, strict=True)


def shape(item: Any) -> Any:
    """An item of a response without what is random."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id")}


ANSWERS = {
    "text": "It rains in Zürich 🌧.",
    "thought": THOUGHT + "It rains.",
    "call": CALL,
    "all": THOUGHT + "I look." + CALL + OTHER,
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_response_is_the_same_streamed_and_whole(speak: Any, text: str) -> None:
    """Its events are the package's, in order, and add up to its items."""
    model = speak(text)
    asked = {"model": MODEL, "input": "Where?", "tools": [{"type": "function", **WEATHER}]}
    whole = model.openai.responses.create(**asked)
    status, told = model.post("/v1/responses", {**asked, "stream": True})
    found = events(told)
    strictly(ResponseStreamEvent, found)
    assert status == 200
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last["type"] == "response.completed"
    streamed = last["response"]
    assert [shape(item) for item in streamed["output"]] == [
        shape(item.model_dump(exclude_unset=True)) for item in whole.output
    ]
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    deltas: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    for item in streamed["output"]:
        inside = item.get("arguments") or item["content"][0]["text"]
        assert deltas[item["id"]] == inside
    assert streamed["usage"] == whole.usage.model_dump(exclude_unset=True)
    kinds = [item["type"] for item in streamed["output"]]
    thinks, calls = text.startswith("<think>"), text.count("<tool_call>")
    assert kinds.count("reasoning") == thinks and kinds.count("function_call") == calls
    reasoning = streamed["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == thinks * len(tokenizer().encode_word("Somewhere in Switzerland."))


def test_a_response_has_log_probabilities(speak: Any) -> None:
    """Of all tokens, as chats have them, streamed and whole."""
    model = speak(THOUGHT + "It rains.")
    asked = {"model": MODEL, "input": "x", "include": ["message.output_text.logprobs"]}
    whole = model.openai.responses.create(**asked)
    found = events(model.post("/v1/responses", {**asked, "stream": True})[1])
    strictly(ResponseStreamEvent, found)
    streamed = [
        score["token"]
        for event in found
        if event["type"] == "response.output_text.delta"
        for score in event["logprobs"]
    ]
    told = [score.token for score in whole.output[1].content[0].logprobs]
    assert streamed == told and "".join(told) == "It rains."


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_message_is_the_same_streamed_and_whole(speak: Any, text: str) -> None:
    """Its events are the package's, in order, and add up to its blocks."""
    model = speak(text)
    tool = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    turn = {"role": "user", "content": "Where?"}
    asked = {"model": MODEL, "max_tokens": 500, "messages": [turn], "tools": [tool]}
    whole = model.anthropic.messages.create(**asked)
    with model.anthropic.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()

    def blocks(message: Any) -> list[Any]:
        return [shape(block.model_dump(exclude_unset=True)) for block in message.content]

    assert blocks(streamed) == blocks(whole)
    calls = text.count("<tool_call>")
    assert [b.type for b in whole.content].count("tool_use") == calls
    assert streamed.stop_reason == whole.stop_reason == ("tool_use" if calls else "end_turn")
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert whole.usage.input_tokens == len(model.engine.requests[0].input_ids)
    counted = model.anthropic.messages.count_tokens(
        model=MODEL, messages=asked["messages"], tools=asked["tools"]
    )
    assert counted.input_tokens == whole.usage.input_tokens
    found = events(model.post("/v1/messages", {**asked, "stream": True})[1])
    strictly(RawMessageStreamEvent, found)
    assert [found[0]["type"], found[-1]["type"]] == ["message_start", "message_stop"]
    assert found[0]["message"]["usage"]["input_tokens"] == whole.usage.input_tokens


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_programs_send_is_answered(speak: Any, name: str) -> None:
    """Requests of Codex 0.169.0, and of Claude Code 2.1.197 and 2.1.330."""
    model, body = speak("Done."), RECORDED[name]
    if name == "claude-count-tokens":
        status, told = model.post("/v1/messages/count_tokens?beta=true", body)
        assert (status, list(json.loads(told))) == (200, ["input_tokens"])
        return
    path = "/v1/responses" if name.startswith("codex") else "/v1/messages?beta=true"
    status, told = model.post(path, body)
    assert status == 200, told
    assert said(told) == "Done."
    (prompt,) = model.engine.prompts
    assert ("[image left out" in prompt) == name.endswith("image")
    for text in texts_in(body.get("input") or body["messages"]):
        assert text in prompt


def said(told: str) -> str:
    """The text of an answer of either API, streamed or whole."""
    if told.startswith("{"):
        answer = json.loads(told)
        (item,) = answer.get("output") or answer["content"]
        text: str = item["text"] if "text" in item else item["content"][0]["text"]
        return text
    deltas = [event["delta"] for event in events(told) if event["type"].endswith("delta")]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def texts_in(value: Any) -> list[str]:
    """The texts of a conversation that the model has to see."""
    if isinstance(value, list):
        return [text for each in value for text in texts_in(each)]
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return texts_in(value["content"])
    if isinstance(value, dict) and value["type"] not in ("reasoning", "thinking"):
        found = [value[k] for k in ("text", "output") if isinstance(value.get(k), str)]
        return found + (texts_in(value["content"]) if "content" in value else [])
    return [value] if isinstance(value, str) else []


def test_tools_of_free_text_and_of_namespaces_come_back_as_they_were(speak: Any) -> None:
    """The model sees functions; the client gets the names and the text that it knows."""
    written = (
        '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a b\\"\\n"}}\n</tool_call>'
        '<tool_call>\n{"name": "agents__close", "arguments": {"id": 1}}\n</tool_call>'
    )
    model = speak(written)
    inner = {"type": "function", "name": "close", "parameters": WEATHER["parameters"]}
    tools = [
        {"type": "custom", "name": "shell", "format": {"type": "text"}},
        {"type": "namespace", "name": "agents", "description": "", "tools": [inner]},
        {"type": "web_search"},
    ]
    found = events(
        model.post("/v1/responses", {"model": MODEL, "input": "x", "tools": tools, "stream": True})[
            1
        ]
    )
    free, called = found[-1]["response"]["output"]
    assert (free["type"], free["name"], free["input"]) == (
        "custom_tool_call",
        "shell",
        'ls "a b"\n',
    )
    assert (called["type"], called["name"], called["namespace"]) == (
        "function_call",
        "close",
        "agents",
    )
    history = [
        {"type": "message", "role": "user", "content": "x"},
        free,
        called,
        {"type": "custom_tool_call_output", "call_id": free["call_id"], "output": "a b"},
        {"type": "function_call_output", "call_id": called["call_id"], "output": "closed"},
    ]
    assert model.post("/v1/responses", {"model": MODEL, "input": history, "tools": tools})[0] == 200
    assert "a b" in model.engine.prompts[-1] and "closed" in model.engine.prompts[-1]


@pytest.mark.parametrize(
    ("tool", "arguments", "made", "output", "read"),
    [
        (
            {"type": "shell", "environment": {"type": "local"}},
            '{"commands": ["ls -l"], "timeout_ms": 5}',
            {"action": {"commands": ["ls -l"], "timeout_ms": 5, "max_output_length": None}},
            {"output": [{"stdout": "total 0", "stderr": "", "outcome": {"type": "exit"}}]},
            "total 0",
        ),
        ({"type": "shell"}, '{"commands": ["ls', {"action": {"commands": []}}, {}, ""),
        ({"type": "shell"}, '{"commands": "ls"}', {"action": {"commands": []}}, {}, ""),
        (
            {"type": "local_shell"},
            '{"command": ["ls"], "env": {"A": "b"}}',
            {"action": {"type": "exec", "command": ["ls"], "env": {"A": "b"}}},
            {"output": "total 0"},
            "total 0",
        ),
        (
            {"type": "apply_patch"},
            '{"type": "create_file", "path": "a.py", "diff": "+x"}',
            {"operation": {"type": "create_file", "path": "a.py", "diff": "+x"}},
            {"output": "no such folder", "status": "failed"},
            "failed\nno such folder",
        ),
    ],
)
def test_tools_that_the_client_runs_are_called_in_their_own_form(
    speak: Any, tool: Any, arguments: str, made: Any, output: Any, read: str
) -> None:
    """A call that cannot be read runs nothing. What it has returned is read, too."""
    kind = tool["type"]
    written = f'<tool_call>\n{{"name": "{kind}", "arguments": {arguments}}}\n</tool_call>'
    model = speak(written)
    asked = {"model": MODEL, "input": "x", "tools": [tool], "tool_choice": {"type": kind}}
    assert model.openai.responses.create(**{**asked, "tool_choice": "auto"}).output
    assert model.post("/v1/responses", asked)[0] == 200
    found = events(model.post("/v1/responses", {**asked, "tool_choice": "auto", "stream": True})[1])
    strictly(ResponseStreamEvent, found)
    (item,) = found[-1]["response"]["output"]
    assert item["type"] == f"{kind}_call"
    for key, value in made.items():
        assert {name: item[key][name] for name in value} == value
    result = {"type": f"{kind}_call_output", "call_id": item["call_id"], **output}
    if kind == "local_shell":
        result["id"] = result.pop("call_id")
    history = [{"role": "user", "content": "x"}, item, *([result] if output else [])]
    for more in (
        {"input": history},
        {"input": [result], "previous_response_id": found[-1]["response"]["id"]},
    ):
        if output:
            status, told = model.post("/v1/responses", {**asked, "tool_choice": "auto", **more})
            assert status == 200, told
            assert read in model.engine.prompts[-1]


def test_a_shell_that_openai_runs_is_left_out(speak: Any) -> None:
    model = speak("Done.")
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    body = {"input": "x", "tools": [hosted], "tool_choice": "required"}
    assert said(model.post("/v1/responses", body)[1]) == "Done."


def test_the_form_of_an_answer_is_repeated_whole(speak: Any) -> None:
    form = {"type": "json_schema", "name": "a", "description": "An a.", "schema": {}}
    status, told = speak("{}").post("/v1/responses", {"input": "x", "text": {"format": form}})
    assert status == 200, told
    assert json.loads(told)["text"]["format"] == {**form, "strict": True}


TURN = {"role": "user", "content": "x"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def without(item: dict[str, str], field: str) -> dict[str, str]:
    return {key: value for key, value in item.items() if key != field}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": [TURN, without(CALLED, "arguments")]}, "input[1].arguments"),
        ({"input": [TURN, without(CALLED, "call_id")]}, "input[1].call_id"),
        ({"input": [without(TURN, "role")]}, "input[0].role"),
        ({"input": [TURN | {"role": "king"}]}, "input[0].role"),
        ({"input": [TURN, {"type": "custom_tool_call", "call_id": "c"}]}, "input[1].name"),
        ({"input": [TURN, {"type": "function_call_output", "output": ""}]}, "input[1].call_id"),
        ({"input": [{"type": "additional_tools"}]}, "input[0].tools"),
        ({"tool_choice": ""}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}},
            "tool_choice.tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "bell"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 1}]}, "tools[0].tools"),
    ],
)
def test_what_responses_cannot_use_is_named(speak: Any, asked: dict[str, Any], param: str) -> None:
    """By its place in the request; the engine hears of none."""
    model = speak("Done.")
    function = {"type": "function", "name": "f", "parameters": {}}
    body = {"model": MODEL, "input": "x", "tools": [function], **asked}
    status, told = model.post("/v1/responses", body)
    error = json.loads(told)["error"]
    assert (status, error["param"]) == (400, param), error
    assert param in error["message"]
    assert not model.engine.requests


def test_reasoning_items_may_be_empty_or_have_either_text(speak: Any) -> None:
    """Codex sends back what it was given, of which other servers fill one field or none."""
    model = speak("Done.")
    text = {"type": "summary_text", "text": "Thought."}
    for item in (
        {"type": "reasoning", "summary": []},
        {"type": "reasoning", "summary": [text], "content": None, "encrypted_content": "a"},
        {"type": "reasoning", "summary": [], "content": [text | {"type": "reasoning_text"}]},
    ):
        status, _ = model.post("/v1/responses", {"model": MODEL, "input": [TURN, item, TURN]})
        assert status == 200


def test_arguments_that_are_not_json_do_not_end_a_conversation(speak: Any) -> None:
    """Codex sends back what the model wrote; a template that wants an object gets one."""
    model = speak("Done.")
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"cmd": "ls'}
    result = {"type": "function_call_output", "call_id": "c", "output": "failed to parse"}
    turn = {"type": "message", "role": "user", "content": "x"}
    model.openai.responses.create(model=MODEL, input=[turn, call, result])
    transcript = Transcript()
    transcript.call("c", "f", call["arguments"])
    transcript.call("d", "f", '{"cmd": "ls"}')
    given = [each["function"]["arguments"] for each in transcript.messages[0]["tool_calls"]]
    assert given == ['{"arguments":"{\\"cmd\\": \\"ls"}', '{"cmd": "ls"}']


def test_room_and_stop_strings_are_told_apart(speak: Any) -> None:
    """Agents ask for more tokens than the model has: they get what there is."""
    script = Script(vocab_size=tokenizer().model_vocab_size, max_sequence_tokens=40)
    model = speak("one two three four five six " * 40, script)
    turn = [{"role": "user", "content": "Count."}]
    full = model.anthropic.messages.create(model=MODEL, max_tokens=20000, messages=turn)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 40
    cut = model.anthropic.messages.create(model=MODEL, max_tokens=5, messages=turn)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    stopped = model.anthropic.messages.create(
        model=MODEL, max_tokens=99, messages=turn, stop_sequences=["nine", "three"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    response = model.openai.responses.create(model=MODEL, input="Count.", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("whole", "rest", "statuses"),
    [
        ("<think>\nHm\n</think>", "\n\nSo it is", ["completed"]),
        ("I look." + CALL[:-13], CALL[-13:], ["completed", "completed"]),
        ("I look." + CALL[:-30], CALL[-30:], ["completed", "incomplete"]),
        ("I look", " here.", ["incomplete"]),
    ],
)
def test_a_part_that_ended_before_the_cut_is_completed(
    speak: Any, whole: str, rest: str, statuses: list[str], stream: bool
) -> None:
    """The response is incomplete all the same."""
    ids = tokenizer().encode(whole + rest, add_special_tokens=False)
    texts = [tokenizer().decode(ids[:count], False) for count in range(len(ids))]
    tokens = next(count for count, text in enumerate(texts) if text.startswith(whole))
    model = speak(whole + rest)
    tool = {"type": "function", **WEATHER}
    body = {"input": "Hi", "tools": [tool], "max_output_tokens": tokens, "stream": stream}
    status, told = model.post("/v1/responses", body)
    assert status == 200, told
    response = events(told)[-1]["response"] if stream else json.loads(told)
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == statuses


@pytest.mark.parametrize(
    "told",
    [
        from_wire(to_wire(PromptTooLong("input_ids", 70000, 64))),
        PromptTooLong("messages", 70000, 64),
    ],
)
def test_a_prompt_that_is_too_long_has_the_words_for_which_agents_compact(
    told: Exception,
) -> None:
    """Whoever noticed it: the engine, or the server, which knows the engine's limit."""
    error = api_error(told, "messages", None)
    message = error_answer(error)[1]["message"]
    assert message == "prompt is too long: 70000 tokens > 64 maximum"


def test_errors_have_the_form_that_each_client_reads(speak: Any) -> None:
    """Too long a prompt in the words that each program looks for, and other errors by status."""
    script = Script(vocab_size=tokenizer().model_vocab_size, max_sequence_tokens=30)
    model = speak("Done.", script)
    long = "word " * 100
    with pytest.raises(anthropic.BadRequestError) as told:
        model.anthropic.messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": long}]
        )
    error: Any = told.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith("prompt is too long: ")
    assert error["error"]["message"].endswith(" tokens > 29 maximum")
    assert told.value.response.headers["request-id"] == error["request_id"]
    with pytest.raises(openai.BadRequestError) as too_long:
        model.openai.responses.create(model=MODEL, input=long)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        model.anthropic.messages.create(
            model="other", max_tokens=9, messages=[{"role": "user", "content": "x"}]
        )
    for field, value in (("conversation", "conv_1"), ("background", True)):
        with pytest.raises(openai.BadRequestError, match=f"{field}: is not supported"):
            model.openai.responses.create(model=MODEL, input="x", **{field: value})


def test_a_full_server_is_overloaded(speak: Any) -> None:
    """In Anthropic's words and with its status, and when to come again."""
    engine = SpeakingEngine(tokenizer(), lambda prompt: "Done.")
    backend = ScriptedBackend(engine, admission=Admission(1, 0, None))
    model = speak("Done.", backend=backend)
    engine.fault = Fault()
    turn = [{"role": "user", "content": "x"}]
    with closing(HTTPConnection(model.api.host, model.api.port, timeout=60)) as held:
        asked = json.dumps({"model": MODEL, "input": "x"})
        held.request("POST", "/v1/responses", asked, {"content-type": "application/json"})
        until(lambda: engine.requests)
        with pytest.raises(anthropic.InternalServerError) as told:
            model.anthropic.messages.create(model=MODEL, max_tokens=9, messages=turn)
    error: Any = told.value.body
    assert (told.value.status_code, error["error"]["type"]) == (529, "overloaded_error")
    assert int(told.value.response.headers["retry-after"]) >= 1
    until(lambda: not engine.live)


def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error(speak: Any) -> None:
    """In the event that each client knows."""
    model = speak("one two three")
    model.engine.fault = Fault(error=EngineError("the engine is lost"), after_tokens=2)
    asked = {"model": MODEL, "input": "x", "stream": True}
    last = events(model.post("/v1/responses", asked)[1])[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine is lost"}
    turn = {"role": "user", "content": "x"}
    asked = {"model": MODEL, "max_tokens": 9, "messages": [turn], "stream": True}
    last = events(model.post("/v1/messages", asked)[1])[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_client_that_waits_is_sent_events(speak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments would not reset the idle timer of Codex, and OpenAI's own packages, whose types are
    checked here, know no ``ping``."""
    monkeypatch.setattr(generating, "_PING_S", 0.02)
    script = Script(vocab_size=tokenizer().model_vocab_size, prefill_seconds=0.02)
    model = speak("Done.", script)
    asked = {"model": MODEL, "input": "x", "stream": True}
    found = events(model.post("/v1/responses", asked)[1])
    strictly(ResponseStreamEvent, found)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    told = [event["type"] for event in found]
    assert told[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert told[-1] == "response.completed"
    turn = {"role": "user", "content": "x"}
    asked = {"model": MODEL, "max_tokens": 9, "messages": [turn], "stream": True}
    told = [event["type"] for event in events(model.post("/v1/messages", asked)[1])]
    assert told[:2] == ["message_start", "ping"] and told[-1] == "message_stop"
    monkeypatch.setattr(generating, "_PING_S", 3600.0)
    model.post("/v1/messages", asked)
    until(lambda: not pinging())  # none outlives its stream


def pinging() -> list[Any]:
    """The tasks that send such events."""
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    return [each for each in tasks if each.get_coro().__name__ == "_ping" and not each.done()]


def test_keys_come_in_either_header(speak: Any, tmp_path: Path) -> None:
    """Claude Code sends ``x-api-key`` or a bearer token, by how it is configured."""
    file = tmp_path / "keys"
    file.write_text("secret\n")
    model = speak("Done.", keys=read_keys(file))
    turn = {"role": "user", "content": "x"}
    body = {"model": MODEL, "max_tokens": 9, "messages": [turn]}
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        found, told = model.post("/v1/messages", body, headers)
        assert found == status
        if status == 401:
            assert json.loads(told)["error"]["type"] == "authentication_error"


def test_an_adapter_is_a_model_by_its_name(speak: Any) -> None:
    """Of every API; the engine is given its task id, or its name."""
    model = speak("Done.", loras={"math": "7", "poems": ""})
    cards = {card.id: card for card in model.openai.models.list()}
    assert list(cards) == [MODEL, "math", "poems"]
    assert cards["math"].model_dump()["parent"] == MODEL
    turn = [{"role": "user", "content": "x"}]
    model.openai.responses.create(model="math", input="x")
    model.anthropic.messages.create(model="poems", max_tokens=9, messages=turn)
    model.openai.chat.completions.create(model=MODEL, messages=turn)
    adapters = [request.adapter for request in model.engine.requests]
    assert adapters == [Adapter(task_id=7), Adapter(name="poems"), None]


@pytest.mark.parametrize("wrong", ["math=x", "=7", "math=-1", f"math={2**64}"])
def test_a_task_id_is_a_number(wrong: str) -> None:
    """Refused before anything is served."""
    told = CliRunner().invoke(main, ["openai", "--lora", wrong])
    assert told.exit_code == 2 and "must be NAME or NAME=TASK_ID" in told.output


def test_logs_and_metrics_tell_the_api(speak: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of each request that is over."""
    model = speak("Done.")
    turn = [{"role": "user", "content": "x"}]
    with caplog.at_level("INFO"):
        model.openai.responses.create(model=MODEL, input="x")
        model.anthropic.messages.create(model=MODEL, max_tokens=9, messages=turn)
        until(lambda: "api=message outcome=success" in caplog.text)
    assert "api=response outcome=success" in caplog.text
    with urllib.request.urlopen(f"{model.api.url}/metrics", timeout=60) as answer:
        told = answer.read().decode()
    for api in ("response", "message"):
        labels = f'api="{api}",outcome="success",model="{MODEL}"'
        assert f"trtllm_bls_api_requests_total{{{labels}}} 1\n" in told


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat.completion"),
        ("/v1/completions", "text_completion"),
        ("/v1/responses", "response"),
        ("/v1/responses/compact", "response.compaction"),
        ("/v1/messages", "message"),
    ],
)
@pytest.mark.parametrize("body", [b"{", b'{"model": "unknown"}'])
def test_metrics_tell_the_api_of_a_refused_request(
    speak: Any, path: str, api: str, body: bytes
) -> None:
    """Also where nobody could read what it asks for: it is over, too."""
    model = speak("Done.")
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{model.api.url}{path}", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()

    def is_counted() -> bool:
        with urllib.request.urlopen(f"{model.api.url}/metrics", timeout=60) as answer:
            labels = f'api="{api}",outcome="refused",model="{MODEL}"'
            return f"trtllm_bls_api_requests_total{{{labels}}} 1\n" in answer.read().decode()

    until(is_counted)


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_where_the_agent_wants_one_at_a_time(speak: Any, parallel: bool) -> None:
    """Each API says so in its own way."""
    model = speak(CALL + OTHER)
    function = {"type": "function", "name": "get_weather", "parameters": WEATHER["parameters"]}
    response = model.openai.responses.create(
        model=MODEL, input="Hi", tools=[function], parallel_tool_calls=parallel
    )
    assert response.parallel_tool_calls == parallel
    message = model.anthropic.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{**WEATHER, "input_schema": WEATHER["parameters"]}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": not parallel},
    )
    for items, kind in ((response.output, "function_call"), (message.content, "tool_use")):
        assert [item.type for item in items].count(kind) == 1 + parallel


def ended(kind: Any, builder: Any, body: dict[str, Any], ending: Ending | None = None) -> Any:
    """The builder of a response to ``body``, whose answer has ended so."""
    request = decode(json.dumps({"model": MODEL, **body}).encode(), kind)
    response = builder(request, ChatModel(tokenizer(), ChatTurns(tokenizer())))
    response.add(0, TextChunk("a", 0, ending))
    return response


@pytest.mark.parametrize(
    ("reason", "told"),
    [(FinishReason.LENGTH, "model_context_window_exceeded"), (FinishReason.TIMEOUT, "max_tokens")],
)
def test_a_message_whose_time_is_up_did_not_fill_the_model(reason: FinishReason, told: str) -> None:
    """Claude Code would compact its conversation, which is not too long."""
    ending = Ending(finish_reason=reason, prompt_tokens=1, completion_tokens=9)
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    response = ended(MessagesRequest, MessagesResponse, body, ending)
    assert json.loads(response.whole())["stop_reason"] == told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(400, "no", code="context_length_exceeded"), "context_length_exceeded"),
        (ApiError(400, "no", code="other"), "invalid_prompt"),
        (ApiError(429, "no", code="overloaded"), "rate_limit_exceeded"),
        (ApiError(503, "no", code="engine_unavailable"), "server_error"),
    ],
)
def test_a_stream_that_fails_says_why_in_the_apis_words(error: ApiError, code: str) -> None:
    """Codex compacts its conversation, tries again, or gives up, by them."""
    response = ended(ResponsesRequest, ResponsesResponse, {"input": "Hi", "stream": True})
    (event,) = events(response.failed(error).decode())
    assert event["response"]["error"] == {"code": code, "message": "no"}
