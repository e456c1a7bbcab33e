"""One choice's text as the fields of a chat message: content, reasoning, tool calls."""

from __future__ import annotations

from typing import Any

from trtllm_bls.chat_parsing import Arguments, ChatParser, Content, Event, Reasoning, ToolCall


class ChoiceDeltas:
    """``parser``: ``None`` where all text is content. Calls beyond ``most_calls`` are left out."""

    def __init__(self, parser: ChatParser | None, most_calls: int | None) -> None:
        self._parser = parser
        self._most_calls = most_calls

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._parser is None

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called so far."""
        return self._parser is not None and self._parser.has_calls

    def of(self, text: str, end: bool) -> list[dict[str, Any]]:
        """The deltas of a stream that this text makes certain, ``end`` being its last."""
        if self._parser is None:
            return [{"content": text}]
        return [_delta(event) for event in self._events(text, end)]

    def whole(self, text: str) -> dict[str, Any]:
        """The message's fields of the whole text."""
        if self._parser is None:
            return {"content": text}
        content, reasoning, calls = [], [], []
        for event in self._events(text, end=True):
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif isinstance(event, ToolCall):
                calls.append(_call(event))
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message: dict[str, Any] = {"content": "".join(content) or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    def _events(self, text: str, end: bool) -> list[Event]:
        assert self._parser is not None
        events = self._parser.feed(text)
        if end:
            events += self._parser.flush()
        if self._most_calls is None:
            return events
        return [event for event in events if getattr(event, "index", 0) < self._most_calls]


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, Arguments):
        call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.text}}
    else:
        call = {"index": event.index, **_call(event)}
    return {"tool_calls": [call]}


def _call(event: ToolCall) -> dict[str, Any]:
    function = {"name": event.name, "arguments": ""}
    return {"id": event.id, "type": "function", "function": function}
