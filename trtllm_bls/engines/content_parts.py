"""The bytes of content parts, apart from the conversation's JSON.

A part has its place in the tensor of its kind where JSON has no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_bls.settings.faces import PART_INPUTS


def split_parts(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[bytes]]]:
    """Return messages for JSON, and the bytes of their parts by the name of the input."""
    split: list[dict[str, Any]] = []
    data: dict[str, list[bytes]] = {}
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_without_bytes(part, data) for part in content]
            message = {**message, "content": parts}
        split.append(dict(message))
    return split, data


def _without_bytes(part: dict[str, Any], data: dict[str, list[bytes]]) -> dict[str, Any]:
    """Return a part with the number of its bytes in ``data``, where they are added."""
    if not isinstance(part.get("data"), bytes):
        return part
    items = data.setdefault(PART_INPUTS[part["type"]], [])
    items.append(part["data"])
    return {**part, "data": len(items) - 1}
