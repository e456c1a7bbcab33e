"""``/v1/responses``, OpenAI's Responses API without its memory: Codex speaks nothing else.

Events and fields follow OpenAI's description. Nothing is stored, so a request brings its whole
conversation.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trtllm_bls.chat_parsing.parser import Content, Reasoning, ToolCall
from trtllm_bls.openai.builder import Opening, PartsBuilder, TokenScores, chat_logprobs, sse
from trtllm_bls.openai.conversation import (
    ChatModel,
    Conversation,
    Transcript,
    format_guide,
    function_tool,
    thinking,
)
from trtllm_bls.openai.errors import ApiError, as_json, invalid
from trtllm_bls.openai.schema import (
    Count,
    Generation,
    RefusedFields,
    TextFormat,
    TextPart,
    checked,
    text_of,
)
from trtllm_bls.types import ChatOptions, FinishReason, TextChunk, Wants

_SCORES = "message.output_text.logprobs"  # what ``include`` says for log-probabilities
# OpenAI runs these tools itself. A model that is not told of them does not call them.
_HOSTED = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("mcp", "local_shell", "computer_use_preview", "tool_search"),
)
# The fields that an item of each type has to have.
_NEEDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "additional_tools": ("tools",),  # Codex sends those of models that it knows
}
# The prefix of an item's id, and the event that has more of it. A call with free text has none:
# the text leaves once its JSON is whole.
_OUTPUTS = {
    "message": ("msg", "response.output_text.delta"),
    "reasoning": ("rs", "response.reasoning_text.delta"),
    "function_call": ("fc", "response.function_call_arguments.delta"),
    "custom_tool_call": ("ctc", ""),
}
# A tool of free text, as the model sees it.
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How hard the model is to think."""

    effort: str | None = None


class ResponsesRequest(Generation, kw_only=True):
    """``POST /v1/responses``."""

    no_effect = (
        *("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        *("stream_options", "user"),
    )
    refused: ClassVar[RefusedFields] = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "moderation"), ()),
        "background": (False,),
        "context_management": ([],),
        "truncation": ("disabled",),
    }

    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=8192)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Item(msgspec.Struct, kw_only=True):
    """Of a conversation: a turn, reasoning, a call, what it has returned, or tools, by its type."""

    type: str = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    summary: list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[TextPart] | None = None
    tools: list[dict[str, Any]] | None = None


