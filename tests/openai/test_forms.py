"""Tool calls, reasoning, structured output and predictions, as the ``openai`` package sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from click.testing import CliRunner

from doubles.scripted import ScriptedEngine
from tests.helpers.openai_server import MODEL, ScriptedBackend, serving
from tests.helpers.scripted_text import saying, tokenizer
from tests.openai.conftest import Connect
from trtllm_bls.cli import main
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.completions import CompletionResponse
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.schema import ChatCompletionRequest, CompletionRequest, decode
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import Ending, FinishReason, Guide, SpeculationStats, TextChunk, TextRequest

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "target"
HELLO: Any = [{"role": "user", "content": "Hi"}]
ARGS = '{"city": "Oslo", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
            "required": ["city", "warm"],
            "additionalProperties": False,
        },
    },
}
PING: Any = {"type": "function", "function": {"name": "ping"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def chatting(text: str) -> ScriptedEngine:
    """Says ``text`` to the conversation."""
    ids = tokenizer().encode(tokenizer().render_chat(HELLO), add_special_tokens=False)
    return saying(text, tokenizer().decode(ids[1:], skip_special_tokens=False))


# --- what a model writes by itself ------------------------------------------------------------


def test_a_tool_call_is_read(connect: Connect) -> None:
    """Whole and streamed agree; arguments are a string, the name comes once and first."""
    _, client = connect(chatting(f"I look.\n{CALL}"), tool_parser="hermes")
    ask: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER]}
    (choice,) = client.chat.completions.create(**ask).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("weather", ARGS)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    calls = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert [each.function.name for each in calls if each.function and each.function.name] == [
        "weather"
    ]
    assert len([each for each in calls if each.id]) == 1 and calls[0].id
    assert "".join(each.function.arguments or "" for each in calls if each.function) == ARGS
    assert len(calls) > 2
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    assert chunks[-1].finish_reason == "tool_calls"


def test_log_probs_of_a_token_come_once(connect: Connect) -> None:
    """Also where it completes a call's name and begins the arguments, which are two events."""
    _, client = connect(
        chatting(f'{{"name": "f", "parameters": {ARGS}}}'), tool_parser="llama3_json"
    )
    ask: Any = {"model": MODEL, "messages": HELLO, "tools": [PING], "logprobs": True}
    (whole,) = client.chat.completions.create(**ask).choices
    assert whole.message.tool_calls and whole.logprobs and whole.logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    scored = [entry for c in chunks for entry in (c.logprobs and c.logprobs.content) or ()]
    assert scored == whole.logprobs.content


def test_a_cut_answer_has_ended_by_its_length(connect: Connect) -> None:
    """Also in the middle of a call."""
    _, client = connect(chatting(CALL), tool_parser="hermes")
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], max_tokens=45
    )
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "length"


def test_a_call_is_text_where_no_tool_may_be_called(connect: Connect) -> None:
    """Without tools, with tool_choice none, and where the server has no parser."""
    _, client = connect(chatting(CALL), tool_parser="hermes")
    _, bare = connect(chatting(CALL), tool_parser="none")
    asked: list[tuple[Any, Any]] = [(client, {}), (client, {"tool_choice": "none"}), (bare, {})]
    for place, (server, more) in enumerate(asked):
        tools = {"tools": [WEATHER]} if place else {}
        answer = server.chat.completions.create(model=MODEL, messages=HELLO, **tools, **more)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"


def test_a_message_of_calls_alone_has_no_content(connect: Connect) -> None:
    """It is null and not an empty string, as OpenAI has it; without calls it is a string."""
    for text, content in ((CALL, None), ("", "")):
        _, client = connect(chatting(text), tool_parser="hermes")
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[WEATHER])
        assert answer.choices[0].message.content == content


def test_what_may_become_a_call_and_does_not_is_text(connect: Connect) -> None:
    """It is held back until the answer ends, and not lost."""
    _, client = connect(chatting("I look. <tool_c"), tool_parser="hermes")
    ask: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER]}
    (choice,) = client.chat.completions.create(**ask).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "I look. <tool_c")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look. <tool_c"


