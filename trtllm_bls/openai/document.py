"""The pages at ``/`` and ``/docs``, and ``/openapi.json``, which has the schema of requests.

The page is sent with a policy under which the browser loads nothing else. Three published libraries
are part of it, each in a file that names its licence: marked (MIT) makes HTML of Markdown,
DOMPurify (Apache-2.0 or MPL-2.0) leaves only harmless elements of that, and Temml (MIT) makes
MathML of formulas.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls import __version__
from trtllm_bls.http.budgets import MAX_EMBEDDED_TEXTS
from trtllm_bls.openai.api_errors import Error
from trtllm_bls.openai.builder import Head
from trtllm_bls.openai.docs_page import docs_page
from trtllm_bls.openai.face_requests import EmbeddingsRequest, RerankRequest, SpeechRequest
from trtllm_bls.openai.field_sentences import sentence_of
from trtllm_bls.openai.messages import PATH, CountTokensRequest, MessagesRequest
from trtllm_bls.openai.responses import CompactRequest, ResponsesRequest
from trtllm_bls.openai.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_PAGE = Path(__file__).with_name("page.html")
_LIBRARIES = ("marked.js", "purify.js", "temml.js")


@cache
def _page() -> tuple[bytes, bytes, str]:
    """Return the page, the same compressed by gzip, and its policy.

    The policy allows the page's own script and style alone, by their digests.
    """
    libraries = ""
    for name in _LIBRARIES:
        source = _PAGE.with_name(name).read_text(encoding="utf-8")
        libraries += f"<script>{source}</script>\n"
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
    raw = text.encode()
    return raw, gzip.compress(raw, mtime=0), policy


_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Answer ``GET /``, for browsers compressed by gzip, which is a quarter of the bytes."""
    raw, compressed, policy = _page()
    headers = {**_HEADERS, "content-security-policy": policy, "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(compressed, media_type="text/html", headers=headers)
    return Response(raw, media_type="text/html", headers=headers)


def docs_answer(model_names: tuple[str, ...]) -> Response:
    """Return the page at ``/docs``."""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    )
    headers = {**_HEADERS, "content-security-policy": policy}
    text = docs_page(document(model_names))
    return Response(text, media_type="text/html", headers=headers)


