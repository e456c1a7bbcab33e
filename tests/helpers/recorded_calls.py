"""Recorded tool calls of model families (of the package canitoolcall), and chat templates that
write calls as these families do, for the tokenizer of DeepSeek."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

_CHAT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set name = call.function.name %}"
    "{% set arguments = call.function.arguments %}CALL{% endfor %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}</tool>{% else %}<｜User｜>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_JSON = "{{ arguments | tojson }}"
_EACH = "{% for key, value in arguments.items() %}"
CALLS = {
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{{{ name }}}}<｜tool▁sep｜>{_JSON}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": "<|tool_call>call:{{ name }}{{ '{' }}" + _EACH + '{{ key }}:<|"|>{{ value }}<|"|>'
    "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}<tool_call|>",
    "glm": "<tool_call>{{ name }}\n" + _EACH + "<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
    "gpt-oss": "<|channel|>commentary to=functions.{{ name }} <|constrain|>json<|message|>"
    f"{_JSON}<|call|>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ name }}:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "llama": '{"name": "{{ name }}", "parameters": ' + _JSON + "}",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]" + _JSON,
    "qwen3-hermes": '<tool_call>\n{"name": "{{ name }}", "arguments": ' + _JSON + "}\n</tool_call>",
    "qwen3-xml": "<tool_call>\n<function={{ name }}>\n" + _EACH + "<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
}
TEMPLATES = {family: _CHAT.replace("CALL", call) for family, call in CALLS.items()}


class Recorded(NamedTuple):
    """An answer with at least one call, and the tools that it may call."""

    family: str
    tools: list[dict[str, Any]]
    answer: str


def recorded_calls() -> Iterator[Recorded]:
    folders = files("canitoolcall") / "_data" / "fixtures"
    for family in TEMPLATES:
        parts = sorted((folders / family).iterdir(), key=lambda part: part.name)
        for part in parts:
            for line in part.read_text().splitlines() if part.name.endswith(".jsonl") else ():
                case = json.loads(line)
                if case.get("expected", {}).get("tool_calls") and case["tools"]:
                    yield Recorded(family, case["tools"], case["raw_output"])
