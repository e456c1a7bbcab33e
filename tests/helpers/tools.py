"""Tools for tests of calls, as a chat names them."""

from __future__ import annotations

from typing import Any

_NODE = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "sub": {"$ref": "#/$defs/node"}},
    "required": ["on"],
    "additionalProperties": False,
}


def ping_and_set_tree(**properties: Any) -> list[dict[str, Any]]:
    """One tool without parameters; one whose ``tree`` refers to itself, with more properties."""
    parameters = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}, **properties},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {"node": _NODE},
    }
    return [
        {"type": "function", "function": {"name": "ping"}},
        {"type": "function", "function": {"name": "set_tree", "parameters": parameters}},
    ]
