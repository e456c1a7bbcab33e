"""Conversations that a text model cannot take as they are: read all the same, by every API."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import MODEL, ScriptedBackend, serving
from tests.helpers.scripted_text import tokenizer_with_tools
from tests.openai.test_agents import CALLED, RECORDED, TURN, Speaking, events, said
from trtllm_bls.openai import chat as chats
from trtllm_bls.openai import content, messages, responses
from trtllm_bls.openai.messages import MessagesRequest
from trtllm_bls.openai.responses import ResponsesRequest
from trtllm_bls.openai.schema import ChatCompletionRequest

PIXELS = base64.b64encode(b"\x89PNG" + bytes(77)).decode()
DEEP = '{"a": ' * 120 + "1" + "}" * 120
SENTENCE = (
    "[{} left out{}: this model reads text only. Tell the user; do not try to read it again.]"
)


@pytest.fixture
def speak() -> Iterator[Callable[..., Speaking]]:
    """Starts a server whose model says the given text, and is shown its tools."""
    with ExitStack() as stack:

        def start(text: str = "Done.", **settings: Any) -> Speaking:
            engine = SpeakingEngine(tokenizer_with_tools(), lambda prompt: text)
            backend = ScriptedBackend(engine, tokenizer_with_tools())
            api = stack.enter_context(serving(engine, backend, tool_parser="hermes", **settings))
            return Speaking(api, engine)

        yield start


def chat(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    turn = {"role": "user", "content": list(parts)}
    return "/v1/chat/completions", {"model": MODEL, "messages": [turn]}


def chat_tool(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [TURN, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c", "content": list(parts)})
    return "/v1/chat/completions", {"model": MODEL, "messages": turns}


def response(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}]}


def response_tool(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    output = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
    return "/v1/responses", {"input": [TURN, CALLED, output]}


def message(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    turn = {"role": "user", "content": list(parts)}
    return "/v1/messages", {"max_tokens": 9, "messages": [turn]}


def message_tool(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    turns = [TURN, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"max_tokens": 9, "messages": turns}


APIS = [chat, chat_tool, response, response_tool, message, message_tool]
URL = f"data:image/png;base64,{PIXELS}"
# What each part is to the model: kind, and what the sentence says of it.
UNREADABLE = [
    ({"type": "image_url", "image_url": {"url": URL}}, "image", "image/png, 81 bytes"),
    ({"type": "input_image", "image_url": URL, "detail": "high"}, "image", "image/png, 81 bytes"),
    ({"type": "input_image", "image_url": "https://a/b.png"}, "image", "https://a/b.png"),
    ({"type": "input_image", "file_id": "file-1"}, "image", "file-1"),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}},
        "image",
        "image/png, 81 bytes",
    ),
    ({"type": "image", "source": {"type": "url", "url": "https://a/b"}}, "image", "https://a/b"),
    (
        {"type": "document", "title": "a\nb", "source": {"type": "base64", "data": PIXELS}},
        "document",
        "81 bytes, a b",
    ),
    ({"type": "input_file", "filename": "a.pdf", "file_data": PIXELS}, "file", "81 bytes, a.pdf"),
    ({"type": "file", "file": {"file_id": "file-2"}}, "file", "file-2"),
    (
        {"type": "input_audio", "input_audio": {"data": PIXELS, "format": "wav"}},
        "audio",
        "81 bytes",
    ),
    ({"type": "hologram"}, "hologram", ""),
]
TEXT = base64.b64encode("Grüezi".encode()).decode()
READABLE = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Grüezi"}},
    {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": TEXT}},
    {"type": "document", "source": {"type": "content", "content": "Grüezi"}},
    {
        "type": "search_result",
        "title": "T",
        "source": "https://a",
        "content": [{"type": "text", "text": "Grüezi"}],
    },
    {"type": "input_file", "filename": "a", "file_data": f"data:text/markdown;base64,{TEXT}"},
    {"type": "refusal", "refusal": "Grüezi"},
    {"type": "words", "text": "Grüezi"},
]


@pytest.mark.parametrize("api", APIS)
def test_what_is_no_text_becomes_a_sentence(speak: Any, api: Any) -> None:
    """In every API, wherever content stands; it is counted, and its bytes reach no prompt."""
    model = speak()
    for part, kind, about in UNREADABLE:
        path, body = api({"type": "text", "text": "Look."}, part)
        status, told = model.post(path, body)
        assert status == 200, told
        prompt = model.engine.prompts[-1]
        assert SENTENCE.format(kind, f" ({about})" if about else "") in prompt
        assert "Look." in prompt and PIXELS not in prompt
    with urllib.request.urlopen(f"{model.api.url}/metrics", timeout=60) as answer:
        counts = dict(
            re.findall(r'unreadable_content_total{kind="(\w+)".*} (\d+)', answer.read().decode())
        )
    kinds = [kind if kind != "hologram" else "other" for _, kind, _ in UNREADABLE]
    assert counts == {kind: str(kinds.count(kind)) for kind in kinds}


@pytest.mark.parametrize("api", APIS)
def test_texts_in_other_forms_are_texts(speak: Any, api: Any) -> None:
    """Documents and search results, whose text is at hand."""
    model = speak()
    for part in READABLE:
        path, body = api(part)
        assert model.post(path, body)[0] == 200
        assert "Grüezi" in model.engine.prompts[-1] and "left out" not in model.engine.prompts[-1]


def test_each_kind_is_logged_once(
    speak: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send them again in each request of a conversation."""
    monkeypatch.setattr(content, "_notes", set())
    model = speak()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            model.post(*response(UNREADABLE[0][0], UNREADABLE[7][0]))
    lines = [line for line in caplog.messages if "left out" in line]
    assert len(lines) == 2 and "'image'" in lines[0] and "'file'" in lines[1]