def test_a_call_that_a_stop_string_cuts_ends_the_answer_as_text(connect: Connect) -> None:
    """A caller that reads ``tool_calls`` would run half of it."""
    _, client = connect(chatting(CALL), tool_parser="hermes")
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], stop=["}"]
    )
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"


def test_one_call_where_parallel_ones_are_not_wanted(connect: Connect) -> None:
    """Further ones are left out."""
    _, client = connect(chatting(CALL + CALL), tool_parser="hermes")
    for parallel, count in ((True, 2), (None, 2), (False, 1)):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[WEATHER], parallel_tool_calls=parallel
        )
        assert len(answer.choices[0].message.tool_calls or ()) == count


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=warm>\ntrue\n</parameter>\n</function>",
        ),
        ("pythonic", "[weather(warm=True)]"),
    ],
)
def test_a_call_that_is_not_json_becomes_json(connect: Connect, parser: str, text: str) -> None:
    """With values of the types that the tool's schema has, and only of tools that there are."""
    _, client = connect(chatting(text), tool_parser=parser)
    (choice,) = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"warm": True})
    if parser == "pythonic":
        other = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[PING])
        assert other.choices[0].message.content == text


def allowing(mode: str, *names: str) -> Any:
    """A ``tool_choice`` of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


class Opening:
    """A tokenizer whose chat template begins the answer's reasoning."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def prompt_end(self, options: Any) -> str:
        return tokenizer().render_chat(HELLO, options) + "<think>"


def response_to(
    formats: ChatFormats | None = None, reader: Any = None, **asked: Any
) -> ChatResponse:
    """The builder of the response to a chat."""
    body = json.dumps({"model": MODEL, "messages": HELLO, **asked}).encode()
    turns = ChatTurns(reader or tokenizer(), formats or ChatFormats())
    model = ChatModel(reader or tokenizer(), turns)
    return ChatResponse(decode(body, ChatCompletionRequest), model)


def message_of(response: ChatResponse, text: str) -> dict[str, Any]:
    """The message of an answer that has this text."""
    ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9)
    response.add(0, TextChunk(text, 0, ending))
    found: dict[str, Any] = json.loads(response.whole())["choices"][0]["message"]
    return found


def test_reasoning_that_the_prompt_has_begun_needs_no_tag() -> None:
    """Some templates end with the tag."""
    thinks = ChatFormats(reasoning=REASONING_TAGS["think"])
    message = message_of(response_to(thinks, Opening()), "Two.</think>Four.")
    assert (message["reasoning_content"], message["content"]) == ("Two.", "Four.")
    assert message_of(response_to(thinks), "Two.</think>Four.")["content"] == "Two.</think>Four."


def test_messages_of_harmony_are_told_apart_without_tools() -> None:
    """Or where none may be called."""
    harmony = ChatFormats(TOOL_FORMATS["harmony"], REASONING_TAGS["harmony"])
    text = "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>4"
    for asked in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = message_of(response_to(harmony, **asked), text)
        assert (message["reasoning_content"], message["content"]) == ("2+2", "4")


@pytest.mark.parametrize("family", [name for name in TOOL_FORMATS if name != "harmony"])
@pytest.mark.parametrize("thought", ["", "Warm?"])
def test_a_demanded_call_is_json_whatever_the_family(family: str, thought: str) -> None:
    """The engine's guide is the same schema for all, behind the model's own reasoning."""
    tags = REASONING_TAGS.get(family, REASONING_TAGS["think"])
    response = response_to(
        ChatFormats(TOOL_FORMATS[family], tags), tools=[PING, WEATHER], tool_choice=NAMED
    )
    (request,) = response.requests
    assert request.guide is not None and request.guide.kind == "structural_tag"
    text = '[{"name": "weather", "arguments": {"warm": true}}]'
    if thought:
        text = f"{tags.begin}{thought}{tags.end}\n\n{text}"
    message = message_of(response, text)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"warm": true}'}
    assert message["content"] is None and message.get("reasoning_content", "") == thought


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>Warm?<|end|>"])
def test_a_demanded_call_of_harmony_is_one_of_its_messages(thought: str) -> None:
    """All that the model writes has a header, so JSON alone would be none of its texts."""
    harmony = ChatFormats(TOOL_FORMATS["harmony"], REASONING_TAGS["harmony"])
    response = response_to(harmony, tools=[PING, WEATHER], tool_choice=NAMED)
    (request,) = response.requests
    assert request.guide is not None and "to=functions.weather" in (request.guide.text or "")
    assert "to=functions.ping" not in (request.guide.text or "")
    text = thought + "<|start|>assistant" * bool(thought)
    text += "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    (call,) = message_of(response, text + '{"warm": true}')["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"warm": true}'}


