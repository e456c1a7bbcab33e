"""The marks of model families around tool calls and reasoning, as data; and the JSON schema with
which guided decoding forces calls.

The package ``regex`` reads the patterns, since it tells the beginning of a match from no match. A
pattern's match must not depend on the text that follows it. Its length has a bound, since the
beginning of a match is read again with every piece of text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from trtllm_bls.types import AnswerMarkup


@dataclass(frozen=True)
class ToolFormat:
    """A model family's way to write calls.

    ``mark``: pattern of a text that only chat templates of the family have.
    ``begin``: markers before calls; without any, the text consists of calls alone.
    ``noise``: text that may stand between and after calls. A marker that is also in ``begin`` is
    never content.
    ``inner``: text that may stand between a marker of ``begin`` and the calls behind it.
    ``header``: pattern of what precedes the arguments. Its group ``name`` is the tool's name;
    without it, the name is part of the JSON. Its group ``id`` is the call's id; without it, the
    parser makes one, of at most ``id_length`` characters. ``id_form`` makes it of the name and the
    number of the call. A header with a group ``channel``, and without a name, begins a message.
    ``bare``: a text that begins with it may be a call without a marker.
    ``loose``: pattern of text that may begin a call without a marker, if it names a tool of the
    request. ``loose_at``: the places of a text where it may. ``loose_end``: text that has to follow
    such a call.
    ``opening``: the beginnings of an answer that calls a tool at once, if other than ``begin``.
    ``special``: the markers are special tokens, which the text has to keep.
    ``language``: of the arguments.
    ``may_be_empty``: no arguments behind a header mean an empty object.

    Patterns of XML: ``key`` precedes a value, and its group ``key`` is the key; its group
    ``string``, else the tool's schema, tells whether the value is one. ``closer`` follows a value;
    what comes next tells it from the same text inside a value. ``line_key`` is a key that shows
    that the closer before it is missing. ``stray`` may stand between arguments without a meaning.
    ``ends`` are the texts that end a call.
    """

    mark: str = ""
    begin: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    header: str = r"(?=\{)"
    bare: str | None = None
    loose: str = ""
    loose_at: Literal["start", "line", "any"] = "any"
    loose_end: str = ""
    opening: tuple[str, ...] = ()
    special: bool = False
    id_length: int = 64
    id_form: str = ""
    language: Literal["json", "xml", "python", "gemma"] = "json"
    may_be_empty: bool = False
    key: str = ""
    closer: str = ""
    line_key: str = ""
    stray: str = "(?!)"
    ends: tuple[str, ...] = ()

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that are in no call's arguments but within a string, the longest first."""
        texts = {text for text in (*self.begin, *self.noise, *self.ends) if len(text) > 2}
        return tuple(sorted(texts, key=len, reverse=True))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Texts that hold all markers of the format."""
        texts = [*self.begin, *self.noise, *self.ends]
        if self.language == "gemma":
            texts.append('<|"|>')
        for pattern in (self.header, self.key, self.closer):
            texts.append(re.sub(r"\\(.)", r"\1", pattern))
        return tuple(texts)

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """Markers behind calls."""
        return tuple(text for text in self.noise if len(text) > 2 and text not in self.begin)


class ReasoningTags(NamedTuple):
    """The tags around reasoning.

    ``mark``: text that only chat templates of the family have, if it is not ``end``. ``special``:
    as in ``ToolFormat``. ``messages``: the format of messages, where all text is in messages.
    """

    begin: str
    end: str
    mark: str = ""
    special: bool = False
    messages: ToolFormat | None = None


_GAP = r"\s{0,64}+"  # white space
_NAME_GROUP = r"(?P<name>[\w.-]{1,256})"
_QUOTED_NAME = r"[\"']?(?P<name>[^\"'<>\s]{1,256})[\"']?"
_QUOTED_KEY = r"[\"']?(?P<key>[^\"'<>\n]{1,256})[\"']?"
_SEP = "<｜tool▁sep｜>"
_DSML_GAP = "｜ ?"
# Harmony: a message is a header and a text. The header has a channel and may have a recipient.
_HEADER_PART = r"<\|channel\|>(?P<channel>\w{1,64})|<\|constrain\|>|[^<]"
_MESSAGE_TAG = rf"{_GAP}<\|message\|>"
_HARMONY = ToolFormat(
    mark=r"<\|channel\|>analysis",
    begin=("<|end|>", "<|return|>", "<|start|>assistant", "<|channel|>"),
    noise=("<|end|>", "<|return|>", "<|start|>assistant", "<|call|>"),
    header=r"(?=to=|<\|channel\|>\w)"
    rf"(?:to=(?P<name>[^<\s]{{1,256}})|{_HEADER_PART}){{1,256}}+<\|message\|>",
    bare="",
    opening=("<|channel|>commentary to=functions.", " to=functions."),
    special=True,
    may_be_empty=True,
)
_HARMONY_TEXT = replace(
    _HARMONY,
    header=r"(?=to=|<\|channel\|>\w)"
    rf"(?:to=[^<\s]{{1,256}}|{_HEADER_PART}){{1,256}}+<\|message\|>",
)
_FENCES = ("```json", "```")

_QWEN3_CODER = ToolFormat(
    mark="<parameter=",
    begin=("<tool_call>", "<function="),
    noise=("</tool_call>",),
    header=r"<function=[\"']?(?P<name>[^<>\s\"']{1,256})[\"']?>",
    language="xml",
    key=rf"<parameter={_QUOTED_KEY}>(?:\r?\n|(?=[^\r\n]))",
    closer=r"(?:\r?\n)?</parameter>",
    line_key=rf"\r?\n[ \t]{{0,64}}+<parameter={_QUOTED_KEY}>\r?\n",
    stray="</parameter>",
    ends=("</function>",),
)
_PYTHON_CALL = r"(?P<name>[^\W\d][\w.-]{0,255})\("
# Around the text of an answer, where a family marks it: no content.
_K3_TEXT = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_COHERE_TEXT = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|END_OF_TURN_TOKEN|>",
)

# The first format whose mark a template has is the template's, so a more specific one comes first.
TOOL_FORMATS = {
    "harmony": _HARMONY,
    "seed_oss": replace(
        _QWEN3_CODER,
        mark="<seed:tool_call>",
        begin=("<seed:tool_call>", "<function="),
        noise=("</seed:tool_call>",),
        special=True,
    ),
    "kimi_k3": ToolFormat(
        mark=r"<\|open\|>call tool=",
        begin=("<|open|>tools<|sep|>", "<|open|>call tool=", *_K3_TEXT),
        noise=("<|close|>tools<|sep|>", *_K3_TEXT),
        opening=("<|open|>tools<|sep|>",),
        header=rf"<\|open\|>call tool={_QUOTED_NAME}(?: index=\"?\d{{1,9}}\"?){{0,1}}+<\|sep\|>",
        special=True,
        language="xml",
        key=rf"<\|open\|>argument key={_QUOTED_KEY}(?: type=\"(?P<string>\w{{1,64}})\")?<\|sep\|>",
        closer=r"<\|close\|>argument<\|sep\|>",
        stray=r"<\|open\|>json type=\"object\"<\|sep\|>|<\|close\|>(?:json|argument)<\|sep\|>",
        ends=("<|close|>call<|sep|>",),
    ),
    "cohere": ToolFormat(
        mark=r"<\|START_ACTION\|>",
        begin=("<|START_ACTION|>", *_COHERE_TEXT),
        noise=("<|END_ACTION|>", *_COHERE_TEXT),
        inner=("[", "]", ","),
        opening=("<|START_ACTION|>",),
        special=True,
    ),
    "granite": ToolFormat(
        mark=r"<\|tool_call\|>",
        begin=("<|tool_call|>",),
        inner=("[", "]", ","),
        special=True,
    ),
    "phi4_mini": ToolFormat(
        mark=r"functools\[", begin=("functools",), inner=("[", "]", ","), special=True
    ),
    "longcat": ToolFormat(
        mark="<longcat_tool_call>",
        begin=("<longcat_tool_call>",),
        noise=("</longcat_tool_call>",),
        inner=("[", "]", ",", *_FENCES),
    ),
    "hunyuan": ToolFormat(
        mark=r"<tool_calls>\W{0,8}\[",
        begin=("<tool_calls>",),
        noise=("</tool_calls>",),
        inner=("[", "]", ",", *_FENCES),
    ),
    "lfm2": ToolFormat(
        mark=r"<\|tool_call_start\|>",
        begin=("<|tool_call_start|>",),
        noise=("[", "]", ",", "<|tool_call_end|>"),
        header=_PYTHON_CALL,
        special=True,
        language="python",
    ),
    "olmo3": ToolFormat(
        mark="<function_calls>",
        begin=("<function_calls>",),
        noise=("[", "]", ",", "</function_calls>"),
        header=_PYTHON_CALL,
        language="python",
    ),
    "deepseek": ToolFormat(
        mark="<｜tool▁call▁begin｜>",
        begin=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        noise=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        header=rf"<｜tool▁call▁begin｜>{_GAP}(?:function{_SEP}){{0,1}}+{_NAME_GROUP}"
        rf"(?:{_SEP}{_GAP}(?:```json)?|{_GAP}```json|{_GAP}(?=\{{))",
        special=True,
        may_be_empty=True,
    ),
    "deepseek_v32": ToolFormat(
        mark="｜DSML｜",
        begin=(
            "<｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "<｜DSML｜ calls>",
            "<｜DSML｜invoke name=",
            "<｜DSML｜ invoke name=",
        ),
        noise=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>"),
        header=rf"<｜DSML{_DSML_GAP}invoke name={_QUOTED_NAME}(?:>|(?=/>))",
        special=True,
        language="xml",
        key=rf"<｜DSML{_DSML_GAP}parameter name={_QUOTED_KEY}"
        r"(?: string=[\"']?(?P<string>[tT]rue|[fF]alse)[\"']?)?>",
        closer=rf"</｜DSML{_DSML_GAP}parameter>",
        stray=rf"</｜DSML{_DSML_GAP}parameter>",
        ends=("</｜DSML｜invoke>", "</｜DSML｜ invoke>", "/>"),
    ),
    "glm": ToolFormat(
        mark="<arg_key>",
        begin=("<tool_call>",),
        noise=("</tool_call>",),
        header=rf"<tool_call>{_GAP}{_NAME_GROUP}{_GAP}(?=<arg_key>|</arg_value>|</tool_call>)",
        language="xml",
        key=rf"<arg_key>(?P<key>[^<>\n]{{1,256}})</arg_key>{_GAP}(?:<arg_value>|(?=[^<\s]))",
        closer="</arg_value>",
        line_key=rf"(?:\r?\n)?<arg_key>(?P<key>[^<>\n]{{1,256}})</arg_key>{_GAP}<arg_value>",
        stray="</arg_value>|</arg_key>",
        ends=("</tool_call>",),
    ),
    "minimax_m2": ToolFormat(
        mark="<minimax:tool_call>",
        begin=("<minimax:tool_call>", "<invoke name="),
        noise=("</minimax:tool_call>",),
        header=rf"<invoke name={_QUOTED_NAME}>",
        special=True,
        language="xml",
        key=rf"<parameter name={_QUOTED_KEY}>",
        closer="</parameter>",
        line_key=rf"(?:\r?\n[ \t]{{0,64}}+)?<parameter name={_QUOTED_KEY}>",
        stray="</parameter>",
        ends=("</invoke>",),
    ),
    "qwen3_coder": _QWEN3_CODER,
    "kimi_k2": ToolFormat(
        mark=r"<\|tool_call_argument_begin\|>",
        begin=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_section_begin|>",
            "<|tool_call_begin|>",
        ),
        noise=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_section_begin|>",
            "<|tool_call_section_end|>",
            "<|tool_call_end|>",
        ),
        header=rf"<\|tool_call_begin\|>{_GAP}(?P<id>(?P<name>[^<>\s]{{1,256}})){_GAP}"
        r"<\|tool_call_argument_begin\|>",
        special=True,
        id_form="functions.{name}:{index}",
        may_be_empty=True,
    ),
    "gemma4": ToolFormat(
        mark=r"<\|tool_call>call:",
        begin=("<|tool_call>",),
        noise=("<tool_call|>", "<|tool_response>"),
        header=rf"<\|tool_call>{_GAP}call:{_NAME_GROUP}{_GAP}(?=[{{(])",
        special=True,
        language="gemma",
    ),
    "pythonic": ToolFormat(
        mark=r"\[func_name1\(",
        begin=("<|python_start|>",),
        noise=("[", "]", ",", ";", "<|python_end|>"),
        header=_PYTHON_CALL,
        bare="[",
        loose=rf"(?:\[{_GAP})?[^\W\d][\w.-]{{0,255}}+\(",
        loose_at="line",
        special=True,
        language="python",
    ),
    "hermes": ToolFormat(
        mark="<tool_call>",
        begin=("<tool_call>",),
        noise=("</tool_call>",),
        inner=("[", "]", ",", *_FENCES),
        loose=r"(?=\{)",
        loose_at="start",
        loose_end="</tool_call>",
    ),
    "mistral": ToolFormat(
        mark=r"\[TOOL_CALLS\]",
        begin=("[TOOL_CALLS]",),
        noise=("[", "]", ","),
        header=rf"\[TOOL_CALLS\]{_GAP}{_NAME_GROUP}{_GAP}(?:\[CALL_ID\][\w-]{{0,256}}{_GAP})?"
        rf"(?:\[ARGS\])?{_GAP}(?=\{{)|(?=\{{)",
        special=True,
        id_length=9,  # the templates refuse others
    ),
    "llama3_json": ToolFormat(
        # The shorter templates of the family do not have the marker.
        mark=r'<\|python_tag\|>|\A(?=.*ipython).*"parameters"',
        begin=("<|python_tag|>",),
        noise=(";", ",", "[", "]", "<|eom_id|>", "</function>"),
        header=r"<function=(?P<name>[\w.-]{1,256})>|(?=\{)",
        bare="{",
        loose=rf"(?=\{{)|\[{_GAP}(?=\{{)|(?=<function=)",
        special=True,
    ),
}
# A list of calls and nothing else, as guided decoding makes a model write it.
FORCED = ToolFormat(noise=("[", "]", ","), bare="")
REASONING_TAGS = {
    "seed": ReasoningTags("<seed:think>", "</seed:think>", special=True),
    "kimi_k3": ReasoningTags(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>think", special=True
    ),
    "cohere": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>", special=True),
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", special=True),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>", special=True),
    "harmony": ReasoningTags(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|channel|>analysis",
        special=True,
        messages=_HARMONY_TEXT,
    ),
}


@lru_cache(maxsize=8)
def formats_of(chat_template: str | None) -> tuple[str | None, str | None]:
    """Return the names of the tool format and the reasoning tags that a chat template has."""
    template = chat_template or ""
    tools = None
    for name, tool_format in TOOL_FORMATS.items():
        if re.search(tool_format.mark, template, re.S):
            tools = name
            break
    reasoning = None
    for name, tags in REASONING_TAGS.items():
        if (tags.mark or tags.end) in template:
            reasoning = name
            break
    return tools, reasoning


def answer_markup(
    tools: ToolFormat | None, reasoning: ReasoningTags | None, *, opened: bool = False
) -> AnswerMarkup:
    """Return the markup of an answer in these formats; ``opened``: the prompt began reasoning."""
    texts: list[str] = []
    if tools is not None:
        texts += tools.texts
    if reasoning is None:
        return AnswerMarkup(markers="\n".join(texts))
    texts += (reasoning.begin, reasoning.end)
    header_end = ""
    if reasoning.messages is not None:
        texts += reasoning.messages.texts
        header_end = "<|message|>"
    return AnswerMarkup(
        reasoning_begin=reasoning.begin,
        reasoning_end=reasoning.end,
        is_opened=opened,
        header_end=header_end,
        markers="\n".join(texts),
    )


def forced_calls(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, parallel: bool = True
) -> str:
    """Return the JSON schema, for guided decoding, of calls that ``FORCED`` parses.

    It is one or more calls of the tool called ``name``, or of any tool. ``tools``: as in OpenAI's
    API, with one of that name. ``parallel``: several calls are allowed.
    """
    calls = []
    parameters = {}
    for tool in tools:
        function = tool["function"]
        if name not in (None, function["name"]):
            continue
        place = f"#/$defs/{function['name']}"
        # Arguments are an object even if the schema omits its type. References inside the schema
        # start at its own root, which moves.
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
    """Return the schema with its references to itself rewritten to start at ``root``."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    return schema
