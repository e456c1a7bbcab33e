"""LangChain: an agent with a tool, over three APIs."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shared import BASE, MODEL, STEPS, check


def loop(model: Any) -> None:
    seen = []

    @tool
    def look(q: str) -> str:
        """Look."""
        seen.append(q)
        return "42"

    agent: Any = create_agent(model, [look])
    asked = {"messages": [{"role": "user", "content": STEPS}]}
    assert agent.invoke(asked)["messages"][-1].text == "It is 42."
    told = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
    assert "".join(chunk.text for chunk in told if chunk.type != "tool").endswith("It is 42.")
    assert seen == ['a"b'] * 2


def openai(**more: Any) -> Any:
    return ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key="any", max_retries=0, **more)  # type: ignore[arg-type]


check("chat", "an agent with a tool, whole and streamed")(lambda: loop(openai()))
check("responses", "an agent with a tool, whole and streamed")(
    lambda: loop(openai(use_responses_api=True))
)
check("messages", "an agent with a tool, whole and streamed")(
    lambda: loop(ChatAnthropic(model=MODEL, base_url=BASE, api_key="any", max_retries=0))  # type: ignore[call-arg,arg-type]
)