def test_what_is_noted_once_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type of megabytes, of an item, a block, a tool or a field, is kept as one short line."""
    notes: set[str] = set()
    monkeypatch.setattr(content, "_notes", notes)
    user = {"role": "user", "content": "Hi"}
    reader = content.ContentReader()
    for number in range(content.MAX_NOTES + 9):
        name = f"{number}" + "x" * 1_000_000
        if number % 4 == 0:
            request = msgspec.convert(
                {"model": "m", "input": [{"type": name}, user]}, ResponsesRequest
            )
            responses._conversation(request, responses._ResponsesTools(), reader, ())
        elif number % 4 == 1:
            fields = {"model": "m", "max_tokens": 1, "messages": [user], "tools": [{"type": name}]}
            fields["tools"][0]["name"] = "t"
            messages._conversation(msgspec.convert(fields, MessagesRequest), reader)
        elif number % 4 == 2:
            chats._functions("tools", [{"type": name}])
        else:
            reader.part("content", {"type": name})
    assert len(notes) == content.MAX_NOTES
    assert max(map(len, notes)) <= content.MAX_NOTE


@pytest.mark.parametrize("api", APIS)
def test_an_operator_may_have_them_refused(speak: Any, api: Any) -> None:
    """By place and kind, in the form that Claude Code looks for."""
    model = speak(unreadable="refuse")
    for part, kind, _ in UNREADABLE:
        status, told = model.post(*api(part))
        text = json.loads(told)["error"]["message"]
        assert status == 400 and re.match(rf"(messages|input)\[\d\][\w.\[\]]*\.{kind}: ", text)
    assert model.post(*api(READABLE[0]))[0] == 200
    assert len(model.engine.requests) == 1


def test_claude_code_drops_what_is_refused_in_these_words(speak: Any) -> None:
    """2.1.330 does, in a result of a tool only where the place has the block's type in it."""
    model = speak(unreadable="refuse")
    source = {"type": "base64", "media_type": "image/png", "data": PIXELS}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for blocks, place in (
        ([image], "messages[2].content[0].image"),
        ([result], "messages[2].content[0].tool_result.content[0].image"),
    ):
        turns = [TURN, {"role": "assistant", "content": [call]}]
        turns.append({"role": "user", "content": blocks})
        status, told = model.post("/v1/messages", {"max_tokens": 9, "messages": turns})
        words = f"{place}: the model reads text only; leave the image out"
        told_type, error = json.loads(told)["type"], json.loads(told)["error"]
        assert (status, told_type) == (400, "error")
        assert error == {"type": "invalid_request_error", "message": words}


