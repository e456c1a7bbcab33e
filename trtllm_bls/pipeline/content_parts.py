"""Images, sounds and files in the conversations that a pipeline answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_bls.errors import InvalidRequest, SettingsError, TrtllmBlsError
from trtllm_bls.settings.faces import PART_INPUTS
from trtllm_bls.settings.model_config import CHAT_REQUEST
from trtllm_bls.types import Array
from trtllm_bls.wire.contract import Tensor

_NO_ITEMS = np.empty(0, np.object_)


@dataclass(frozen=True)
class ContentPart:
    """An image, a sound or a file of a message.

    ``kind``: image, audio or file. ``data``: its bytes, empty if the caller sent a ``url``, which
    the pipeline may fetch itself. ``media_type``: such as ``image/png``, as the caller wrote it.
    ``name``: the name of a file.
    """

    kind: str
    data: bytes = b""
    media_type: str = ""
    name: str = ""
    url: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The part as the OpenAI API sends it to a pipeline."""
        fields: dict[str, Any] = {
            "type": self.kind,
            "media_type": self.media_type,
            "name": self.name,
        }
        if self.url:
            fields["url"] = self.url
        else:
            fields["data"] = self.data
        return fields


def part_tensors(accepts: Collection[str]) -> Iterator[Tensor]:
    """Yield the inputs for parts of these kinds. Raises ``SettingsError``."""
    if isinstance(accepts, str) or not set(accepts) <= PART_INPUTS.keys():
        kinds = ", ".join(PART_INPUTS)
        raise SettingsError(f"accepts: {accepts!r} is no set of {kinds}")
    for kind, name in PART_INPUTS.items():
        if kind in accepts:
            yield Tensor(name, "STRING", (-1,))


def with_parts(
    messages: Iterable[dict[str, Any]], arrays: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Return a request's messages. A content that is a list gets texts and ``ContentPart``s.

    Raises ``InvalidRequest``.
    """
    converted = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_part(part, arrays) for part in content]}
        converted.append(message)
    return converted


def _part(part: Any, arrays: Mapping[str, Array]) -> str | ContentPart:
    if not isinstance(part, dict):
        part = {}
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if not isinstance(kind, str) or kind not in PART_INPUTS:
        raise InvalidRequest(CHAT_REQUEST, f"a part of content is none of {', '.join(PART_INPUTS)}")
    texts = {}
    for name in ("media_type", "name", "url"):
        texts[name] = part.get(name, "")
        if not isinstance(texts[name], str):
            raise InvalidRequest(CHAT_REQUEST, f"{name} of a part must be a text")
    data = b""
    if not texts["url"]:
        data = _part_data(PART_INPUTS[kind], part.get("data"), arrays)
    return ContentPart(kind, data=data, **texts)


def _part_data(input_name: str, index: Any, arrays: Mapping[str, Array]) -> bytes:
    """Return the bytes of a part, which is item ``index`` of an input."""
    array = arrays.get(input_name, _NO_ITEMS).reshape(-1)
    if type(index) is not int or not 0 <= index < len(array):
        raise InvalidRequest(input_name, f"has no bytes with the number {index!r:.40}")
    return bytes(array[index])


def check_text_only(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``TrtllmBlsError`` if a language model would have to read a ``ContentPart``."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            continue
        for part in content:
            if isinstance(part, ContentPart):
                problem = f"messages[{number}]: the language model reads text only, and no"
                remedy = "put text in its place, as request.texts does"
                raise TrtllmBlsError(f"{problem} {part.kind}; {remedy}")
