"""LlamaIndex: chats, and an agent with a tool."""

from __future__ import annotations

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from shared import BASE, MODEL, STEPS, check

llm = OpenAILike(
    model=MODEL,
    api_base=f"{BASE}/v1",
    api_key="any",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)


@check("chat", "whole and streamed")
def _chat() -> None:
    turns = [ChatMessage(role="user", content="[[say Hi there.]]")]
    assert llm.chat(turns).message.content == "Hi there."
    assert [*llm.stream_chat(turns)][-1].message.content == "Hi there."


@check("chat", "an agent with a tool")
def _agent() -> None:
    seen = []

    def look(q: str) -> str:
        """Look."""
        seen.append(q)
        return "42"

    async def run() -> str:
        return str(await FunctionAgent(tools=[look], llm=llm).run(STEPS))

    assert (asyncio.run(run()), seen) == ("It is 42.", ['a"b'])