# --- tools of Messages ------------------------------------------------------------------------


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"about {name}",
        "input_schema": {"type": "object"},
        **more,
    }


def tools_seen(model: Speaking, **body: Any) -> list[str]:
    """The tools that the model is told of, for a request of Messages."""
    body = {"max_tokens": 9, "messages": [TURN], **body}
    status, told = model.post("/v1/messages", body)
    assert status == 200, told
    return re.findall(r"about (\w+)", model.engine.prompts[-1])


def change(kind: str, inner: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": inner}]}


def test_a_deferred_tool_is_shown_once_it_was_found(speak: Any) -> None:
    """By the client's own search, whose result names it; the search's placeholder never is."""
    model = speak()
    tools = [tool("ToolSearch"), tool("WebFetch", defer_loading=True)]
    tools.append(tool("DeferredToolPlaceholder", defer_loading=True))
    assert tools_seen(model, tools=tools) == ["ToolSearch"]
    found = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    call = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    turns = [TURN, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert tools_seen(model, tools=tools, messages=turns) == ["ToolSearch", "WebFetch"]
    assert "Tool WebFetch is now available." in model.engine.prompts[-1]
    choice = {"type": "tool", "name": "WebFetch"}
    assert tools_seen(model, tools=tools, tool_choice=choice) == ["ToolSearch", "WebFetch"]


@pytest.mark.parametrize("kind", ["tool_search_tool_regex_20251119", "tool_search_tool_bm25_x"])
def test_deferred_tools_are_shown_where_the_server_should_search(speak: Any, kind: str) -> None:
    """Nobody searches here, so a tool that stayed hidden could never be called."""
    tools = [{"type": kind, "name": "search"}, tool("a"), tool("b", defer_loading=True)]
    assert tools_seen(speak(), tools=tools) == ["a", "b"]


def test_tools_come_and_go_within_a_conversation(speak: Any) -> None:
    """As the conversation says, in its order."""
    model, tools = speak(), [tool("a"), tool("b", defer_loading=True)]
    added = change("addition", {"type": "tool_definition", "definition": tool("c")})
    shown = change("addition", {"type": "tool_reference", "name": "b"})
    gone = change("removal", {"type": "tool_reference", "name": "a"})
    for changes, seen in (
        ([added], ["a", "c"]),
        ([shown, gone], ["b"]),
        ([gone, added, change("addition", {"type": "tool_reference", "name": "a"})], ["a", "c"]),
        ([added, change("removal", {"type": "tool_reference", "name": "c"})], ["a"]),
    ):
        assert tools_seen(model, tools=tools, messages=[TURN, *changes, TURN]) == seen


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("bash_20250124", "bash", "restart"),
        ("bash_20241022", "bash", "restart"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text"),
        ("memory_20250818", "memory", "old_path"),
    ],
)
def test_tools_that_the_client_runs_have_their_schema(
    speak: Any, kind: str, name: str, field: str
) -> None:
    """The model sees functions and the client gets calls of them."""
    model = speak(f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>')
    answer = model.anthropic.messages.create(
        model=MODEL, max_tokens=99, messages=[TURN], tools=[{"type": kind, "name": name}]
    )
    assert (answer.content[0].name, answer.stop_reason) == (name, "tool_use")
    assert f'"{field}"' in model.engine.prompts[-1] and f'"{name}"' in model.engine.prompts[-1]


HOSTED = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 1},
]


@pytest.mark.parametrize("hosted", HOSTED, ids=lambda each: each["type"])
def test_tools_that_anthropic_runs_are_left_out(speak: Any, hosted: Any) -> None:
    """Also where the choice of a tool names one, or no other is left."""
    model = speak()
    named = {"type": "tool", "name": hosted.get("name", "x")}
    for choice in ({"type": "auto"}, {"type": "any"}, *([named] if "name" in hosted else [])):
        assert tools_seen(model, tools=[hosted], tool_choice=choice) == []
    assert tools_seen(model, tools=[hosted, tool("a")]) == ["a"]


