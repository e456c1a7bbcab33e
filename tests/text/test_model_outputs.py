"""Outputs that models were publicly reported to write, whole and cut at every place.

``model_outputs.json`` has the tools that are offered, each output, how the answer ended, and what
has to be read: the calls, or that the one call was cut or is unreadable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.chat_parser import (
    Arguments,
    CallOutcome,
    ChatParser,
    Content,
    Reasoning,
    ToolCall,
)
from trtllm_bls.text.json_values import json_value
from trtllm_bls.types import FinishReason

OUTPUTS = json.loads(Path(__file__).with_name("model_outputs.json").read_text(encoding="utf-8"))
ENDS = {
    "end_id": FinishReason.END_ID,
    "length": FinishReason.LENGTH,
    "stop": FinishReason.STOP,
}


class Reading:
    """The parts of an answer that comes in these pieces."""

    def __init__(self, case: dict[str, Any], pieces: Iterable[str]) -> None:
        tools = case["format"]
        self.parser = ChatParser(
            TOOL_FORMATS[tools],
            REASONING_TAGS.get(tools, REASONING_TAGS["think"]),
            opened=case["opened"],
            schemas=OUTPUTS["schemas"],
            new_id=lambda: "id",
        )
        self.texts = {Content: "", Reasoning: ""}
        self.calls: list[list[str]] = []
        events = [event for piece in pieces for event in self.parser.feed(piece)]
        for event in events + self.parser.flush(ENDS[case["ended"]]):
            if isinstance(event, ToolCall):
                self.calls.append([event.name, ""])
            elif isinstance(event, Arguments):
                self.calls[event.index][1] += event.text
            else:
                assert isinstance(event, (Content, Reasoning))
                self.texts[type(event)] += event.separator + event.text

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.texts, self.calls, self.parser.outcomes


def known(name: str) -> str:
    """Return a tool's name as all formats can spell it."""
    return name.replace("-", "_")


@pytest.mark.parametrize("case", OUTPUTS["cases"], ids=lambda case: case["name"])
def test_what_models_write_is_read(case: dict[str, Any]) -> None:
    """A call is whole with all that the model wrote, or said not to be."""
    reading = Reading(case, [case["text"]])
    outcomes = reading.parser.outcomes
    if isinstance(case["calls"], list):
        calls = [(known(name), json.loads(arguments)) for name, arguments in reading.calls]
        assert calls == [(known(call["name"]), call["arguments"]) for call in case["calls"]]
        kinds = [list(map(type, arguments.values())) for _, arguments in calls]
        assert kinds == [list(map(type, call["arguments"].values())) for call in case["calls"]]
        assert set(outcomes) <= {CallOutcome.WHOLE}
    elif case["calls"] in ("cut", "unreadable"):
        ((_, arguments),) = reading.calls
        assert not isinstance(json_value(arguments), dict)
        assert outcomes == [CallOutcome(case["calls"])]
    for kind, field in ((Content, "content"), (Reasoning, "reasoning")):
        if case[field] is not None:
            assert reading.texts[kind].strip() == case[field].strip()


@pytest.mark.parametrize("case", OUTPUTS["cases"], ids=lambda case: case["name"])
def test_what_models_write_reads_the_same_however_it_is_cut(case: dict[str, Any]) -> None:
    """In two pieces at every place, and in single characters."""
    text = case["text"]
    whole = Reading(case, [text]).parts
    assert Reading(case, text).parts == whole
    for place in range(len(text)):
        assert Reading(case, [text[:place], text[place:]]).parts == whole, place
