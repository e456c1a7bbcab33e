"""``/v1/messages``, Anthropic's Messages API: Claude Code speaks nothing else.

Events, fields and errors follow the types of Anthropic's own package.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from trtllm_bls.chat_parsing.parser import Reasoning, ToolCall
from trtllm_bls.openai.builder import Opening, PartsBuilder, sse
from trtllm_bls.openai.conversation import (
    ChatModel,
    Conversation,
    Transcript,
    format_guide,
    function_tool,
    thinking,
)
from trtllm_bls.openai.errors import ApiError, as_json, invalid
from trtllm_bls.openai.schema import Count, Generation, RefusedFields, TextFormat, Word
from trtllm_bls.types import ChatOptions, FinishReason

PATH = "/v1/messages"
_OVERLOADED = 529  # Anthropic's status for what is 429 or 503 elsewhere
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    _OVERLOADED: "overloaded_error",
}
# Claude Code compacts its conversation where an error has these words and numbers.
_NUMBERS = re.compile(r"(\d+) tokens; .* at most (\d+)")
# A system text that differs between requests of one conversation, and would spoil the KV cache.
_BILLING = "x-anthropic-billing-header:"


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to think before it answers."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    effort: str | None = None


class ClientTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; ``type``: of others, which Anthropic runs."""

    name: Word
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether and which tools have to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class TextBlock(msgspec.Struct, tag="text"):
    """Text of a message."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thought before it answered."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """What nobody but Anthropic can read: it is left out."""


class ToolUseBlock(msgspec.Struct, tag="tool_use", kw_only=True):
    """A call of a tool."""

    id: str
    name: Word
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, tag="tool_result", kw_only=True):
    """What a call has returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block: TypeAlias = (
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class Message(msgspec.Struct, kw_only=True):
    """One turn; Claude Code sends system texts between others."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CountTokensRequest(Generation, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    no_effect = (
        *("metadata", "service_tier", "cache_control", "context_management", "speed"),
        *("inference_geo", "betas"),
    )
    refused: ClassVar[RefusedFields] = {"container": (), "mcp_servers": ([],)}

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=8192)]
    system: str | list[TextBlock] | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[Word], msgspec.Meta(max_length=1024)] | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=512)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Count


class MessagesResponse(PartsBuilder):
    """Builds the response to a ``MessagesRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "message"
    prompt_field = "messages"
    id_prefix = "msg_"

    def __init__(self, request: CountTokensRequest, model: ChatModel) -> None:
        stop_words, max_tokens = tuple(request.stop_sequences or ()), request.max_tokens
        asked = _conversation(request)
        super().__init__(request, model, asked, max_tokens=max_tokens, stop_words=stop_words)

    def last_events(self) -> bytes:
        delta = {**self._stopped(), "container": None}
        return sse("message_delta", delta=delta, usage=self._usage()) + sse("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return sse("error", error=error_answer(error)[1])

    def _first_events(self) -> bytes:
        return sse("message_start", message=self._body())

    def _open(self, event: Opening) -> bytes:
        kind, key = "text_delta", "text"
        block: dict[str, Any] = {"type": "text", "text": ""}
        if isinstance(event, ToolCall):
            kind, key = "input_json_delta", "partial_json"
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        elif isinstance(event, Reasoning):
            kind, key = "thinking_delta", "thinking"
            block = {"type": "thinking", "thinking": "", "signature": ""}
        index = len(self._items)
        self._items.append(block)
        start = {"type": "content_block_delta", "index": index, "delta": {"type": kind}}
        fields = msgspec.json.encode(start)[:-2]
        self._before = b'event: content_block_delta\ndata: %b,"%b":' % (fields, key.encode())
        self._after = b"}}\n\n"
        return sse("content_block_start", index=index, content_block=block)

    def _closed(self, item: dict[str, Any], text: str) -> bytes:
        events, index = b"", len(self._items) - 1
        if item["type"] == "tool_use":
            with suppress(msgspec.DecodeError):  # cut, or not JSON at all
                item["input"] = msgspec.json.decode(text or "{}")
        elif item["type"] == "text":
            item["text"] = text
        else:
            item["thinking"] = text
            # Clients send the signature back, and some want it before the stop.
            delta = {"type": "signature_delta", "signature": ""}
            events = sse("content_block_delta", index=index, delta=delta)
        return events + sse("content_block_stop", index=index)

    def _body(self) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._items,
            **self._stopped(),
            "usage": self._usage(),
        }

    def _stopped(self) -> dict[str, str | None]:
        ending = self._ending
        if ending is None:
            return {"stop_reason": None, "stop_sequence": None}
        if ending.finish_reason is FinishReason.STOP and ending.stop_reason is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_reason}
        reason = "tool_use" if self._parser.has_calls else "end_turn"
        if ending.finish_reason in (FinishReason.LENGTH, FinishReason.TIMEOUT):
            reason = "max_tokens"
            asked = self.requests[0].max_tokens or 0
            if ending.finish_reason is FinishReason.LENGTH and ending.completion_tokens < asked:
                reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        made = self._ending.completion_tokens if self._ending is not None else 0
        cached = self.cached_tokens or 0
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": made,
        }


def error_answer(error: ApiError) -> tuple[int, dict[str, str]]:
    """The status and the error object of an error, as Anthropic's clients read them."""
    status, message = error.status, error.message
    if status in (429, 503):
        status = _OVERLOADED
    elif error.code == "context_length_exceeded":
        numbers = _NUMBERS.search(message)
        told = "{} tokens > {} maximum".format(*numbers.groups()) if numbers else message
        message = f"prompt is too long: {told}"
    kind = "api_error" if status >= 500 else "invalid_request_error"
    return status, {"type": _TYPES.get(status, kind), "message": message}


def _conversation(request: CountTokensRequest) -> Conversation:
    transcript = Transcript()
    if request.system:
        transcript.say("system", _text(request.system))
    for message in request.messages:
        texts: list[str] = []
        content = message.content
        for block in [TextBlock(text=content)] if isinstance(content, str) else content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                transcript.think(block.thinking)
            elif isinstance(block, ToolUseBlock):
                transcript.call(block.id, block.name, as_json("messages", block.input))
            elif isinstance(block, ToolResultBlock):
                transcript.result(block.tool_use_id, _text(block.content or ""))
        if texts:
            transcript.say(message.role, "\n".join(texts))
    turns = transcript.messages
    if not turns:
        raise invalid("messages", "hold nothing; send at least one block of text")
    config, choice = request.output_config or OutputConfig(), request.tool_choice
    form = config.format or TextFormat()
    thinks = None if request.thinking is None else request.thinking.type != "disabled"
    goes_on = turns[-1]["role"] == "assistant"
    if goes_on and (request.tools or thinks):
        problem = "ends with an answer to go on with, which tools and thinking do not allow"
        raise invalid("messages", problem)
    if choice is not None and choice.type == "tool" and not choice.name:
        raise invalid("tool_choice.name", "is missing")
    demands = {"any": "required", "tool": "required", "none": "none"}
    return Conversation(
        messages=turns,
        tools=[
            function_tool(tool.name, tool.description, tool.input_schema)
            for tool in request.tools or ()
        ],
        choice=demands.get(choice.type, "auto") if choice else "auto",
        forced=choice.name if choice and choice.type == "tool" else None,
        parallel=not (choice and choice.disable_parallel_tool_use),
        guide=format_guide("output_config.format", form.type, form.schema),
        options=ChatOptions(
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            variables=thinking(config.effort, thinks) | (request.chat_template_kwargs or {}),
        ),
    )


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(b.text for b in content if not b.text.startswith(_BILLING))
