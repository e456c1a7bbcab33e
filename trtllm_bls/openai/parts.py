"""What the APIs of agents share: an answer is a list of parts, which are streamed one by one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from trtllm_bls.chat_parsing.parser import Arguments, Content, Reasoning, ToolCall
from trtllm_bls.openai.builder import Head, ResponseBuilder, well_ended
from trtllm_bls.openai.conversation import ChatTurn
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import Ending, TextChunk

Kind: TypeAlias = type[Content] | type[Reasoning] | type[ToolCall]


@dataclass(slots=True)
class Part:
    """A text, reasoning, or a call. ``before`` and ``after``: the constant bytes of its deltas."""

    kind: Kind
    index: int
    call: ToolCall | None
    id: str = ""
    before: bytes = b""
    after: bytes = b""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it; of a call, its arguments."""
        return "".join(self.texts)


def sse(kind: str, **fields: object) -> bytes:
    """A server-sent event, whose type is also in its JSON."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class PartsBuilder(ResponseBuilder):
    """A response of one choice whose parts are opened, grow, and are closed, one after another."""

    has_pings = True

    def __init__(self, head: Head, turn: ChatTurn, tokenizer: Tokenizer) -> None:
        super().__init__(head, [turn.text], turn.guide_field)
        self._tokenizer = tokenizer
        self._answer = turn.parts[0]
        self._parts: list[Part] = []
        self._is_open = False  # the last part
        self._begun = False
        self._ending: Ending | None = None

    def add(self, index: int, chunk: TextChunk) -> bytes:
        events = self._begin_once()
        self._ending = well_ended(chunk)
        for event in self._answer.feed(chunk.text, end=self._ending is not None):
            if isinstance(event, ToolCall):
                events += self._open(ToolCall, event)
                continue
            goes_on = self._is_open and self._parts[-1].kind is type(event)
            if not isinstance(event, Arguments) and not goes_on:
                events += self._open(type(event))
            part = self._parts[-1]
            part.texts.append(event.text)
            events += self._grown(part, event.text)
        if self._ending is not None:
            self.count_cached(self._ending)
            events += self._close()
        return events if self.stream else b""

    def _begin_once(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._first_events()

    def _open(self, kind: Kind, call: ToolCall | None = None) -> bytes:
        events = self._close()
        part = Part(kind, len(self._parts), call)
        self._parts.append(part)
        self._is_open = True
        return events + self._opened(part)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._closed(self._parts[-1])

    @property
    def is_large(self) -> bool:
        # Tokenising the reasoning takes a millisecond for some thousand characters.
        scored = self.requests[0].wants.log_probs
        return scored or sum(map(len, self._reasoning())) > 4096

    def _reasoning(self) -> list[str]:
        return [part.text for part in self._parts if part.kind is Reasoning]

    def _num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's text, which is tokenised for it: chunks do not say."""
        texts = self._tokenizer.encode_all(self._reasoning(), add_special_tokens=False)
        return sum(map(len, texts))

    @abstractmethod
    def _first_events(self) -> bytes: ...

    @abstractmethod
    def _opened(self, part: Part) -> bytes: ...

    def _grown(self, part: Part, text: str) -> bytes:
        return part.before + msgspec.json.encode(text) + part.after

    @abstractmethod
    def _closed(self, part: Part) -> bytes: ...


class Transcript:
    """A conversation as chat templates take it, from turns in any pieces."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # with lists of texts, which ``messages`` joins

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns so far."""
        found = []
        for turn in self._turns:
            message = {**turn, "content": "\n".join(filter(None, turn["content"]))}
            if "reasoning" in turn:
                message["reasoning"] = message["reasoning_content"] = "".join(turn["reasoning"])
            found.append(message)
        return found

    def say(self, role: str, text: str) -> None:
        """Add a message of text; to the assistant's message where that is the last one."""
        if role == "assistant":
            self._assistant()["content"].append(text)
        else:
            self._turns.append({"role": role, "content": [text]})

    def think(self, text: str) -> None:
        """Reasoning of the assistant's message that is the last one, or follows."""
        self._assistant().setdefault("reasoning", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant's message that is the last one, or of a new one.

        Arguments that are no JSON object, which the model may have written, become one: many
        templates would refuse the conversation for ever.
        """
        try:
            is_object = isinstance(msgspec.json.decode(arguments), dict)
        except msgspec.DecodeError:
            is_object = False
        if not is_object:
            arguments = msgspec.json.encode({"arguments": arguments}).decode()
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a call has returned."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    def _assistant(self) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": []})
        return self._turns[-1]
