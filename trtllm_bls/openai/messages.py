"""``/v1/messages``, Anthropic's Messages API: Claude Code speaks nothing else.

Events, fields and errors follow the types of Anthropic's own package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trtllm_bls.http.budgets import MAX_ITEMS, MAX_TOOLS
from trtllm_bls.openai.api_errors import ApiError, invalid
from trtllm_bls.openai.builder import Opening, PartsBuilder, sse
from trtllm_bls.openai.content import Content, ContentReader, Piece, note_once
from trtllm_bls.openai.conversation import (
    CallDemand,
    ChatModel,
    Transcript,
    client_tool,
    form_demand,
    function_tool,
    message_form,
    thinking,
)
from trtllm_bls.openai.schema import (
    Count,
    Generation,
    TextFormat,
    UnsupportedFields,
    Word,
    checked,
    json_text,
)
from trtllm_bls.orchestrator.chat_turn import Conversation
from trtllm_bls.text.chat_parser import Reasoning, Refusal, ToolCall
from trtllm_bls.text.json_values import json_value
from trtllm_bls.types import ChatOptions, FinishReason

PATH = "/v1/messages"
_OVERLOADED = 529  # Anthropic's status in place of 429 and 503
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# The field for a conversation that Anthropic's server keeps. After a refusal with these details its
# packages send whole conversations. If the field had no effect, the next request would have no
# history.
_THREAD = "thread"
_DATE = re.compile(r"_\d{8}$")
# The demand on calls for each type of ``tool_choice``.
_DEMANDS = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
# A system text that differs between requests of one conversation, so no prefix would be reused.
_BILLING = "x-anthropic-billing-header:"


class Thinking(msgspec.Struct, kw_only=True):
    """The switch of reasoning before the answer."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    effort: str | None = None


class ClientTool(msgspec.Struct, kw_only=True):
    """A tool.

    ``type`` names a tool whose schema Anthropic knows. The model sees a tool with ``defer_loading``
    only after the conversation refers to it.
    """

    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """The demand on calls: none, any number, one at least, or one of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Block(msgspec.Struct, kw_only=True):
    """A block of a turn: thinking, a call, its result, or a change of the tools, by its type."""

    type: str
    thinking: str | None = None
    id: str | None = None
    name: Word | None = None
    input: Any = {}
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    tool: dict[str, Any] | None = None


# The fields that a block of each type must have. Other blocks of a user or a tool are content.
# Other blocks of the assistant belong to tools that Anthropic runs, and are left out.
_BLOCK_FIELDS: dict[str, tuple[str, ...]] = {
    "thinking": ("thinking",),
    "redacted_thinking": (),  # only Anthropic can read it
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
}


class Message(msgspec.Struct, kw_only=True):
    """A turn; Claude Code sends system texts between those of user and assistant."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(Generation, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    no_effect = (
        *("metadata", "service_tier", "cache_control", "context_management", "speed"),
        *("inference_geo", "betas", "billing_policy", "diagnostics", "fallbacks"),
        *("fallback_credit_token", "user_profile_id", "workspace_id"),
    )
    unsupported: ClassVar[UnsupportedFields] = {
        **{"container": ({},), "mcp_servers": ([],)},
        **dict.fromkeys(("compaction", _THREAD), ()),
    }

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[Word], msgspec.Meta(max_length=1024)] | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None  # the older name of ``output_config.format``
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Count


