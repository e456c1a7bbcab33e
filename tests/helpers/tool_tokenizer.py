"""A tokenizer whose chat template has tool calls and reasoning."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

from tests.helpers.directories import shared_directory
from tests.helpers.small_tokenizers import directory

# Says that calls are written as Hermes does, and thoughts between tags.
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}{{ tools | tojson }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{# <think> </think> #}"""


@cache
def tool_tokenizer() -> Path:
    """Make its directory; that of the tokenizer itself is shared by many tests."""
    path = shared_directory("tokenizer-tools")
    shutil.copytree(directory("byte-level"), path, dirs_exist_ok=True)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path
