"""A tokenizer whose chat template has tool calls and reasoning."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.small_tokenizers import directory

# Says that calls are written as Hermes does, and thoughts between tags.
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}{{ tools | tojson }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{# <think> </think> #}"""


def tool_tokenizer() -> Path:
    """Its directory."""
    where = directory("byte-level")
    config = json.loads((where / "tokenizer_config.json").read_text())
    (where / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return where