def test_what_hosted_tools_left_behind_is_left_out(speak: Any) -> None:
    """Conversations that began elsewhere go on, with the texts of both sides."""
    model = speak()
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "a"}]},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "container_upload", "file_id": "x"},
        {"type": "text", "text": "Found."},
    ]
    turns = [TURN, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And?"}]
    assert tools_seen(model, messages=turns) == []
    assert "I search.\nFound." in model.engine.prompts[-1]
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "They met."}]}
    tools_seen(model, messages=[summary, TURN])
    assert "They met." in model.engine.prompts[-1]
    items = [
        TURN,
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {}},
        {"type": "file_search_call", "id": "f", "queries": [], "results": None},
        {"type": "mcp_list_tools", "id": "m", "server_label": "a", "tools": []},
        {"type": "mcp_call", "id": "m", "name": "a", "arguments": "{}", "output": "x"},
        {"type": "local_shell_call_output", "id": "l", "output": "x"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "x"}},
        {"role": "user", "content": "And then?"},
    ]
    status, told = model.post("/v1/responses", {"input": items})
    assert status == 200, told
    assert "And then?" in model.engine.prompts[-1]


# --- fields -----------------------------------------------------------------------------------


def test_the_only_model_need_not_be_named(speak: Any) -> None:
    """Where adapters are served too, it has to be."""
    model = speak()
    several = speak(loras={"math": "7"})
    chats = {"messages": [TURN]}
    for path, body in (
        ("/v1/chat/completions", chats),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/messages", {**chats, "max_tokens": 9}),
        ("/v1/messages/count_tokens", chats),
    ):
        status, told = model.post(path, body)
        assert (status, json.loads(told).get("model", MODEL)) == (200, MODEL)
        status, told = several.post(path, body)
        text = json.loads(told)["error"]["message"]
        assert (status, text) == (400, f"model: is missing; send one of {MODEL}, math")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
        {
            "type": "allowed_tools",
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "f"}],
        },
    ],
)
def test_choices_that_leave_the_model_free(speak: Any, choice: Any) -> None:
    """A hosted tool cannot be called; allowed tools without a mode may be."""
    model = speak()
    functions = [{"type": "function", "name": name, "parameters": {}} for name in ("f", "g")]
    body = {"input": "x", "tools": functions, "tool_choice": choice}
    status, told = model.post("/v1/responses", body)
    assert (status, said(told)) == (200, "Done.")
    assert ('"g"' in model.engine.prompts[-1]) == (choice["type"] != "allowed_tools")
    chat_choice = {
        "type": "allowed_tools",
        "allowed_tools": {"tools": [{"function": {"name": "f"}}]},
    }
    tools = [{"type": "function", "function": each} for each in functions]
    body = {"messages": [TURN], "tools": tools, "tool_choice": chat_choice}
    assert model.post("/v1/chat/completions", body)[0] == 200
    assert '"g"' not in model.engine.prompts[-1]


CUSTOM = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
SHELL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l\\n"}}\n</tool_call>'


