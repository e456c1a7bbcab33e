"""From a request of any API to a text request, and to what parses the text of its answer.

A demand on the form of the answer is enforced by the engine's guided decoding, or the request is
refused.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.content import ContentReader
from trtllm_bls.openai.schema import Generation, StructuredOutputs, Tool, checked, json_text
from trtllm_bls.text.chat_formats import (
    FORCED,
    REASONING_TAGS,
    TOOL_FORMATS,
    ReasoningTags,
    ToolFormat,
    forced_calls,
    formats_of,
)
from trtllm_bls.text.chat_parser import ChatParser, EventParser
from trtllm_bls.text.json_values import JsonStrings, json_value
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import ChatOptions, Guide, Sampling, SpeculationRequest, TextRequest

# Below it, temperature and top_p select the likeliest token, or overflow in the engine.
_COLDEST = 1e-5
# How hard the model is to think, as agents say it, in the words that templates know.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
# Tools that clients run and whose schema the APIs' makers know, by their type without its date.
_CLIENT_TOOLS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("client_tools.json").read_bytes()
)
_ANY_TEXT = {"type": "any_text"}
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
    greedy = request.top_k == 1 or (request.top_p is not None and request.top_p < _COLDEST)
    greedy = greedy or (request.temperature is not None and request.temperature < _COLDEST)
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


@dataclass(frozen=True)
class GuidedDecoding:
    """A form that the engine enforces; ``field``: the request's field that asked for it."""

    field: str
    kind: str
    text: str = ""

    @property
    def guide(self) -> Guide:
        """The form as the engine is asked for it."""
        return Guide(self.kind, self.text or None)


@dataclass(frozen=True)
class TakenConversations:
    """Which conversations a chat template takes, of those that agents send.

    ``system``: one that begins with a system message. ``systems``: system messages at any place.
    ``same_roles``: two messages of users in a row.
    """

    system: bool = True
    systems: bool = True
    same_roles: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TakenConversations:
        """Whether the template refuses, drops or reorders texts is seen from its prompts."""

        def takes(roles: str) -> bool:
            known = {"s": "system", "u": "user", "a": "assistant"}
            messages = [{"role": known[r], "content": f"{r}{n}9q"} for n, r in enumerate(roles)]
            try:
                prompt = tokenizer.render_chat(messages)
            except InvalidRequest:
                return False
            places = [prompt.find(message["content"]) for message in messages]
            return places[0] >= 0 and places == sorted(places)

        systems = takes("ssu") and takes("suasu") and takes("usu")
        return cls(takes("su"), systems, takes("uu"))

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with system texts moved to the front and turns joined where need be."""
        turns = list(messages)
        systems = [message for message in turns if message["role"] == "system"]
        begins_alone = len(systems) == 1 and turns[0]["role"] == "system"
        if systems and not (self.systems or begins_alone):
            others = [message for message in turns if message["role"] != "system"]
            turns = [_joined(systems), *others]
        if systems and not self.system:
            turns[0] = {**turns[0], "role": "user"}
        if self.same_roles:
            return turns
        merged: list[dict[str, Any]] = []
        for of_users, run in itertools.groupby(turns, lambda turn: turn["role"] == "user"):
            group = list(run)
            merged += [_joined(group)] if of_users else group
        return merged


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first message with the texts of all."""
    text = "\n\n".join(message["content"] for message in messages)
    return {**messages[0], "content": text}


