"""``/v1/responses``, OpenAI's Responses API: Codex speaks nothing else.

Events and fields follow OpenAI's description. A request brings its whole conversation, or refers to
responses that are stored (``stored.py``).
"""

from __future__ import annotations

import base64
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trtllm_bls.http.budgets import MAX_ITEMS, MAX_TOOLS, STORED_RESPONSE_BYTES
from trtllm_bls.openai.api_errors import DONE, ApiError, invalid
from trtllm_bls.openai.builder import Opening, PartsBuilder, TokenScores, chat_logprobs, sse
from trtllm_bls.openai.content import ContentReader, note_once
from trtllm_bls.openai.conversation import (
    FREE_TEXT,
    CallDemand,
    ChatModel,
    Transcript,
    client_tool,
    form_demand,
    free_text,
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
from trtllm_bls.openai.stored import Stored, StoredResponses
from trtllm_bls.orchestrator.chat_turn import Conversation
from trtllm_bls.text.chat_parser import Content, Reasoning, Refusal, ToolCall
from trtllm_bls.text.json_values import json_value
from trtllm_bls.types import ChatOptions, FinishReason, TextChunk, Wants

_INCLUDE_LOGPROBS = "message.output_text.logprobs"  # asks for log-probabilities in ``include``
# OpenAI's other values of ``include``. Its own tools and servers would add what they ask for.
_INCLUDE_WITHOUT_EFFECT = {
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
}
# The fields that an item of each type must have. Items of other types are left out: they belong to
# tools that OpenAI runs, in conversations that began there.
_ITEM_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "additional_tools": ("tools",),  # Codex sends them for models that it knows
    "tool_search_output": ("tools",),
    "compaction": ("encrypted_content",),
    "shell_call": ("call_id", "action"),
    "local_shell_call": ("call_id", "action"),
    "apply_patch_call": ("call_id", "operation"),
    "shell_call_output": ("call_id", "output"),
    "local_shell_call_output": ("output",),
    "apply_patch_call_output": ("call_id",),
}
# The prefix of an item's id, and the event that adds to the item. A call of a client's tool or with
# free text has no such event, as it is sent once its JSON is whole.
_OUTPUTS = {
    "message": ("msg", "response.output_text.delta"),
    "reasoning": ("rs", "response.reasoning_text.delta"),
    "function_call": ("fc", "response.function_call_arguments.delta"),
    "custom_tool_call": ("ctc", ""),
    "shell_call": ("sh", ""),
    "local_shell_call": ("lsh", ""),
    "apply_patch_call": ("apc", ""),
}
_SUMMARY_PREFIX = "b64:"  # begins a summary that this server made
_COMPACT_PROMPT = (
    "Sum up this conversation for someone who goes on with it and has only the summary: the aims, "
    "what was done and found, what is open, and every name, path and number that is still needed."
)


class Shell(msgspec.Struct, kw_only=True):
    """The commands for a shell."""

    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class Program(msgspec.Struct, kw_only=True):
    """A program that runs without a shell."""

    type: Literal["exec"] = "exec"
    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class Patch(msgspec.Struct, kw_only=True):
    """A change of a file."""

    type: Literal["create_file", "update_file", "delete_file"] = "update_file"
    path: str = ""
    diff: str = ""


# Calls of tools that clients run: the key of the call's payload, and the payload's type.
_CLIENT_CALLS: dict[str, tuple[str, type[Shell | Program | Patch]]] = {
    "shell_call": ("action", Shell),
    "local_shell_call": ("action", Program),
    "apply_patch_call": ("operation", Patch),
}


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The effort of the model's reasoning."""

    effort: str | None = None


_CONVERSATION_ID = msgspec.Meta(min_length=1, max_length=256)


class ConversationId(msgspec.Struct, kw_only=True):
    """A conversation by the client's own id."""

    id: Annotated[str, _CONVERSATION_ID]


