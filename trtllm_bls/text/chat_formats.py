"""How model families mark tool calls and reasoning in their text, as data; and the JSON schema with
which guided decoding forces calls.

Patterns are read by the package ``regex``, which tells the beginning of a match from no match. What
a pattern matches in a text must not depend on what follows that match. Its length has a bound,
since the beginning of a match is read again with every piece of text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    ``mark``: pattern of what only chat templates of the family have.
    ``begin``: markers before calls; without any, the text consists of calls alone.
    ``noise``: text that may stand between and after calls. A marker that is also in ``begin`` is
    never content.
    ``header``: pattern of what precedes the arguments. Its group ``name`` is the tool's name;
    without it, the name is part of the JSON. Its group ``id`` is the call's id; without it, the
    parser makes one, of at most ``id_length`` characters. A header with a group ``channel``, and
    without a name, begins a message.
    ``bare``: a text that begins with it may be a call without a marker.
    ``opening``: what an answer that calls a tool at once begins with, where it is not a marker.
    ``special``: the markers are special tokens, which the text has to keep.
    ``language``: of the arguments.

    Patterns of XML: ``key`` precedes a value, and its group ``key`` is the key; its group
    ``string``, else the tool's schema, tells whether the value is one. ``value_end``
    follows a value; what comes next tells it from the same text inside a value. ``end`` follows the
    last value.
    """

    mark: str = ""
    begin: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    header: str = r"(?=\{)"
    bare: str | None = None
    opening: tuple[str, ...] = ()
    special: bool = False
    id_length: int = 64
    language: Literal["json", "xml", "python", "gemma"] = "json"
    key: str = ""
    value_end: str = ""
    end: str = ""


class ReasoningTags(NamedTuple):
    """What stands around reasoning.

    ``mark``: what only chat templates of the family have, if that is not ``end``. ``special``: as
    of ``ToolFormat``. ``messages``: where all text is in messages, their format.
    """

    begin: str
    end: str
    mark: str = ""
    special: bool = False
    messages: ToolFormat | None = None


_GAP = r"\s{0,64}+"  # white space
_NAME = r"(?P<name>[\w.-]{1,256})"
_SEP = "<｜tool▁sep｜>"
# Harmony: a message is a header and a text. The header has a channel and may have a recipient.
_CHANNEL = rf"<\|channel\|>(?P<channel>\w{{1,64}}){_GAP}"
_MESSAGE = rf"(?:<\|constrain\|>)?\w{{0,64}}{_GAP}<\|message\|>"
_OTHER = rf"(?:to=(?P<other>(?!functions\.)[^<\s]{{1,256}}){_GAP})?"  # not the caller's tool
_TOOL = rf"to=functions\.{_NAME}{_GAP}"
_HARMONY_CALL = rf"(?:{_TOOL}{_CHANNEL}|{_CHANNEL}{_TOOL}){_MESSAGE}{_GAP}(?=\{{)"
_HARMONY = ToolFormat(
    mark=r"<\|channel\|>analysis",
    begin=("<|end|>", "<|return|>", "<|start|>assistant", "<|channel|>"),
    noise=("<|end|>", "<|return|>", "<|start|>assistant", "<|call|>"),
    header=f"{_HARMONY_CALL}|{_OTHER}{_CHANNEL}{_OTHER}{_MESSAGE}",
    bare="",
    opening=("<|channel|>commentary to=functions.", " to=functions."),
    special=True,
)
_RECIPIENT = rf"(?:to=[^<\s]{{1,256}}{_GAP})?"
_HARMONY_TEXT = replace(_HARMONY, header=f"{_RECIPIENT}{_CHANNEL}{_RECIPIENT}{_MESSAGE}")

