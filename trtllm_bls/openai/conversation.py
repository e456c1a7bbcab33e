"""What the APIs share: fields of requests as the orchestrator has them, conversations, forms.

``turn_request`` makes the text request of a chat of any API. What a turn is, and how its answer is
guided and read, is decided below (``orchestrator.chat_turn``).
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

# How hard the model is to think, as agents say it, in the words that templates know.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
# Tools that clients run and whose schema the APIs' makers know, by their type without its date.
_CLIENT_TOOLS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("client_tools.json").read_bytes()
)
# A tool of free text, as the model sees it.
FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def shared_fields(request: Generation, vocab_size: int) -> dict[str, Any]:
    """The fields of ``TextRequest`` that requests of all APIs have. Raises ``ApiError``."""
    bias = []
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
    """As OpenAI samples: without any field at temperature 1 over the whole vocabulary.

    What changes nothing is left out, since some engines have no input for it.
    """
    greedy = request.top_k == 1 or (request.top_p is not None and request.top_p < COLDEST)
    greedy = greedy or (request.temperature is not None and request.temperature < COLDEST)
    chosen: dict[str, Any] = {}
    if not greedy:
        chosen["temperature"] = 1.0 if request.temperature is None else request.temperature
        chosen["top_p"] = 1.0 if request.top_p is None else request.top_p
        chosen["top_k"] = request.top_k if request.top_k and request.top_k > 1 else None
        chosen["min_p"] = request.min_p or None
        if request.seed is not None:
            chosen["seed"] = request.seed % 2**64  # unsigned on the engine's wire
    penalty = request.repetition_penalty
    return Sampling(
        frequency_penalty=request.frequency_penalty or None,
        presence_penalty=request.presence_penalty or None,
        repetition_penalty=None if penalty == 1 else penalty,
        min_tokens=request.min_tokens or None,
        **chosen,
    )


def sent_sampling(request: Generation) -> Sampling:
    """The fields of a request for a pipeline, which has defaults of its own: as they were sent."""
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k == -1 else request.top_k,  # -1: any
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        min_tokens=request.min_tokens,
        seed=None if request.seed is None else request.seed % 2**64,
    )


@dataclass(frozen=True)
class ChatModel:
    """The model that requests are read for.

    ``turns``: ``None``: it is a pipeline, which takes conversations as they are and divides its
    answer itself. ``fingerprint`` tells clients that it is another model. ``count_call`` is called
    with a call's format and how it went on: see ``ChatParser``.
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
        """True for a model that is known to write reasoning."""
        return self.turns is not None and self.turns.formats.reasoning is not None

    def turn(self, conversation: Conversation) -> ChatTurn:
        """Return the next turn. Raises ``ApiError``, and ``InvalidRequest`` for contradictions."""
        checked("tools", conversation.tools, list[Tool])
        return pipeline_turn(conversation) if self.turns is None else self.turns.turn(conversation)


def check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidRequest`` for more images, sounds and files than a request may have."""
    count = 0
    for message in messages:
        if not isinstance(message["content"], str):
            count += sum(part["type"] != "text" for part in message["content"])
    if count > MAX_PARTS:
        problem = f"{count} images, sounds and files; at most {MAX_PARTS} are allowed"
        raise InvalidRequest("messages", problem)


def function_tool(name: str, description: str, parameters: object) -> dict[str, Any]:
    """A tool as chat templates take it; ``parameters``: its JSON schema, if it has one."""
    schema = parameters or {"type": "object", "properties": {}}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def client_tool(name: str, kind: str) -> dict[str, Any] | None:
    """The function that the model sees of a tool that clients run, if this is one."""
    if (known := _CLIENT_TOOLS.get(kind)) is None:
        return None
    schema = {key: value for key, value in known.items() if key != "description"}
    return function_tool(name, known["description"], {"type": "object", **schema})


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
    members = [
        ("structured_outputs", kind, getattr(outputs, kind)) for kind in outputs.__struct_fields__
    ]
    members += [
        (f"guided_{kind}", kind, getattr(request, f"guided_{kind}"))
        for kind in ("json", "regex", "choice", "grammar")
    ]
    members += [("regex", "regex", request.regex), ("ebnf", "grammar", request.ebnf)]
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
        return Guide("json_schema", value if isinstance(value, str) else json_text(value))
    if kind == "choice":
        if not value:
            raise invalid(field, "has no text to choose; send at least one")
        return Guide("ebnf_grammar", "root ::= " + " | ".join(map(_quoted, value)))
    if kind == "regex":
        # Not every engine takes an empty expression, which the empty text alone matches.
        return Guide("regex", value) if value else Guide("ebnf_grammar", 'root ::= ""')
    if not value:
        raise invalid(field, "is empty; send a grammar")
    return Guide("ebnf_grammar", value)


def _quoted(text: str) -> str:
    """``text`` in a grammar, escaped as llguidance and xgrammar both read it.

    A character given by number is a string of its own: xgrammar would take the digits after it for
    more of the number.
    """
    text = text.replace("\\", r"\\").replace('"', r"\"")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f'" "\\x{ord(c[0]):02x}" "', text) + '"'


def object_arguments(text: str) -> str:
    """The arguments of a past call as a JSON object, which they become if they are none.

    A model may have written anything. Many templates would refuse the conversation for ever.
    """
    if not text.strip():
        return "{}"
    for mended in (text, JsonStrings().feed(text, end=True)):
        if isinstance(json_value(mended), dict):
            return mended
    return json_text({"arguments": mended})


def free_text(arguments: str) -> str:
    """The text of a call of a free-text tool; all of it where the model wrote no such JSON."""
    value = json_value(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class Transcript:
    """A conversation as chat templates take it, from turns in any pieces."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # with lists of pieces, which ``messages`` joins

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns so far."""
        found = []
        for turn in self._turns:
            pieces = [piece for piece in turn["content"] if piece]
            message = {**turn, "content": joined(pieces)}
            if "reasoning" in turn:
                message["reasoning"] = message["reasoning_content"] = "".join(turn["reasoning"])
            found.append(message)
        return found

    def say(self, role: str, *pieces: Piece) -> None:
        """Add a message; to the assistant's message where that is the last one."""
        if role == "assistant":
            self._assistant()["content"] += pieces
        else:
            self._turns.append({"role": role, "content": list(pieces)})

    def think(self, text: str) -> None:
        """Reasoning of the assistant's message that is the last one, or follows."""
        self._assistant().setdefault("reasoning", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant's message that is the last one, or of a new one."""
        function = {"name": name, "arguments": object_arguments(arguments)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, *pieces: Piece) -> None:
        """Add what a call has returned."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": list(pieces)})

    def _assistant(self) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": []})
        return self._turns[-1]


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
    """Return what is asked of the orchestrator; ``fields`` are further ones of the ``TextRequest``.

    Raises ``ApiError``, and ``InvalidRequest`` for demands that contradict each other.
    """
    check_parts(conversation.messages)
    turn = model.turn(conversation)
    shared = shared_fields(request, model.tokenizer.model_vocab_size)
    if model.is_pipeline:
        shared["sampling"] = sent_sampling(request)
    text_request = turn.request(
        request_id=uuid.uuid4().hex, num_return_sequences=choices, **{**shared, **fields}
    )
    parsers = [turn.parser(model.count_call) for _ in range(choices)]
    return TurnRequest(text_request, turn.guide_field, parsers)
