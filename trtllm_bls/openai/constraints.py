"""The form that a request demands: guided decoding for the engine, and how the text is parsed.

A demand is enforced by the engine's guided decoding, or the request is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trtllm_bls.chat_parsing.forced import forced_calls
from trtllm_bls.chat_parsing.formats import (
    FORCED,
    REASONING_TAGS,
    TOOL_FORMATS,
    ReasoningTags,
    ToolFormat,
    formats_of,
)
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.openai.errors import as_json, invalid
from trtllm_bls.openai.schema import Common, StructuredOutputs, Tool, checked
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import Array, ChatOptions

_ANY_TEXT = {"type": "any_text"}


@dataclass(frozen=True)
class GuidedDecoding:
    """A form that the engine enforces; ``field``: the request's field that asked for it."""

    field: str
    kind: str
    text: str = ""

    @property
    def extras(self) -> dict[str, Array]:
        """The engine's inputs."""
        values = {"guided_decoding_guide_type": self.kind, "guided_decoding_guide": self.text}
        return {
            name: np.array([value.encode()], dtype=np.object_)
            for name, value in values.items()
            if value
        }


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
        found = list(messages)
        first = [message for message in found if message["role"] == "system"]
        if first and not (self.systems or (len(first) == 1 and found[0]["role"] == "system")):
            text = "\n\n".join(message["content"] for message in first)
            found = [message for message in found if message["role"] != "system"]
            found.insert(0, {**first[0], "content": text})
        if first and not self.system:
            found[0] = {**found[0], "role": "user"}
        if self.same_roles:
            return found
        joined: list[dict[str, Any]] = []
        for of_users, turns in itertools.groupby(found, lambda each: each["role"] == "user"):
            group = list(turns)
            if of_users:
                text = "\n\n".join(message["content"] for message in group)
                group = [{**group[0], "content": text}]
            joined += group
        return joined


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


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat request of any API.

    ``messages`` and ``tools`` are as chat templates take them. ``choice``: ``auto``, ``none``, or
    ``required``: at least one call; ``forced`` names the tool that it has to call. ``parallel``:
    the answer may have several calls. ``guide``: the form that the answer must have.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    forced: str | None = None
    parallel: bool = True
    guide: GuidedDecoding | None = None
    options: ChatOptions = field(default_factory=ChatOptions)

    def __post_init__(self) -> None:
        checked("tools", self.tools, list[Tool])

    def with_tools(self, names: Collection[str], place: str) -> Conversation:
        """Without other tools: a model does not call one that its prompt does not have."""
        if unknown := set(names) - {tool["function"]["name"] for tool in self.tools}:
            raise invalid(place, f"tools has none called {unknown.pop()!r}")
        tools = [tool for tool in self.tools if tool["function"]["name"] in names]
        return replace(self, tools=tools)


def answer_form(
    asked: Conversation, formats: ChatFormats
) -> tuple[GuidedDecoding | None, ToolFormat | None, dict[str, Any]]:
    """The answer's guided decoding, how its calls are written, and the schemas of what it may call.

    Raises ``ApiError`` for demands that contradict each other or make no sense.
    """
    functions = [tool["function"] for tool in asked.tools]
    schemas = {each["name"]: each.get("parameters") for each in functions}
    if asked.choice == "required":
        if asked.guide is not None:
            problem = f"demands a call, and {asked.guide.field} another form; send one"
            raise invalid("tool_choice", problem)
        if not schemas:
            raise invalid("tool_choice", "is only allowed with tools")
        if asked.forced is not None and asked.forced not in schemas:
            problem = f"there is no tool '{asked.forced}'; tools: {', '.join(schemas)}"
            raise invalid("tool_choice", problem)
        try:
            schema = forced_calls(asked.tools, asked.forced, parallel=asked.parallel)
        except RecursionError:
            raise invalid("tools", "is nested too deeply") from None
        if asked.forced is not None:
            schemas = {asked.forced: schemas[asked.forced]}
        return GuidedDecoding("tool_choice", "json_schema", schema), FORCED, schemas
    tools = formats.tools if asked.tools and asked.choice == "auto" else None
    if asked.guide is not None and tools is not None:
        return _or_calls(asked.guide, tools, schemas), tools, schemas
    return asked.guide, tools, schemas


def prompt_opens(tag: str, options: ChatOptions, tokenizer: Tokenizer) -> bool:
    """Whether the chat template ends the prompt with the tag that begins reasoning."""
    try:
        prompt = tokenizer.render_chat([{"role": "user", "content": "a"}], options)
    except InvalidRequest:
        return False  # rendering the whole conversation raises it again
    return prompt.rstrip().endswith(tag)


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
    return GuidedDecoding(field, "json_schema", as_json(field, schema))


def guided_decoding(request: Common, other: GuidedDecoding | None = None) -> GuidedDecoding | None:
    """The guided decoding that vLLM's ``structured_outputs`` asks for, or ``other``.

    Also by the older names of its members, such as ``guided_json``.
    """
    form = request.structured_outputs or StructuredOutputs()
    asked = [("structured_outputs", kind, getattr(form, kind)) for kind in form.__struct_fields__]
    for kind in ("json", "regex", "choice", "grammar"):
        asked.append((f"guided_{kind}", kind, getattr(request, f"guided_{kind}")))
    asked = [(field, kind, value) for field, kind, value in asked if value]
    if not asked:
        return other
    field, kind, value = asked[0]
    if other is not None or len(asked) > 1:
        raise invalid(field, "send one demand on the form of the answer alone")
    if kind == "json":
        schema = value if isinstance(value, str) else as_json(field, value)
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
        schemas.append(as_json("tools", {**shape, "required": list(call)}))
    elif tools.bare:
        begins += [f"{tools.bare}{name}(" for name in names]
    # Put together as text: the schema may be text that is no JSON, which the engine refuses.
    texts = [f'{{"type":"json_schema","json_schema":{schema}}}' for schema in schemas]
    markers = [{"type": "const_string", "value": begin} for begin in begins]
    calls = {"type": "sequence", "elements": [{"type": "or", "elements": markers}, _ANY_TEXT]}
    elements = ",".join([*texts, as_json("tools", calls)])
    tag = f'{{"type":"structural_tag","format":{{"type":"or","elements":[{elements}]}}}}'
    return GuidedDecoding(guide.field, "structural_tag", tag)