def test_a_chat_may_call_a_tool_of_free_text(speak: Any) -> None:
    """Whole and streamed, beside another; and the call comes back in the conversation."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    model = speak(f"I look.{SHELL}{call}{SHELL}")
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"model": MODEL, "messages": [TURN], "tools": [CUSTOM, function]}
    (choice,) = model.openai.chat.completions.create(**asked).choices
    calls = choice.message.to_dict()["tool_calls"]
    assert choice.finish_reason == "tool_calls"
    assert [call["type"] for call in calls] == ["custom", "function", "custom"]
    assert calls[0]["custom"] == calls[2]["custom"] == {"name": "shell", "input": "ls -l\n"}
    assert calls[1]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    streamed: dict[int, dict[str, Any]] = {}
    with model.openai.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            for told in (chunk.choices[0].to_dict()["delta"].get("tool_calls")) or []:
                known = streamed.setdefault(told["index"], {"type": told.get("type")})
                own = known.setdefault(known["type"], {})
                for key, text in told[known["type"]].items():
                    own[key] = own.get(key, "") + text
    plain = [{key: value for key, value in call.items() if key != "id"} for call in calls]
    assert [streamed[index] for index in range(3)] == plain
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "total 0"}
    asked["messages"] = [TURN, {"role": "assistant", "tool_calls": calls[:1]}, result]
    model.openai.chat.completions.create(**asked)
    prompt = model.engine.prompts[-1]
    assert '"name": "shell"' in prompt and "ls -l" in prompt and "total 0" in prompt


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({"type": "web_search"}, ["shell", "f"]),
        ({"type": "custom", "custom": {"name": "shell"}}, ["shell", "f"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [CUSTOM, {"type": "mcp"}]},
            },
            ["shell"],
        ),
    ],
)
def test_kinds_of_a_chats_tools_and_choices(speak: Any, choice: Any, seen: list[str]) -> None:
    """Those that OpenAI runs are left out, as in Responses."""
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    model = speak()
    tools = [{"type": "web_search"}, CUSTOM, function, {"type": "mcp", "server_label": "x"}]
    body = {"messages": [TURN], "tools": tools, "tool_choice": choice}
    status, told = model.post("/v1/chat/completions", body)
    assert status == 200, told
    prompt = model.engine.prompts[-1]
    assert [name for name in ("shell", "f") if f'"name": "{name}"' in prompt] == seen
    for hosted in (tools[:1], [*tools[:1], *tools[3:]]):
        body = {"messages": [TURN], "tools": hosted, "tool_choice": "required"}
        assert model.post("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
    ],
)
def test_tools_of_chats_without_a_name_are_refused(speak: Any, fields: Any, param: str) -> None:
    status, told = speak().post("/v1/chat/completions", {"messages": [TURN], **fields})
    assert (status, json.loads(told)["error"]["param"]) == (400, param)


def test_functions_as_they_were_called_once_are_read(speak: Any) -> None:
    """In a conversation that began with an old client."""
    model = speak()
    called = {"name": "look", "arguments": '{"q": "x"}'}
    turns = [TURN, {"role": "assistant", "content": None, "function_call": called}]
    turns.append({"role": "function", "name": "look", "content": "found it"})
    status, told = model.post("/v1/chat/completions", {"messages": turns})
    assert status == 200, told
    assert re.search(r'"look".*\ntool: found it', model.engine.prompts[-1])


def test_a_call_is_not_demanded_where_all_tools_are_deferred(speak: Any) -> None:
    """The model is told of none; a choice that names one shows it."""
    model, tools = speak(), [tool("WebFetch", defer_loading=True)]
    assert tools_seen(model, tools=tools, tool_choice={"type": "any"}) == []
    choice = {"type": "tool", "name": "WebFetch"}
    assert tools_seen(model, tools=tools, tool_choice=choice) == ["WebFetch"]


def test_a_call_cannot_be_demanded_of_hosted_tools_alone(speak: Any) -> None:
    """The model answers with text."""
    body = {"input": "x", "tools": [{"type": "web_search_2025_08_26"}], "tool_choice": "required"}
    assert said(speak().post("/v1/responses", body)[1]) == "Done."


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("regex", "a+", "regex"),
        ("guided_regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "ebnf_grammar"),
        ("guided_json", {"type": "object"}, "json_schema"),
        ("structured_outputs", {"choice": ["a"]}, "ebnf_grammar"),
    ],
)
@pytest.mark.parametrize("api", [chat, response, message])
def test_forms_in_the_words_of_other_servers(
    speak: Any, api: Any, field: str, value: Any, kind: str
) -> None:
    """In every API; the engine is asked for the same guide."""
    model = speak()
    path, body = api({"type": "text", "text": "x"})
    assert model.post(path, {**body, field: value})[0] == 200
    (asked,) = model.engine.requests
    assert asked.guide is not None and asked.guide.kind == kind
    status, told = model.post(path, {**body, "grammar": "root ::= a"})
    assert status == 400 and "send guided_grammar" in json.loads(told)["error"]["message"]


def test_browsers_may_read_the_headers_that_clients_read(speak: Any) -> None:
    """A page's client retries and reports by them."""
    model = speak(allowed_origins=("https://page",))
    sent = {"Origin": "https://page", "content-type": "application/json"}
    address = (model.api.host, model.api.port)
    with closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        connection.request("POST", "/v1/messages", "{}", sent)
        exposed = connection.getresponse().headers["access-control-expose-headers"]
    assert set(exposed.split(", ")) >= {"x-request-id", "request-id", "retry-after"}


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "max_completion_tokens", "max_output_tokens"),
        ("/v1/responses", "n_predict", "max_output_tokens"),
        ("/v1/responses", "response_format", "text"),
        ("/v1/responses", "stop", ""),
        ("/v1/responses", "stop_sequences", ""),
        ("/v1/responses", "n", ""),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/messages", "max_output_tokens", "max_tokens"),
        ("/v1/messages", "response_format", "output_config"),
        ("/v1/messages", "allowed_token_ids", ""),
        ("/v1/chat/completions", "max_output_tokens", "max_completion_tokens"),
        ("/v1/chat/completions", "stop_sequences", "stop"),
        ("/v1/chat/completions", "format", "response_format"),
        ("/v1/chat/completions", "guided_json_object", "guided_json"),
        ("/v1/completions", "max_new_tokens", "max_tokens"),
    ],
)
def test_no_other_name_of_a_field_is_ignored(speak: Any, path: str, wrong: str, right: str) -> None:
    """What says how the answer has to be is refused under another API's name, with its own here."""
    model, body = speak(), {"model": MODEL, wrong: 3}
    if path == "/v1/completions":
        body["prompt"] = "a"
    elif path == "/v1/responses":
        body["input"] = "a"
    else:
        body |= {"messages": [TURN], "max_tokens": 9}
    status, told = model.post(path, body)
    problem = json.loads(told)["error"]["message"]
    assert status == 400 and wrong in problem
    assert problem.endswith(f"send {right}" if right else "supported here")
    assert model.post(path, {**body, wrong: None})[0] == 200


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1}',
        '{"cmd": "rm -rf /tmp/x/bui',
        '{"a": "x" y"}',
        "{a: 1}",
        '{"a": 1,}',
        '{"a": "\\q"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        "[1, 2]",
        "",
        pytest.param(DEEP, id="deep"),
    ],
)
def test_a_tool_is_run_with_what_the_model_wrote_or_with_all_of_it_as_text(
    speak: Any, arguments: str
) -> None:
    """Never with a part of it or with nothing; by Anthropic's own reader of streams."""
    head = '<tool_call>\n{"name": "f", "arguments": '
    model = speak(head + arguments + ("}\n</tool_call>" if arguments == '{"a": 1}' else ""))
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 900,
        "messages": [TURN],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    (whole,) = model.anthropic.messages.create(**asked).content
    with model.anthropic.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    if whole.type == "tool_use":
        assert streamed.input == whole.input
        assert whole.input in ({"a": 1}, {"arguments": arguments}), whole.input
    else:  # no call has begun
        assert streamed.text == whole.text and not arguments


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        (" ", {}),
        ('{"q": 1}', {"q": 1}),
        ('{"q": "a\nb"}', {"q": "a\nb"}),
        ('{"q": "a\\ud83d"}', {"q": "a\ufffd"}),
        ('{"q": cut', {"arguments": '{"q": cut'}),
        ("[1]", {"arguments": "[1]"}),
        ('""', {"arguments": '""'}),
        pytest.param(DEEP, {"arguments": DEEP}, id="deep"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_no_call_of_the_past_ends_a_conversation(
    speak: Any, path: str, arguments: str, shown: dict[str, Any]
) -> None:
    """A model may have written any arguments; the template is shown an object."""
    model = speak()
    if path == "/v1/responses":
        called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c", "output": "r"}
        body: dict[str, Any] = {"input": [TURN, called, result]}
    else:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [TURN, {"role": "assistant", "content": None, "tool_calls": [call]}]
        turns.append({"role": "tool", "tool_call_id": "c", "content": "r"})
        body = {"model": MODEL, "messages": turns}
    assert model.post(path, body)[0] == 200
    lines = model.engine.prompts[-1].splitlines()
    (told,) = [json.loads(line)["arguments"] for line in lines if line.startswith("{")]
    assert (json.loads(told) if isinstance(told, str) else told) == shown


def test_no_field_of_the_published_packages_is_unknown() -> None:
    """Each is read, refused, or known to have no effect; what is unknown would be lost silently."""
    for kind, declared in (
        (ChatCompletionRequest, chat_params.CompletionCreateParamsBase),
        (ResponsesRequest, response_params.ResponseCreateParamsBase),
        (MessagesRequest, message_params.MessageCreateParamsBase),
        (MessagesRequest, beta_params.MessageCreateParamsBase),
    ):
        known = {*kind.__struct_fields__, *kind.no_effect, *kind.unsupported}
        assert set(declared.__annotations__) - known == set()


def test_a_thread_is_refused_so_that_its_client_sends_everything(speak: Any) -> None:
    """Anthropic's runner of tools asks for one by itself."""
    model = speak()
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        body = {"max_tokens": 9, "messages": [TURN], "thread": thread}
        status, told = model.post("/v1/messages", body)
        error = json.loads(told)["error"]
        assert (status, error["details"]["error_code"]) == (400, "thread_unsupported_request")
    assert not model.engine.requests


def test_claude_code_finds_its_tools(speak: Any) -> None:
    """A request of 2.1.330 after its search: the two tools that it found, and no placeholder."""
    model = speak()
    body = RECORDED["claude-2.1.330-tool-reference"]
    assert model.post("/v1/messages?beta=true", body)[0] == 200
    names = re.findall(r'"name": "(\w+)"', model.engine.prompts[-1])
    assert {"WebFetch", "NotebookEdit"} <= set(names) and "DeferredToolPlaceholder" not in names


def test_a_stream_of_responses_ends_as_all_streams_do(speak: Any) -> None:
    """Open Responses wants the mark that chats have."""
    told = speak().post("/v1/responses", {"input": "x", "stream": True})[1]
    assert told.endswith("data: [DONE]\n\n")
    assert events(told)[-1]["type"] == "response.completed"


def test_a_summary_stands_for_a_conversation(speak: Any) -> None:
    """Beside what users said; requests take it, and leave out one that another server made."""
    model = speak("They launch on Tuesday.")
    said = {"type": "message", "role": "user", "content": "We launch on Tuesday."}
    answered = {"type": "message", "role": "assistant", "content": "Understood."}
    asked = {"model": MODEL, "prompt_cache_key": "k", "input": [said, answered]}
    status, told = model.post("/v1/responses/compact", asked)
    made = json.loads(told)
    assert (status, made["object"]) == (200, "response.compaction")
    user, summary = made["output"]
    assert user["content"] == [{"type": "input_text", "text": "We launch on Tuesday."}]
    assert summary["type"] == "compaction" and made["usage"]["output_tokens"] > 3
    assert "Sum up this conversation" in model.engine.prompts[-1]
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    wrong = {"type": "compaction", "encrypted_content": "b64:\u2014"}
    body = {"input": [*made["output"], foreign, wrong, TURN], "tools": []}
    assert model.post("/v1/responses", body)[0] == 200
    prompt = model.engine.prompts[-1]
    assert "The conversation so far, in short:\nThey launch on Tuesday." in prompt
    assert "gAAAA" not in prompt
    assert model.post("/v1/responses/compact", {"input": "x"})[0] == 400
    first = json.loads(model.post("/v1/responses", {"input": "First."})[1])["id"]
    body = {"model": MODEL, "previous_response_id": first}
    status, told = model.post("/v1/responses/compact", body)
    assert status == 200 and json.loads(told)["output"][0]["content"][0]["text"] == "First."