class _Tools:
    """The tools of a request as functions, and what each was before it was one."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.origins: dict[str, tuple[str, str | None, bool]] = {}  # name, namespace, free text

    def add(self, place: str, tools: object, namespace: str | None = None) -> None:
        """Add a list of tools; those in a namespace get its name in front of theirs."""
        if not isinstance(tools, list):
            raise invalid(place, "must be a list of tools")
        for index, tool in enumerate(tools):
            own = f"{place}[{index}]"
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind == "namespace":
                self.add(f"{own}.tools", tool.get("tools"), tool.get("name"))
            elif kind in ("function", "custom"):
                name, free = tool.get("name"), kind == "custom"
                if not isinstance(name, str) or not name:
                    raise invalid(f"{own}.name", "must be a string that is not empty")
                seen, about = _seen(name, namespace), tool.get("description") or ""
                parameters = _FREE_TEXT if free else tool.get("parameters")
                self.functions.append(function_tool(seen, about, parameters))
                self.origins[seen] = (name, namespace, free)
            elif kind not in _HOSTED:
                problem = f"{str(kind)[:40]!r} is not a type of tool; send function or custom"
                raise invalid(f"{own}.type", problem)


def _seen(name: object, namespace: str | None) -> str:
    """The name that the model sees."""
    return f"{namespace}__{name}" if namespace else str(name)


class ResponsesResponse(PartsBuilder):
    """Builds the response to a ``ResponsesRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "response"
    prompt_field = "input"
    id_prefix = "resp_"

    def __init__(self, request: ResponsesRequest, model: ChatModel) -> None:
        self._tools, alternatives = _Tools(), request.top_logprobs or 0
        scored = bool(alternatives) or _SCORES in (request.include or ())
        super().__init__(
            request,
            model,
            _conversation(request, self._tools),
            max_tokens=request.max_output_tokens,
            wants=Wants(log_probs=scored, top_log_probs=alternatives),
            return_tokens=scored,
        )
        self._tokenizer = model.tokenizer
        self._scores = TokenScores(model.tokenizer, alternatives) if scored else None
        self._scored: list[Any] = []  # log-probabilities of tokens whose text has not left
        self._logprobs: list[Any] = []  # of the message so far
        # Of events, but for pings: clients skip a type that they do not know.
        self._numbers = itertools.count()
        self._echoed = _echoed(request)

    def last_events(self) -> bytes:
        return self._event(f"response.{self._end_status}", response=self._body())

    def failed(self, error: ApiError) -> bytes:
        code = error.code if error.code == "context_length_exceeded" else "server_error"
        if error.status == 429:
            code = "rate_limit_exceeded"
        elif error.status < 500 and code == "server_error":
            code = "invalid_prompt"
        told = {"code": code, "message": error.message}
        return self._event("response.failed", response=self._body("failed", told))

    @property
    def _end_status(self) -> str:
        """How the answer, or the part that is closed, has ended."""
        reasons = (FinishReason.LENGTH, FinishReason.TIMEOUT)
        cut = self._ending is not None and self._ending.finish_reason in reasons
        return "incomplete" if cut else "completed"

    def _first_events(self) -> bytes:
        response = self._body("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _open(self, event: Opening) -> bytes:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if isinstance(event, ToolCall):
            known = self._tools.origins.get(event.name)
            name, namespace, free = known or (event.name, None, False)
            kind, key = ("custom_tool_call", "input") if free else ("function_call", "arguments")
            item = {"type": kind, "call_id": event.id, "name": name, key: ""}
            if namespace:
                item["namespace"] = namespace
        elif isinstance(event, Reasoning):
            item = {"type": "reasoning", "summary": [], "content": []}
        prefix, delta = _OUTPUTS[item["type"]]
        item |= {"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress"}
        place = {"output_index": len(self._items), "item_id": item["id"]}
        events = self._event("response.output_item.added", output_index=len(self._items), item=item)
        self._items.append(item)
        if not isinstance(event, ToolCall):
            place["content_index"] = 0
            added = _content(item, "", [])
            events += self._event("response.content_part.added", **place, part=added)
        if isinstance(event, Content) and self._scores is None:
            place["logprobs"] = []
        fields = msgspec.json.encode({"type": delta, **place})[:-1]
        self._before = b"event: %b\ndata: %b" % (delta.encode(), fields) if delta else b""
        return events

    def add(self, index: int, chunk: TextChunk) -> bytes:
        if self._scores is not None and chunk.tokens:
            self._scored += chat_logprobs(self._scores.of(chunk))["content"]
        return super().add(index, chunk)

    def _grown(self, text: str) -> bytes:
        scores = b""
        if self._scores is not None and self._kind is Content:
            told, self._scored = self._scored, []
            self._logprobs += told
            scores = b',"logprobs":' + msgspec.json.encode(told)
        if not self._before:
            return b""
        parts = (self._before, scores, next(self._numbers), msgspec.json.encode(text))
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % parts

    def _closed(self, item: dict[str, Any], text: str) -> bytes:
        index = len(self._items) - 1
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "custom_tool_call":
            item["input"] = text = _free_text(text)
            kind = "response.custom_tool_call_input"
            events = self._event(f"{kind}.delta", **place, delta=text)
            events += self._event(f"{kind}.done", **place, input=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            events = self._event(kind, **place, name=item["name"], arguments=text)
        else:
            done = _content(item, text, self._logprobs)
            item["content"], self._logprobs = [done], []
            place["content_index"] = 0
            told = {key: done[key] for key in ("text", "logprobs") if key in done}
            events = self._event(f"response.{done['type']}.done", **place, **told)
            events += self._event("response.content_part.done", **place, part=done)
        item["status"] = self._end_status
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse(kind, sequence_number=next(self._numbers), **fields)

    def _body(self, status: str = "", error: Any = None) -> dict[str, Any]:
        status, is_cut = status or self._end_status, self._end_status == "incomplete"
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": self._head.created if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._head.model,
            "output": self._items,
            "usage": self._usage() if self._ending is not None else None,
            **self._echoed,
        }

    def _usage(self) -> dict[str, Any]:
        assert self._ending is not None
        made = self._ending.completion_tokens
        # Chunks do not say which tokens were reasoning, so its text is tokenised.
        reasoning = self._tokenizer.encode_all(self._reasoning, add_special_tokens=False)
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": min(made, sum(map(len, reasoning)))},
            "total_tokens": self.prompt_tokens + made,
        }