def test_a_model_without_reasoning_is_guided_from_the_first_token() -> None:
    """By the schema alone, which every engine's guided decoding takes."""
    plain = ChatFormats(TOOL_FORMATS["hermes"])
    for demand in ({"tools": [WEATHER], "tool_choice": NAMED}, {"response_format": OBJECT}):
        (request,) = response_to(plain, **demand).requests
        assert request.guide is not None and request.guide.kind in ("json", "json_schema")


def test_an_enforced_form_comes_behind_the_reasoning() -> None:
    """The prompt has begun it; the guide ends it, and only then demands the form."""
    thinks = ChatFormats(reasoning=REASONING_TAGS["think"])
    response = response_to(thinks, Opening(), response_format=OBJECT)
    (request,) = response.requests
    assert request.guide is not None
    tag = json.loads(request.guide.text or "")["format"]
    assert tag["elements"][0]["end"] == "</think>"
    message = message_of(response, 'An object.</think>\n\n{"a": 1}')
    assert (message["reasoning_content"], message["content"]) == ("An object.", '{"a": 1}')


def test_markers_that_are_special_tokens_are_kept() -> None:
    """Where they are looked for; other special tokens are left out as ever."""
    special, plain = (ChatFormats(TOOL_FORMATS[name]) for name in ("mistral", "hermes"))
    thinks = ChatFormats(reasoning=REASONING_TAGS["mistral"])
    harmony = ChatFormats(TOOL_FORMATS["harmony"], REASONING_TAGS["harmony"])
    for formats, more, marker in (
        (special, {"tools": [PING]}, "[TOOL_CALLS]"),
        (special, {}, None),
        (special, {"tools": [PING], "skip_special_tokens": True}, "[TOOL_CALLS]"),
        (plain, {"tools": [PING]}, "<tool_call>"),
        (thinks, {}, "[THINK]"),
        (harmony, {}, "<|channel|>"),
    ):
        request = response_to(formats, **more).requests[0]
        assert request.skip_special_tokens is more.get("skip_special_tokens")
        assert request.markup is not None
        assert (marker or "") in request.markup.markers
        assert bool(request.markup.markers) is bool(marker)


def text_request(**asked: Any) -> TextRequest:
    """What the orchestrator is given for a chat."""
    return response_to(**asked).requests[0]


def test_templates_get_a_variable_as_the_request_has_it() -> None:
    """``chat_template_kwargs`` is the more particular place."""
    for given, effort in (({}, "low"), ({"reasoning_effort": "high"}, "high")):
        chat = text_request(reasoning_effort="low", chat_template_kwargs=given).chat
        assert chat.variables == {"reasoning_effort": effort}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_find_earlier_reasoning_by_either_name(name: str) -> None:
    """Clients send one, templates look for one."""
    said = {"role": "assistant", "content": "4", name: "2+2"}
    *_, message = text_request(messages=[*HELLO, said]).messages or ()
    assert (message["reasoning"], message["reasoning_content"]) == ("2+2", "2+2")


def test_a_chat_has_at_most_max_completion_tokens() -> None:
    """``max_tokens`` is the older name."""
    assert text_request(max_tokens=9).max_tokens == 9
    assert text_request(max_tokens=9, max_completion_tokens=5).max_tokens == 5


