"""From a conversation of any API to a text request, and to what parses the text of its answer."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from trtllm_bls.chat_parsing.parser import ChatParser
from trtllm_bls.openai.builder import shared_fields
from trtllm_bls.openai.constraints import ChatFormats, Conversation, answer_form, prompt_opens
from trtllm_bls.openai.errors import as_json
from trtllm_bls.openai.schema import Generation
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import TextRequest

# How hard the model is to think, as agents say it, in the words that templates know.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


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
        guide, calls, schemas = answer_form(asked, formats)
        # Where there is a guide, the engine enforces the form from the first token on.
        reasoning = formats.reasoning if guide is None else None
        tools = as_json("tools", asked.tools) if asked.tools and asked.choice != "none" else None
        options = replace(asked.options, tools=tools)
        shared = shared_fields(request, tokenizer.model_vocab_size)
        marked = any(each is not None and each.special for each in (calls, reasoning))
        if marked and request.skip_special_tokens is None:  # the text has to keep the markers
            shared["skip_special_tokens"] = False
        self.guide_field = guide.field if guide else ""
        self.text = TextRequest(
            request_id=uuid.uuid4().hex,
            messages=as_json("messages", formats.conversations.fitted(asked.messages)),
            chat=options,
            num_return_sequences=choices,
            extras=guide.extras if guide else {},
            **{**shared, **fields},
        )
        opened = reasoning is not None and prompt_opens(reasoning.begin, options, tokenizer)
        most = None if asked.parallel else 1
        self.parts = [
            ChatParser(calls, reasoning, opened=opened, schemas=schemas, most_calls=most)
            for _ in range(choices)
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