def overview(model_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the answer of ``GET /v1``: the operations below it, and where their document is."""
    operations: list[str] = []
    for path, methods in document(model_names)["paths"].items():
        if path.startswith("/v1/"):
            operations += [f"{method.upper()} {path}" for method in methods]
    return {"object": "list", "data": operations, "docs": "/docs", "openapi": "/openapi.json"}


def _object(*further: str, **properties: object) -> dict[str, Any]:
    """Return the schema of an object with these properties, and ``further`` ones of any type.

    All of them are required.
    """
    schemas = {**properties, **{name: {} for name in further}}
    return {"type": "object", "required": list(schemas), "properties": schemas}


def _choices(kind: str, **choice: object) -> dict[str, Any]:
    head = {name: _STRING for name in Head.__struct_fields__}
    head |= {"object": {"const": kind}, "created": _INTEGER}
    item = _object("index", "finish_reason", "logprobs", **choice)
    usage = _object("prompt_tokens", "completion_tokens", "total_tokens")
    return _object(**head, choices={"type": "array", "items": item}, usage=usage)


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_MODEL = _object(id=_STRING, object=_STRING, created=_INTEGER, owned_by=_STRING)
_MODEL_LIST = _object(object=_STRING, data={"type": "array", "items": _MODEL})
_INTEGERS = {"type": "array", "items": _INTEGER}
_NONEMPTY = {"type": "string", "minLength": 1}
_LIST = {"type": "array", "items": {"type": "object"}}
_RESPONSE = _object("usage", id=_STRING, object={"const": "response"}, status=_STRING, output=_LIST)
_ANTHROPIC_MESSAGE = _object(
    "stop_reason", "usage", id=_STRING, type={"const": "message"}, content=_LIST
)
_COMPACTION = _object("usage", object={"const": "response.compaction"}, output=_LIST)
_COUNT_ANSWER = _object(input_tokens=_INTEGER)
_CHAT = _choices("chat.completion", message=_object("role", "content"))
_TOKENIZE_ANSWER = _object("token_strs", "max_model_len", count=_INTEGER, tokens=_INTEGERS)
_EMBEDDINGS = _object("usage", object={"const": "list"}, data=_LIST, model=_STRING)
_RERANKED = _object("usage", id=_STRING, model=_STRING, results=_LIST)
# By path: the request, the schema of the answer, and true where the answer can be streamed.
_POSTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any], bool]] = {
    "/v1/chat/completions": (ChatCompletionRequest, _CHAT, True),
    "/v1/completions": (CompletionRequest, _choices("text_completion", text=_STRING), True),
    "/v1/responses": (ResponsesRequest, _RESPONSE, True),
    "/v1/responses/input_tokens": (ResponsesRequest, _COUNT_ANSWER, False),
    "/v1/responses/compact": (CompactRequest, _COMPACTION, False),
    PATH: (MessagesRequest, _ANTHROPIC_MESSAGE, True),
    f"{PATH}/count_tokens": (CountTokensRequest, _COUNT_ANSWER, False),
    "/v1/embeddings": (EmbeddingsRequest, _EMBEDDINGS, False),
    "/v1/audio/speech": (SpeechRequest, {"type": "string", "format": "binary"}, False),
    "/v1/rerank": (RerankRequest, _RERANKED, False),
    "/tokenize": (TokenizeRequest, _TOKENIZE_ANSWER, False),
    "/detokenize": (DetokenizeRequest, _object(prompt=_STRING), False),
}
_SUMMARIES = {
    "post /v1/chat/completions": 'Answer a conversation, in pieces with "stream": true.',
    "post /v1/completions": "Go on with a text.",
    "post /v1/responses": "Answer in the form of the Responses API, which stores the answer.",
    "post /v1/responses/input_tokens": "Count the tokens of a request.",
    "post /v1/responses/compact": "Sum up a conversation to go on from.",
    "get /v1/responses/{id}": "Read a stored response.",
    "delete /v1/responses/{id}": "Delete a stored response.",
    "get /v1/responses/{id}/input_items": "List what a stored response was made from.",
    "post /v1/responses/{id}/cancel": "Refuse: responses are stored once they have ended.",
    "post /v1/messages": "Answer in the form of Anthropic's Messages API.",
    "post /v1/messages/count_tokens": "Count the tokens of a request for a message.",
    "post /v1/embeddings": "Turn texts into vectors, by a pipeline with embed.",
    "post /v1/audio/speech": "Say a text, by a pipeline with speak; streamed as it is made.",
    "post /v1/rerank": "Order documents by their relevance to a query, by a pipeline with rerank.",
    "post /tokenize": "Return the token ids of a text or a conversation.",
    "post /detokenize": "Return the text of token ids.",
    "get /v1": "List the paths below.",
    "get /v1/models": "List the models, with the length of their context.",
    "get /v1/models/{name}": "Tell of one model.",
    "get /health": "Tell whether requests are answered.",
    "get /health/ready": "The same, as Kubernetes asks.",
    "get /version": "Tell the version of this server.",
    "get /metrics": "Print the metrics for Prometheus.",
    "get /openapi.json": "This document.",
    "get /docs": "This document, to be read in a browser.",
    "get /": "A page to chat with the model.",
}
_DOCUMENT_LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
_EXAMPLE_QUESTION = "How do I count to nine in Hindi?"
_EXAMPLE_TURNS = [{"role": "user", "content": _EXAMPLE_QUESTION}]
# By path: a request that works as it is, once it names a model.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _EXAMPLE_TURNS, "max_tokens": 60},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 10},
    "/v1/responses": {"input": _EXAMPLE_QUESTION, "max_output_tokens": 60},
    "/v1/responses/input_tokens": {"input": _EXAMPLE_QUESTION},
    "/v1/responses/compact": {"input": _EXAMPLE_TURNS},
    PATH: {"messages": _EXAMPLE_TURNS, "max_tokens": 60},
    f"{PATH}/count_tokens": {"messages": _EXAMPLE_TURNS},
    "/tokenize": {"prompt": _EXAMPLE_QUESTION},
    "/detokenize": {"tokens": [10, 11, 12]},
}
# Schemas of fields that a type of Python does not describe.
_PROMPT_FORM = [
    _NONEMPTY,
    {"type": "array", "minItems": 1, "items": _NONEMPTY},
    {**_INTEGERS, "minItems": 1},
    {"type": "array", "items": _INTEGERS},
]
_EMBEDDED_FORM = [
    _NONEMPTY,
    {"type": "array", "minItems": 1, "maxItems": MAX_EMBEDDED_TEXTS, "items": _NONEMPTY},
]
_MESSAGES = {"items": {"$ref": "#/components/schemas/ChatMessage"}}
_ERROR_DESCRIPTIONS = {
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
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING))


@cache
def document(model_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1, of a server of these models."""
    kinds = {kind for kind, _, _ in _POSTS.values()}
    _, schemas = msgspec.json.schema_components(
        (*kinds, ChatMessage, Error), ref_template="#/components/schemas/{name}"
    )
    for kind in kinds:
        schemas[kind.__name__]["properties"]["model"] = {"enum": list(model_names)}
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": _PROMPT_FORM}
    schemas["EmbeddingsRequest"]["properties"]["input"] = {"anyOf": _EMBEDDED_FORM}
    schemas["ChatCompletionRequest"]["properties"]["messages"] |= _MESSAGES
    for title, schema in schemas.items():
        for field, field_schema in schema.get("properties", {}).items():
            field_schema["description"] = sentence_of(title, field)
    name = {"name": "name", "in": "path", "required": True, "schema": _STRING}
    response_id = {"name": "id", "in": "path", "required": True, "schema": _STRING}
    model = {"responses": _responses(_MODEL, 401, 404), "parameters": [name]}
    metrics = {"description": "For Prometheus", "content": {"text/plain": {"schema": _STRING}}}
    html = {"description": "A page", "content": {"text/html": {"schema": _STRING}}}
    deleted = _object(id=_STRING, object={"const": "response"}, deleted={"const": True})
    items = _object("first_id", "last_id", "has_more", object=_STRING, data=_LIST)
    stored: dict[str, Any] = {
        "get": {"responses": _responses(_RESPONSE, 400, 401, 404), "parameters": [response_id]},
        "delete": {"responses": _responses(deleted, 400, 401, 404), "parameters": [response_id]},
    }
    input_items = {"responses": _responses(items, 400, 401, 404), "parameters": [response_id]}
    cancel = {"responses": _responses(_RESPONSE, 400, 401, 404), "parameters": [response_id]}
    paths: dict[str, Any] = {
        "/": {"get": {"responses": {"200": html}}},
        "/docs": {"get": {"responses": {"200": html}}},
        "/openapi.json": {"get": {"responses": _responses({"type": "object"})}},
        "/v1": {"get": {"responses": _responses({"type": "object"}, 401)}},
        "/v1/models": {"get": {"responses": _responses(_MODEL_LIST, 401)}},
        "/v1/models/{name}": {"get": model},
        "/v1/responses/{id}": stored,
        "/v1/responses/{id}/input_items": {"get": input_items},
        "/v1/responses/{id}/cancel": {"post": cancel},
        "/health": {"get": {"responses": _responses({"type": "object"}, 503)}},
        "/health/ready": {"get": {"responses": _responses({"type": "object"}, 503)}},
        "/version": {"get": {"responses": _responses(_object(version=_STRING))}},
        "/metrics": {"get": {"responses": {"200": metrics}}},
    }
    for path, (kind, answer, streams) in _POSTS.items():
        statuses = [400, 401, 404, 405, 413, 415, 500]
        if path.startswith(PATH):
            responses = _responses(answer, *statuses, 529, error=_ANTHROPIC_ERROR)
        else:
            responses = _responses(answer, *statuses, 429, 503)
        if kind is SpeechRequest:
            responses["200"]["content"] = {"audio/*": {"schema": answer}}
        if streams:
            responses["200"]["content"]["text/event-stream"] = {"schema": {}}
        body = _json({"$ref": f"#/components/schemas/{kind.__name__}"})
        if path in EXAMPLES:
            example = {"model": model_names[0], **EXAMPLES[path]}
            body["content"]["application/json"]["example"] = example
        paths[path] = {"post": {"responses": responses, "requestBody": {"required": True, **body}}}
    for operation, summary in _SUMMARIES.items():
        method, _, path = operation.partition(" ")
        paths[path][method]["summary"] = summary
        words = re.findall(r"\w+", path)
        paths[path][method]["operationId"] = "_".join([method, *words])
    bearer = {"type": "http", "scheme": "bearer"}
    api_key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trtllm-bls", "version": __version__, "license": _DOCUMENT_LICENSE},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": bearer, "api_key": api_key},
        },
        "security": [{}, {"bearer": []}, {"api_key": []}],
    }


def _responses(
    answer: dict[str, Any], *statuses: int, error: dict[str, Any] = _ERROR
) -> dict[str, Any]:
    responses = {"200": {"description": "The answer", **_json(answer)}}
    for status in statuses:
        description = _ERROR_DESCRIPTIONS[status]
        responses[str(status)] = {"description": description, **_json(error)}
    return responses


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
