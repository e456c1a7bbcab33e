"""The openai package, whose own types judge each event."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from shared import BASE, MODEL, PARAMETERS, STEPS, check

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="any", max_retries=0)
LOOK: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@check("responses", "every event by its own types; a loop of calls by previous_response_id")
def _events() -> None:
    with client.responses.with_streaming_response.create(
        model=MODEL, input=STEPS, tools=[LOOK], stream=True
    ) as told:
        lines = [line for line in told.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        EVENT.validate_python(event, strict=True)
    first = events[-1]["response"]
    call = first["output"][-1]
    assert json.loads(call["arguments"]) == {"q": 'a"b'}
    result: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    second = client.responses.create(
        model=MODEL, input=[result], tools=[LOOK], previous_response_id=first["id"]
    )
    assert second.output_text == "It is 42."


@check("responses", "stream helper")
def _stream() -> None:
    with client.responses.stream(model=MODEL, input=STEPS, tools=[LOOK]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


@check("chat", "stream helper")
def _chat() -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    turns: Any = [{"role": "user", "content": STEPS}]
    with client.chat.completions.stream(model=MODEL, messages=turns, tools=[tool]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "I look." and message.tool_calls
    turns += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}]
    done = client.chat.completions.create(model=MODEL, messages=turns, tools=[tool])
    assert done.choices[0].message.content == "It is 42."