@dataclass(frozen=True)
class ChatFormats:
    """How the served model writes tool calls and reasoning; ``None``: it writes none.

    ``conversations``: which of them its chat template takes.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None
    conversations: TakenConversations = TakenConversations()

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> ChatFormats:
        """The formats of these names; ``auto`` finds them in the chat template."""
        tools, reasoning = formats_of(tokenizer.chat_template)
        tools = tools if tool_parser == "auto" else tool_parser
        reasoning = reasoning if reasoning_parser == "auto" else reasoning_parser
        taken = TakenConversations.of(tokenizer)
        return cls(TOOL_FORMATS.get(tools or ""), REASONING_TAGS.get(reasoning or ""), taken)


@dataclass(frozen=True)
class ChatModel:
    """What requests are read with. ``fingerprint`` tells clients that it is another model.

    ``count_call`` is called with a call's format and how it went on: see ``ChatParser``.
    """

    tokenizer: Tokenizer
    formats: ChatFormats = ChatFormats()
    fingerprint: str = ""
    reader: ContentReader = field(default_factory=ContentReader)
    count_call: Callable[[str, str], None] = lambda tool_format, outcome: None
    pipeline: bool = False  # it takes conversations as they are, and divides its answer itself


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


@dataclass(kw_only=True)
class Conversation:
    """A chat request of any API. Raises ``ApiError``.

    ``messages`` and ``tools`` are as chat templates take them. ``choice``: ``auto``, ``none``, or
    ``required``: at least one call; ``forced`` names the tool that it has to call. ``allowed``:
    names of the only tools that may be called, as the request's field ``allowed_by`` says.
    ``parallel``: the answer may have several calls. ``guide``: the form that the answer must have.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    forced: str | None = None
    allowed: Collection[str] | None = None
    allowed_by: str = "tool_choice.tools"
    parallel: bool = True
    guide: GuidedDecoding | None = None
    options: ChatOptions = field(default_factory=ChatOptions)

    def __post_init__(self) -> None:
        checked("tools", self.tools, list[Tool])
        if self.allowed is not None:
            # The prompt has no other tools: a model does not call one that it is not told of.
            if unknown := set(self.allowed) - {tool["function"]["name"] for tool in self.tools}:
                raise invalid(self.allowed_by, f"tools has none called {unknown.pop()!r}")
            self.tools = [t for t in self.tools if t["function"]["name"] in self.allowed]


def answer_form(
    asked: Conversation, formats: ChatFormats
) -> tuple[GuidedDecoding | None, ToolFormat | None, dict[str, Any]]:
    """The answer's guided decoding, how its calls are written, and the schemas of what it may call.

    Raises ``ApiError`` for demands that contradict each other or make no sense.
    """
    functions = [tool["function"] for tool in asked.tools]
    schemas = {function["name"]: function.get("parameters") for function in functions}
    if asked.choice == "required":
        if asked.guide is not None:
            problem = f"demands a call, and {asked.guide.field} another form; send one"
            raise invalid("tool_choice", problem)
        if not schemas:
            raise invalid("tool_choice", "is only allowed with tools")
        if asked.forced is not None and asked.forced not in schemas:
            problem = f"there is no tool '{asked.forced}'; tools: {', '.join(schemas)}"
            raise invalid("tool_choice", problem)
        schema = forced_calls(asked.tools, asked.forced, parallel=asked.parallel)
        if asked.forced is not None:
            schemas = {asked.forced: schemas[asked.forced]}
        return GuidedDecoding("tool_choice", "json_schema", schema), FORCED, schemas
    tools = formats.tools if asked.tools and asked.choice == "auto" else None
    if asked.guide is not None and tools is not None:
        return _or_calls(asked.guide, tools, schemas), tools, schemas
    return asked.guide, tools, schemas