def test_tools_that_are_not_allowed_are_not_shown(connect: Connect) -> None:
    """The template gets the others; what the model calls of them is read as ever."""
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER, PING]}
    asked["tool_choice"] = allowing("auto", "weather")
    assert text_request(**asked).chat.tools == [WEATHER]
    _, client = connect(chatting(CALL), tool_parser="hermes")
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_reasoning_is_a_field_of_its_own(connect: Connect) -> None:
    """Whole and streamed, with the log-probs of all tokens."""
    _, client = connect(chatting("<think>Two and two.</think>\n\nFour."), reasoning_parser="think")
    ask: Any = {"model": MODEL, "messages": HELLO, "logprobs": True}
    (choice,) = client.chat.completions.create(**ask).choices
    message = choice.message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    deltas = [chunk.delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Two and two."
    assert "".join(delta["content"] or "" for delta in deltas) == "Four."
    scored = [
        token for chunk in chunks for token in (chunk.logprobs and chunk.logprobs.content) or ()
    ]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(scored) == len(choice.logprobs.content)


# --- what is enforced -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    """The demo model, which knows nothing of tools."""
    sizes = {"max_batch": 4, "max_sequence_tokens": 512, "threads": 1}
    engine = RoutingEngine(EmbeddedEngine(EngineParameters(model_dir=DEMO, **sizes)))
    backend = ScriptedBackend(engine, tokenizer=load_tokenizer(DEMO))
    with serving(engine, backend, tool_parser="hermes") as api:
        client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0)
        with client:
            yield client


