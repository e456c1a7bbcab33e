"""Pydantic AI: an agent with a tool, over three APIs."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from shared import BASE, MODEL, STEPS, check


def loop(make: Any) -> None:
    seen = []

    async def both() -> None:
        agent = Agent(make())

        @agent.tool_plain
        def look(q: str) -> str:
            seen.append(q)
            return "42"

        assert (await agent.run(STEPS)).output == "It is 42."
        async with agent.run_stream_events(STEPS) as told:
            events = [event async for event in told]
        assert events[-1].result.output == "It is 42."  # type: ignore[union-attr]

    asyncio.run(both())
    assert seen == ['a"b'] * 2


def openai() -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{BASE}/v1", api_key="any")


DID = "an agent with a tool, whole and streamed"
check("chat", DID)(lambda: loop(lambda: OpenAIChatModel(MODEL, provider=openai())))
check("responses", DID)(lambda: loop(lambda: OpenAIResponsesModel(MODEL, provider=openai())))
check("messages", DID)(
    lambda: loop(
        lambda: AnthropicModel(MODEL, provider=AnthropicProvider(api_key="any", base_url=BASE))
    )
)
