"""The JSON schema of calls that a request demands; ``FORCED`` parses the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def forced_calls(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, parallel: bool = True
) -> str:
    """The schema of a list of one or more calls of the tool called ``name``, or of any tool.

    ``tools``: as in OpenAI's API, with one of that name. ``parallel``: several calls are allowed.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if name in (None, function["name"])]
    calls, parameters = [], {}
    for function in chosen:
        name_of = function["name"]
        place = f"#/$defs/{name_of}"
        # Arguments are an object, also where the schema does not say so. References inside it start
        # at its own root, which is moved.
        given = {"type": "object", **(function.get("parameters") or {"properties": {}})}
        parameters[name_of] = _moved(given, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name_of}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
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
