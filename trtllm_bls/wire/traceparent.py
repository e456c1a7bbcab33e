"""A caller's trace context, as W3C's Trace Context writes it in the field ``traceparent``."""

from __future__ import annotations

import re

# Version, trace id, parent id and flags. Version ff and ids of zeros alone are invalid. A later
# version may have more behind the flags, after another hyphen.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?"
)
_MAX_CHARS = 256  # in a context of a later version


def valid_traceparent(text: str) -> str | None:
    """Return ``text`` if it is a trace context, which a request may pass on."""
    match = _TRACEPARENT.fullmatch(text[: _MAX_CHARS + 1])
    if match is None or len(text) > _MAX_CHARS:
        return None
    if match[1] == "00" and match[2] is not None:
        return None
    return text
