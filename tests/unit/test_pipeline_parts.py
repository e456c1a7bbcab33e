"""Images, sounds and files in a conversation with a pipeline."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.tool_tokenizer import tool_tokenizer
from trtllm_bls.engines.content_parts import split_parts
from trtllm_bls.errors import SettingsError
from trtllm_bls.pipeline import ChatRequest, ContentPart, StreamingModel
from trtllm_bls.pipeline.testing import serving

PICTURE = ContentPart("image", data=b"\x89PNG\0", media_type="image/png")
LINKED = ContentPart("image", url="https://example.com/a.png")
SOUND = ContentPart("audio", data=b"RIFF\0\0", media_type="audio/wav")


class Sees(StreamingModel):
    """Tells what it was given, and passes the text on."""

    accepts = frozenset({"image", "audio"})

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()
        self.seen: list[ContentPart] = []

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        self.seen = request.parts
        messages = request.texts(lambda part: f"<{part.kind}>")
        async for step in self.llm.chat(messages):
            yield step


def test_parts_reach_a_pipeline_between_their_texts() -> None:
    """Their bytes are the same, NULs included; a URL stays a URL."""
    content = ["Look:", PICTURE, LINKED, "and", SOUND]
    with serving(Sees, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        model.chat([{"role": "user", "content": content}, {"role": "user", "content": "plain"}])
        (inner,) = model.llm.requests
        assert model.model.seen == [PICTURE, LINKED, SOUND]
    assert inner.messages is not None
    assert inner.messages[0]["content"] == "Look:\n<image>\n<image>\nand\n<audio>"
    assert inner.messages[1]["content"] == "plain"


def test_a_language_model_is_given_no_part() -> None:
    """It would answer as if the part were not there."""

    class Blind(Sees):
        async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
            async for step in self.llm.chat(request.messages):
                yield step

    with (
        serving(Blind, llm=["a"], tokenizer_dir=tool_tokenizer()) as model,
        pytest.raises(AssertionError, match="reads text only, and no image; put text in its place"),
    ):
        model.chat([{"role": "user", "content": ["Look", PICTURE]}])


def test_the_inputs_of_a_model_tell_what_it_accepts() -> None:
    inputs, _ = Sees.tensors()
    assert [tensor.name for tensor in inputs] == ["chat_request", "chat_image", "chat_audio"]


@pytest.mark.parametrize("accepts", [{"video"}, "image", ["image", "text"]])
def test_another_kind_cannot_be_accepted(accepts: Any) -> None:
    wrong = type("Wrong", (Sees,), {"accepts": accepts})
    with pytest.raises(SettingsError, match=r"accepts: .* is no set of image, audio, file"):
        wrong.tensors()


def test_only_conversations_have_parts() -> None:
    class Wrong(StreamingModel):
        accepts = frozenset({"image"})

    with pytest.raises(SettingsError, match="accepts: is of conversations; write a method chat"):
        Wrong.tensors()


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "video"}, "chat_request: a part of content is none of image, audio, file"),
        (7, "chat_request: a part of content is none of image, audio, file"),
        ({"type": "text", "text": 7}, "chat_request: a part of content is none of image"),
        ({"type": "image", "data": 1}, "chat_image: has no bytes with the number 1"),
        ({"type": "image", "data": True}, "chat_image: has no bytes with the number True"),
        ({"type": "image", "data": -1}, "chat_image: has no bytes with the number -1"),
        ({"type": "audio", "data": 0}, "chat_audio: has no bytes with the number 0"),
        ({"type": "image", "data": 0, "name": 7}, "chat_request: name of a part must be a text"),
    ],
)
def test_a_part_that_no_api_of_ours_sends_is_its_senders_mistake(part: Any, problem: str) -> None:
    """Any client of Triton may send the tensors."""
    request = json.dumps({"messages": [{"role": "user", "content": ["a", part][1:]}]})
    with serving(Sees, llm=["a"], tokenizer_dir=tool_tokenizer()) as model:
        picture = np.array([b"\x89PNG", None], np.object_)[:1]
        ask = model.ask(chat_request=request, chat_image=picture, outputs=["chat_events"]).wait()
    assert ask.error is not None and ask.error.message().startswith(f"INVALID_ARG: {problem}")


def test_bytes_travel_beside_the_json() -> None:
    """Each in the tensor of its kind, in order; texts and messages without parts are as before."""
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [PICTURE.fields, SOUND.fields, PICTURE.fields, LINKED.fields]},
    ]
    split, data = split_parts(messages)
    assert json.loads(json.dumps(split)) == split and split[0] == messages[0]
    assert [part.get("data") for part in split[1]["content"]] == [0, 0, 1, None]
    assert data == {"chat_image": [PICTURE.data, PICTURE.data], "chat_audio": [SOUND.data]}
