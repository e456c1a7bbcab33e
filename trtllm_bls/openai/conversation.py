"""From a conversation of any API to a text request, and from its text to the parts of an answer."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from trtllm_bls.chat_parsing.parser import ChatParser, Content, Event
from trtllm_bls.openai.builder import shared_fields
from trtllm_bls.openai.constraints import AnswerForm, ChatFormats, Conversation
from trtllm_bls.openai.errors import as_json
from trtllm_bls.openai.schema import Generation
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import TextRequest

# How hard the model is to think, as agents say it, in the words that templates know.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


class AnswerParts:
    """The text of one choice as parts: content, reasoning, and calls of tools.

    ``parser``: ``None`` where all text is content. Calls beyond ``most_calls`` are left out.
    """

    def __init__(self, parser: ChatParser | None, most_calls: int | None) -> None:
        self._parser = parser
        self._most_calls = most_calls

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._parser is None

    @property
    def has_calls(self) -> bool:
        """Whether the text so far calls a tool."""
        return self._parser is not None and self._parser.has_calls

    def of(self, text: str, end: bool) -> list[Event]:
        """The parts that are certain with this text; ``end``: there is no more."""
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.feed(text)
        if end:
            events += self._parser.flush()
        if self._most_calls is None:
            return events
        return [event for event in events if getattr(event, "index", 0) < self._most_calls]


class ChatTurn:
    """One conversation that is to be answered. Raises ``ApiError`` where it cannot be.

    ``text``: what is asked of the orchestrator; ``fields`` are further ones of it. ``parts``: one
    for each choice. ``guide_field``: the request's field that asked for guided decoding, if any.
    """

    def __init__(
        self,
        request: Generation,
        asked: Conversation,
        tokenizer: Tokenizer,
        formats: ChatFormats,
        *,
        choices: int = 1,
        **fields: Any,
    ) -> None:
        form = AnswerForm(asked, formats, tokenizer)
        tools = as_json("tools", asked.tools) if asked.tools and asked.choice != "none" else None
        options = replace(asked.options, tools=tools)
        shared = shared_fields(request, tokenizer.model_vocab_size)
        if form.keeps_special and request.skip_special_tokens is None:
            shared["skip_special_tokens"] = False
        self.guide_field = form.guide.field if form.guide else None
        self.text = TextRequest(
            request_id=uuid.uuid4().hex,
            messages=as_json("messages", formats.conversations.fitted(asked.messages)),
            chat=options,
            num_return_sequences=choices,
            extras=form.guide.extras if form.guide else {},
            **{**shared, **fields},
        )
        self.parts = [
            AnswerParts(parser, form.most_calls) for parser in form.parsers(options, choices)
        ]


def thinking(effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """Variables of chat templates: how hard the model is to think, and whether it is to."""
    if effort == "none":
        effort, thinks = None, False
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if thinks is not None:
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    return variables
