"""Images, sounds and files in the conversations that a pipeline is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_bls.errors import InvalidRequest, SettingsError, TrtllmBlsError
from trtllm_bls.settings.faces import PART_INPUTS
from trtllm_bls.settings.model_config import CHAT_REQUEST
from trtllm_bls.types import Array
from trtllm_bls.wire.contract import Tensor


@dataclass(frozen=True)
class ContentPart:
    """An image, a sound or a file of a message.

    ``kind``: image, audio or file. ``data``: its bytes; empty where the caller sent a
    ``url``, which nobody has fetched. ``media_type``: as the caller says, such as ``image/png``.
    ``name``: of a file.
    """

    kind: str
    data: bytes = b""
    media_type: str = ""
    name: str = ""
    url: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The part as it is sent to a pipeline."""
        source = {"url": self.url} if self.url else {"data": self.data}
        return {"type": self.kind, "media_type": self.media_type, "name": self.name, **source}


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
    """Return the messages of a request with texts and ``ContentPart``s where content is a list.

    Raises ``InvalidRequest``.
    """
    whole = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_part(part, arrays) for part in content]}
        whole.append(message)
    return whole


def _part(part: Any, arrays: Mapping[str, Array]) -> str | ContentPart:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PART_INPUTS:
        raise InvalidRequest(CHAT_REQUEST, f"a part of content is none of {', '.join(PART_INPUTS)}")
    texts = {}
    for name in ("media_type", "name", "url"):
        texts[name] = part.get(name, "")
        if not isinstance(texts[name], str):
            raise InvalidRequest(CHAT_REQUEST, f"{name} of a part must be a text")
    data = b""
    if not texts["url"]:
        index = part.get("data")
        items = arrays[PART_INPUTS[kind]].reshape(-1) if PART_INPUTS[kind] in arrays else ()
        if type(index) is not int or not 0 <= index < len(items):
            raise InvalidRequest(PART_INPUTS[kind], f"has no bytes with the number {index!r:.40}")
        data = bytes(items[index])
    return ContentPart(kind, data=data, **texts)


def check_text_only(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``TrtllmBlsError`` for a part that a language model is to read."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, ContentPart):
                problem = f"messages[{number}]: the language model reads text only, and no"
                mend = "put text in its place, as request.texts does"
                raise TrtllmBlsError(f"{problem} {part.kind}; {mend}")
