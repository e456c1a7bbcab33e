"""A day of conversation: pictures, calls that fail, cuts, a search for tools, a restart. Nothing of
it may end the conversation, neither when it comes nor when it is sent again with every later turn.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import ScriptedBackend, serving
from tests.helpers.scripted_text import tokenizer_with_tools
from tests.openai.test_agents import Speaking, events

PIXELS = base64.b64encode(b"\x89PNG" + bytes(77)).decode()
LOOK = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"q": 0x1, }}\n</tool_call>'
FOUND = '<tool_call>\n{"name": "paint", "arguments": {"q": "red"}}\n</tool_call>'
NO_CALL = '<tool_call>\n{"name": "look", "argu'
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
THOUGHT = "<think>\nI look.\n</think>\n\n"


class Day:
    """A model that says what it is told to, behind a server that may be started anew."""

    def __init__(self, store: Path) -> None:
        self._store, self._next = store, ""
        self.prompts: list[str] = []

    @contextmanager
    def server(self) -> Iterator[None]:
        engine = SpeakingEngine(tokenizer_with_tools(), self._say)
        backend = ScriptedBackend(engine, tokenizer_with_tools())
        formats = {"tool_parser": "hermes", "reasoning_parser": "think"}
        with serving(engine, backend, store_dir=self._store, **formats) as api:
            self._model = Speaking(api, engine)
            yield

    def _say(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._next

    def ask(self, says: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, which is never a refusal; every other one is streamed."""
        self._next = says
        stream = len(self.prompts) % 2 == 1
        status, told = self._model.post(path, {**body, "stream": stream})
        assert status == 200, (told, body)
        if not stream:
            whole: dict[str, Any] = json.loads(told)
            return whole
        if path.endswith("responses"):
            last: dict[str, Any] = events(told)[-1]["response"]
            return last
        return folded(events(told))


def folded(told: list[dict[str, Any]]) -> dict[str, Any]:
    """A message of Anthropic's API, as its client puts it together."""
    blocks: list[dict[str, Any]] = []
    for event in told:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for key in ("text", "thinking", "partial_json"):
                if key in delta:
                    blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json") or "{}")
    return {"content": blocks}


@pytest.mark.parametrize("chained", [True, False])
def test_a_day_over_responses(tmp_path: Path, chained: bool) -> None:
    """By references to what is stored, and by sending everything again."""
    day, said = Day(tmp_path / "store"), list[dict[str, Any]]()
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "look", "parameters": SCHEMA},
        {"type": "shell"},
        {"type": "web_search"},
    ]
    last: dict[str, Any] = {}

    def turn(says: str, *items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        nonlocal last
        said.extend(items)
        body = {"tools": tools, "input": list(items), **more}
        if chained and last:
            body["previous_response_id"] = last["id"]
        elif not chained:
            body |= {"input": said, "store": False}
        last = day.ask(says, "/v1/responses", body)
        said.extend(last["output"])
        output: list[dict[str, Any]] = last["output"]
        return output

    def output(call: dict[str, Any], told: Any, kind: str = "function_call") -> dict[str, Any]:
        return {"type": f"{kind}_output", "call_id": call["call_id"], "output": told}

    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"}
    with day.server():
        words = {"type": "input_text", "text": "Good morning \ud83d."}
        call = turn(THOUGHT + "Yes." + LOOK, {"role": "user", "content": [words, picture]})[-1]
        call = turn(BROKEN, output(call, [picture]))[-1]
        assert call["type"] == "function_call"
        failed = turn("I look again." + LOOK, output(call, "Error: no JSON"), max_output_tokens=14)
        assert failed[-1]["status"] == "incomplete"
        left = [output(each, "cut") for each in failed if each["type"] == "function_call"]
        turn(NO_CALL, *left, {"role": "user", "content": "Go on."})
        (call,) = turn(
            '<tool_call>\n{"name": "shell", "arguments": {"commands": ["ls"]}}\n</tool_call>',
            {"role": "user", "content": "List it."},
        )
        lines = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
        found = {"type": "function", "name": "paint", "parameters": SCHEMA}
        search = {"type": "tool_search_call", "id": "t", "arguments": "{}"}
        tools_found = {"type": "tool_search_output", "tools": [found]}
        (call,) = turn(FOUND, output(call, lines, "shell_call"), search, tools_found)
        assert (call["type"], call["name"]) == ("function_call", "paint")
    with day.server():
        searched = {"type": "web_search_call", "id": "w", "status": "completed", "action": {}}
        turn("Red.", output(call, "painted"), searched)
        (answer,) = turn("Good night.", {"role": "user", "content": [picture]})
        if chained:
            last = {}
            referred = {"type": "item_reference", "id": answer["id"]}
            turn("Still here.", referred, {"role": "user", "content": "Hello?"})
            assert "Good night." in day.prompts[-1]
            return
    texts = ("Good morning", "Yes.", "image left out", "no JSON", "ls", "painted")
    places = [day.prompts[-1].find(text) for text in texts]
    assert -1 not in places and "Good night" not in day.prompts[-1]


def test_a_day_over_messages(tmp_path: Path) -> None:
    day, said = Day(tmp_path / "store"), list[dict[str, Any]]()
    tools: list[dict[str, Any]] = [
        {"name": "look", "input_schema": SCHEMA},
        {"name": "ToolSearch", "input_schema": SCHEMA},
        {"name": "paint", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]

    def turn(says: str, *blocks: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        said.append({"role": "user", "content": list(blocks)})
        body = {"tools": tools, "messages": said, "max_tokens": 200, **more}
        content: list[dict[str, Any]] = day.ask(says, "/v1/messages", body)["content"]
        if content:
            said.append({"role": "assistant", "content": content})
        return content

    def result(call: dict[str, Any], told: Any, **more: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": call["id"], "content": told, **more}

    source = {"type": "base64", "media_type": "image/png", "data": PIXELS}
    picture = {"type": "image", "source": source}
    with day.server():
        words = {"type": "text", "text": "Good morning \ud83d."}
        call = turn(THOUGHT + "Yes." + LOOK, words, picture)[-1]
        call = turn(BROKEN, result(call, [picture]))[-1]
        assert isinstance(call["input"], dict) and call["input"]
        cut = turn("I look again." + LOOK, result(call, "no JSON", is_error=True), max_tokens=14)
        left = [result(each, "cut", is_error=True) for each in cut if each["type"] == "tool_use"]
        turn(NO_CALL, *left, {"type": "text", "text": "Go on."})
        search = LOOK.replace("look", "ToolSearch")
        call = turn(search, {"type": "text", "text": "Paint it."})[-1]
        call = turn(FOUND, result(call, [{"type": "tool_reference", "tool_name": "paint"}]))[-1]
        assert (call["type"], call["name"]) == ("tool_use", "paint")
    with day.server():
        said.append({"role": "system", "content": "It is evening."})
        turn("Red.", result(call, "painted"))
        hosted = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
        said[-1]["content"].append(hosted)
        turn("Good night.", picture, {"type": "document", "source": source})
    texts = ("Good morning", "Yes.", "image left out", "no JSON", "evening", "painted", "Red.")
    assert -1 not in [day.prompts[-1].find(text) for text in texts]
