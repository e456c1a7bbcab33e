"""How model families mark tool calls and reasoning in their text, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    ``begin``: markers before calls; without any, the text consists of calls alone.
    ``noise``: text that may stand between and after calls.
    ``header``: pattern of what precedes the arguments where the name is not part of the JSON; its
    group is the name.
    ``bare``: a text that begins with this character is a call without a marker.
    ``special``: the markers are special tokens, which the text has to keep.
    ``written``: the language of a call.
    """

    begin: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    header: str | None = None
    bare: str = ""
    special: bool = False
    written: Literal["json", "xml", "python"] = "json"


XML_CALL = "<function="  # what begins a call that is written as XML
_SEP = "<｜tool▁sep｜>"
TOOL_FORMATS = {
    "hermes": ToolFormat(begin=("<tool_call>",), noise=("</tool_call>",)),
    "qwen3_coder": ToolFormat(
        begin=("<tool_call>", XML_CALL), noise=("</tool_call>",), written="xml"
    ),
    "pythonic": ToolFormat(
        begin=("<|python_start|>",),
        noise=("[", "]", ",", "<|python_end|>"),
        bare="[",
        special=True,
        written="python",
    ),
    "llama3_json": ToolFormat(
        begin=("<|python_tag|>",), noise=(";", ",", "<|eom_id|>"), bare="{", special=True
    ),
    "mistral": ToolFormat(
        begin=("[TOOL_CALLS]",),
        noise=("[", "]", ","),
        header=r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\])?",
        special=True,
    ),
    "deepseek": ToolFormat(
        begin=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        noise=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        header=rf"(?:function{_SEP})?([\w.-]+)(?:{_SEP})?\s*(?:```json)?",
        special=True,
    ),
}
# A list of calls and nothing else, as guided decoding makes a model write it.
FORCED = ToolFormat(noise=("[", "]", ","))
REASONING_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


def formats_of(chat_template: str | None) -> tuple[str | None, str | None]:
    """The names of the tool format and the reasoning tags that a chat template has."""
    template = chat_template or ""
    marks = {
        "deepseek": "<｜tool▁call▁begin｜>",
        "qwen3_coder": "<parameter=",
        "pythonic": "[func_name1(",
        "hermes": "<tool_call>",
        "mistral": "[TOOL_CALLS]",
        "llama3_json": "<|python_tag|>",
    }
    tools = next((name for name, mark in marks.items() if mark in template), None)
    if tools is None and "ipython" in template and '"parameters"' in template:
        tools = "llama3_json"  # the shorter templates of the family do not have the marker
    tags = (name for name, (_, end) in REASONING_TAGS.items() if end in template)
    return tools, next(tags, None)
