"""smolagents: an agent that calls tools, and gives its answer by one."""

from __future__ import annotations

from shared import BASE, MODEL, check
from smolagents import OpenAIModel, ToolCallingAgent, tool

STEPS = '[[call look {"q": "a"}]] [[call final_answer {"answer": "It is 42."}]]'


@check("chat", "an agent with a tool, whole and streamed")
def _agent() -> None:
    seen = []

    @tool
    def look(q: str) -> str:
        """Look.

        Args:
            q: what for
        """
        seen.append(q)
        return "42"

    for streams in (False, True):
        model = OpenAIModel(MODEL, api_base=f"{BASE}/v1", api_key="any")
        agent = ToolCallingAgent([look], model, stream_outputs=streams, verbosity_level=0)
        assert agent.run(STEPS) == "It is 42."
    assert seen == ["a", "a"]
