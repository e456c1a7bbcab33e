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

_INCLUDE_LOGPROBS = "message.output_text.logprobs"  # what ``include`` says for log-probabilities
# The other values of ``include`` that OpenAI knows; all are of what its own tools and servers add.
_NOTHING_INCLUDED = {
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
}
# The fields that an item of each type has to have. Items of other types belong to tools that
# OpenAI runs, in conversations that began there: they are left out.
_ITEM_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "additional_tools": ("tools",),  # Codex sends those of models that it knows
    "tool_search_output": ("tools",),
    "compaction": ("encrypted_content",),
    "shell_call": ("call_id", "action"),
    "local_shell_call": ("call_id", "action"),
    "apply_patch_call": ("call_id", "operation"),
    "shell_call_output": ("call_id", "output"),
    "local_shell_call_output": ("output",),
    "apply_patch_call_output": ("call_id",),
}
# The prefix of an item's id, and the event that has more of it. A call with free text has none:
# the text leaves once its JSON is whole.
_OUTPUTS = {
    "message": ("msg", "response.output_text.delta"),
    "reasoning": ("rs", "response.reasoning_text.delta"),
    "function_call": ("fc", "response.function_call_arguments.delta"),
    "custom_tool_call": ("ctc", ""),
    "shell_call": ("sh", ""),
    "local_shell_call": ("lsh", ""),
    "apply_patch_call": ("apc", ""),
}
_SUMMARY = "b64:"  # the beginning of a summary that this server made
_SUM_UP = (
    "Sum up this conversation for someone who goes on with it and has only the summary: the aims, "
    "what was done and found, what is open, and every name, path and number that is still needed."
)


class Shell(msgspec.Struct, kw_only=True):
    """What a shell is to run."""

    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class Program(msgspec.Struct, kw_only=True):
    """What is to be run without a shell."""

    type: Literal["exec"] = "exec"
    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class Patch(msgspec.Struct, kw_only=True):
    """What is to become of a file."""

    type: Literal["create_file", "update_file", "delete_file"] = "update_file"
    path: str = ""
    diff: str = ""


# Calls of tools that clients run: what they hold, and under which key.
_CLIENT_CALLS: dict[str, tuple[str, type[Shell | Program | Patch]]] = {
    "shell_call": ("action", Shell),
    "local_shell_call": ("action", Program),
    "apply_patch_call": ("operation", Patch),
}


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How hard the model is to think."""

    effort: str | None = None


_CONVERSATION_ID = msgspec.Meta(min_length=1, max_length=256)


class ConversationId(msgspec.Struct, kw_only=True):
    """What the client calls a conversation."""

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
    # Of pipelines alone.
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
    # ``auto`` holds while the conversation fits; what is too long is refused, as without it.
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Item(msgspec.Struct, kw_only=True):
    """Of a conversation: a turn, reasoning, a call, what it has returned, or tools, by its type."""

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
    """The tools of a request as functions, and what each was before it was one."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        # Name and namespace, and the type of their calls.
        self.origins: dict[str, tuple[str, str | None, str]] = {}

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
                model_name, about = _model_name(name, namespace), tool.get("description") or ""
                parameters = FREE_TEXT if free else tool.get("parameters")
                self.functions.append(function_tool(model_name, about, parameters))
                call_type = "custom_tool_call" if free else "function_call"
                self.origins[model_name] = (name, namespace, call_type)
            elif not isinstance(kind, str):
                raise invalid(f"{own}.type", "must be a string, such as function")
            elif (
                f"{kind}_call" in _CLIENT_CALLS
                and _is_local(tool)
                and (known := client_tool(kind, kind))
            ):
                self.functions.append(known)
                self.origins[kind] = (kind, None, f"{kind}_call")
            else:
                # OpenAI runs it itself. A model that is not told of it does not call it.
                note_once(f"the tool {kind!r}, which this server does not run: it is left out")


def _is_local(tool: dict[str, Any]) -> bool:
    """Whether the client runs the tool, and not a container at OpenAI."""
    place = tool.get("environment")
    return not isinstance(place, dict) or place.get("type") == "local"


def _model_name(name: object, namespace: str | None) -> str:
    """The name that the model sees."""
    return f"{namespace}__{name}" if namespace else str(name)