# The first format whose mark a template has is the template's, so a more specific one comes first.
TOOL_FORMATS = {
    "harmony": _HARMONY,
    "deepseek": ToolFormat(
        mark="<｜tool▁call▁begin｜>",
        begin=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        noise=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        header=rf"<｜tool▁call▁begin｜>{_GAP}(?:function{_SEP})?{_NAME}(?:{_SEP})?{_GAP}"
        rf"(?:```json)?{_GAP}(?=\{{)",
        special=True,
    ),
    "deepseek_v32": ToolFormat(
        mark="｜DSML｜",
        begin=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),
        noise=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>"),
        header=rf'<｜DSML｜ ?invoke name="{_NAME}"(?:>|(?=/>))',
        special=True,
        language="xml",
        key=r'<｜DSML｜ ?parameter name="(?P<key>[^"<>\n]{1,256})"'
        r'(?: string="(?P<string>true|false)")?>',
        value_end=rf"</｜DSML｜ ?parameter>(?={_GAP}</?｜DSML｜ ?(?:parameter name=|invoke>))",
        end=r"(?:</｜DSML｜ ?invoke>|/>)",
    ),
    "glm": ToolFormat(
        mark="<arg_key>",
        begin=("<tool_call>",),
        noise=("</tool_call>",),
        header=rf"<tool_call>{_GAP}{_NAME}{_GAP}(?=<arg_key>|</tool_call>)",
        language="xml",
        key=rf"<arg_key>(?P<key>[^<>\n]{{1,256}})</arg_key>{_GAP}<arg_value>",
        value_end=rf"</arg_value>(?={_GAP}<(?:arg_key>|/tool_call>))",
        end="</tool_call>",
    ),
    "minimax_m2": ToolFormat(
        mark="<minimax:tool_call>",
        begin=("<minimax:tool_call>",),
        noise=("</minimax:tool_call>",),
        header=rf'<invoke name="{_NAME}">',
        special=True,
        language="xml",
        key=r'<parameter name="(?P<key>[^"<>\n]{1,256})">',
        value_end=rf"</parameter>(?={_GAP}<(?:parameter name=|/invoke>))",
        end="</invoke>",
    ),
    "qwen3_coder": ToolFormat(
        mark="<parameter=",
        begin=("<tool_call>", "<function="),
        noise=("</tool_call>",),
        header=r"<function=(?P<name>[^<>\s]{1,256})>",
        language="xml",
        key=r"<parameter=(?P<key>[^<>\n]{1,256})>(?:\n|(?=[^\n]))",
        # The model forgets the end of a value at times.
        value_end=rf"\n?</parameter>(?={_GAP}<(?:parameter=|/function>))"
        rf"|(?=\n(?:<parameter=[^<>\n]{{1,256}}>\n|</function>{_GAP}</tool_call>))",
        end="</function>",
    ),
    "kimi_k2": ToolFormat(
        mark=r"<\|tool_call_argument_begin\|>",
        begin=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        noise=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            "<|tool_call_end|>",
        ),
        header=rf"<\|tool_call_begin\|>{_GAP}(?P<id>(?:functions\.)?{_NAME}:\d{{1,9}}){_GAP}"
        rf"<\|tool_call_argument_begin\|>{_GAP}(?=\{{)",
        special=True,
    ),
    "gemma4": ToolFormat(
        mark=r"<\|tool_call>call:",
        begin=("<|tool_call>",),
        noise=("<tool_call|>", "<|tool_response>"),
        header=rf"<\|tool_call>{_GAP}call:{_NAME}{_GAP}(?=\{{)",
        special=True,
        language="gemma",
    ),
    "pythonic": ToolFormat(
        mark=r"\[func_name1\(",
        begin=("<|python_start|>",),
        noise=("[", "]", ",", "<|python_end|>"),
        header=r"(?P<name>[^\W\d][\w.-]{0,255})\(",
        bare="[",
        special=True,
        language="python",
    ),
    "hermes": ToolFormat(mark="<tool_call>", begin=("<tool_call>",), noise=("</tool_call>",)),
    "mistral": ToolFormat(
        mark=r"\[TOOL_CALLS\]",
        begin=("[TOOL_CALLS]",),
        noise=("[", "]", ","),
        header=rf"\[TOOL_CALLS\]{_GAP}{_NAME}{_GAP}(?:\[CALL_ID\][\w-]{{0,256}}{_GAP})?"
        rf"(?:\[ARGS\])?{_GAP}(?=\{{)|(?=\{{)",
        special=True,
        id_length=9,  # the templates refuse others
    ),
    "llama3_json": ToolFormat(
        # The shorter templates of the family do not have the marker.
        mark=r'<\|python_tag\|>|\A(?=.*ipython).*"parameters"',
        begin=("<|python_tag|>",),
        noise=(";", ",", "<|eom_id|>"),
        bare="{",
        special=True,
    ),
}
# A list of calls and nothing else, as guided decoding makes a model write it.
FORCED = ToolFormat(noise=("[", "]", ","), bare="")
REASONING_TAGS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", special=True),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>", special=True),
    "harmony": ReasoningTags(
        *("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>analysis"),
        special=True,
        messages=_HARMONY_TEXT,
    ),
}


def formats_of(chat_template: str | None) -> tuple[str | None, str | None]:
    """The names of the tool format and the reasoning tags that a chat template has."""
    template = chat_template or ""
    formats, families = TOOL_FORMATS.items(), REASONING_TAGS.items()
    tools = (name for name, format in formats if re.search(format.mark, template, re.S))
    reasoning = (name for name, tags in families if (tags.mark or tags.end) in template)
    return next(tools, None), next(reasoning, None)


def forced_calls(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, parallel: bool = True
) -> str:
    """The JSON schema of what ``FORCED`` parses, for guided decoding: one or more calls of the tool
    called ``name``, or of any tool.

    ``tools``: as in OpenAI's API, with one of that name. ``parallel``: several calls are allowed.
    """
    calls, parameters = [], {}
    for tool in tools:
        function = tool["function"]
        if name not in (None, function["name"]):
            continue
        place = f"#/$defs/{function['name']}"
        # Arguments are an object, also where the schema does not say so. References inside it start
        # at its own root, which is moved.
        arguments = {"type": "object", **(function.get("parameters") or {"properties": {}})}
        parameters[function["name"]] = _moved(arguments, place)
        call = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls.append(call)
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": parameters}
    if name is not None or not parallel:
        schema["maxItems"] = 1
    return json.dumps(schema)


def _moved(schema: Any, root: str) -> Any:
    """The schema, its references to itself rewritten to start at ``root``."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    return schema
