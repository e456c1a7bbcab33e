"""Fields of text requests, conversations and forms of answers, which all APIs share.

``turn_request`` makes the text request of a chat of any API. ``orchestrator.chat_turn`` decides how
the answer of a turn is guided and read.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.http.budgets import MAX_PARTS
from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.content import ContentReader, Piece, joined
from trtllm_bls.openai.schema import Generation, StructuredOutputs, Tool, checked, json_text
from trtllm_bls.orchestrator.chat_turn import (
    ChatTurn,
    ChatTurns,
    Conversation,
    FormDemand,
    pipeline_turn,
)
from trtllm_bls.text.chat_parser import ChatParser, EventParser
from trtllm_bls.text.json_values import JsonStrings, json_value
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import COLDEST, Guide, Sampling, SpeculationRequest, TextRequest

# Levels of reasoning effort that agents send, by the words of chat templates.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
# Tools that clients run. Their schema is not in the request, since the API's own models know it.
# The key is the tool's type without its date.
_CLIENT_TOOLS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("client_tools.json").read_bytes()
)
# The parameters of a tool of free text, as the model sees it.
FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def shared_fields(request: Generation, vocab_size: int) -> dict[str, Any]:
    """Return the fields of ``TextRequest`` that requests of all APIs have. Raises ``ApiError``."""
    bias: list[tuple[int, float]] = []
    for key, weight in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            problem = f"{key[:40]!r} is not a token id of this model; they are 0 to"
            raise invalid("logit_bias", f"{problem} {vocab_size - 1}")
        bias.append((int(key), weight))
    return {
        "stream": bool(request.stream),
        "sampling": sampling(request),
        "include_stop": bool(request.include_stop_str_in_output),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "bad_words": tuple(request.bad_words or ()),
        "token_bias": tuple(bias),
        "end_id": -1 if request.ignore_eos else None,
        "skip_special_tokens": request.skip_special_tokens,
        "speculation": SpeculationRequest(
            num_draft_tokens=request.num_draft_tokens, draft_source=request.draft_source
        ),
    }


def sampling(request: Generation) -> Sampling:
    """Return the sampling with OpenAI's defaults: temperature 1 over the whole vocabulary.

    A field that changes nothing is left out, since some engines have no input for it.
    """
    greedy = request.top_k == 1 or (request.top_p is not None and request.top_p < COLDEST)
    greedy = greedy or (request.temperature is not None and request.temperature < COLDEST)
    random: dict[str, Any] = {}
    if not greedy:
        random["temperature"] = 1.0 if request.temperature is None else request.temperature
        random["top_p"] = 1.0 if request.top_p is None else request.top_p
        if request.top_k and request.top_k > 1:
            random["top_k"] = request.top_k
        random["min_p"] = request.min_p or None
        random["seed"] = _unsigned(request.seed)
    penalty = request.repetition_penalty
    if penalty == 1:
        penalty = None
    return Sampling(
        frequency_penalty=request.frequency_penalty or None,
        presence_penalty=request.presence_penalty or None,
        repetition_penalty=penalty,
        min_tokens=request.min_tokens or None,
        **random,
    )


def _unsigned(seed: int | None) -> int | None:
    """Return the seed as the unsigned number of the engine's wire."""
    if seed is None:
        return None
    return seed % 2**64


def pipeline_sampling(request: Generation) -> Sampling:
    """Return the request's own fields, without defaults: a pipeline has defaults of its own."""
    top_k = request.top_k
    if top_k == -1:  # any
        top_k = None
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        min_tokens=request.min_tokens,
        seed=_unsigned(request.seed),
    )