@dataclass(frozen=True, kw_only=True)
class Referred:
    """What a request refers to, and what becomes of its response.

    ``earlier``: the items of the conversation that the request goes on with. ``can_store``: there
    is something to store responses in. ``continues``: the next request may go on from the response
    although it is not stored, so its ``conversation`` is needed. ``session``: that of the response
    before, where the connection keeps it.
    """

    earlier: tuple[dict[str, Any], ...] = ()
    can_store: bool = False
    continues: bool = False
    session: str | None = None


_NO_REFERENCES = Referred()


class ResponsesResponse(PartsBuilder):
    """Builds the response to a ``ResponsesRequest``. Raises ``ApiError`` if it cannot be served.

    ``referred``: what ``References.resolve`` found.
    """

    object = "response"
    prompt_field = "input"
    id_prefix = "resp_"

    def __init__(
        self,
        request: ResponsesRequest,
        model: ChatModel,
        referred: Referred = _NO_REFERENCES,
    ) -> None:
        if request.conversation is not None and not model.is_pipeline:
            problem = "is not supported by a language model; a pipeline takes it"
            raise invalid("conversation", problem, "unsupported_parameter")
        self._tools = _ResponsesTools()
        alternatives = request.top_logprobs or 0
        for unknown in {*(request.include or ())} - {_INCLUDE_LOGPROBS, *_NOTHING_INCLUDED}:
            note_once(f"the value {unknown[:80]!r} of include, which is unknown and has no effect")
        scored = bool(alternatives) or _INCLUDE_LOGPROBS in (request.include or ())
        super().__init__(
            request,
            model,
            _conversation(request, self._tools, model.reader, referred.earlier),
            max_tokens=request.max_output_tokens,
            wants=Wants(log_probs=scored, top_log_probs=alternatives),
            # Without them nobody knows how many tokens were reasoning.
            return_tokens=scored or model.reasons,
        )
        self._scores = TokenScores(model.tokenizer, alternatives) if scored else None
        self._annotations: list[Any] = []  # of the message so far
        self._numbers = itertools.count()  # of events
        self._before_it: list[dict[str, Any]] = []
        if referred.continues:
            self._before_it = [*referred.earlier, *own_items(request)]
        self._input = b""
        if referred.can_store and request.store is not False:
            self._input = msgspec.json.encode(list(map(_as_stored, own_items(request))))
        # A client that is told so sends the whole conversation.
        self._is_stored = 0 < len(self._input) <= STORED_RESPONSE_BYTES
        self._echoed = {**_echoed(request), "store": self._is_stored}
        self._room = STORED_RESPONSE_BYTES - len(msgspec.json.encode(self._echoed))

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [*self._before_it, *self._items]

    def last_events(self) -> bytes:
        return self._event(f"response.{self._end_status}", response=self._body()) + DONE

    def stored(self, status: str = "", error: ApiError | None = None) -> Stored | None:
        if self._is_stored and status and self._kind is not None:
            self._close()
            self._items[-1]["status"] = "incomplete"
        if not self._is_stored:
            return None
        body = msgspec.json.encode(self._body(status, error and _error_object(error)))
        ids = [item["id"] for item in self._items]
        parent = self._echoed["previous_response_id"]
        return Stored(id=self._head.id, parent=parent, input=self._input, body=body, items=ids)

    def failed(self, error: ApiError) -> bytes:
        response = self._body("failed", _error_object(error))
        return self._event("response.failed", response=response) + DONE

    def ping(self) -> bytes:
        # OpenAI's Node package fails at a type that it does not know, as ``ping`` would be.
        if not self._begun:
            return self._begin_once()
        # Without items: a client that takes them for news would lose what an open one has so far.
        response = {**self._body("in_progress"), "output": []}
        return self._event("response.in_progress", response=response)

    @property
    def _end_status(self) -> str:
        """How the answer, or the part that is closed in its middle, has ended.

        A call is cut, too, where a stop string or the model itself has ended the answer inside it.
        """
        return "incomplete" if self._is_limited or self._parser.is_cut else "completed"

    @property
    def _is_limited(self) -> bool:
        """True where a limit has ended the answer."""
        reasons = (FinishReason.LENGTH, FinishReason.TIMEOUT)
        return self._ending is not None and self._ending.finish_reason in reasons

    @property
    def _is_part_cut(self) -> bool:
        """True where the part that is closed now was cut; only a call may be so without a limit."""
        if self._parser.ended:
            return False
        return self._is_limited or (self._kind is ToolCall and self._parser.is_cut)

    def _first_events(self) -> bytes:
        response = self._body("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _open(self, event: Opening) -> bytes:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if isinstance(event, ToolCall):
            known = self._tools.origins.get(event.name)
            name, namespace, kind = known or (event.name, None, "function_call")
            item = {"type": kind, "call_id": event.id}
            if kind in _CLIENT_CALLS:
                key, form = _CLIENT_CALLS[kind]
                item[key] = form()
            else:
                key = "input" if kind == "custom_tool_call" else "arguments"
                item |= {"name": name, key: ""}
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
            added = _content(item, "", [], refused=isinstance(event, Refusal))
            events += self._event("response.content_part.added", **place, part=added)
        if isinstance(event, Refusal):
            delta = "response.refusal.delta"
        elif isinstance(event, Content) and self._scores is None:
            place["logprobs"] = []
        fields = msgspec.json.encode({"type": delta, **place})[:-1]
        self._before = b"event: %b\ndata: %b" % (delta.encode(), fields) if delta else b""
        return events

    def _scores_of(self, chunk: TextChunk) -> Sequence[Any]:
        if self._scores is None or not chunk.tokens:
            return super()._scores_of(chunk)
        scores: list[Any] = chat_logprobs(self._scores.of(chunk))["content"]
        return scores

    def _grown(self, text: str, tokens: list[Any]) -> bytes:
        if not self._before:
            return b""
        scores = b""
        if self._scores is not None and self._kind is Content:
            scores = b',"logprobs":' + msgspec.json.encode(tokens)
        parts = (self._before, scores, next(self._numbers), msgspec.json.encode(text))
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % parts

    def _annotated(self, annotation: Mapping[str, Any]) -> bytes:
        index = len(self._annotations)
        self._annotations.append(annotation)
        if self._kind is not Content:  # it is the next message's, and told at its end
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
            key, form = _CLIENT_CALLS[item["type"]]
            events = b""
            with suppress(msgspec.ValidationError):  # else nothing is run: a guess may do harm
                item[key] = msgspec.convert(json_value(text), form)
        elif item["type"] == "custom_tool_call":
            item["input"] = text = free_text(text)
            kind = "response.custom_tool_call_input"
            events = self._event(f"{kind}.delta", **place, delta=text)
            events += self._event(f"{kind}.done", **place, input=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            events = self._event(kind, **place, name=item["name"], arguments=text)
        else:
            scores = [] if self._scores is None else tokens
            done = _content(item, text, scores, refused=self._kind is Refusal)
            if self._annotations and "annotations" in done:
                done["annotations"], self._annotations = self._annotations, []
            item["content"] = [done]
            place["content_index"] = 0
            told = {key: done[key] for key in ("text", "logprobs", "refusal") if key in done}
            events = self._event(f"response.{done['type']}.done", **place, **told)
            events += self._event("response.content_part.done", **place, part=done)
        item["status"] = "incomplete" if self._is_part_cut else "completed"
        if self._is_stored:
            self._room -= len(msgspec.json.encode(item))
            self._is_stored = self._echoed["store"] = self._room >= 0
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
            "store": self._is_stored and not self.storage_failed,
        }

    def _usage(self) -> dict[str, Any]:
        assert self._ending is not None
        made = self._ending.completion_tokens
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + made,
        }