class ResponsesRequest(Generation, kw_only=True):
    """``POST /v1/responses``."""

    no_effect = (
        *("client_metadata", "prompt_cache_options", "prompt_cache_retention", "service_tier"),
        *("stream_options", "user", "access_programs", "background_options", "image"),
        "context_management",
    )
    unsupported: ClassVar[UnsupportedFields] = {
        **dict.fromkeys(("prompt", "moderation"), ()),
        "background": (False,),
        "generate": (True,),
    }

    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    previous_response_id: str | None = None
    # For pipelines; a language model refuses it.
    conversation: Annotated[str, _CONVERSATION_ID] | ConversationId | None = None
    store: bool | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    # Without effect, but repeated in the response.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    include: list[str] | None = None
    # No effect: a conversation that is too long is refused, also with ``auto``.
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Item(msgspec.Struct, kw_only=True):
    """An item of a conversation: a turn, reasoning, a call, its result, or tools, by its type."""

    type: str = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    status: str | None = None


class _ResponsesTools:
    """The tools of a request as functions, and the tool behind each function."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        # By the function's name: the tool's name, its namespace, and the type of its calls.
        self.origins: dict[str, tuple[str, str | None, str]] = {}

    def is_for_client(self, name: str) -> bool:
        """Return true for a tool of the API that the client runs, such as a shell."""
        return name in self.origins and self.origins[name][2] in _CLIENT_CALLS

    def add(self, place: str, tools: object, namespace: str | None = None) -> None:
        """Add a list of tools; those in a namespace get its name in front of theirs."""
        if not isinstance(tools, list):
            raise invalid(place, "must be a list of tools")
        for index, tool in enumerate(tools):
            tool_place = f"{place}[{index}]"
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind == "namespace":
                self.add(f"{tool_place}.tools", tool.get("tools"), tool.get("name"))
            elif kind in ("function", "custom"):
                self._add_function(tool_place, tool, kind == "custom", namespace)
            elif not isinstance(kind, str):
                raise invalid(f"{tool_place}.type", "must be a string, such as function")
            else:
                function = None
                if f"{kind}_call" in _CLIENT_CALLS and _is_local(tool):
                    function = client_tool(kind, kind)
                if function is None:
                    # OpenAI runs the tool itself. A model that does not see it does not call it.
                    note_once(f"the tool {kind!r}, which this server does not run: it is left out")
                    continue
                self.functions.append(function)
                self.origins[kind] = (kind, None, f"{kind}_call")

    def _add_function(
        self, place: str, tool: dict[str, Any], is_free_text: bool, namespace: str | None
    ) -> None:
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise invalid(f"{place}.name", "must be a string that is not empty")
        parameters = tool.get("parameters")
        call_type = "function_call"
        if is_free_text:
            parameters = FREE_TEXT
            call_type = "custom_tool_call"
        model_name = _model_name(name, namespace)
        function = function_tool(model_name, tool.get("description") or "", parameters)
        self.functions.append(function)
        self.origins[model_name] = (name, namespace, call_type)


def _is_local(tool: dict[str, Any]) -> bool:
    """Return true where the client runs the tool, and not a container at OpenAI."""
    place = tool.get("environment")
    return not isinstance(place, dict) or place.get("type") == "local"


def _model_name(name: object, namespace: str | None) -> str:
    """Return the name that the model sees."""
    if namespace:
        return f"{namespace}__{name}"
    return str(name)


@dataclass(frozen=True, kw_only=True)
class History:
    """The conversation before a request, and whether it is kept for later requests.

    ``items``: the items of the conversation that the request goes on with. ``can_store``: there is
    a store for responses. ``keeps_conversation``: the next request may go on from the response
    although it is not stored, so its ``conversation`` is needed. ``session``: the session of the
    previous response, where the connection keeps it.
    """

    items: tuple[dict[str, Any], ...] = ()
    can_store: bool = False
    keeps_conversation: bool = False
    session: str | None = None


_NO_HISTORY = History()


class ResponsesResponse(PartsBuilder):
    """The response to a ``ResponsesRequest``. Raises ``ApiError`` if it cannot be served.

    ``history``: the result of ``References.resolve``.
    """

    object = "response"
    prompt_field = "input"
    id_prefix = "resp_"

    def __init__(
        self,
        request: ResponsesRequest,
        model: ChatModel,
        history: History = _NO_HISTORY,
    ) -> None:
        if request.conversation is not None and not model.is_pipeline:
            problem = "is not supported by a language model; a pipeline takes it"
            raise invalid("conversation", problem, "unsupported_parameter")
        self._tools = _ResponsesTools()
        alternatives = request.top_logprobs or 0
        include = set(request.include or ())
        for unknown in include - {_INCLUDE_LOGPROBS, *_INCLUDE_WITHOUT_EFFECT}:
            note_once(f"the value {unknown[:80]!r} of include, which is unknown and has no effect")
        log_probs = bool(alternatives) or _INCLUDE_LOGPROBS in include
        super().__init__(
            request,
            model,
            _conversation(request, self._tools, model.reader, history.items),
            max_tokens=request.max_output_tokens,
            wants=Wants(log_probs=log_probs, top_log_probs=alternatives),
            # The number of reasoning tokens is counted from the tokens.
            return_tokens=log_probs or model.reasons,
        )
        self._scores: TokenScores | None = None
        if log_probs:
            self._scores = TokenScores(model.tokenizer, alternatives)
        self._annotations: list[Any] = []  # for the open message, or the next one
        self._event_numbers = itertools.count()
        self._history: list[dict[str, Any]] = []
        if history.keeps_conversation:
            self._history = [*history.items, *input_items(request)]
        self._input = b""  # the input as it is stored
        if history.can_store and request.store is not False:
            self._input = msgspec.json.encode(list(map(_stored_item, input_items(request))))
        # A client that reads ``"store": false`` sends the whole conversation.
        self._is_stored = 0 < len(self._input) <= STORED_RESPONSE_BYTES
        self._request_fields = {**_request_fields(request), "store": self._is_stored}
        self._room = STORED_RESPONSE_BYTES - len(msgspec.json.encode(self._request_fields))

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [*self._history, *self._items]

    def last_events(self) -> bytes:
        return self._event(f"response.{self._end_status}", response=self._body()) + DONE

    def stored(self, status: str = "", error: ApiError | None = None) -> Stored | None:
        if not self._is_stored:
            return None
        if status and self._kind is not None:
            self._close()
            self._items[-1]["status"] = "incomplete"
        if not self._is_stored:  # closing the part has made it too large
            return None
        body = msgspec.json.encode(self._body(status, error and _error_object(error)))
        ids = [item["id"] for item in self._items]
        parent = self._request_fields["previous_response_id"]
        return Stored(id=self._head.id, parent=parent, input=self._input, body=body, items=ids)

    def failed(self, error: ApiError) -> bytes:
        response = self._body("failed", _error_object(error))
        return self._event("response.failed", response=response) + DONE

    def ping(self) -> bytes:
        # OpenAI's Node package fails at a type that it does not know, as ``ping`` would be.
        if not self._is_started:
            return self._start_once()
        # Without items: a client that reads them as news would lose the text of an open item.
        response = {**self._body("in_progress"), "output": []}
        return self._event("response.in_progress", response=response)

    @property
    def _end_status(self) -> str:
        """The response's status at its end, or where its answer breaks off.

        A call is cut, too, where a stop string or the model itself has ended the answer inside it.
        """
        if self._is_limited or self._parser.is_cut:
            return "incomplete"
        return "completed"

    @property
    def _is_limited(self) -> bool:
        """True where a limit has ended the answer."""
        reasons = (FinishReason.LENGTH, FinishReason.TIMEOUT)
        return self._ending is not None and self._ending.finish_reason in reasons

    @property
    def _is_part_cut(self) -> bool:
        """True where the part that is closed now was cut. Without a limit only a call may be."""
        if self._parser.ended:
            return False
        return self._is_limited or (self._kind is ToolCall and self._parser.is_cut)

    def _first_events(self) -> bytes:
        response = self._body("in_progress")
        events = self._event("response.created", response=response)
        return events + self._event("response.in_progress", response=response)

    def _open(self, event: Opening) -> bytes:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if isinstance(event, ToolCall):
            unknown = (event.name, None, "function_call")
            name, namespace, kind = self._tools.origins.get(event.name, unknown)
            item = {"type": kind, "call_id": event.id}
            if kind in _CLIENT_CALLS:
                key, payload_type = _CLIENT_CALLS[kind]
                item[key] = payload_type()
            elif kind == "custom_tool_call":
                item |= {"name": name, "input": ""}
            else:
                item |= {"name": name, "arguments": ""}
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
            part = _content(item, "", [], is_refusal=isinstance(event, Refusal))
            events += self._event("response.content_part.added", **place, part=part)
        if isinstance(event, Refusal):
            delta = "response.refusal.delta"
        elif isinstance(event, Content) and self._scores is None:
            place["logprobs"] = []
        self._delta_head = b""
        if delta:
            fields = msgspec.json.encode({"type": delta, **place})[:-1]
            self._delta_head = b"event: %b\ndata: %b" % (delta.encode(), fields)
        return events

    def _scores_of(self, chunk: TextChunk) -> Sequence[Any]:
        if self._scores is None or not chunk.tokens:
            return super()._scores_of(chunk)
        scores: list[Any] = chat_logprobs(self._scores.of(chunk))["content"]
        return scores

    def _grown(self, text: str, tokens: list[Any]) -> bytes:
        if not self._delta_head:
            return b""
        scores = b""
        if self._scores is not None and self._kind is Content:
            scores = b',"logprobs":' + msgspec.json.encode(tokens)
        parts = (self._delta_head, scores, next(self._event_numbers), msgspec.json.encode(text))
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % parts

    def _annotated(self, annotation: Mapping[str, Any]) -> bytes:
        index = len(self._annotations)
        self._annotations.append(annotation)
        if self._kind is not Content:  # it belongs to the next message, and is sent at its end
            return b""
        return self._event(
            "response.output_text.annotation.added",
            item_id=self._items[-1]["id"],
            output_index=len(self._items) - 1,
            content_index=0,
            annotation_index=index,
            annotation=annotation,
        )

    def _closed(self, item: dict[str, Any], text: str, tokens: list[Any]) -> bytes:
        index = len(self._items) - 1
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] in _CLIENT_CALLS:
            key, payload_type = _CLIENT_CALLS[item["type"]]
            events = b""
            # A payload that is wrong stays empty, so nothing is run: a guess may do harm.
            with suppress(msgspec.ValidationError):
                item[key] = msgspec.convert(json_value(text), payload_type)
        elif item["type"] == "custom_tool_call":
            text = free_text(text)
            item["input"] = text
            kind = "response.custom_tool_call_input"
            events = self._event(f"{kind}.delta", **place, delta=text)
            events += self._event(f"{kind}.done", **place, input=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            events = self._event(kind, **place, name=item["name"], arguments=text)
        else:
            logprobs = [] if self._scores is None else tokens
            part = _content(item, text, logprobs, is_refusal=self._kind is Refusal)
            if self._annotations and "annotations" in part:
                part["annotations"] = self._annotations
                self._annotations = []
            item["content"] = [part]
            place["content_index"] = 0
            fields = {key: part[key] for key in ("text", "logprobs", "refusal") if key in part}
            events = self._event(f"response.{part['type']}.done", **place, **fields)
            events += self._event("response.content_part.done", **place, part=part)
        item["status"] = "incomplete" if self._is_part_cut else "completed"
        if self._is_stored:
            self._room -= len(msgspec.json.encode(item))
            self._is_stored = self._room >= 0
            self._request_fields["store"] = self._is_stored
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse(kind, sequence_number=next(self._event_numbers), **fields)

    def _body(self, status: str = "", error: Any = None) -> dict[str, Any]:
        if not status:
            status = self._end_status
        incomplete_details = None
        if self._end_status == "incomplete":
            incomplete_details = {"reason": "max_output_tokens"}
        usage = None
        if self._ending is not None:
            usage = self._usage()
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": self._head.created if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "model": self._head.model,
            "output": self._items,
            "usage": usage,
            **self._request_fields,
            "store": self._is_stored and not self.storage_failed,
        }

    def _usage(self) -> dict[str, Any]:
        assert self._ending is not None
        output_tokens = self._ending.completion_tokens
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + output_tokens,
        }


class CompactRequest(ResponsesRequest, kw_only=True):
    """``POST /v1/responses/compact``."""

    model: Word


class CompactResponse(ResponsesResponse):
    """The model's summary of a conversation, which then stands for it with the users' messages.

    OpenAI encrypts the summary. Here it is Base64, since the client knows the conversation.
    """

    object = "response.compaction"

    def __init__(
        self,
        request: CompactRequest,
        model: ChatModel,
        history: History = _NO_HISTORY,
    ) -> None:
        items = input_items(request)
        self._user_messages: list[dict[str, Any]] = []
        for item in (*history.items, *items):
            if item.get("role") == "user":
                self._user_messages.append(_stored_item(item))
        prompt = {"type": "message", "role": "user", "content": _COMPACT_PROMPT}
        form = {"tools": None, "tool_choice": None, "text": None, "stream": False, "store": False}
        request = msgspec.structs.replace(request, input=[*items, prompt], **form)
        super().__init__(request, model, History(items=history.items))

    def _first_events(self) -> bytes:
        return b""

    def _body(self, status: str = "", error: Any = None) -> dict[str, Any]:
        parts = [item["content"][0] for item in self._items if item["type"] == "message"]
        summary = "\n".join(part["text"] for part in parts)
        content = _SUMMARY_PREFIX + base64.b64encode(summary.encode()).decode()
        item = {"type": "compaction", "id": f"cmp_{secrets.token_hex(16)}"}
        return {
            "id": self._head.id,
            "object": self.object,
            "created_at": self._head.created,
            "output": [*self._user_messages, {**item, "encrypted_content": content}],
            "usage": self._usage(),
        }


def _content(
    item: dict[str, Any], text: str, logprobs: list[Any], *, is_refusal: bool
) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    if is_refusal:
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _error_object(error: ApiError) -> dict[str, str]:
    """Return the error object of a response that has failed."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code == "context_length_exceeded":
        code = error.code
    elif error.status < 500:
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": error.message}