class MessagesResponse(PartsBuilder):
    """The response to a ``MessagesRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "message"
    prompt_field = "messages"
    id_prefix = "msg_"

    def __init__(self, request: CountTokensRequest, model: ChatModel) -> None:
        super().__init__(
            request,
            model,
            _conversation(request, model.reader),
            max_tokens=request.max_tokens,
            stop_words=tuple(request.stop_sequences or ()),
        )
        self._has_refusal = False
        self._annotations: list[Mapping[str, Any]] = []  # sent when the text is closed
        self._num_citations = 0

    def last_events(self) -> bytes:
        delta = {**self._stop_fields(), "container": None}
        return sse("message_delta", delta=delta, usage=self._usage()) + sse("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return sse("error", error=error_answer(error)[1])

    def _first_events(self) -> bytes:
        return sse("message_start", message=self._body())

    def _open(self, event: Opening) -> bytes:
        delta_type = "text_delta"
        key = "text"
        block: dict[str, Any] = {"type": "text", "text": ""}
        if isinstance(event, ToolCall):
            delta_type = "input_json_delta"
            key = "partial_json"
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        elif isinstance(event, Reasoning):
            delta_type = "thinking_delta"
            key = "thinking"
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(event, Refusal):
            self._has_refusal = True
        index = len(self._items)
        self._items.append(block)
        start = {"type": "content_block_delta", "index": index, "delta": {"type": delta_type}}
        fields = msgspec.json.encode(start)[:-2]
        self._delta_head = b'event: content_block_delta\ndata: %b,"%b":' % (fields, key.encode())
        self._delta_tail = b"}}\n\n"
        return sse("content_block_start", index=index, content_block=block)

    def _grown(self, text: str, tokens: list[Any]) -> bytes:
        # A call's arguments are sent at its end. A client would run a call whose arguments break
        # off with the part that it has.
        if self._kind is ToolCall:
            return b""
        return super()._grown(text, tokens)

    def _annotated(self, annotation: Mapping[str, Any]) -> bytes:
        self._annotations.append(annotation)
        return b""

    def _citations(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the annotations as citations of a search's results.

        That is the form of a citation that has a name and no place in a document.
        """
        for annotation in self._annotations:
            fields = {**annotation, **(annotation.get("url_citation") or {})}
            start = fields.get("start_index")
            end = fields.get("end_index")
            cited_text = ""
            if start is not None and end is not None:
                cited_text = text[start:end]
            url = fields.get("url")
            file = fields.get("filename") or url or fields.get("file_id")
            yield {
                "type": "search_result_location",
                "cited_text": cited_text,
                "source": str(url or file or ""),
                "title": fields.get("title") or file or None,
                "search_result_index": self._num_citations,
                "start_block_index": 0,
                "end_block_index": 1,
            }
            self._num_citations += 1
        self._annotations = []

    def _closed(self, item: dict[str, Any], text: str, tokens: list[Any]) -> bytes:
        events = b""
        index = len(self._items) - 1
        if item["type"] == "tool_use":
            item["input"] = json_value(text)
            if not isinstance(item["input"], dict):
                # ``object_arguments`` gives the same object when the conversation comes back.
                item["input"] = {"arguments": text}
                text = json_text(item["input"])
            events = super()._grown(text, tokens)
        elif item["type"] == "text":
            item["text"] = text
            for citation in self._citations(text):
                item.setdefault("citations", []).append(citation)
                delta = {"type": "citations_delta", "citation": citation}
                events += sse("content_block_delta", index=index, delta=delta)
        else:
            item["thinking"] = text
            # Clients send the signature back, and some need it before the stop.
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
            **self._stop_fields(),
            "usage": self._usage(),
        }

    def _stop_fields(self) -> dict[str, str | None]:
        ending = self._ending
        if ending is None:
            return {"stop_reason": None, "stop_sequence": None}
        if ending.finish_reason is FinishReason.STOP and ending.stop_reason is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_reason}
        reason = "end_turn"
        if ending.finish_reason in (FinishReason.LENGTH, FinishReason.TIMEOUT):
            reason = "max_tokens"
            max_tokens = self.requests[0].max_tokens or 0
            is_length = ending.finish_reason is FinishReason.LENGTH
            if is_length and ending.completion_tokens < max_tokens:
                reason = "model_context_window_exceeded"
        elif self._has_refusal:
            reason = "refusal"
        elif self._parser.has_calls and not self._parser.is_cut:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        output_tokens = 0
        if self._ending is not None:
            output_tokens = self._ending.completion_tokens
        cached = self.cached_tokens or 0
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


