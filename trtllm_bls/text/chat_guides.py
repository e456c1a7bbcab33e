"""Guides of a chat's answers: a form, calls, or either, and reasoning before them.

Where one schema is not enough, the guide is a structural tag, as xgrammar describes them: JSON that
TensorRT-LLM and the embedded engine know. A tag is put together as text, since the schema in it is
a caller's and may be no JSON; the engine then refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_bls.text.chat_formats import FORCED, ReasoningTags, ToolFormat, forced_calls
from trtllm_bls.types import Guide, Message

# Harmony writes all text in messages. These are the headers of an answer's and of a call's message,
# and the beginning of a message behind another one.
_ANSWER_HEADER = "<|channel|>final<|message|>"
_CALL_HEADER = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
_NEXT_MESSAGE = "<|start|>assistant"
_ANY_OBJECT = '{"type":"object"}'
_ANY_TEXT = '{"type":"any_text"}'
_LINE_ENDS = '{"type":"regex","pattern":"\\\\n{0,2}"}'  # between reasoning and what follows
# The names of a guide's text in a structural tag, by the guide's kind.
_PLACES = {"regex": "pattern", "ebnf_grammar": "grammar"}


def is_json(guide: Guide) -> bool:
    """True for a guide whose text is a JSON document."""
    return guide.kind in ("json", "json_schema")


def is_part(guide: Guide) -> bool:
    """True for a guide that can be part of another one."""
    return is_json(guide) or guide.kind in _PLACES


def form_guide(form: Guide, reasoning: ReasoningTags | None, *, opened: bool) -> Guide:
    """Return the guide of a text in this form, behind reasoning."""
    if reasoning is None or not is_part(form):
        return form
    text = _part(form)
    if reasoning.messages is not None:
        text = _sequence(_constant(_ANSWER_HEADER), text)
    return _structural(_behind(text, reasoning, opened=opened))


def form_or_calls_guide(
    form: Guide,
    tools: ToolFormat,
    names: Sequence[str],
    reasoning: ReasoningTags | None,
    *,
    opened: bool,
) -> Guide:
    """Return the guide of a text in this form, or that begins as the model's own calls do."""
    text = _part(form)
    if reasoning is not None and reasoning.messages is not None:
        text = _sequence(_constant(_ANSWER_HEADER), text)
    alternatives = [text]
    begins = list(tools.opening or tools.begin)
    if tools.bare == "{":
        call = {"name": {"enum": list(names)}, "parameters": {"type": "object"}}
        schema = {"type": "object", "properties": call, "additionalProperties": False}
        alternatives.append(_schema(json.dumps({**schema, "required": list(call)})))
    elif tools.bare:
        begins += [f"{tools.bare}{name}(" for name in names]
    markers = _alternatives(*map(_constant, begins))
    alternatives.append(_sequence(markers, _ANY_TEXT))
    return _structural(_behind(_alternatives(*alternatives), reasoning, opened=opened))


def calls_guide(
    tools: Sequence[Message],
    forced: str | None,
    model_format: ToolFormat | None,
    reasoning: ReasoningTags | None,
    *,
    parallel: bool,
    opened: bool,
) -> tuple[Guide, ToolFormat]:
    """Return the guide of one or more calls, of the tool ``forced`` or of any, and their format.

    ``model_format``: the format of the model's own calls.
    """
    if model_format is not None and reasoning is not None and reasoning.messages is not None:
        calls = []
        for tool in tools:
            function = tool["function"]
            if forced in (None, function["name"]):
                header = _constant(_CALL_HEADER.format(function["name"]))
                schema = json.dumps(_object_schema(function.get("parameters")))
                calls.append(_sequence(header, _schema(schema)))
        text = _behind(_alternatives(*calls), reasoning, opened=opened)
        return _structural(text), model_format
    guide = Guide("json_schema", forced_calls(tools, forced, parallel=parallel))
    if reasoning is not None:
        guide = _structural(_behind(_part(guide), reasoning, opened=opened))
    return guide, FORCED


def _behind(text: str, reasoning: ReasoningTags | None, *, opened: bool) -> str:
    """Put reasoning before a part: the remainder of the prompt's, else none or some."""
    if reasoning is None:
        return text
    if opened:
        return _sequence(_until("", reasoning.end), _LINE_ENDS, text)
    thought = _until(reasoning.begin, reasoning.end)
    between = _LINE_ENDS
    if reasoning.messages is not None:
        between = _constant(_NEXT_MESSAGE)
    return _alternatives(text, _sequence(thought, between, text))


def _object_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of arguments, which are an object even if the caller omits the type."""
    return {"type": "object", **(parameters or {"properties": {}})}


def _part(guide: Guide) -> str:
    if is_json(guide):
        return _schema(guide.text or _ANY_OBJECT)
    kind = guide.kind.removeprefix("ebnf_")
    return json.dumps({"type": kind, _PLACES[guide.kind]: guide.text})


def _schema(text: str) -> str:
    return f'{{"type":"json_schema","json_schema":{text}}}'


def _constant(text: str) -> str:
    return json.dumps({"type": "const_string", "value": text}, ensure_ascii=False)


def _until(begin: str, end: str) -> str:
    """Return a part for any text between two markers."""
    begin = json.dumps(begin, ensure_ascii=False)
    end = json.dumps(end, ensure_ascii=False)
    return f'{{"type":"tag","begin":{begin},"content":{_ANY_TEXT},"end":{end}}}'


def _sequence(*parts: str) -> str:
    return f'{{"type":"sequence","elements":[{",".join(parts)}]}}'


def _alternatives(*parts: str) -> str:
    return parts[0] if len(parts) == 1 else f'{{"type":"or","elements":[{",".join(parts)}]}}'


def _structural(part: str) -> Guide:
    return Guide("structural_tag", f'{{"type":"structural_tag","format":{part}}}')