class CompactRequest(ResponsesRequest, kw_only=True):
    """``POST /v1/responses/compact``."""

    model: Word


class CompactResponse(ResponsesResponse):
    """Has the model sum up a conversation: what users said and the summary stand for it then.

    OpenAI encrypts the summary. Here it is Base64, since the client knows the conversation.
    """

    object = "response.compaction"

    def __init__(
        self,
        request: CompactRequest,
        model: ChatModel,
        referred: Referred = _NO_REFERENCES,
    ) -> None:
        own = own_items(request)
        items = (*referred.earlier, *own)
        self._said = [_as_stored(item) for item in items if item.get("role") == "user"]
        asked = {"type": "message", "role": "user", "content": _SUM_UP}
        form = {"tools": None, "tool_choice": None, "text": None, "stream": False, "store": False}
        request = msgspec.structs.replace(request, input=[*own, asked], **form)
        super().__init__(request, model, Referred(earlier=referred.earlier))

    def _first_events(self) -> bytes:
        return b""

    def _body(self, status: str = "", error: Any = None) -> dict[str, Any]:
        parts = [item["content"][0] for item in self._items if item["type"] == "message"]
        summary = "\n".join(part["text"] for part in parts)
        content = _SUMMARY + base64.b64encode(summary.encode()).decode()
        item = {"type": "compaction", "id": f"cmp_{secrets.token_hex(16)}"}
        return {
            "id": self._head.id,
            "object": self.object,
            "created_at": self._head.created,
            "output": [*self._said, {**item, "encrypted_content": content}],
            "usage": self._usage(),
        }