OBJECT: Any = {"type": "json_object"}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def called(
    client: openai.OpenAI, stream: bool, **asked: Any
) -> tuple[str | None, str, str, str | None]:
    """The name and arguments of the one call, ``None`` and none where there is none; the content;
    and why the answer ended."""
    asked = {"model": MODEL, "messages": HELLO, "temperature": 0, **asked}
    calls: list[Any]
    if stream:
        chunks = [
            chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)
        ]
        calls = [each.function for chunk in chunks for each in chunk.delta.tool_calls or ()]
        content, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        (answer,) = client.chat.completions.create(**asked).choices
        calls = [each.function for each in answer.message.tool_calls or ()]
        content, reason = answer.message.content or "", answer.finish_reason
    names = [call.name for call in calls if call.name]
    assert len(names) <= 1
    arguments = "".join(call.arguments or "" for call in calls)
    return (names[0] if names else None), arguments, content, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([WEATHER], "required"),
        ([PING, WEATHER], NAMED),
        ([PING, WEATHER], allowing("required", "weather")),
    ],
)
def test_a_demanded_call_is_made(
    real: openai.OpenAI, tools: list[Any], choice: Any, stream: bool
) -> None:
    """By a model that would not: its arguments are valid, and there is no other text."""
    asked: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    name, arguments, *rest = called(real, stream, max_tokens=100, **asked)
    assert (name, *rest) == ("weather", "", "tool_calls")
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "choice"), [([PING, WEATHER], NAMED), ([WEATHER], "required"), ([PING], "required")]
)
def test_a_demanded_call_that_is_cut_is_a_call_without_its_end(
    real: openai.OpenAI, tools: list[Any], choice: Any, stream: bool
) -> None:
    """As OpenAI and vLLM send it: the name, what there is of the arguments, ``length``."""
    asked: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    wanted, whole, *_ = called(real, False, max_tokens=100, **asked)
    cut = [called(real, stream, max_tokens=most, **asked) for most in (1, 2, 4, 7, 10, 12)]
    for name, arguments, content, reason in cut:
        assert (name, content, reason) == (wanted, "", "length")
        assert whole.startswith(arguments)
    assert cut[0][1] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_tools_one_is_called_once_its_name_is_there(
    real: openai.OpenAI, stream: bool
) -> None:
    """Until then there is neither a call nor content."""
    asked: Any = {"tools": [PING, WEATHER], "tool_choice": "required"}
    assert called(real, stream, max_tokens=3, **asked) == (None, "", "", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_text_beside_tools_keeps_the_schema(real: openai.OpenAI, stream: bool) -> None:
    """The model may call, in its own form; this one does not."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked: Any = {"tools": [WEATHER], "response_format": form, "max_tokens": 100}
    name, _, content, reason = called(real, stream, **asked)
    assert (name, reason) == (None, "stop")
    jsonschema.validate(json.loads(content), PERSON)


def test_only_json_can_stand_beside_tools() -> None:
    """No engine's structural tag has our grammars."""
    with pytest.raises(InvalidRequest, match="structured_outputs: cannot be combined with tools"):
        response_to(
            ChatFormats(TOOL_FORMATS["hermes"]),
            tokenizer(),
            tools=[WEATHER],
            structured_outputs={"regex": "a"},
        )


def test_a_schema_is_kept(real: openai.OpenAI) -> None:
    """In every choice, sampled at any temperature, streamed or not."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked: Any = {"model": MODEL, "messages": HELLO, "response_format": form, "max_tokens": 100}
    answer = real.chat.completions.create(**asked, n=3, temperature=1.8, seed=4)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    chunks = real.chat.completions.create(**asked, stream=True, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("name", ["structured_outputs", "guided"])
@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"choice": ["yes", 'no "no"']}, ["yes", 'no "no"']),
        ({"regex": "(left|right)!"}, ["left!", "right!"]),
        ({"grammar": 'root ::= "a" | "b"'}, ["a", "b"]),
        ({"json": {"enum": [1, 2]}}, ["1", "2"]),
    ],
)
def test_other_forms_are_kept(
    real: openai.OpenAI, form: Any, allowed: list[str], name: str
) -> None:
    """By the fields that vLLM's clients send, in chats and completions."""
    extra = {name: form} if name != "guided" else {f"guided_{k}": v for k, v in form.items()}
    chat = real.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
    assert chat.choices[0].message.content in allowed
    text = real.completions.create(model=MODEL, prompt="Well", extra_body=extra)
    assert text.choices[0].text in allowed


def test_json_is_an_object(real: openai.OpenAI) -> None:
    """Unless it was cut, which is said."""
    answer = real.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=60
    )
    (choice,) = answer.choices
    if choice.finish_reason != "length":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "often"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [PING], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [PING], "tool_choice": allowing("required")},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [PING], "tool_choice": allowing("auto", "pong")},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tool_choice": allowing("auto", "ping")}, "tool_choice.allowed_tools.tools"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"xml": "a"}}}, "structured_outputs"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    real: openai.OpenAI, asked: dict[str, Any], param: str
) -> None:
    """Before anything is generated, with the field that the caller sent."""
    with pytest.raises(openai.BadRequestError) as caught:
        real.chat.completions.create(model=MODEL, messages=HELLO, **asked)
    assert caught.value.param == param


def test_a_demanded_tool_that_is_not_there_is_named_with_those_that_are(
    real: openai.OpenAI,
) -> None:
    choice: Any = {"type": "function", "function": {"name": "pong"}}
    tools: Any = [PING, WEATHER]
    with pytest.raises(openai.BadRequestError, match="no tool 'pong'; tools: ping, weather"):
        real.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, tool_choice=choice)


# --- predictions ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_drafted_from(connect: Connect, stream: bool) -> None:
    """The text is the model's own; usage tells how much of the prediction was right."""
    text = "one two three four five six seven eight nine ten eleven twelve"
    _, client = connect(RoutingEngine(chatting(text)))  # type: ignore[arg-type]
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 80, "temperature": 0}
    asked["prediction"] = {"type": "content", "content": text.replace("six", "VI")}
    if stream:
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        usage = chunks[-1].usage
    else:
        answer = client.chat.completions.create(**asked)
        said, usage = answer.choices[0].message.content or "", answer.usage
    assert said == text
    assert usage is not None and usage.completion_tokens_details is not None
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens or 0) > 5
    assert details.rejected_prediction_tokens is not None


