"""The page at ``/``, and ``/openapi.json``, of the schema that checks requests.

The page is sent with a policy under which the browser loads nothing else. Three published libraries
are part of it, each in a file that names its licence: marked (MIT) makes HTML of Markdown,
DOMPurify (Apache-2.0 or MPL-2.0) leaves only harmless elements of that, and Temml (MIT) makes
MathML of formulas.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls import __version__
from trtllm_bls.openai.api_errors import Error
from trtllm_bls.openai.builder import Head
from trtllm_bls.openai.messages import PATH, CountTokensRequest, MessagesRequest
from trtllm_bls.openai.responses import CompactRequest, ResponsesRequest
from trtllm_bls.openai.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_PAGE = Path(__file__).with_name("page.html")
_LIBRARIES = ("marked.js", "purify.js", "temml.js")


@cache
def _page() -> tuple[str, str]:
    """The page and its policy, which allows its own script and style alone, by their digests."""
    sources = (_PAGE.with_name(name).read_text(encoding="utf-8") for name in _LIBRARIES)
    libraries = "".join(f"<script>{source}</script>\n" for source in sources)
    text = _PAGE.read_text(encoding="utf-8").replace("<!-- libraries -->", libraries)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    for tag in ("script", "style"):
        policy += f"; {tag}-src"
        for inside in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest())
            policy += f" 'sha256-{digest.decode()}'"
    return text, policy


async def page(request: Request) -> Response:
    """``GET /``."""
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


def _object(*further: str, **properties: object) -> dict[str, Any]:
    """An object with these properties, and ``further`` ones of any type; it has all of them."""
    required = [*properties, *further]
    return {"type": "object", "required": required, "properties": properties}


def _choices(kind: str, **choice: object) -> dict[str, Any]:
    head = {name: _TEXT for name in Head.__struct_fields__}
    head |= {"object": {"const": kind}, "created": _NUMBER}
    item = _object("index", "finish_reason", "logprobs", **choice)
    usage = _object("prompt_tokens", "completion_tokens", "total_tokens")
    return _object(**head, choices={"type": "array", "items": item}, usage=usage)


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_MODEL = _object(id=_TEXT, object=_TEXT, created=_NUMBER, owned_by=_TEXT)
_MODELS = _object(object=_TEXT, data={"type": "array", "items": _MODEL})
_IDS, _WORD = {"type": "array", "items": _NUMBER}, {"type": "string", "minLength": 1}
_LIST = {"type": "array", "items": {"type": "object"}}
_RESPONSE = _object("usage", id=_TEXT, object={"const": "response"}, status=_TEXT, output=_LIST)
_MESSAGE = _object("stop_reason", "usage", id=_TEXT, type={"const": "message"}, content=_LIST)
_COMPACTION = _object("usage", object={"const": "response.compaction"}, output=_LIST)
_COUNT = _object(input_tokens=_NUMBER)
_CHAT = _choices("chat.completion", message=_object("role", "content"))
_TOKENS = _object("token_strs", "max_model_len", count=_NUMBER, tokens=_IDS)
# By path: what is taken, what is given, and whether it can be streamed.
_POSTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any], bool]] = {
    "/v1/chat/completions": (ChatRequest, _CHAT, True),
    "/v1/completions": (CompletionRequest, _choices("text_completion", text=_TEXT), True),
    "/v1/responses": (ResponsesRequest, _RESPONSE, True),
    "/v1/responses/input_tokens": (ResponsesRequest, _COUNT, False),
    "/v1/responses/compact": (CompactRequest, _COMPACTION, False),
    PATH: (MessagesRequest, _MESSAGE, True),
    f"{PATH}/count_tokens": (CountTokensRequest, _COUNT, False),
    "/tokenize": (TokenizeRequest, _TOKENS, False),
    "/detokenize": (DetokenizeRequest, _object(prompt=_TEXT), False),
}
# What is checked beyond the types.
_PROMPTS = [
    _WORD,
    {"type": "array", "minItems": 1, "items": _WORD},
    {**_IDS, "minItems": 1},
    {"type": "array", "items": _IDS},
]
_MESSAGES = {"items": {"$ref": "#/components/schemas/ChatMessage"}}
_WHY = {
    400: "A field is wrong; param names it",
    401: "No valid API key",
    404: "No such model or path",
    405: "Another method is meant",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "As many requests as allowed are being answered",
    500: "The engine failed",
    503: "The engine is full, cannot be reached, or the server shuts down",
    529: "The server is full, or shuts down",
}
_ERROR = _object(error={"$ref": "#/components/schemas/Error"})
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))


@cache
def document(model_names: tuple[str, ...]) -> dict[str, Any]:
    """The document, in OpenAPI 3.1, of a server of these models."""
    kinds = {kind for kind, _, _ in _POSTS.values()}
    _, schemas = msgspec.json.schema_components(
        (*kinds, ChatMessage, Error), ref_template="#/components/schemas/{name}"
    )
    for kind in kinds:
        schemas[kind.__name__]["properties"]["model"] = {"enum": list(model_names)}
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": _PROMPTS}
    schemas["ChatRequest"]["properties"]["messages"] |= _MESSAGES
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    model = {"responses": _responses(_MODEL, 401, 404), "parameters": [name]}
    metrics = {"description": "For Prometheus", "content": {"text/plain": {"schema": _TEXT}}}
    paths: dict[str, Any] = {
        "/v1/models": {"get": {"responses": _responses(_MODELS, 401)}},
        "/v1/models/{name}": {"get": model},
        "/health": {"get": {"responses": _responses({"type": "object"}, 503)}},
        "/version": {"get": {"responses": _responses(_object(version=_TEXT))}},
        "/metrics": {"get": {"responses": {"200": metrics}}},
    }
    for path, (kind, answer, streams) in _POSTS.items():
        full, error = ((529,), _ANTHROPIC_ERROR) if path.startswith(PATH) else ((429, 503), _ERROR)
        responses = _responses(answer, 400, 401, 404, 405, 413, 415, 500, *full, error=error)
        if streams:
            responses["200"]["content"]["text/event-stream"] = {"schema": {}}
        body = _json({"$ref": f"#/components/schemas/{kind.__name__}"})
        paths[path] = {"post": {"responses": responses, "requestBody": {"required": True, **body}}}
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trtllm-bls", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
        "security": [{}, {"key": []}],
    }


def _responses(
    answer: dict[str, Any], *statuses: int, error: dict[str, Any] = _ERROR
) -> dict[str, Any]:
    failures = {str(status): {"description": _WHY[status], **_json(error)} for status in statuses}
    return {"200": {"description": "The answer", **_json(answer)}, **failures}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
