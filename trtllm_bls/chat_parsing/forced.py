"""The JSON schema of calls that a request demands; ``FORCED`` parses the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_bls.errors import InvalidRequest


def forced_calls(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, parallel: bool = True
) -> str:
    """The schema of a list of one or more calls of the tool called ``name``, or of any tool.

    ``tools``: as in OpenAI's API. ``parallel``: several calls are allowed. Raises
    ``InvalidRequest`` where there is no such tool.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if name in (None, function["name"])]
    if not chosen:
        known = ", ".join(function["name"] for function in functions) or "none"
        raise InvalidRequest("tool_choice", f"there is no tool '{name}'; tools: {known}")
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"anyOf": [_call(function) for function in chosen]},
        "minItems": 1,
        # References inside a tool's schema start at its own root, which is moved here.
        "$defs": {
            function["name"]: _moved(_parameters(function), f"#/$defs/{function['name']}")
            for function in chosen
        },
    }
    if name is not None or not parallel:
        schema["maxItems"] = 1
    return json.dumps(schema)


def _parameters(function: Mapping[str, Any]) -> Any:
    """Arguments are an object, also where the schema does not say so."""
    given = function.get("parameters")
    return {"type": "object", **given} if given else {"type": "object", "properties": {}}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {"$ref": f"#/$defs/{function['name']}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


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
