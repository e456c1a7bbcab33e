"""OpenAI's Agents SDK: an agent with a tool, over both of its APIs."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from shared import BASE, MODEL, STEPS, check

set_tracing_disabled(True)


def loop(make: type[OpenAIResponsesModel] | type[OpenAIChatCompletionsModel]) -> None:
    seen = []

    @function_tool
    def look(q: str) -> str:
        """Look."""
        seen.append(q)
        return "42"

    async def both() -> None:
        client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any", max_retries=0)
        model: Model = make(MODEL, client)
        agent = Agent(name="a", model=model, tools=[look])
        assert (await Runner.run(agent, STEPS)).final_output == "It is 42."
        streamed = Runner.run_streamed(agent, STEPS)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "It is 42."

    asyncio.run(both())
    assert seen == ['a"b'] * 2


check("responses", "an agent with a tool, whole and streamed")(lambda: loop(OpenAIResponsesModel))
check("chat", "an agent with a tool, whole and streamed")(lambda: loop(OpenAIChatCompletionsModel))
