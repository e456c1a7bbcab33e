"""Images, sounds and files of a request, as a pipeline that accepts them is sent them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tests.helpers.scripted_text import tokenizer
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.http.budgets import MAX_PART_BYTES, MAX_PARTS
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.content import ContentReader
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import ChatCompletionRequest, decode

PNG = b"\x89PNG\r\n\0\xff"
PACKED = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{PACKED}"
LINK = "https://example.com/a.png"
IMAGE = {"type": "image", "media_type": "image/png", "name": "", "data": PNG}
LINKED = {"type": "image", "media_type": "", "name": "", "url": LINK}
APIS: Any = {
    "chat": (ChatCompletionRequest, ChatResponse),
    "responses": (ResponsesRequest, ResponsesResponse),
    "messages": (MessagesRequest, MessagesResponse),
}


def pipeline(*accepts: str) -> ChatModel:
    return ChatModel(tokenizer(), None, "", ContentReader(accepts=frozenset(accepts)))


def turns(api: str, parts: Sequence[Any], model: ChatModel) -> Sequence[Mapping[str, Any]]:
    """The messages that a request with one turn of these parts becomes."""
    kind, builder = APIS[api]
    message = {"role": "user", "content": parts}
    body: dict[str, Any] = {"messages": [message]}
    if api == "responses":
        body = {"input": [{"type": "message", **message}]}
    if api == "messages":
        body["max_tokens"] = 9
    request = decode(msgspec.json.encode(body), kind)
    messages = builder(request, model).requests[0].messages
    assert messages is not None
    return messages


FORMS = {
    "chat": [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": LINK}},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "tell"},
    ],
    "responses": [
        {"type": "input_text", "text": "Look"},
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
        {"type": "input_image", "image_url": LINK},
        {"type": "input_text", "text": "and\ntell"},
    ],
    "messages": [
        {"type": "text", "text": "Look"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": PACKED},
        },
        {"type": "image", "source": {"type": "url", "url": LINK}},
        {"type": "text", "text": "and\ntell"},
    ],
}


@pytest.mark.parametrize("api", APIS)
def test_an_image_has_one_form_whatever_the_api(api: str) -> None:
    """Its bytes where the request has them, else its URL, which is not fetched."""
    (message,) = turns(api, FORMS[api], pipeline("image"))
    texts = [{"type": "text", "text": "Look"}, {"type": "text", "text": "and\ntell"}]
    assert message["content"] == [texts[0], IMAGE, LINKED, texts[1]]


@pytest.mark.parametrize("api", APIS)
def test_a_model_that_does_not_accept_images_reads_a_sentence(api: str) -> None:
    (message,) = turns(api, FORMS[api], pipeline("audio"))
    assert isinstance(message["content"], str)
    assert "[image left out (image/png, 8 bytes)" in message["content"]


@pytest.mark.parametrize(
    ("api", "part", "found"),
    [
        (
            "chat",
            {"type": "input_audio", "input_audio": {"data": PACKED, "format": "mp3"}},
            {"type": "audio", "media_type": "audio/mpeg", "name": ""},
        ),
        (
            "chat",
            {"type": "file", "file": {"filename": "a.pdf", "file_data": PACKED}},
            {"type": "file", "media_type": "application/pdf", "name": "a.pdf"},
        ),
        (
            "responses",
            {"type": "input_file", "filename": "a", "file_data": f"data:x/y;base64,{PACKED}"},
            {"type": "file", "media_type": "x/y", "name": "a"},
        ),
        (
            "messages",
            {
                "type": "document",
                "title": "A",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PACKED},
            },
            {"type": "file", "media_type": "application/pdf", "name": "A"},
        ),
        (
            "chat",
            {"type": "image_url", "image_url": {"url": "data:image/svg+xml,%3Csvg/%3E"}},
            {"type": "image", "media_type": "image/svg+xml", "name": "", "data": b"<svg/>"},
        ),
    ],
)
def test_sounds_and_files_are_parts_too(api: str, part: Any, found: dict[str, Any]) -> None:
    (message,) = turns(api, [part], pipeline("image", "audio", "file"))
    assert message["content"] == [{"data": PNG, **found}]


def test_a_file_of_text_stays_text() -> None:
    part = {
        "type": "file",
        "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
    }
    (message,) = turns("chat", [part], pipeline("file"))
    assert message["content"] == "hi"


def test_what_a_tool_returns_may_have_images() -> None:
    """In Messages and in Responses, as agents send screenshots."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": FORMS["messages"][:2]}
    (message,) = turns("messages", [result], pipeline("image"))
    assert message["role"] == "tool" and message["content"][1] == IMAGE
    body = {
        "input": [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": FORMS["responses"][:2]},
        ]
    }
    request = decode(msgspec.json.encode(body), ResponsesRequest)
    messages = ResponsesResponse(request, pipeline("image")).requests[0].messages
    assert messages is not None and messages[-1]["content"][1] == IMAGE


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png;base64,a", "its data is not Base64: "),
        ("data:image/png;base64,ä===", "its data is not Base64: "),
        (
            "data:image/png;base64," + "A" * (MAX_PART_BYTES // 3 * 4 + 8),
            f"at most {MAX_PART_BYTES} are allowed",
        ),
    ],
    ids=["short", "not ASCII", "too large"],
)
def test_a_part_that_cannot_be_is_refused_by_its_place(url: str, problem: str) -> None:
    """Before it is decoded; a number of parts, too."""
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ApiError) as refused:
        turns("chat", [{"type": "text", "text": "a"}, part], pipeline("image"))
    assert refused.value.param == "messages[0].content[1]" and problem in refused.value.message
    many = [{"type": "image_url", "image_url": {"url": "data:,a"}}] * (MAX_PARTS + 1)
    with pytest.raises(InvalidRequest, match=f"messages: {MAX_PARTS + 1} images, sounds and files"):
        turns("chat", many, pipeline("image"))
