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
    CallDemand,
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

_CALL_TEXTS = {"function": "arguments", "custom": "input"}  # by a call's kind: its text's key


def _delta(event: ChatEvent) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.separator + event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.separator + event.text}
    if isinstance(event, Refusal):
        return {"refusal": event.text}
    if isinstance(event, Annotation):
        return {"annotations": [event.value]}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, ToolCall):
        call["function"] = {"name": event.name, "arguments": ""}
        call |= {"id": event.id, "type": "function"}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}


class ChatResponse(ChoicesBuilder):
    """The response to a ``ChatCompletionRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    id_prefix = "chatcmpl-"

    def __init__(self, request: ChatCompletionRequest, model: ChatModel) -> None:
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_tokens = request.max_tokens
        prediction = None
        if request.prediction:
            prediction = model.reader.text("prediction.content", request.prediction.content)
        turn = turn_request(
            request,
            model,
            conversation_of(request, model.reader),
            choices=request.n or 1,
            stop_words=request.stop_words,
            max_tokens=max_tokens,
            wants=Wants(log_probs=bool(request.logprobs), top_log_probs=request.top_logprobs or 0),
            # The number of reasoning tokens is counted from the tokens.
            return_tokens=bool(request.logprobs) or model.reasons,
            return_drafted=bool(request.return_drafted),
            prediction=prediction,
        )
        super().__init__(request, model, [turn.request], turn.guide_field)
        self._parsers = turn.parsers
        self._reasoning: dict[int, ReasoningTokens] = {}  # by choice, if the model reasons
        if model.reasons:
            self._reasoning = {index: ReasoningTokens() for index in range(request.n or 1)}
        self._started: set[int] = set()  # choices with a first event
        self._custom_tools: set[str] = set()
        for tool in request.tools or ():
            if tool.get("type") == "custom":
                self._custom_tools.add(tool["custom"]["name"])
        # Open calls of free text by choice: the call's index, and the pieces of its arguments.
        self._free_text: dict[int, tuple[int, list[str]]] = {}
        self._scores: TokenScores | None = None
        if request.logprobs:
            self._scores = TokenScores(model.tokenizer, request.top_logprobs or 0)

    def add(self, index: int, chunk: TextChunk) -> bytes:
        opening = b""
        if self.stream:
            # OpenAI's package keeps choices in a list, so each has to start before the next one.
            for previous in range(index):
                for delta in self._opening(previous):
                    opening += self._frames.event(previous, delta)
        return opening + super().add(index, chunk)

    def _opening(self, index: int) -> Iterator[Delta]:
        """Yield the first event of a choice, unless the choice has started."""
        if index not in self._started:
            self._started.add(index)
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            yield {"delta": delta, "logprobs": None, "finish_reason": None}

    def _deltas(self, index: int, chunk: TextChunk) -> Iterator[Delta]:
        # Clients measure the first token's time by the first event, so the role is sent with text.
        yield from self._opening(index)
        logprobs = None
        if self._scores is not None and chunk.tokens:
            logprobs = chat_logprobs(self._scores.of(chunk))
        parser = self._parsers[index]
        ending = well_ended(chunk)
        if parser.plain and not chunk.draft_spans and logprobs is None:
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
            if not deltas and logprobs is not None:  # the tokens have no text yet
                deltas.append({})
            for event_delta in deltas:
                fields: dict[str, Any] = {"delta": event_delta, "logprobs": logprobs}
                fields["finish_reason"] = None
                if chunk.draft_spans and chunk.text in event_delta.values():  # the text is whole
                    fields["drafted"] = chunk.draft_spans
                yield fields
                logprobs = None
        if ending is not None:
            yield {"delta": {}, "logprobs": None, **self._finish(index, ending)}

    def _event_deltas(
        self, index: int, events: Sequence[ChatEvent], ending: Ending | None
    ) -> Iterator[dict[str, Any]]:
        """Yield each event's delta. The text of a free-text call is sent once its JSON is whole."""
        for event in events:
            if isinstance(event, Arguments) and index in self._free_text:
                _, pieces = self._free_text[index]
                pieces.append(event.text)
                continue
            if index in self._free_text:
                yield self._free_text_delta(index)
            if isinstance(event, ToolCall) and event.name in self._custom_tools:
                self._free_text[index] = (event.index, [])
                custom = {"name": event.name, "input": ""}
                call = {"index": event.index, "id": event.id, "type": "custom", "custom": custom}
                yield {"tool_calls": [call]}
            else:
                yield _delta(event)
        if ending and index in self._free_text:
            yield self._free_text_delta(index)

    def _free_text_delta(self, index: int) -> dict[str, Any]:
        """Close the choice's open free-text call, and return its text."""
        call_index, pieces = self._free_text.pop(index)
        text = free_text("".join(pieces))
        return {"tool_calls": [{"index": call_index, "custom": {"input": text}}]}

    def _folded(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        keys = ("content", "reasoning_content", "refusal")
        texts: dict[str, list[str]] = {key: [] for key in keys}
        annotations: list[Any] = []
        calls: list[dict[str, Any]] = []
        scores: list[Any] = []
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
            for call_delta in delta.get("tool_calls", ()):
                if "id" in call_delta:
                    kind = call_delta["type"]
                    name = call_delta[kind]["name"]
                    calls.append({"id": call_delta["id"], "type": kind, kind: {"name": name}})
                call = calls[call_delta["index"]]
                kind = call["type"]
                key = _CALL_TEXTS[kind]
                call[kind].setdefault(key, []).append(call_delta[kind][key])
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
            function = call[call["type"]]
            key = _CALL_TEXTS[call["type"]]
            function[key] = "".join(function[key])
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
            details["reasoning_tokens"] = sum(tokens.count for tokens in self._reasoning.values())
        return details


def _call_demand(choice: str | ToolChoice | None) -> CallDemand:
    """Return the demand of ``tool_choice``. Raises ``ApiError``."""
    if not isinstance(choice, ToolChoice):
        return CallDemand(choice or "auto")
    kind = choice.type
    if kind == "allowed_tools":
        if choice.allowed_tools is None:
            problem = "must have a mode, auto or required, and tools"
            raise invalid("tool_choice.allowed_tools", problem)
        tools = _functions("tool_choice.allowed_tools.tools", choice.allowed_tools.tools)
        allowed = {tool["function"]["name"] for tool in tools}
        return CallDemand(choice.allowed_tools.mode, allowed=allowed)
    if kind not in _CALL_TEXTS:  # a tool that others run
        return CallDemand("auto")
    function = choice.custom if kind == "custom" else choice.function
    if function is None:
        raise invalid(f"tool_choice.{kind}", "is missing")
    return CallDemand("required", forced=function.name)


def conversation_of(request: ChatCompletionRequest, reader: ContentReader) -> Conversation:
    """Return the conversation of a chat. Raises ``ApiError`` for demands that make no sense."""
    tools = _functions("tools", request.tools or ())
    demand = _call_demand(request.tool_choice)
    choice = demand.choice
    callable_tools = tools if demand.allowed is None else demand.allowed
    if choice == "required" and request.tools and not callable_tools:
        choice = "auto"  # others run all of the tools
    form = None
    if (response_format := request.response_format) is not None:
        schema = response_format.json_schema and response_format.json_schema.schema
        form = message_form("response_format", response_format.type, schema, "json_schema.schema")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = request.add_generation_prompt is not False
    if request.continue_final_message and generation_prompt:
        problem = "is only allowed when add_generation_prompt is false"
        raise invalid("continue_final_message", problem)
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(_modern(request.messages)):
        messages.append(_read_message(reader, index, message))
    return Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        forced=demand.forced,
        allowed=demand.allowed,
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
    """Return tools, or mentions of tools, as functions, without those that OpenAI runs itself."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        tool_place = f"{place}[{index}]"
        if kind == "custom":
            name = checked(f"{tool_place}.custom", tool.get("custom"), Function).name
            tool = function_tool(name, tool["custom"].get("description") or "", FREE_TEXT)
        elif kind != "function" and isinstance(kind, str):
            note_once(f"the tool {kind!r}, which this server does not run: it is left out")
            continue
        checked(tool_place, tool, Tool)
        functions.append(tool)
    return functions


def _modern(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages with all calls as ``tool_calls`` of functions.

    OpenAI's older form was ``function_call``. Calls of custom tools become calls of functions.
    """
    call_id = ""
    for index, message in enumerate(messages):
        if isinstance(function := message.get("function_call"), dict):
            call_id = f"call{index:05}"  # Mistral's templates need this length
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
    """Return a call as one of a function, also where it is a free-text call."""
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
    """Return a message as chat templates expect it: with text for parts, and without null."""
    place = f"messages[{index}]"
    fields = checked(place, message, ChatMessage)
    if fields.content is None and fields.role != "assistant":
        raise invalid(f"{place}.content", "must be text or a list of parts")
    turn = {key: value for key, value in message.items() if value is not None}
    turn["content"] = joined(reader.pieces(f"{place}.content", fields.content or ""))
    if fields.tool_calls:
        turn["tool_calls"] = [_read_call(call) for call in turn["tool_calls"]]
    if fields.role == "developer":  # templates do not know that role
        turn["role"] = "system"
    # Templates read one of the two names.
    if "reasoning" in turn:
        turn.setdefault("reasoning_content", turn["reasoning"])
    elif "reasoning_content" in turn:
        turn["reasoning"] = turn["reasoning_content"]
    return turn
