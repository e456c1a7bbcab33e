"""``/v1/chat/completions``: from messages to a text request, from text chunks to deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.builder import (
    ChoicesBuilder,
    Delta,
    ReasoningTokens,
    TokenScores,
    chat_logprobs,
    well_ended,
)
from trtllm_bls.openai.content import ContentReader, joined, note_once
from trtllm_bls.openai.conversation import (
    FREE_TEXT,
    ChatModel,
    form_demand,
    free_text,
    function_tool,
    message_form,
    object_arguments,
    turn_request,
)
from trtllm_bls.openai.schema import (
    ChatCompletionRequest,
    ChatMessage,
    Function,
    Tool,
    ToolChoice,
    checked,
    json_text,
)
from trtllm_bls.orchestrator.chat_turn import Conversation
from trtllm_bls.text.chat_parser import (
    Annotation,
    Arguments,
    ChatEvent,
    Content,
    Reasoning,
    Refusal,
    ToolCall,
)
from trtllm_bls.types import ChatOptions, Ending, TextChunk, Wants

_CALL_TEXTS = {"function": "arguments", "custom": "input"}  # of a call, by its kind


def _delta(event: ChatEvent) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.separator + event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.separator + event.text}
    if isinstance(event, Refusal):
        return {"refusal": event.text}
    if isinstance(event, Annotation):
        return {"annotations": [event.value]}
    function = {"arguments": event.text if isinstance(event, Arguments) else ""}
    call: dict[str, Any] = {"index": event.index, "function": function}
    if isinstance(event, ToolCall):
        call |= {"id": event.id, "type": "function", "function": {"name": event.name, **function}}
    return {"tool_calls": [call]}


class ChatResponse(ChoicesBuilder):
    """Builds the response to a ``ChatCompletionRequest``.

    Raises ``ApiError`` if it cannot be served.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    id_prefix = "chatcmpl-"

    def __init__(self, request: ChatCompletionRequest, model: ChatModel) -> None:
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        limit, prediction = request.max_completion_tokens, request.prediction
        turn = turn_request(
            request,
            model,
            conversation_of(request, model.reader),
            choices=request.n or 1,
            stop_words=request.stop_words,
            max_tokens=request.max_tokens if limit is None else limit,
            wants=Wants(log_probs=bool(request.logprobs), top_log_probs=request.top_logprobs or 0),
            # Without them nobody knows how many tokens were reasoning.
            return_tokens=bool(request.logprobs) or model.reasons,
            return_drafted=bool(request.return_drafted),
            prediction=model.reader.text("prediction.content", prediction.content)
            if prediction
            else None,
        )
        super().__init__(request, model, [turn.request], turn.guide_field)
        self._parsers = turn.parsers
        self._reasoning: dict[int, ReasoningTokens] = {}  # by choice, of a model that reasons
        if model.reasons:
            self._reasoning = {index: ReasoningTokens() for index in range(request.n or 1)}
        self._begun: set[int] = set()
        custom = [tool["custom"] for tool in request.tools or () if tool.get("type") == "custom"]
        self._custom = {tool["name"] for tool in custom}
        self._free: dict[int, tuple[int, list[str]]] = {}  # open calls of free text, by choice
        scores = TokenScores(model.tokenizer, request.top_logprobs or 0)
        self._scores = scores if request.logprobs else None

    def add(self, index: int, chunk: TextChunk) -> bytes:
        opening = b""
        if self.stream:
            # OpenAI's package keeps choices in a list, so each has to begin before the next one.
            for earlier in range(index):
                opening += b"".join(
                    [self._frames.event(earlier, delta) for delta in self._opening(earlier)]
                )
        return opening + super().add(index, chunk)

    def _opening(self, index: int) -> Iterator[Delta]:
        """The first event of a choice, unless it has begun."""
        if index not in self._begun:
            self._begun.add(index)
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            yield {"delta": delta, "logprobs": None, "finish_reason": None}

    def _deltas(self, index: int, chunk: TextChunk) -> Iterator[Delta]:
        # Clients take the first event for the first token, so the role comes with text.
        yield from self._opening(index)
        logprobs = None
        if self._scores is not None and chunk.tokens:
            logprobs = chat_logprobs(self._scores.of(chunk))
        parser, ending = self._parsers[index], well_ended(chunk)
        if parser.plain and not chunk.drafted and logprobs is None:
            if chunk.text:
                yield chunk.text
        else:
            reason = None if ending is None else ending.finish_reason
            events = parser.feed(chunk.text, reason)
            reasoning = self._reasoning.get(index)
            if reasoning is not None:
                reasoning.add(chunk.tokens or ())
                for event in events:
                    reasoning.read(event)
                if ending is not None:
                    reasoning.close()
            deltas = list(self._event_deltas(index, events, ending))
            if not deltas and logprobs is not None:  # of tokens that have no text yet
                deltas.append({})
            for event_delta in deltas:
                fields: dict[str, Any] = {"delta": event_delta, "logprobs": logprobs}
                fields["finish_reason"] = None
                if chunk.drafted and chunk.text in event_delta.values():  # uncut
                    fields["drafted"] = chunk.drafted
                yield fields
                logprobs = None
        if ending is not None:
            yield {"delta": {}, "logprobs": None, **self._finish(index, ending)}

    def _event_deltas(
        self, index: int, events: Sequence[ChatEvent], ending: Ending | None
    ) -> Iterator[dict[str, Any]]:
        """Each event's delta. The text of a call of free text leaves once its JSON is whole."""
        for event in (*events, *([None] if ending else [])):
            if isinstance(event, Arguments) and index in self._free:
                self._free[index][1].append(event.text)
                continue
            if opened := self._free.pop(index, None):
                call = {"index": opened[0], "custom": {"input": free_text("".join(opened[1]))}}
                yield {"tool_calls": [call]}
            if isinstance(event, ToolCall) and event.name in self._custom:
                self._free[index] = (event.index, [])
                custom = {"name": event.name, "input": ""}
                call = {"index": event.index, "id": event.id, "type": "custom", "custom": custom}
                yield {"tool_calls": [call]}
            elif event is not None:
                yield _delta(event)

    def _folded(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        keys = ("content", "reasoning_content", "refusal")
        texts: dict[str, list[str]] = {key: [] for key in keys}
        annotations = list[Any]()
        calls, scores = list[dict[str, Any]](), list[Any]()
        choice: dict[str, Any] = {}
        for fields in deltas:
            if isinstance(fields, str):
                texts["content"].append(fields)
                continue
            choice |= fields
            delta = fields["delta"]
            for key, parts in texts.items():
                parts.append(delta.get(key, ""))
            annotations += delta.get("annotations", ())
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    kind = call["type"]
                    name = call[kind]["name"]
                    calls.append({"id": call["id"], "type": kind, kind: {"name": name}})
                whole = calls[call["index"]]
                kind, key = whole["type"], _CALL_TEXTS[whole["type"]]
                whole[kind].setdefault(key, []).append(call[kind][key])
            if fields["logprobs"]:
                scores += fields["logprobs"]["content"]
        content, reasoning, refusal = map("".join, texts.values())
        message: dict[str, Any] = {"role": "assistant", "refusal": refusal or None}
        message["content"] = content or (None if calls else "")
        if annotations:
            message["annotations"] = annotations
        if reasoning:
            message["reasoning_content"] = reasoning
        for call in calls:
            own, key = call[call["type"]], _CALL_TEXTS[call["type"]]
            own[key] = "".join(own[key])
        if calls:
            message["tool_calls"] = calls
        del choice["delta"]
        choice.pop("drafted", None)
        logprobs = None if self._scores is None else {"content": scores, "refusal": None}
        del choice["logprobs"]
        return {"message": message, "logprobs": logprobs, **choice}

    def _finish(self, index: int, ending: Ending) -> dict[str, Any]:
        fields = super()._finish(index, ending)
        parser = self._parsers[index]
        if fields["finish_reason"] == "stop" and parser.has_calls and not parser.is_cut:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _completion_details(self) -> dict[str, int]:
        details = super()._completion_details()
        if self._reasoning:
            details["reasoning_tokens"] = sum(each.count for each in self._reasoning.values())
        return details


def conversation_of(request: ChatCompletionRequest, reader: ContentReader) -> Conversation:
    """What a chat asks for. Raises ``ApiError`` for demands that make no sense."""
    choice, forced, allowed = request.tool_choice or "auto", None, None
    tools = _functions("tools", request.tools or ())
    if isinstance(choice, ToolChoice):
        few, kind = choice.allowed_tools, choice.type
        function = choice.custom if kind == "custom" else choice.function
        if kind == "allowed_tools":
            if few is None:
                problem = "must have a mode, auto or required, and tools"
                raise invalid("tool_choice.allowed_tools", problem)
            named = _functions("tool_choice.allowed_tools.tools", few.tools)
            choice, allowed = few.mode, {tool["function"]["name"] for tool in named}
        elif kind not in _CALL_TEXTS:
            choice = "auto"  # a tool that others run
        elif function is None:
            raise invalid(f"tool_choice.{kind}", "is missing")
        else:
            choice, forced = "required", function.name
    if choice == "required" and request.tools and not (tools if allowed is None else allowed):
        choice = "auto"  # all of them are tools that others run
    form = None
    if (demand := request.response_format) is not None:
        schema = demand.json_schema and demand.json_schema.schema
        form = message_form("response_format", demand.type, schema, "json_schema.schema")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = request.add_generation_prompt is not False
    if request.continue_final_message and generation_prompt:
        problem = "is only allowed when add_generation_prompt is false"
        raise invalid("continue_final_message", problem)
    messages = enumerate(_modern(request.messages))
    return Conversation(
        messages=[_read_message(reader, index, message) for index, message in messages],
        tools=tools,
        choice=choice,
        forced=forced,
        allowed=allowed,
        allowed_by="tool_choice.allowed_tools.tools",
        parallel=request.parallel_tool_calls is not False,
        form=form_demand(request, form),
        options=ChatOptions(
            add_generation_prompt=generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            variables=variables,
        ),
    )


def _functions(place: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools, or mentions of them, as functions, without those that OpenAI runs itself."""
    functions = []
    for index, tool in enumerate(tools):
        kind, own = tool.get("type", "function"), f"{place}[{index}]"
        if kind == "custom":
            name = checked(f"{own}.custom", tool.get("custom"), Function).name
            tool = function_tool(name, tool["custom"].get("description") or "", FREE_TEXT)
        elif kind != "function" and isinstance(kind, str):
            note_once(f"the tool {kind!r}, which this server does not run: it is left out")
            continue
        checked(own, tool, Tool)
        functions.append(tool)
    return functions


def _modern(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with all calls as those of functions, which had another form once."""
    call_id = ""
    for index, message in enumerate(messages):
        if isinstance(function := message.get("function_call"), dict):
            call_id = f"call{index:05}"  # of the length that Mistral's templates take
            calls = [{"id": call_id, "type": "function", "function": function}]
            message = {**message, "tool_calls": calls}
            del message["function_call"]
        elif isinstance(original := message.get("tool_calls"), list):
            place = f"messages[{index}].tool_calls"
            calls = [_function_call(f"{place}[{n}]", call) for n, call in enumerate(original)]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": call_id}
        yield message


def _function_call(place: str, call: Any) -> Any:
    """A call, which of free text becomes that of a function."""
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    name = checked(f"{place}.custom", call.get("custom"), Function).name
    arguments = json_text({"input": call["custom"].get("input") or ""})
    function = {"name": name, "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(arguments := function.get("arguments"), str):
        function = {**function, "arguments": object_arguments(arguments)}
    return {**call, "function": function}


def _read_message(reader: ContentReader, index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: with text for parts, and without null."""
    field = f"messages[{index}]"
    read = checked(field, message, ChatMessage)
    if read.content is None and read.role != "assistant":
        raise invalid(f"{field}.content", "must be text or a list of parts")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = joined(reader.pieces(f"{field}.content", read.content or ""))
    if read.tool_calls:
        plain["tool_calls"] = [_read_call(call) for call in plain["tool_calls"]]
    if read.role == "developer":  # templates do not know that role
        plain["role"] = "system"
    for own, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if own in plain:
            plain.setdefault(other, plain[own])
    return plain
