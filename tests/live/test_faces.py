"""Pipelines behind ``/v1/embeddings``, ``/v1/audio/speech`` and ``/v1/rerank``, on a tritonserver.

The engine says its prompt back. The clients are published ones.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from tests.helpers.openai_server import RunningApi, serving
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import until
from tests.helpers.watched import watched
from tests.live.conftest import echo_settings
from tests.live.pipelines import live_requests
from trtllm_bls.openai.openai_command import read_parameters
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.settings.model_config import served_pipelines

pytestmark = pytest.mark.slow

TEXTS = ["the fox runs", "a bicycle has two wheels", "the fox hunts mice"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    settings = echo_settings(tmp_path_factory.mktemp("faces"))
    assert settings.model_repository is not None
    for name in ("search", "embedder", "speech", "vocoder", "vision", "image_encoder"):
        shutil.copytree(ROOT / "examples" / name, settings.model_repository / name)
    with watched(settings, "server") as running:
        yield running


@pytest.fixture(scope="module")
def api(server: TritonServer) -> Iterator[RunningApi]:
    repository = server.settings.model_repository
    assert repository is not None
    given = {"engine_url": server.grpc_url, "tokenizer_dir": str(DEMO / "target")}
    parameters = read_parameters(repository, given)
    digest = hashlib.sha256(b"key").digest()
    backend = Deployment(parameters, model_name="demo")
    names = {"model_names": ("demo",), "pipelines": served_pipelines(repository)}
    with serving(backend.engine, backend, keys=(digest,), **names) as running:
        yield running


@pytest.fixture
def client(api: RunningApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=0) as opened:
        yield opened


def test_the_models_tell_what_they_can_do(client: openai.OpenAI) -> None:
    told = {model.id: model.to_dict()["capabilities"] for model in client.models.list()}
    assert told == {
        "demo": ["chat", "completions"],
        "search": ["embeddings", "rerank"],
        "speech": ["speech"],
        "vision": ["chat"],
    }
    accepted = {model.id: model.to_dict()["accepts"] for model in client.models.list()}
    assert accepted["vision"] == ["text", "image"] and accepted["demo"] == ["text"]


def test_texts_become_vectors(client: openai.OpenAI) -> None:
    """As floats and packed, whole and cut; 16 callers share batches."""
    asked: Any = {"model": "search", "input": TEXTS}
    packed = client.embeddings.create(**asked)  # the package asks for base64
    plain = client.embeddings.create(**asked, encoding_format="float")
    vectors = np.array([item.embedding for item in plain.data])
    assert vectors.shape == (3, 256)
    np.testing.assert_allclose(np.array([item.embedding for item in packed.data]), vectors)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1]
    cut = np.array(
        [item.embedding for item in client.embeddings.create(**asked, dimensions=64).data]
    )
    assert cut.shape == (3, 64)
    short = vectors[:, :64]
    np.testing.assert_allclose(cut * np.linalg.norm(short, axis=1, keepdims=True), short, atol=1e-6)

    def one(index: int) -> list[float]:
        answer = client.embeddings.create(model="search", input=TEXTS[index % 3])
        return answer.data[0].embedding

    with ThreadPoolExecutor(16) as pool:
        for index, vector in enumerate(pool.map(one, range(32))):
            np.testing.assert_allclose(vector, vectors[index % 3])


@pytest.mark.parametrize(
    ("model", "more", "problem"),
    [
        ("search", {"input": [1, 2]}, "input: has token ids; this model takes texts"),
        ("search", {"input": []}, "input: "),
        ("search", {"input": ["a", ""]}, "input: has an empty text"),
        ("search", {"input": "a", "dimensions": 65}, "dimensions: 65 is not supported; send 64 or"),
        ("demo", {"input": "a"}, "model: 'demo' does not answer /v1/embeddings; send search"),
        ("speech", {"input": "a"}, "model: 'speech' does not answer /v1/embeddings; send search"),
    ],
)
def test_an_embedding_that_cannot_be_is_refused(
    client: openai.OpenAI, model: str, more: Any, problem: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        client.embeddings.create(model=model, **more)


def test_a_pipeline_without_chat_says_what_it_answers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="search", messages=[{"role": "user", "content": "a"}])
    assert "'search' answers /v1/embeddings and /v1/rerank alone" in refused.value.message


def test_a_text_is_said_as_it_is_made(client: openai.OpenAI, server: TritonServer) -> None:
    """Streamed and whole, as WAV and PCM; its samples are the vocoder's."""
    asked: Any = {"model": "speech", "input": "the quick brown fox " * 8}
    whole = client.audio.speech.create(**asked, voice="low", response_format="wav").content
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        samples = file.readframes(file.getnframes())
    streaming = client.audio.speech.with_streaming_response
    with streaming.create(**asked, voice="low", response_format="pcm") as response:
        assert response.headers["content-type"] == "audio/pcm;rate=16000"
        pieces = list(response.iter_bytes())
    assert b"".join(pieces) == samples and len(samples) > 640 * 2 * 8
    high = client.audio.speech.create(**asked, voice="high", response_format="pcm").content
    assert len(high) == len(samples) and high != samples
    with streaming.create(**asked, voice="low", response_format="pcm") as response:
        next(response.iter_bytes())
    until(lambda: live_requests(server) == 0)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"voice": "eve"}, "voice: there is no voice 'eve'; send low or high"),
        ({"voice": "low", "response_format": "mp3"}, "response_format: 'mp3' is not supported"),
        ({"voice": "low", "speed": 2}, "speed: is not supported"),
        ({"voice": "low", "input": ""}, "input: "),
    ],
)
def test_a_speech_that_cannot_be_is_refused(client: openai.OpenAI, more: Any, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        client.audio.speech.create(**{"model": "speech", "input": "a", **more})


def test_documents_are_ordered_by_their_relevance(api: RunningApi) -> None:
    """In Cohere's form, as vLLM answers it."""
    asked = {"model": "search", "query": "a fox", "documents": [TEXTS[1], {"text": TEXTS[0]}]}
    headers = {"authorization": "Bearer key"}
    answer = httpx.post(f"{api.url}/v1/rerank", json=asked, headers=headers, timeout=60).json()
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["document"] == {"text": TEXTS[0]}
    assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"]
    assert answer["model"] == "search" and answer["id"].startswith("rerank-")
    short = {**asked, "top_n": 1, "return_documents": False}
    answer = httpx.post(f"{api.url}/v1/rerank", json=short, headers=headers, timeout=60).json()
    (result,) = answer["results"]
    assert result["index"] == 1 and "document" not in result
    refused = httpx.post(
        f"{api.url}/v1/rerank", json={**asked, "documents": []}, headers=headers, timeout=60
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"
    assert httpx.post(f"{api.url}/v1/rerank", json=asked, timeout=60).status_code == 401


def test_an_image_reaches_its_pipeline_over_each_api(
    client: openai.OpenAI, api: RunningApi
) -> None:
    """The engine says back a prompt that has ids of the image between its words."""
    png = base64.b64encode(b"\x89PNG\0" * 40).decode()
    url = f"data:image/png;base64,{png}"
    chat_parts: Any = [
        {"type": "text", "text": "the fox sees"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    turn: Any = [{"role": "user", "content": chat_parts}]
    answer = client.chat.completions.create(model="vision", messages=turn, max_tokens=200)
    said = answer.choices[0].message.content
    assert said and "the fox sees" in said and "left out" not in said
    input_parts: Any = [
        {"type": "input_text", "text": "the fox sees"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    asked: Any = [{"role": "user", "content": input_parts}]
    assert "the fox sees" in client.responses.create(model="vision", input=asked).output_text
    blocks: Any = [
        {"type": "text", "text": "the fox sees"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}},
    ]
    with anthropic.Anthropic(base_url=api.url, api_key="key") as other:
        message = other.messages.create(
            model="vision", max_tokens=200, messages=[{"role": "user", "content": blocks}]
        )
    assert message.content[0].type == "text" and "the fox sees" in message.content[0].text
    with pytest.raises(openai.BadRequestError, match="send images as data: URLs; none is fetched"):
        chat_parts[1] = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
        client.chat.completions.create(model="vision", messages=turn)
    with pytest.raises(openai.BadRequestError, match="its data is not Base64"):
        chat_parts[1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}
        client.chat.completions.create(model="vision", messages=turn)
    chat_parts[1] = {"type": "image_url", "image_url": {"url": url}}
    blind = client.chat.completions.create(model="demo", messages=turn, max_tokens=200)
    assert "image left out" in (blind.choices[0].message.content or "")


def test_packed_vectors_are_little_endian_floats(api: RunningApi) -> None:
    asked = {"model": "search", "input": "fox", "encoding_format": "base64"}
    headers = {"authorization": "Bearer key"}
    answer = httpx.post(f"{api.url}/v1/embeddings", json=asked, headers=headers, timeout=60).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert vector.shape == (256,) and np.isclose(np.linalg.norm(vector), 1)
