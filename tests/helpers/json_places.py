"""Every place of a JSON value, and what may stand there instead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

MISSING: Any = object()
VALUES = (MISSING, None, True, 7, -1.5, "x", "", [], ["x"], [["x"]], {}, {"type": ["x"]}, {"a": []})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    part: Any = body
    for key in path[:-1]:
        part = part[key]
    if value is MISSING:
        del part[path[-1]]
    else:
        part[path[-1]] = copy.deepcopy(value)
    return body
