"""Claude Agent SDK, which runs the Claude Code that it brings: an agent with a tool of its own."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    create_sdk_mcp_server,
    tool,
)
from shared import BASE, MODEL, check

_STEPS = 'Find it. [[say I look. || call mcp__a__look {"q": "a\\"b"}]] [[say It is 42.]]'


@check("messages", "an agent with a tool of the application's, and a second turn")
def _loop() -> None:
    seen = []

    @tool("look", "Look.", {"q": str})
    async def look(arguments: dict[str, Any]) -> dict[str, Any]:
        seen.append(arguments["q"])
        return {"content": [{"type": "text", "text": "42"}]}

    async def both() -> list[str | None]:
        with tempfile.TemporaryDirectory() as work:
            keys = {"ANTHROPIC_BASE_URL": BASE, "ANTHROPIC_AUTH_TOKEN": "any", "HOME": work}
            options = ClaudeAgentOptions(
                model=MODEL,
                cwd=work,
                mcp_servers={"a": create_sdk_mcp_server("a", tools=[look])},
                allowed_tools=["mcp__a__look"],
                env={**keys, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
            )
            said = []
            async with ClaudeSDKClient(options) as client:
                for asked in (_STEPS, "[[say I go on.]]"):
                    await client.query(asked)
                    async for message in client.receive_response():
                        if isinstance(message, ResultMessage):
                            assert not message.is_error, message
                            said.append(message.result)
            return said

    assert asyncio.run(both()) == ["It is 42.", "I go on."]
    assert seen == ['a"b']
