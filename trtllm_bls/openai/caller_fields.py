"""What a request says to a pipeline, beside the conversation: see ``types.CallerFields``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.types import Scope

from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.schema import Generation
from trtllm_bls.types import CallerFields

# Names of the person who asks: OpenAI's newer field, its older one.
_USER_FIELDS = ("safety_identifier", "user")
_OWN_FIELDS = frozenset((*_USER_FIELDS, "metadata", "prompt_cache_key"))


def caller_fields(request: Generation, scope: Scope, headers: Collection[str]) -> CallerFields:
    """Return what ``request`` has for a pipeline. ``headers``: the names of those to pass on.

    Raises ``ApiError``.
    """
    metadata = _sent(request, "metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise invalid("metadata", "must be an object")
    user = None
    for name in _USER_FIELDS:
        user = user or _text(request, name)
    if user is None and isinstance(metadata.get("user_id"), str):  # Anthropic's place for it
        user = metadata["user_id"]
    further = {name: value for name, value in request.further.items() if name not in _OWN_FIELDS}
    return CallerFields(
        metadata=metadata,
        user=user,
        prompt_cache_key=_text(request, "prompt_cache_key"),
        headers=_headers(scope, headers),
        further=further,
    )


def _sent(request: Generation, name: str) -> Any:
    """The value of a field, which not every API has as one of its own."""
    value = getattr(request, name, None)
    return request.further.get(name) if value is None else value


def _text(request: Generation, name: str) -> str | None:
    value = _sent(request, name)
    if value is not None and not isinstance(value, str):
        raise invalid(name, "must be a text")
    return value


def _headers(scope: Scope, names: Collection[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        if name in names:
            values[name] = f"{values[name]}, {value}" if name in values else value
    return values
