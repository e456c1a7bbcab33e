"""A caller's trace context: the field ``traceparent`` of W3C's Trace Context."""

from __future__ import annotations

import re

# Version, trace id, parent id and flags. Version ff is invalid, as are ids of zeros only. A later
# version may add fields after the flags, behind another hyphen.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?"
)
_MAX_CHARS = 256  # limit for the contexts of later versions, whose length W3C leaves open


def valid_traceparent(text: str) -> str | None:
    """Return ``text`` if it is a valid trace context, else None."""
    match = _TRACEPARENT.fullmatch(text[: _MAX_CHARS + 1])
    if match is None or len(text) > _MAX_CHARS:
        return None
    if match[1] == "00" and match[2] is not None:
        return None
    return text