def _content(
    item: dict[str, Any], text: str, logprobs: list[Any], *, refused: bool
) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    if refused:
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _error_object(error: ApiError) -> dict[str, str]:
    """The error object of a response that has failed."""
    code = error.code if error.code == "context_length_exceeded" else "server_error"
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status < 500 and code == "server_error":
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that repeat the request."""
    reasoning, text = request.reasoning or ReasoningOptions(), request.text or TextOptions()
    form = text.format or TextFormat()
    told: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        known = {"name": form.name or "", "description": form.description}
        told |= {**known, "schema": form.schema, "strict": True}
    choice = request.tool_choice or "auto"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"mode": "auto", **choice}
    functions = {"description": None, "parameters": None, "strict": None}
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
        "text": {"format": told},
        "tool_choice": choice,
        "tools": [
            {**functions, **tool} if tool.get("type") == "function" else tool
            for tool in request.tools or []
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
    }


def _conversation_object(conversation: str | ConversationId | None) -> dict[str, str] | None:
    if conversation is None:
        return None
    return {"id": conversation if isinstance(conversation, str) else conversation.id}


def own_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The items that a request brings itself."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input or []


def is_stateful(request: Generation) -> bool:
    """Whether a request refers to what may be stored."""
    return isinstance(request, ResponsesRequest) and (
        request.previous_response_id is not None or any(map(_is_reference, own_items(request)))
    )


def _is_reference(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def with_references(
    request: ResponsesRequest,
    owner: str,
    store: StoredResponses | None,
    lost: dict[str, Any] | None,
    last: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Put what is stored in the place of references; the items that the request goes on with.

    ``last``: those up to the previous response, where they need not be stored. ``lost`` stands for
    what is no longer stored. Without it such a request is refused, in OpenAI's words, by which
    clients send the whole conversation again. Waits for the disk.
    """
    earlier = last
    if (previous := request.previous_response_id) is not None and last is None:
        earlier = store.conversation(owner, previous) if store else None
        if earlier is None:
            raise ApiError(
                400,
                f"Previous response with id '{previous[:200]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
    items = _resolved(own_items(request), owner, store, lost)
    num_items = len(items) + len(earlier or ())
    if num_items > MAX_ITEMS:
        problem = f"has {num_items} items with those before it; at most {MAX_ITEMS} are allowed"
        raise invalid("input", problem)
    request.input = items
    if earlier is not None:
        calls = {item.get("call_id") for item in (*earlier, *items) if "output" not in item}
        for item in items:
            call_id = item.get("call_id") or item.get("id")
            if str(item.get("type")).endswith("_call_output") and call_id not in calls:
                problem = f"no tool call found for the output with call_id '{str(call_id)[:200]}'"
                raise invalid("input", problem)
    return earlier or []


def _resolved(
    own: Sequence[dict[str, Any]],
    owner: str,
    store: StoredResponses | None,
    lost: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """``own`` items with stored ones in the place of references. Raises ``ApiError``.

    A reference is short and may be repeated, so the bytes count of all that they stand for.
    """
    ids = [str(item.get("id")) for item in own if _is_reference(item)]
    stored: dict[str, dict[str, Any]] = {}
    if store is not None and ids:
        stored = store.items(owner, ids)
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in stored.items()}
        if sum(sizes.get(item_id, 0) for item_id in ids) > store.max_chain_bytes:
            raise store.too_large()
    items: list[dict[str, Any]] = []
    for item in own:
        if _is_reference(item):
            item_id = str(item.get("id"))
            original = stored.get(item_id, lost)
            if original is None:
                raise _not_found(item_id, store is not None)
            item = original
        items.append(item)
    return items


def _not_found(item_id: str, stores: bool) -> ApiError:
    mend = "Try again with `store` set to true" if stores else "Send `store: false`"
    problem = f"Item with id '{item_id[:200]}' not found. Items are not persisted when "
    problem += f"`store` is set to false. {mend}, or remove this item from your input."
    return ApiError(404, problem, param="input")


def _as_stored(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as ``input_items`` tells it."""
    kind = str(item.get("type") or "message")
    prefix, _ = _OUTPUTS.get(kind, ("item", ""))
    told = {"id": f"{prefix}_{secrets.token_hex(16)}", "status": "completed", **item, "type": kind}
    if kind == "message" and isinstance(text := item.get("content"), str):
        by_model = item.get("role") == "assistant"
        told["content"] = [{"type": "output_text" if by_model else "input_text", "text": text}]
        if by_model:
            told["content"][0]["annotations"] = []
    return told


def _conversation(
    request: ResponsesRequest,
    tools: _ResponsesTools,
    reader: ContentReader,
    earlier: Sequence[dict[str, Any]],
) -> Conversation:
    tools.add("tools", request.tools or [])
    transcript = Transcript()
    if request.instructions:
        transcript.say("system", request.instructions)
    items = own_items(request)
    if not (items or earlier):
        raise invalid("input", "is missing; send a text or a list of items")
    for item in earlier:
        _read_item("previous_response_id", item, transcript, tools, reader)
    for index, item in enumerate(items):
        _read_item(f"input[{index}]", item, transcript, tools, reader)
    effort = request.reasoning.effort if request.reasoning else None
    form = (request.text or TextOptions()).format or TextFormat()
    demand = "auto" if request.tool_choice is None else request.tool_choice
    forced = allowed = None
    choice = demand if isinstance(demand, str) else "auto"
    if choice not in ("auto", "none", "required"):
        raise invalid("tool_choice", "must be auto, none, required, or an object")
    if isinstance(demand, dict):
        kind = demand.get("type")
        if not isinstance(kind, str):
            raise invalid("tool_choice", "must have a type, such as function")
        if kind in ("function", "custom") or tools.origins.get(kind, ("",))[-1] in _CLIENT_CALLS:
            choice = "required"
            forced = _model_name(demand.get("name", kind), demand.get("namespace"))
        elif kind == "allowed_tools":
            choice, named = demand.get("mode") or "auto", demand.get("tools")
            if choice not in ("auto", "required"):
                raise invalid("tool_choice", "must have the mode auto or required")
            if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
                raise invalid("tool_choice.tools", "must be a list of tools")
            allowed = set()
            for tool in named:
                kind = str(tool.get("type", "function"))
                if tools.origins.get(kind, ("",))[-1] in _CLIENT_CALLS:
                    allowed.add(kind)
                elif kind in ("function", "custom"):
                    allowed.add(_model_name(tool.get("name"), tool.get("namespace")))
    if choice == "required" and request.tools and not tools.functions:
        choice = "auto"  # all of them are tools that OpenAI runs
    return Conversation(
        messages=transcript.messages,
        tools=tools.functions,
        choice=choice,
        forced=forced,
        allowed=allowed,
        parallel=request.parallel_tool_calls is not False,
        form=form_demand(request, message_form("text.format", form.type, form.schema)),
        options=ChatOptions(variables=thinking(effort) | (request.chat_template_kwargs or {})),
    )


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
        role = "system" if item.role == "developer" else item.role
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
        kind, _, packed = item.encrypted_content.partition(":")
        with suppress(ValueError):
            summary = base64.b64decode(packed, validate=True).decode()
            if kind == _SUMMARY[:-1]:
                transcript.say("system", f"The conversation so far, in short:\n{summary}")
                return
        note_once("a summary that another server made and only that one can read: left out")
    elif item.tools is not None:
        tools.add(f"{place}.tools", item.tools)
    else:
        pieces = reader.pieces(f"{place}.output", item.output or "")
        if item.type == "apply_patch_call_output":
            pieces = [item.status or "", *pieces]
        transcript.result(item.call_id or item.id, *pieces)
