"""The content of messages and of what tools return.

The language model reads text only. A text document is its text. In place of an image, a file or any
other part without text the model reads a sentence, which says what was left out. Clients send their
whole conversation again in each request, so refusing one part would end the conversation for ever.

A pipeline may accept images, sounds and files. Those are parts of their own between the texts, with
their bytes where the request has them. Nothing is fetched: any other URL stays a text.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from mimetypes import guess_type
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

from trtllm_bls.errors import printable
from trtllm_bls.http.budgets import MAX_NOTE, MAX_NOTES, MAX_PART_BYTES
from trtllm_bls.openai.api_errors import ApiError, invalid

log = logging.getLogger(__name__)

Content: TypeAlias = str | Sequence[dict[str, Any]]
# A text, or a part that a pipeline accepts: ``type``, ``media_type``, ``name``, and ``data`` or
# ``url``.
Piece: TypeAlias = str | dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
# Parts that the metric counts by these names; any other is counted as "other".
_UNREADABLE_KINDS = ("image", "file", "document", "audio", "video")
_AFFIXES = re.compile(r"^(input|output)_|_url$")
_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^,]*)?,(.*)", re.DOTALL)
_BASE64_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_NAME_KEYS = ("filename", "title", "name", "image_url", "file_url", "url", "file_id")
_AUDIO_TYPES = {"mp3": "mpeg"}  # by OpenAI's name of a format
_notes: set[str] = set()


def note_once(note: str) -> None:
    """Log a note about requests, once in a process."""
    note = printable(note, MAX_NOTE)
    if note not in _notes and len(_notes) < MAX_NOTES:
        _notes.add(note)
        log.info("requests bring %s", note)


@dataclass(frozen=True)
class ContentReader:
    """Reader of content as text, and as parts of the kinds that are accepted.

    ``refuses``: any other part is refused. Otherwise ``count`` is called with its kind.
    """

    refuses: bool = False
    count: Callable[[str], None] = lambda kind: None
    accepts: frozenset[str] = frozenset()

    def pieces(self, place: str, content: Content) -> list[Piece]:
        """Return the texts of ``content``, the field ``place``, and the parts between them.

        Raises ``ApiError``.
        """
        if isinstance(content, str):
            return [content]
        return [self.piece(f"{place}[{n}]", part) for n, part in enumerate(content)]

    def piece(self, place: str, part: dict[str, Any]) -> Piece:
        """Return one part, or the text in its place. Raises ``ApiError``."""
        if self.accepts:
            media = self._media(place, part)
            if media is not None:
                return media
        return self.part(place, part)

    def text(self, place: str, content: Content) -> str:
        """Return the text of ``content``, the field ``place``. Raises ``ApiError``."""
        if isinstance(content, str):
            return content
        return "\n".join(self.part(f"{place}[{n}]", part) for n, part in enumerate(content))

    def part(self, place: str, part: dict[str, Any]) -> str:
        """Return the text of one part. Raises ``ApiError``."""
        kind = _kind_of(part)
        if kind is None:
            raise invalid(f"{place}.type", "must be a string")
        for text in (part.get("text"), part.get("refusal")):
            if isinstance(text, str):
                return text
        if kind in _TEXT_PARTS:
            raise invalid(place, "must have a text")
        if kind == "tool_reference":
            return f"Tool {part.get('tool_name')} is now available."
        source = part.get("source")
        document = part
        if isinstance(source, dict) and source.get("type") == "content":
            document = source
        if isinstance(inner := document.get("content"), (str, list)):
            lines = [part.get("title"), source, self.text(f"{place}.content", inner)]
            return "\n".join(line for line in lines if isinstance(line, str))
        flat = _flat(part)
        data = flat.get("data") or flat.get("file_data", "")
        media_type = flat.get("media_type", "")
        for url in (data, flat.get("image_url", ""), flat.get("url", "")):
            if data_url := _DATA_URL.match(url):
                media_type, data = data_url.groups()
        if media_type.startswith("text/"):
            if isinstance(source, dict) and source.get("type") == "text":
                return data
            with suppress(ValueError):
                return base64.b64decode(data, validate=True).decode()
        name = next((flat[key] for key in _NAME_KEYS if flat.get(key, "data:")[:5] != "data:"), "")
        details: list[str] = []
        if media_type:
            details.append(media_type)
        if data:
            details.append(f"{len(data) * 3 // 4 - data[-2:].count('=')} bytes")
        if words := name.split():
            details.append(" ".join(words)[:200])
        return self._omission(place, _AFFIXES.sub("", kind), ", ".join(details))

    def _media(self, place: str, part: dict[str, Any]) -> dict[str, Any] | None:
        """Return a part of an accepted kind, decoded; None: it is of another, or is a text."""
        kind = _kind_of(part)
        if kind is None or isinstance(part.get("text"), str):
            return None
        kind = _AFFIXES.sub("", kind)
        if kind == "document":
            kind = "file"
        if kind not in self.accepts:
            return None
        flat = _flat(part)
        name = next((flat[key] for key in ("filename", "title", "name") if key in flat), "")
        media_type = flat.get("media_type", "")
        if not media_type and kind == "audio" and "format" in flat:
            media_type = f"audio/{_AUDIO_TYPES.get(flat['format'], flat['format'])}"
        data = flat.get("data") or flat.get("file_data", "")
        urls = [flat.get(key, "") for key in ("image_url", "audio_url", "file_url", "url")]
        for url in (data, *urls):
            if data_url := _DATA_URL.match(url):
                media_type = data_url[1] or media_type
                data = url
        if not media_type and name:
            media_type = guess_type(name)[0] or ""
        if media_type.startswith("text/"):
            return None
        media: dict[str, Any] = {"type": kind, "media_type": media_type, "name": name}
        if data:
            return {**media, "data": _decoded(place, data)}
        if url := next(filter(None, urls), ""):
            return {**media, "url": url}
        return None

    def _omission(self, place: str, kind: str, details: str) -> str:
        """Return the sentence in the place of a part, or raise ``ApiError`` where it refuses."""
        if self.refuses:
            # Claude Code drops a block where an error names its place and its kind in this form.
            param = f"{place}.{kind}"
            problem = f"{param}: the model reads text only; leave the {kind} out"
            raise ApiError(400, problem, param=param)
        if kind in _UNREADABLE_KINDS:
            self.count(kind)
        else:
            self.count("other")
        note_once(f"content of type {kind!r}, in whose place the model reads that it was left out")
        omission = f"{kind} left out"
        if details:
            omission += f" ({details})"
        problem = "this model reads text only. Tell the user; do not try to read it again."
        return f"[{omission}: {problem}]"


def joined(pieces: Sequence[Piece]) -> str | list[dict[str, Any]]:
    """Return content of these pieces: a text, or a list where there are other parts."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return "\n".join(texts)
    parts: list[dict[str, Any]] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            parts.append({"type": "text", "text": "\n".join(map(str, group))})
        else:
            parts += [piece for piece in group if not isinstance(piece, str)]
    return parts


def _kind_of(part: object) -> str | None:
    """Return the type that a part names; ``None`` where it is no part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    return kind if isinstance(kind, str) else None


def _flat(part: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a part, with those that an API nests in it, as in ``source``."""
    levels = [part, *(value for value in part.values() if isinstance(value, dict))]
    flat: dict[str, str] = {}
    for level in levels:
        for key, value in level.items():
            if isinstance(value, str) and value:
                flat[key] = value
    return flat


def _decoded(place: str, data: str) -> bytes:
    """Return the bytes of Base64 or of a ``data:`` URL. Raises ``ApiError``."""
    text = data
    is_url = data.startswith("data:")
    if is_url:
        text = data.partition(",")[2]
    if len(text) // 4 * 3 > MAX_PART_BYTES:
        problem = f"about {len(text) // 4 * 3} bytes; at most {MAX_PART_BYTES} are allowed"
        raise invalid(place, problem)
    if is_url and not _BASE64_URL.match(data):
        return unquote_to_bytes(text)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise invalid(place, f"its data is not Base64: {error}") from None