@dataclass(frozen=True)
class ChatModel:
    """The model that requests are read for.

    ``turns`` is ``None`` for a pipeline, which takes conversations as they are and divides its
    answer itself. ``fingerprint`` differs between models and versions. ``count_call`` is called
    with a call's format and its outcome: see ``ChatParser``.
    """

    tokenizer: Tokenizer
    turns: ChatTurns | None = None
    fingerprint: str = ""
    reader: ContentReader = field(default_factory=ContentReader)
    count_call: Callable[[str, str], None] = lambda tool_format, outcome: None

    @property
    def is_pipeline(self) -> bool:
        """True for a pipeline."""
        return self.turns is None

    def reading_text(self) -> ChatModel:
        """Return the model with a sentence in the place of each part that is no text."""
        return replace(self, reader=replace(self.reader, accepts=frozenset()))

    @property
    def reasons(self) -> bool:
        """True for a model whose format of reasoning is known."""
        return self.turns is not None and self.turns.formats.reasoning is not None

    def turn(self, conversation: Conversation) -> ChatTurn:
        """Return the next turn. Raises ``ApiError``, and ``InvalidRequest`` for contradictions."""
        checked("tools", conversation.tools, list[Tool])
        if self.turns is None:
            return pipeline_turn(conversation)
        return self.turns.turn(conversation)


def check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidRequest`` for more images, sounds and files than a request may have."""
    count = 0
    for message in messages:
        if not isinstance(message["content"], str):
            count += sum(part["type"] != "text" for part in message["content"])
    if count > MAX_PARTS:
        problem = f"{count} images, sounds and files; at most {MAX_PARTS} are allowed"
        raise InvalidRequest("messages", problem)


@dataclass(frozen=True)
class CallDemand:
    """The demand on calls: auto, none or required, and the functions that it names."""

    choice: str
    forced: str | None = None  # the function that has to be called
    allowed: set[str] | None = None  # the functions that may be called; ``None``: all


def function_tool(name: str, description: str, parameters: object) -> dict[str, Any]:
    """Return a tool as chat templates take it; ``parameters``: its JSON schema, if it has one."""
    schema = parameters or {"type": "object", "properties": {}}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def client_tool(name: str, kind: str) -> dict[str, Any] | None:
    """Return the function for a tool of type ``kind`` that clients run; ``None`` for others."""
    if kind not in _CLIENT_TOOLS:
        return None
    schema = {"type": "object", **_CLIENT_TOOLS[kind]}
    description = schema.pop("description")
    return function_tool(name, description, schema)


def message_form(field: str, kind: str, schema: Any, place: str = "schema") -> FormDemand | None:
    """Return the form of a message that ``field`` demands, of type text, json_object, json_schema.

    ``place``: where in the field the schema is. Raises ``ApiError``.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return FormDemand(field=field, guide=Guide("json"), of_message=True)
    if schema is None:
        raise invalid(f"{field}.{place}", "must be a JSON schema")
    return FormDemand(field=field, guide=Guide("json_schema", json_text(schema)), of_message=True)


def form_demand(request: Generation, of_message: FormDemand | None = None) -> FormDemand | None:
    """Return the form that vLLM's ``structured_outputs`` demands, or else ``of_message``.

    Its members have older names, too, such as ``guided_json``, and SGLang's. Raises ``ApiError``.
    """
    outputs = request.structured_outputs or StructuredOutputs()
    members: list[tuple[str, str, Any]] = []  # the request's field, the kind of guide, the value
    for kind in outputs.__struct_fields__:
        members.append(("structured_outputs", kind, getattr(outputs, kind)))
    for kind in ("json", "regex", "choice", "grammar"):
        members.append((f"guided_{kind}", kind, getattr(request, f"guided_{kind}")))
    members.append(("regex", "regex", request.regex))
    members.append(("ebnf", "grammar", request.ebnf))
    demands = [member for member in members if member[2] is not None and member[2] is not False]
    if not demands:
        return of_message
    field, kind, value = demands[0]
    if of_message is not None or len(demands) > 1:
        raise invalid(field, "send one demand on the form of the answer alone")
    return FormDemand(field=field, guide=_guide(field, kind, value))


