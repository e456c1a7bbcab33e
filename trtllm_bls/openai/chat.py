"""``/v1/chat/completions``: from messages to a text request, from text chunks to deltas."""

from __future__ import annotations

from typing import Any

from trtllm_bls.chat_parsing.parser import Arguments, ChatEvent, Content, Reasoning, ToolCall
from trtllm_bls.openai.builder import ChoicesBuilder, TokenScores, chat_logprobs, well_ended
from trtllm_bls.openai.conversation import (
    ChatModel,
    Conversation,
    chat_turn,
    format_guide,
    guided_decoding,
)
from trtllm_bls.openai.errors import invalid
from trtllm_bls.openai.schema import ChatMessage, ChatRequest, ToolChoice, checked, text_of
from trtllm_bls.types import ChatOptions, Ending, TextChunk, Wants


def _delta(event: ChatEvent) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    function = {"arguments": event.text if isinstance(event, Arguments) else ""}
    call: dict[str, Any] = {"index": event.index, "function": function}
    if isinstance(event, ToolCall):
        call |= {"id": event.id, "type": "function", "function": {"name": event.name, **function}}
    return {"tool_calls": [call]}


class ChatResponse(ChoicesBuilder):
    """Builds the response to a ``ChatRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    id_prefix = "chatcmpl-"

    def __init__(self, request: ChatRequest, model: ChatModel) -> None:
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        limit, prediction = request.max_completion_tokens, request.prediction
        text, guide, self._parsers = chat_turn(
            request,
            model,
            conversation_of(request),
            choices=request.n or 1,
            stop_words=request.stop_words,
            max_tokens=request.max_tokens if limit is None else limit,
            wants=Wants(log_probs=bool(request.logprobs), top_log_probs=request.top_logprobs or 0),
            return_tokens=bool(request.logprobs),
            return_drafted=bool(request.return_drafted),
            prediction=text_of(prediction.content) if prediction else None,
        )
        super().__init__(request, model, [text], guide)
        self._begun: set[int] = set()
        scores = TokenScores(model.tokenizer, request.top_logprobs or 0)
        self._scores = scores if request.logprobs else None

    def _events(self, index: int, chunk: TextChunk) -> bytes:
        events = b""
        if index not in self._begun:
            # Clients take the first event for the first token, so the role comes with text.
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
            events = self._frames.choice(index, delta=delta, logprobs=None, finish_reason=None)
        logprobs = None
        if self._scores is not None and chunk.tokens:
            logprobs = chat_logprobs(self._scores.of(chunk))
        parser = self._parsers[index]
        if parser.plain and not chunk.drafted and logprobs is None:
            events += self._frames.text(index, chunk.text) if chunk.text else b""
        else:
            found = map(_delta, parser.feed(chunk.text, end=well_ended(chunk) is not None))
            for delta in [*found] or [{}] * (logprobs is not None):
                fields: dict[str, Any] = {"delta": delta, "logprobs": logprobs}
                fields["finish_reason"] = None
                if chunk.drafted and chunk.text in delta.values():  # uncut
                    fields["drafted"] = chunk.drafted
                events += self._frames.choice(index, **fields)
                logprobs = None
        if ending := well_ended(chunk):
            fields = self._finish(index, ending)
            events += self._frames.choice(index, delta={}, logprobs=None, **fields)
        return events

    def _choice(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        logprobs = None if self._scores is None else chat_logprobs(self._scores.of(chunk))
        texts, calls = {Content: "", Reasoning: ""}, list[dict[str, Any]]()
        for event in self._parsers[index].feed(chunk.text, end=True):
            if isinstance(event, (Content, Reasoning)):
                texts[type(event)] += event.text
            elif isinstance(event, Arguments):
                calls[event.index]["function"]["arguments"] += event.text
            else:
                function = {"name": event.name, "arguments": ""}
                calls.append({"id": event.id, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = texts[Content] or (None if calls else "")
        if texts[Reasoning]:
            message["reasoning_content"] = texts[Reasoning]
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": logprobs}

    def _finish(self, index: int, ending: Ending) -> dict[str, Any]:
        fields = super()._finish(index, ending)
        if fields["finish_reason"] == "stop" and self._parsers[index].has_calls:
            fields["finish_reason"] = "tool_calls"
        return fields


def conversation_of(request: ChatRequest) -> Conversation:
    """What a chat asks for. Raises ``ApiError`` for demands that make no sense."""
    choice, forced, allowed = request.tool_choice or "auto", None, None
    if isinstance(choice, ToolChoice):
        function, few = choice.function, choice.allowed_tools
        if choice.type == "allowed_tools":
            if few is None:
                problem = "must have a mode, auto or required, and tools"
                raise invalid("tool_choice.allowed_tools", problem)
            choice, allowed = few.mode, {tool.function.name for tool in few.tools}
        elif function is None:
            raise invalid("tool_choice.function", "is missing")
        else:
            choice, forced = "required", function.name
    form = None
    if (given := request.response_format) is not None:
        schema = given.json_schema and given.json_schema.schema
        form = format_guide("response_format", given.type, schema, "json_schema.schema")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = request.add_generation_prompt is not False
    if request.continue_final_message and generation_prompt:
        problem = "is only allowed when add_generation_prompt is false"
        raise invalid("continue_final_message", problem)
    return Conversation(
        messages=[_read_message(*each) for each in enumerate(request.messages)],
        tools=request.tools or (),
        choice=choice,
        forced=forced,
        allowed=allowed,
        allowed_by="tool_choice.allowed_tools.tools",
        parallel=request.parallel_tool_calls is not False,
        guide=guided_decoding(request, form),
        options=ChatOptions(
            add_generation_prompt=generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            variables=variables,
        ),
    )


def _read_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: with text for parts, and without null."""
    field = f"messages[{index}]"
    read = checked(field, message, ChatMessage)
    if read.content is None and read.role != "assistant":
        raise invalid(f"{field}.content", "must be text or a list of parts")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = text_of(read.content or "")
    if read.role == "developer":  # templates do not know that role
        plain["role"] = "system"
    for own, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if own in plain:
            plain.setdefault(other, plain[own])
    return plain