def _content(item: dict[str, Any], text: str, logprobs: list[Any]) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _free_text(arguments: str) -> str:
    """The text of a call of a free-text tool; all of it where the model wrote no such JSON."""
    try:
        text = msgspec.json.decode(arguments)["input"]
    except (msgspec.DecodeError, TypeError, KeyError):
        return arguments
    return text if isinstance(text, str) else arguments


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that repeat the request."""
    reasoning, text = request.reasoning or ReasoningOptions(), request.text or TextOptions()
    form = text.format or TextFormat()
    told: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        told |= {"name": form.name or "", "schema": form.schema, "strict": True}
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": told},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }


def _conversation(request: ResponsesRequest, tools: _Tools) -> Conversation:
    tools.add("tools", request.tools or [])
    transcript = Transcript()
    if request.instructions:
        transcript.say("system", request.instructions)
    if isinstance(request.input, str):
        transcript.say("user", request.input)
    else:
        for index, each in enumerate(request.input):
            _read_item(f"input[{index}]", each, transcript, tools)
    effort = request.reasoning.effort if request.reasoning else None
    form = (request.text or TextOptions()).format or TextFormat()
    demand = "auto" if request.tool_choice is None else request.tool_choice
    forced = allowed = None
    if isinstance(demand, str):
        choice = demand
        if choice not in ("auto", "none", "required"):
            raise invalid("tool_choice", "must be auto, none, required, or an object")
    elif (kind := demand.get("type")) in ("function", "custom"):
        choice, forced = "required", _seen(demand.get("name"), demand.get("namespace"))
    elif kind != "allowed_tools" or demand.get("mode") not in ("auto", "required"):
        raise invalid("tool_choice", f"{str(kind)[:40]!r} is not supported; send a function")
    else:
        choice, named = demand["mode"], demand.get("tools")
        if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
            raise invalid("tool_choice.tools", "must be a list of tools")
        allowed = {_seen(tool.get("name"), tool.get("namespace")) for tool in named}
    return Conversation(
        messages=transcript.messages,
        tools=tools.functions,
        choice=choice,
        forced=forced,
        allowed=allowed,
        parallel=request.parallel_tool_calls is not False,
        guide=format_guide("text.format", form.type, form.schema),
        options=ChatOptions(variables=thinking(effort) | (request.chat_template_kwargs or {})),
    )


def _read_item(place: str, given: dict[str, Any], transcript: Transcript, tools: _Tools) -> None:
    item: Any = checked(place, given, Item)
    if item.type not in _NEEDS:
        raise invalid(f"{place}.type", f"invalid value {item.type[:40]!r}")
    for field in _NEEDS[item.type]:
        if getattr(item, field) is None:
            raise invalid(f"{place}.{field}", "is missing")
    if item.type == "message":
        role = "system" if item.role == "developer" else item.role
        transcript.say(role, text_of(item.content))
    elif item.type == "reasoning":
        transcript.think(text_of(item.content or item.summary or ""))
    elif item.type == "function_call":
        transcript.call(item.call_id, _seen(item.name, item.namespace), item.arguments)
    elif item.type == "custom_tool_call":
        arguments = as_json(place, {"input": item.input})
        transcript.call(item.call_id, _seen(item.name, item.namespace), arguments)
    elif item.type == "additional_tools":
        tools.add(f"{place}.tools", item.tools)
    else:
        transcript.result(item.call_id, text_of(item.output))