def _request_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    reasoning = request.reasoning or ReasoningOptions()
    text = request.text or TextOptions()
    form = text.format or TextFormat()
    text_format: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        text_format["name"] = form.name or ""
        text_format["description"] = form.description
        text_format["schema"] = form.schema
        text_format["strict"] = True
    choice = request.tool_choice or "auto"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"mode": "auto", **choice}
    tools: list[dict[str, Any]] = []
    for tool in request.tools or ():
        if tool.get("type") == "function":
            tool = {"description": None, "parameters": None, "strict": None, **tool}
        tools.append(tool)
    return {
        "background": False,
        "conversation": _conversation_object(request.conversation),
        "frequency_penalty": request.frequency_penalty or 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text_format},
        "tool_choice": choice,
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
    }


def _conversation_object(conversation: str | ConversationId | None) -> dict[str, str] | None:
    if conversation is None:
        return None
    if isinstance(conversation, str):
        return {"id": conversation}
    return {"id": conversation.id}


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the items of the request's ``input``, without its history."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input or []


def is_stateful(request: Generation) -> bool:
    """Return true where a request refers to responses or items that may be stored."""
    if not isinstance(request, ResponsesRequest):
        return False
    if request.previous_response_id is not None:
        return True
    return any(map(_is_reference, input_items(request)))


