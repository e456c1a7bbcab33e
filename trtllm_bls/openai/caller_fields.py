"""Fields of a request that pipelines read beside the conversation: see ``types.CallerFields``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.types import Scope

from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.schema import Generation
from trtllm_bls.types import CallerFields

# Fields for the client's user: OpenAI's newer one, its older one.
_USER_FIELDS = ("safety_identifier", "user")
_CALLER_FIELDS = frozenset((*_USER_FIELDS, "metadata", "prompt_cache_key"))


def caller_fields(request: Generation, scope: Scope, headers: Collection[str]) -> CallerFields:
    """Return the fields of ``request`` for a pipeline, with the headers of these names.

    Raises ``ApiError``.
    """
    metadata = _value_of(request, "metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise invalid("metadata", "must be an object")
    user = None
    for name in _USER_FIELDS:
        user = user or _text(request, name)
    if user is None and isinstance(metadata.get("user_id"), str):  # Anthropic's place for it
        user = metadata["user_id"]
    further = {name: value for name, value in request.further.items() if name not in _CALLER_FIELDS}
    return CallerFields(
        metadata=metadata,
        user=user,
        prompt_cache_key=_text(request, "prompt_cache_key"),
        headers=_headers(scope, headers),
        further=further,
    )


def _value_of(request: Generation, name: str) -> Any:
    """Return the value of a field that not every API has."""
    value = getattr(request, name, None)
    if value is None:
        value = request.further.get(name)
    return value


def _text(request: Generation, name: str) -> str | None:
    value = _value_of(request, name)
    if value is not None and not isinstance(value, str):
        raise invalid(name, "must be a text")
    return value


def _headers(scope: Scope, names: Collection[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        if name in values:
            values[name] += f", {value}"
        elif name in names:
            values[name] = value
    return values