def error_answer(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return the status and the error object of an error, as Anthropic's clients read them."""
    status = error.status
    message = error.message
    if status in (429, 503):
        status = _OVERLOADED
    elif error.code == "context_length_exceeded":
        # Claude Code compacts its conversation at these words and numbers.
        if error.too_long is not None:
            message = "{} tokens > {} maximum".format(*error.too_long)
        message = f"prompt is too long: {message}"
    kind = "api_error" if status >= 500 else "invalid_request_error"
    answer: dict[str, Any] = {"type": _ERROR_TYPES.get(status, kind), "message": message}
    if error.param == _THREAD:
        answer["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return status, answer


class _MessagesTools:
    """The tools of a request as functions; the model sees those in ``visible``."""

    def __init__(self, tools: Sequence[ClientTool]) -> None:
        self._functions: dict[str, dict[str, Any]] = {}
        self.visible: set[str] = set()
        self.hosted: set[str] = set()  # tools that Anthropic's server would run
        # Anthropic's server would search the deferred tools. This one has no search, so all of them
        # are visible then.
        searches = any((tool.type or "").startswith("tool_search_tool_") for tool in tools)
        for index, tool in enumerate(tools):
            self.add(f"tools[{index}]", tool)
            if tool.defer_loading and not searches:
                self.visible.discard(tool.name)

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool for name, tool in self._functions.items() if name in self.visible]

    def add(self, place: str, tool: ClientTool) -> None:
        function: dict[str, Any] | None
        if tool.type not in (None, "custom"):
            function = client_tool(tool.name, _DATE.sub("", tool.type))
            if function is None:
                note_once(f"the tool {tool.type!r}, which this server does not run: it is left out")
                self.hosted.add(tool.name)
                return
        else:
            function = function_tool(tool.name, tool.description, tool.input_schema)
        if not tool.name:
            raise invalid(f"{place}.name", "is missing")
        self._functions[tool.name] = function
        self.visible.add(tool.name)

    def change(self, place: str, kind: str, tool: dict[str, Any]) -> None:
        """Add or remove a tool at a place in the conversation."""
        name = str(tool.get("name"))
        if kind == "tool_removal":
            self.visible.discard(name)
        elif (definition := tool.get("definition")) is not None:
            self.add(place, checked(f"{place}.definition", definition, ClientTool))
        else:
            self.visible.add(name)

    def refer(self, content: Content) -> None:
        """Make the tools visible that a search of the client returned."""
        if isinstance(content, str):
            return
        for part in content:
            if part.get("type") == "tool_reference":
                self.visible.add(str(part.get("tool_name")))


def _conversation(request: CountTokensRequest, reader: ContentReader) -> Conversation:
    transcript = Transcript()
    tools = _MessagesTools(request.tools or ())
    if system := request.system:
        if not isinstance(system, str):
            system = [part for part in system if not str(part.get("text")).startswith(_BILLING)]
        transcript.say("system", reader.text("system", system))
    for number, message in enumerate(request.messages):
        if isinstance(message.content, str):
            transcript.say(message.role, message.content)
            continue
        pieces: list[Piece] = []
        for index, block in enumerate(message.content):
            place = f"messages[{number}].content[{index}]"
            kind = str(block.get("type"))
            if kind in _BLOCK_FIELDS:
                _read_block(place, checked(place, block, Block), transcript, tools, reader)
            elif message.role != "assistant" or "text" in block:
                pieces.append(reader.piece(place, block))
            elif isinstance(summary := block.get("content"), str):  # a summary of the turns before
                pieces.append(summary)
            else:
                note_once(f"blocks of type {kind!r}, which hold nothing for the model: left out")
        if pieces:
            transcript.say(message.role, *pieces)
    turns = transcript.messages
    if not turns:
        raise invalid("messages", "hold nothing; send at least one block of text")
    config = request.output_config or OutputConfig()
    form = config.format or request.output_format or TextFormat()
    thinks: bool | None = None
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
    is_continuation = turns[-1]["role"] == "assistant"
    if is_continuation and (request.tools or thinks):
        problem = "ends with an answer to go on with, which tools and thinking do not allow"
        raise invalid("messages", problem)
    choice = request.tool_choice
    demand = _call_demand(request, tools)
    return Conversation(
        messages=turns,
        tools=tools.functions,
        choice=demand.choice,
        forced=demand.forced,
        parallel=not (choice and choice.disable_parallel_tool_use),
        form=form_demand(request, message_form("output_config.format", form.type, form.schema)),
        options=ChatOptions(
            add_generation_prompt=not is_continuation,
            continue_final_message=is_continuation,
            variables=thinking(config.effort, thinks) | (request.chat_template_kwargs or {}),
        ),
    )


def _call_demand(request: CountTokensRequest, tools: _MessagesTools) -> CallDemand:
    """Return the demand of ``tool_choice``. Raises ``ApiError``."""
    choice = request.tool_choice
    if choice is None:
        return CallDemand("auto")
    forced = None
    if choice.type == "tool":
        if not choice.name:
            raise invalid("tool_choice.name", "is missing")
        tools.visible.add(choice.name)
        forced = choice.name
    demand = _DEMANDS[choice.type]
    # All tools may be ones that Anthropic runs, or that the model does not see yet.
    if forced in tools.hosted or (request.tools and not tools.functions and demand == "required"):
        return CallDemand("auto")
    return CallDemand(demand, forced)


def _read_block(
    place: str, block: Block, transcript: Transcript, tools: _MessagesTools, reader: ContentReader
) -> None:
    for field in _BLOCK_FIELDS[block.type]:
        if getattr(block, field) is None:
            raise invalid(f"{place}.{field}", "is missing")
    content = block.content or ""
    if block.type == "thinking":
        transcript.think(block.thinking or "")
    elif block.type == "tool_use":
        transcript.call(block.id or "", block.name or "", json_text(block.input))
    elif block.type == "tool_result":
        tools.refer(content)
        # Anthropic's name of the place, so that Claude Code drops the part that an error names.
        pieces = reader.pieces(f"{place}.tool_result.content", content)
        transcript.result(block.tool_use_id or "", *pieces)
    elif block.tool is not None:
        tools.change(f"{place}.tool", block.type, block.tool)
