"""The anthropic package, whose own types judge each event."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from shared import BASE, MODEL, PARAMETERS, STEPS, check

client = anthropic.Anthropic(base_url=BASE, api_key="any", max_retries=0)
TOOLS: Any = [{"name": "look", "description": "d", "input_schema": PARAMETERS}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TURNS: Any = [{"role": "user", "content": STEPS}]


@check("messages", "every event by its own types")
def _events() -> None:
    with client.messages.with_streaming_response.create(
        model=MODEL, max_tokens=999, messages=TURNS, tools=TOOLS, stream=True
    ) as told:
        lines = [line for line in told.iter_lines() if line.startswith("data: {")]
    for line in lines:
        event = json.loads(line.removeprefix("data: "))
        if event["type"] != "ping":  # no event of the type, but one of the API
            EVENT.validate_python(event, strict=True)


@check("messages", "stream helper, a loop of calls")
def _stream() -> None:
    asked: Any = {"model": MODEL, "max_tokens": 999, "tools": TOOLS}
    with client.messages.stream(messages=TURNS, **asked) as stream:
        message = stream.get_final_message()
    call: Any = message.content[-1]
    assert (call.input, message.stop_reason) == ({"q": 'a"b'}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
    turns = [*TURNS, {"role": "assistant", "content": message.content}]
    done = client.messages.create(messages=[*turns, {"role": "user", "content": [result]}], **asked)
    assert done.content[0].type == "text" and done.content[0].text == "It is 42."


@check("messages", "runner of tools")
def _runner() -> None:
    seen = []

    @anthropic.beta_tool
    def look(q: str) -> str:
        """Look."""
        seen.append(q)
        return "42"

    asked: Any = {"model": MODEL, "max_tokens": 999, "messages": TURNS, "tools": [look]}
    done: Any = client.beta.messages.tool_runner(**asked).until_done()
    assert (done.content[0].text, seen) == ("It is 42.", ['a"b'])