def _is_reference(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def resolve_references(
    request: ResponsesRequest,
    owner: str,
    store: StoredResponses | None,
    substitute: dict[str, Any] | None,
    history: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Put stored items in the place of references, and return the items before the request.

    ``history``: the items up to the previous response, where the connection keeps them.
    ``substitute`` stands for an item that is no longer stored. Without it such a request is refused
    with OpenAI's message, after which clients send the whole conversation. Waits for the disk.
    """
    previous = request.previous_response_id
    if previous is not None and history is None:
        if store is not None:
            history = store.conversation(owner, previous)
        if history is None:
            raise ApiError(
                400,
                f"Previous response with id '{previous[:200]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
    items = _resolved(input_items(request), owner, store, substitute)
    num_items = len(items) + len(history or ())
    if num_items > MAX_ITEMS:
        problem = f"has {num_items} items with those before it; at most {MAX_ITEMS} are allowed"
        raise invalid("input", problem)
    request.input = items
    if history is not None:
        calls = {item.get("call_id") for item in (*history, *items) if "output" not in item}
        for item in items:
            call_id = item.get("call_id") or item.get("id")
            if str(item.get("type")).endswith("_call_output") and call_id not in calls:
                problem = f"no tool call found for the output with call_id '{str(call_id)[:200]}'"
                raise invalid("input", problem)
    return history or []


def _resolved(
    items: Sequence[dict[str, Any]],
    owner: str,
    store: StoredResponses | None,
    substitute: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return ``items`` with stored ones in the place of references. Raises ``ApiError``.

    A reference is short and may be repeated. So the limit counts the bytes of the item for each.
    """
    ids = [str(item.get("id")) for item in items if _is_reference(item)]
    stored: dict[str, dict[str, Any]] = {}
    if store is not None and ids:
        stored = store.items(owner, ids)
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in stored.items()}
        if sum(sizes.get(item_id, 0) for item_id in ids) > store.max_chain_bytes:
            raise store.too_large()
    resolved: list[dict[str, Any]] = []
    for item in items:
        if _is_reference(item):
            item_id = str(item.get("id"))
            original = stored.get(item_id, substitute)
            if original is None:
                raise _not_found(item_id, store is not None)
            item = original
        resolved.append(item)
    return resolved


def _not_found(item_id: str, has_store: bool) -> ApiError:
    remedy = "Send `store: false`"
    if has_store:
        remedy = "Try again with `store` set to true"
    problem = f"Item with id '{item_id[:200]}' not found. Items are not persisted when "
    problem += f"`store` is set to false. {remedy}, or remove this item from your input."
    return ApiError(404, problem, param="input")


def _stored_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the input with all fields that a client reads of a stored one."""
    kind = str(item.get("type") or "message")
    prefix, _ = _OUTPUTS.get(kind, ("item", ""))
    item_id = f"{prefix}_{secrets.token_hex(16)}"
    stored_item = {"id": item_id, "status": "completed", **item, "type": kind}
    if kind == "message" and isinstance(text := item.get("content"), str):
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        else:
            part = {"type": "input_text", "text": text}
        stored_item["content"] = [part]
    return stored_item


def _conversation(
    request: ResponsesRequest,
    tools: _ResponsesTools,
    reader: ContentReader,
    history: Sequence[dict[str, Any]],
) -> Conversation:
    tools.add("tools", request.tools or [])
    transcript = Transcript()
    if request.instructions:
        transcript.say("system", request.instructions)
    items = input_items(request)
    if not (items or history):
        raise invalid("input", "is missing; send a text or a list of items")
    for item in history:
        _read_item("previous_response_id", item, transcript, tools, reader)
    for index, item in enumerate(items):
        _read_item(f"input[{index}]", item, transcript, tools, reader)
    reasoning = request.reasoning or ReasoningOptions()
    text = request.text or TextOptions()
    form = text.format or TextFormat()
    demand = _call_demand(request.tool_choice, tools)
    choice = demand.choice
    if choice == "required" and request.tools and not tools.functions:
        choice = "auto"  # OpenAI would run all of the tools
    variables = thinking(reasoning.effort)
    return Conversation(
        messages=transcript.messages,
        tools=tools.functions,
        choice=choice,
        forced=demand.forced,
        allowed=demand.allowed,
        parallel=request.parallel_tool_calls is not False,
        form=form_demand(request, message_form("text.format", form.type, form.schema)),
        options=ChatOptions(variables=variables | (request.chat_template_kwargs or {})),
    )


def _call_demand(tool_choice: str | dict[str, Any] | None, tools: _ResponsesTools) -> CallDemand:
    """Return the demand of ``tool_choice``. Raises ``ApiError``."""
    if tool_choice is None:
        return CallDemand("auto")
    if isinstance(tool_choice, str):
        if tool_choice not in ("auto", "none", "required"):
            raise invalid("tool_choice", "must be auto, none, required, or an object")
        return CallDemand(tool_choice)
    kind = tool_choice.get("type")
    if not isinstance(kind, str):
        raise invalid("tool_choice", "must have a type, such as function")
    if kind in ("function", "custom") or tools.is_for_client(kind):
        name = _model_name(tool_choice.get("name", kind), tool_choice.get("namespace"))
        return CallDemand("required", forced=name)
    if kind != "allowed_tools":  # a tool that OpenAI would run
        return CallDemand("auto")
    mode = tool_choice.get("mode") or "auto"
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", "must have the mode auto or required")
    mentions = tool_choice.get("tools")
    if not isinstance(mentions, list) or not all(isinstance(tool, dict) for tool in mentions):
        raise invalid("tool_choice.tools", "must be a list of tools")
    allowed: set[str] = set()
    for tool in mentions:
        kind = str(tool.get("type", "function"))
        if tools.is_for_client(kind):
            allowed.add(kind)
        elif kind in ("function", "custom"):
            allowed.add(_model_name(tool.get("name"), tool.get("namespace")))
    return CallDemand(mode, allowed=allowed)


def _read_item(
    place: str,
    fields: dict[str, Any],
    transcript: Transcript,
    tools: _ResponsesTools,
    reader: ContentReader,
) -> None:
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in _ITEM_FIELDS:
        note_once(f"items of type {kind!r}, which hold nothing for the model: left out")
        return
    item: Any = checked(place, fields, Item)
    for field in _ITEM_FIELDS[item.type]:
        if getattr(item, field) is None:
            raise invalid(f"{place}.{field}", "is missing")
    if item.type == "message":
        role = item.role
        if role == "developer":
            role = "system"
        transcript.say(role, *reader.pieces(f"{place}.content", item.content))
    elif item.type == "reasoning":
        transcript.think(reader.text(place, item.content or item.summary or ""))
    elif item.type == "function_call":
        transcript.call(item.call_id, _model_name(item.name, item.namespace), item.arguments)
    elif item.type == "custom_tool_call":
        arguments = json_text({"input": item.input})
        transcript.call(item.call_id, _model_name(item.name, item.namespace), arguments)
    elif item.type in _CLIENT_CALLS:
        action = json_text(item.action or item.operation)
        transcript.call(item.call_id, item.type.removesuffix("_call"), action)
    elif item.type == "shell_call_output":
        transcript.result(item.call_id, json_text(item.output))
    elif item.type == "compaction":
        content = item.encrypted_content
        if content.startswith(_SUMMARY_PREFIX):
            with suppress(ValueError):
                data = base64.b64decode(content[len(_SUMMARY_PREFIX) :], validate=True)
                summary = f"The conversation so far, in short:\n{data.decode()}"
                transcript.say("system", summary)
                return
        note_once("a summary that another server made and only that one can read: left out")
    elif item.tools is not None:
        tools.add(f"{place}.tools", item.tools)
    else:
        pieces = reader.pieces(f"{place}.output", item.output or "")
        if item.type == "apply_patch_call_output":
            pieces = [item.status or "", *pieces]
        transcript.result(item.call_id or item.id, *pieces)