def _guide(field: str, kind: str, value: Any) -> Guide:
    """Return the guide of one member of ``structured_outputs``. Raises ``ApiError``."""
    if kind == "json_object":
        return Guide("json")
    if kind == "json":
        if not isinstance(value, str):
            value = json_text(value)
        return Guide("json_schema", value)
    if kind == "choice":
        if not value:
            raise invalid(field, "has no text to choose; send at least one")
        return Guide("ebnf_grammar", "root ::= " + " | ".join(map(_quoted, value)))
    if kind == "regex":
        if not value:  # the empty text alone matches, and not every engine takes the expression
            return Guide("ebnf_grammar", 'root ::= ""')
        return Guide("regex", value)
    if not value:
        raise invalid(field, "is empty; send a grammar")
    return Guide("ebnf_grammar", value)


def _quoted(text: str) -> str:
    """Quote ``text`` for a grammar, with escapes that llguidance and xgrammar both read.

    A character by its number is a string of its own, as xgrammar would take digits that follow it
    for digits of the number.
    """
    text = text.replace("\\", r"\\").replace('"', r"\"")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f'" "\\x{ord(c[0]):02x}" "', text) + '"'


def object_arguments(text: str) -> str:
    """Return the arguments of a past call as a JSON object; other texts become its only member.

    A model may have written anything, and many templates would refuse the conversation for ever.
    """
    if not text.strip():
        return "{}"
    if isinstance(json_value(text), dict):
        return text
    repaired = JsonStrings().feed(text, end=True)
    if isinstance(json_value(repaired), dict):
        return repaired
    return json_text({"arguments": repaired})


def free_text(arguments: str) -> str:
    """Return the text of a free-text tool's call; all arguments where they are no such JSON."""
    value = json_value(arguments)
    if isinstance(value, dict):
        text = value.get("input")
        if isinstance(text, str):
            return text
    return arguments


class Transcript:
    """A conversation as chat templates take it, which is written in pieces."""

    def __init__(self) -> None:
        # Messages whose content is a list of pieces; ``messages`` joins them.
        self._turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        messages: list[dict[str, Any]] = []
        for turn in self._turns:
            pieces = [piece for piece in turn["content"] if piece]
            message = {**turn, "content": joined(pieces)}
            if "reasoning" in turn:
                reasoning = "".join(turn["reasoning"])
                message["reasoning"] = reasoning
                message["reasoning_content"] = reasoning
            messages.append(message)
        return messages

    def say(self, role: str, *pieces: Piece) -> None:
        """Add a message. Text of the assistant is added to its message, if that is the last one."""
        if role == "assistant":
            self._assistant()["content"] += pieces
        else:
            self._turns.append({"role": role, "content": list(pieces)})

    def think(self, text: str) -> None:
        """Add reasoning to the assistant's message, which is the last one or a new one."""
        self._assistant().setdefault("reasoning", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to the assistant's message, which is the last one or a new one."""
        function = {"name": name, "arguments": object_arguments(arguments)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, *pieces: Piece) -> None:
        """Add the result of a call."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": list(pieces)})

    def _assistant(self) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": []})
        return self._turns[-1]


def thinking(effort: str | None, enabled: bool | None = None) -> dict[str, Any]:
    """Return a chat template's variables for the reasoning effort, and for reasoning at all."""
    variables: dict[str, Any] = {}
    if effort == "none":
        enabled = False
    elif effort is not None:
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    return variables


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn, the field that demands its guide, and a parser of each choice."""

    request: TextRequest
    guide_field: str
    parsers: Sequence[ChatParser | EventParser]


def turn_request(
    request: Generation,
    model: ChatModel,
    conversation: Conversation,
    *,
    choices: int = 1,
    **fields: Any,
) -> TurnRequest:
    """Return the request to the orchestrator; ``fields`` are further ones of the ``TextRequest``.

    Raises ``ApiError``, and ``InvalidRequest`` for demands that contradict each other.
    """
    check_parts(conversation.messages)
    turn = model.turn(conversation)
    shared = shared_fields(request, model.tokenizer.model_vocab_size)
    if model.is_pipeline:
        shared["sampling"] = pipeline_sampling(request)
    text_request = turn.request(
        request_id=uuid.uuid4().hex, num_return_sequences=choices, **{**shared, **fields}
    )
    parsers = [turn.parser(model.count_call) for _ in range(choices)]
    return TurnRequest(text_request, turn.guide_field, parsers)
