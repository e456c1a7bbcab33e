"""The content of messages and of what tools return, as text: the model reads nothing else.

A text document is its text. In place of an image, a file or any other part without text the model
reads a sentence, which says what was left out. Clients send their whole conversation again in each
request, so refusing one part would end the conversation for ever.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from trtllm_bls.errors import printable
from trtllm_bls.http.budgets import MAX_NOTE, MAX_NOTES
from trtllm_bls.openai.api_errors import ApiError, invalid

log = logging.getLogger(__name__)

Content: TypeAlias = str | Sequence[dict[str, Any]]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_UNREADABLE_KINDS = (
    "image",
    "file",
    "document",
    "audio",
    "video",
)  # that are counted by their names
_AFFIXES = re.compile(r"^(input|output)_|_url$")
_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^,]*)?,(.*)", re.DOTALL)
_NAME_KEYS = ("filename", "title", "name", "image_url", "file_url", "url", "file_id")
_notes: set[str] = set()


def note_once(note: str) -> None:
    """Log something new that requests bring, once in a process."""
    note = printable(note, MAX_NOTE)
    if note not in _notes and len(_notes) < MAX_NOTES:
        _notes.add(note)
        log.info("requests bring %s", note)


@dataclass(frozen=True)
class ContentReader:
    """Reads content as text.

    ``refuses``: a part that is no text is refused. Otherwise ``count`` is called with its kind.
    """

    refuses: bool = False
    count: Callable[[str], None] = lambda kind: None

    def text(self, place: str, content: Content) -> str:
        """The text of ``content``, the field ``place``. Raises ``ApiError``."""
        if isinstance(content, str):
            return content
        return "\n".join(self.part(f"{place}[{n}]", part) for n, part in enumerate(content))

    def part(self, place: str, part: dict[str, Any]) -> str:
        """The text of one part. Raises ``ApiError``."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid(f"{place}.type", "must be a string")
        for text in (part.get("text"), part.get("refusal")):
            if isinstance(text, str):
                return text
        if kind in _TEXT_PARTS:
            raise invalid(place, "must have a text")
        if kind == "tool_reference":
            return f"Tool {part.get('tool_name')} is now available."
        source = part.get("source")
        nested = source if isinstance(source, dict) and source.get("type") == "content" else part
        if isinstance(inner := nested.get("content"), (str, list)):
            heads = [part.get("title"), source]
            texts = [*heads, self.text(f"{place}.content", inner)]
            return "\n".join(text for text in texts if isinstance(text, str))
        # What an API nests in a part, as in ``source`` or ``image_url``, beside the part's own.
        levels = [part, *(value for value in part.values() if isinstance(value, dict))]
        flat = {k: v for level in levels for k, v in level.items() if isinstance(v, str) and v}
        data, media_type = flat.get("data") or flat.get("file_data", ""), flat.get("media_type", "")
        for url in (data, flat.get("image_url", ""), flat.get("url", "")):
            if packed := _DATA_URL.match(url):
                media_type, data = packed.groups()
        if media_type.startswith("text/"):
            if isinstance(source, dict) and source.get("type") == "text":
                return data
            with suppress(ValueError):
                return base64.b64decode(data, validate=True).decode()
        name = next((flat[key] for key in _NAME_KEYS if flat.get(key, "data:")[:5] != "data:"), "")
        size = f"{len(data) * 3 // 4 - data[-2:].count('=')} bytes" if data else ""
        about = ", ".join(filter(None, (media_type, size, " ".join(name.split())[:200])))
        return self._left_out(place, _AFFIXES.sub("", kind), about)

    def _left_out(self, place: str, kind: str, about: str) -> str:
        if self.refuses:
            # Claude Code drops a block where an error names its place and its kind in this form.
            param = f"{place}.{kind}"
            problem = f"{param}: the model reads text only; leave the {kind} out"
            raise ApiError(400, problem, param=param)
        self.count(kind if kind in _UNREADABLE_KINDS else "other")
        note_once(f"content of type {kind!r}, in whose place the model reads that it was left out")
        told = f"{kind} left out ({about})" if about else f"{kind} left out"
        return f"[{told}: this model reads text only. Tell the user; do not try to read it again.]"