def test_usage_parts_drafted_tokens_into_accepted_and_rejected() -> None:
    """Of a prediction's; tokens from other drafts are not among them."""
    response = response_to(prediction={"type": "content", "content": "ab"})
    drafts = SpeculationStats(drafted=9, accepted=8, predicted=7, predicted_accepted=5)
    ending = Ending(
        finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9, speculation=drafts
    )
    response.add(0, TextChunk("", 0, ending))
    details = json.loads(response.whole())["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}


def test_usage_counts_a_cached_prompt_once() -> None:
    """However many choices it has; of an engine that does not tell, nothing is said."""
    for cached, told in ((4, {"cached_tokens": 4}), (0, {"cached_tokens": 0}), (None, None)):
        response = response_to(n=3)
        for index in range(3):
            ending = Ending(
                finish_reason=FinishReason.STOP,
                prompt_tokens=5,
                completion_tokens=1,
                cached_tokens=cached,
            )
            response.add(index, TextChunk("", index, ending))
        assert json.loads(response.whole())["usage"].get("prompt_tokens_details") == told


def test_usage_sums_the_cached_tokens_of_all_prompts() -> None:
    """Each prompt of a completion counts its own."""
    body = json.dumps({"model": MODEL, "prompt": ["a", "b"]}).encode()
    response = CompletionResponse(decode(body, CompletionRequest), ChatModel(tokenizer()))
    for index, cached in enumerate((4, 3)):
        ending = Ending(
            finish_reason=FinishReason.STOP,
            prompt_tokens=5,
            completion_tokens=1,
            cached_tokens=cached,
        )
        response.add(index, TextChunk("", 0, ending))
    usage = json.loads(response.whole())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


def test_the_servers_variables_of_the_template_hold_where_a_request_sets_none() -> None:
    """A request's own come before them, also those that other fields become."""
    variables = {"enable_thinking": False, "reasoning_effort": "high"}
    turns = ChatTurns(tokenizer(), variables=variables)
    for fields, expected in (
        ({}, variables),
        ({"reasoning_effort": "low"}, {**variables, "reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {**variables, "enable_thinking": True},
        ),
    ):
        body = json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()
        response = ChatResponse(decode(body, ChatCompletionRequest), ChatModel(tokenizer(), turns))
        assert response.requests[0].chat.variables == expected


def test_variables_of_the_template_are_a_json_object() -> None:
    """Anything else is refused before a model is loaded."""
    told = CliRunner().invoke(main, ["openai", "--chat-template-kwargs", "thinking"])
    assert told.exit_code == 2 and "must be a JSON object, such as" in told.output


def test_a_demanded_call_takes_the_place_of_a_message_and_its_form() -> None:
    """``response_format`` is of a message; a form of the whole answer contradicts a call."""
    plain = ChatFormats(TOOL_FORMATS["hermes"])
    demand: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED}
    (alone,) = response_to(plain, **demand).requests
    (beside,) = response_to(plain, **demand, response_format=OBJECT).requests
    assert beside.guide == alone.guide
    with pytest.raises(InvalidRequest, match="tool_choice: demands a call, and regex another form"):
        response_to(plain, **demand, regex="a")


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"structured_outputs": {"json": {}}}, Guide("json_schema", "{}")),
        ({"structured_outputs": {"regex": ""}}, Guide("ebnf_grammar", 'root ::= ""')),
        ({"guided_json": {}}, Guide("json_schema", "{}")),
    ],
)
def test_an_empty_form_is_a_form(fields: dict[str, Any], guide: Guide) -> None:
    """Any JSON, or the empty text; neither is answered freely."""
    assert response_to(**fields).requests[0].guide == guide


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"grammar": ""}},
        {"structured_outputs": {"regex": "a", "json": {}}},
        {"structured_outputs": {"json": {}}, "response_format": OBJECT},
    ],
)
def test_no_form_and_two_forms_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="structured_outputs: "):
        response_to(**fields)
