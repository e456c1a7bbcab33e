"""``/v1/embeddings``, ``/v1/audio/speech`` and ``/v1/rerank`` over pipelines in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.helpers.loaded_faces import FacesBackend
from tests.helpers.openai_server import RunningApi, serving
from trtllm_bls.http.budgets import MAX_DOCUMENTS, MAX_EMBEDDED_TEXTS, MAX_SPEECH_CHARACTERS
from trtllm_bls.pipeline import EngineError, Speech, StreamingModel
from trtllm_bls.pipeline import testing as pipeline_testing


class Everything(StreamingModel):
    """Has all three faces; a text that is a word of ``WRONG`` makes them fail in its way."""

    speech = Speech(voices=("anna",), rate=8_000)

    async def embed(self, texts: list[str]) -> Any:
        for text in texts:
            if text == "raises":
                raise ValueError("a secret path")
            if text == "down":
                raise EngineError("encoder: it is down")
        rows = [[len(text), 1] for text in texts if text != "fewer"]
        array = np.array(rows, np.float64).reshape(-1, 2)
        array[[text == "nan" for text in texts if text != "fewer"]] = np.nan
        return array

    async def speak(self, text: str, voice: str) -> AsyncIterator[Any]:
        for piece in text.split():
            if piece == "raises":
                raise ValueError("a secret path")
            if piece == "nan":
                yield np.array([np.nan])
            if piece == "waits":
                await asyncio.Event().wait()
            yield np.zeros(len(piece), np.int16)

    async def rerank(self, query: str, documents: list[str]) -> Any:
        return [len(document) for document in documents if document != "fewer"]


@pytest.fixture(scope="module")
def api() -> Iterator[RunningApi]:
    with pipeline_testing.serving(Everything) as model:
        backend = FacesBackend({"all": model})
        with serving(backend.engine, backend, pipelines=backend.served) as running:
            yield running


@pytest.fixture
def client(api: RunningApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def test_the_only_pipeline_with_a_face_is_the_default(api: RunningApi) -> None:
    """As the language model is for chats."""
    answer = httpx.post(f"{api.url}/v1/embeddings", json={"input": "abc"}, timeout=60).json()
    assert answer["model"] == "all" and answer["data"][0]["embedding"] == [3.0, 1.0]
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raises", "unexpected ValueError; the server's log tells more"),
        ("nan", "embed gave a vector with a number that is not finite"),
        ("fewer", "embed gave an array of shape [0, 2] for 1 texts"),
        ("down", "encoder: it is down"),
    ],
)
def test_a_failure_of_embed_is_one_line(client: openai.OpenAI, text: str, problem: str) -> None:
    """Without what the exception said, since that is for the log."""
    if text == "fewer":
        problem = "embed gave 0 vectors for 1 texts; give one for each"
    with pytest.raises(openai.APIStatusError) as failed:
        client.embeddings.create(model="all", input=[text])
    assert failed.value.status_code in (500, 502)
    assert problem in failed.value.message and "secret" not in failed.value.message


def test_a_sound_that_breaks_off_is_no_success(client: openai.OpenAI, api: RunningApi) -> None:
    """Before the first piece it is a status, later the connection ends without the last chunk."""
    with pytest.raises(openai.APIStatusError, match="ValueError"):
        client.audio.speech.create(model="all", input="raises", voice="anna")
    for text in ("hello raises", "hello nan"):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{api.url}/v1/audio/speech", json={"input": text}, timeout=60)


def test_a_caller_who_leaves_ends_the_sound(api: RunningApi) -> None:
    """The pipeline's ``testing`` fails at the end of the module if it still runs."""
    asked = {"input": "hello waits"}
    with httpx.stream("POST", f"{api.url}/v1/audio/speech", json=asked, timeout=60) as response:
        next(response.iter_bytes())


def test_a_voice_may_be_an_object(client: openai.OpenAI) -> None:
    """OpenAI's newer form; another voice is refused in either."""
    voice: Any = {"id": "anna"}
    sound = client.audio.speech.create(model="all", input="abc", voice=voice).content
    assert sound[:4] == b"RIFF" and len(sound) == 44 + 6
    for wrong in ("eve", {"id": "eve"}):
        with pytest.raises(openai.BadRequestError, match="there is no voice 'eve'; send anna"):
            client.audio.speech.create(model="all", input="abc", voice=wrong)


def test_documents_have_a_score_each(api: RunningApi) -> None:
    asked: dict[str, Any] = {"query": "q", "documents": ["a", "ccc", "bb"]}
    answer = httpx.post(f"{api.url}/v1/rerank", json=asked, timeout=60).json()
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    wrong = httpx.post(
        f"{api.url}/v1/rerank", json={**asked, "documents": ["a", "fewer"]}, timeout=60
    )
    assert wrong.status_code in (500, 502)
    assert "rerank gave an array of shape [1] for 2 documents" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("embeddings", {"input": ["a"] * (MAX_EMBEDDED_TEXTS + 1)}, "input"),
        ("rerank", {"query": "q", "documents": ["a"] * (MAX_DOCUMENTS + 1)}, "documents"),
        ("audio/speech", {"input": "a" * (MAX_SPEECH_CHARACTERS + 1)}, "input"),
        ("audio/speech", {"input": "a", "voice": "v" * 257}, "voice"),
        ("embeddings", {"input": {"a": 1}}, "input"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("rerank", {"query": "q", "documents": "a"}, "documents"),
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("audio/speech", {"input": "a", "instructions": "sing"}, "instructions"),
    ],
)
def test_counts_of_faces_are_checked_before_work(
    api: RunningApi, path: str, body: dict[str, Any], param: str
) -> None:
    """And other wrong values, each by the caller's name."""
    answer = httpx.post(f"{api.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_the_faces_are_in_the_document(api: RunningApi) -> None:
    paths = httpx.get(f"{api.url}/openapi.json", timeout=60).json()["paths"]
    assert {"/v1/embeddings", "/v1/audio/speech", "/v1/rerank"} <= paths.keys()