def format_guide(
    field: str, kind: str, schema: Any, place: str = "schema"
) -> GuidedDecoding | None:
    """The guided decoding that ``field`` asks for, whose type is text, json_object or json_schema.

    ``place``: where in the field the schema is.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return GuidedDecoding(field, "json")
    if schema is None:
        raise invalid(f"{field}.{place}", "must be a JSON schema")
    return GuidedDecoding(field, "json_schema", json_text(schema))


def guided_decoding(
    request: Generation, other: GuidedDecoding | None = None
) -> GuidedDecoding | None:
    """The guided decoding that vLLM's ``structured_outputs`` asks for, or ``other``.

    Also by the older names of its members, such as ``guided_json``, and by SGLang's.
    """
    form = request.structured_outputs or StructuredOutputs()
    asked = [("structured_outputs", kind, getattr(form, kind)) for kind in form.__struct_fields__]
    older = ("json", "regex", "choice", "grammar")
    asked += [(f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in older]
    asked += [("regex", "regex", request.regex), ("ebnf", "grammar", request.ebnf)]
    asked = [(field, kind, value) for field, kind, value in asked if value]
    if not asked:
        return other
    field, kind, value = asked[0]
    if other is not None or len(asked) > 1:
        raise invalid(field, "send one demand on the form of the answer alone")
    if kind == "json":
        schema = value if isinstance(value, str) else json_text(value)
        return GuidedDecoding(field, "json_schema", schema)
    if kind == "json_object":
        return GuidedDecoding(field, "json")
    if kind == "choice":
        kind, value = "grammar", "root ::= " + " | ".join(map(_quoted, value))
    return GuidedDecoding(field, {"regex": "regex", "grammar": "ebnf_grammar"}[kind], value)


def _quoted(text: str) -> str:
    """``text`` in a grammar, escaped as llguidance and xgrammar both read it.

    A character given by number is a string of its own: xgrammar would take the digits after it for
    more of the number.
    """
    text = text.replace("\\", r"\\").replace('"', r"\"")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f'" "\\x{ord(c[0]):02x}" "', text) + '"'


def _or_calls(guide: GuidedDecoding, tools: ToolFormat, names: Iterable[str]) -> GuidedDecoding:
    """The form, or an answer that begins as the model's calls do."""
    if guide.kind not in ("json", "json_schema"):
        problem = "cannot be combined with tools that may be called; send tool_choice none"
        raise invalid(guide.field, f"{problem} or required")
    schemas = [guide.text or '{"type":"object"}']
    begins = list(tools.opening or tools.begin)
    if tools.bare == "{":
        call = {"name": {"enum": list(names)}, "parameters": {"type": "object"}}
        shape = {"type": "object", "properties": call, "additionalProperties": False}
        schemas.append(json_text({**shape, "required": list(call)}))
    elif tools.bare:
        begins += [f"{tools.bare}{name}(" for name in names]
    # Put together as text: the schema may be text that is no JSON, which the engine refuses.
    texts = [f'{{"type":"json_schema","json_schema":{schema}}}' for schema in schemas]
    markers = [{"type": "const_string", "value": begin} for begin in begins]
    calls = {"type": "sequence", "elements": [{"type": "or", "elements": markers}, _ANY_TEXT]}
    elements = ",".join([*texts, json_text(calls)])
    tag = f'{{"type":"structural_tag","format":{{"type":"or","elements":[{elements}]}}}}'
    return GuidedDecoding(guide.field, "structural_tag", tag)


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
        self._turns: list[dict[str, Any]] = []  # with lists of texts, which ``messages`` joins

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns so far."""
        found = []
        for turn in self._turns:
            message = {**turn, "content": "\n".join(filter(None, turn["content"]))}
            if "reasoning" in turn:
                message["reasoning"] = message["reasoning_content"] = "".join(turn["reasoning"])
            found.append(message)
        return found

    def say(self, role: str, text: str) -> None:
        """Add a message of text; to the assistant's message where that is the last one."""
        if role == "assistant":
            self._assistant()["content"].append(text)
        else:
            self._turns.append({"role": role, "content": [text]})

    def think(self, text: str) -> None:
        """Reasoning of the assistant's message that is the last one, or follows."""
        self._assistant().setdefault("reasoning", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant's message that is the last one, or of a new one."""
        function = {"name": name, "arguments": object_arguments(arguments)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a call has returned."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

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


def chat_turn(
    request: Generation, model: ChatModel, asked: Conversation, *, choices: int = 1, **fields: Any
) -> tuple[TextRequest, str, Sequence[ChatParser | EventParser]]:
    """What is asked of the orchestrator, which field asked for guided decoding, if any, and what
    parses each choice.

    ``fields`` are further ones of the ``TextRequest``. Raises ``ApiError``.
    """
    tokenizer, formats = model.tokenizer, model.formats
    guide, calls, schemas = answer_form(asked, formats)
    options = asked.options
    if model.pipeline:  # which writes its calls itself
        choice = (asked.forced or "required") if asked.choice == "required" else "auto"
        options = replace(options, tool_choice=choice, parallel_tool_calls=asked.parallel)
        guide = asked.guide
    # Where there is a guide, the engine enforces the form from the first token on.
    reasoning = formats.reasoning if guide is None else None
    tools = json_text(asked.tools) if asked.tools and asked.choice != "none" else None
    options = replace(options, tools=tools)
    shared = shared_fields(request, tokenizer.model_vocab_size)
    marked = any(markup is not None and markup.special for markup in (calls, reasoning))
    if marked and request.skip_special_tokens is None:  # the text has to keep the markers
        shared["skip_special_tokens"] = False
    text = TextRequest(
        request_id=uuid.uuid4().hex,
        messages=json_text(formats.conversations.fitted(asked.messages)),
        chat=options,
        num_return_sequences=choices,
        guide=guide.guide if guide else None,
        **{**shared, **fields},
    )
    opened = reasoning is not None and tokenizer.prompt_ends_with(reasoning.begin, options)
    if model.pipeline:
        return text, guide.field if guide else "", [EventParser() for _ in range(choices)]
    most = None if asked.parallel else 1
    name = next((name for name, known in TOOL_FORMATS.items() if known is calls), "forced")
    note = partial(model.count_call, name)
    fields = {"opened": opened, "schemas": schemas, "most_calls": most, "note_call": note}
    parsers = [ChatParser(calls, reasoning, **fields) for _ in range(choices)]
    return text, guide.field if guide else "", parsers
