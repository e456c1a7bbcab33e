"""A pipeline's ``embed``, ``speak`` and ``rerank``: what they are given, and what they may give."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from trtllm_bls.errors import SettingsError
from trtllm_bls.pipeline import Speech, StreamingModel, batched
from trtllm_bls.pipeline.faces import face_tensors
from trtllm_bls.pipeline.testing import LoadedModel, serving


def embed_answer(model: LoadedModel, *texts: str, **more: Any) -> Any:
    """Ask for vectors, and do not wait."""
    request = json.dumps({"input": texts, **more})
    return model.ask(embed_request=request, outputs=["embed_vectors", "face_end"])


class Lengths(StreamingModel):
    """Embeds a text as its length and 1."""

    dimensions = (1,)

    async def load(self, deployment: Any) -> None:
        self.batches: list[list[str]] = []

    @batched(max_size=4, max_wait_ms=60_000)
    async def embed(self, texts: list[str]) -> Any:
        self.batches.append(texts)
        for text in texts:
            if text == "bad":
                raise ValueError("a bad text")
        vectors = np.array([[len(text), 1.0] for text in texts])
        vectors[[text == "nan" for text in texts]] = np.nan
        return vectors[: len(texts) - ("lost" in texts)]


class Alone(Lengths):
    """Embeds the texts of a request at once."""

    @batched(max_size=1, max_wait_ms=0)
    async def embed(self, texts: list[str]) -> Any:
        return [[len(text), 1.0] for text in texts]


class OlderNames(StreamingModel):
    """A model from before the faces, whose own methods have names of theirs."""

    async def embed(self, texts: list[str], pooling: str) -> Any:
        return texts, pooling

    async def speak(self, tokens: list[int], offset: int, request: Any) -> None:
        return None


def test_a_method_with_other_arguments_is_the_models_own() -> None:
    assert face_tensors(OlderNames) == ((), ())
    assert [tensor.name for tensor in face_tensors(Lengths)[0]] == ["embed_request"]


def test_texts_of_several_requests_are_one_batch() -> None:
    """Each request gets the vectors of its own texts, in its order."""
    with serving(Lengths) as model:
        first = embed_answer(model, "a", "bb")
        second = embed_answer(model, "ccc", "dddd")
        assert first.wait().said("embed_vectors") == [[[1, 1], [2, 1]]]
        assert second.wait().said("embed_vectors") == [[[3, 1], [4, 1]]]
        assert model.model.batches == [["a", "bb", "ccc", "dddd"]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bad", "unexpected ValueError"),
        ("nan", "embed gave a vector with a number that is not finite"),
        ("lost", "embed gave 0 vectors for 1 texts; give one for each"),
    ],
)
def test_one_bad_text_does_not_spoil_its_batch(text: str, problem: str) -> None:
    with serving(Lengths) as model:
        asks = [embed_answer(model, word) for word in ("a", text, "bb", "ccc")]
        for ask in asks:
            ask.wait()
        assert model.model.batches[0] == ["a", text, "bb", "ccc"]
    assert problem in asks[1].error.message()
    said = [asks[index].said("embed_vectors") for index in (0, 2, 3)]
    assert said == [[[[1, 1]]], [[[2, 1]]], [[[3, 1]]]]


def test_a_vector_is_cut_to_a_declared_length_alone() -> None:
    with serving(Alone) as model:
        cut = embed_answer(model, "abc", dimensions=1).wait()
        whole = embed_answer(model, "abc", dimensions=2).wait()
        refused = embed_answer(model, "abc", dimensions=3).wait()
    assert cut.said("embed_vectors") == [[[1.0]]]
    assert whole.said("embed_vectors") == [[[3.0, 1.0]]]
    message = refused.error.message()
    assert message == "UNSUPPORTED: dimensions: 3 is not supported; send 1 or 2"


class Uneven(Alone):
    """Embeds a text as as many numbers as it has characters."""

    dimensions = (1, 9)

    @batched(max_size=1, max_wait_ms=0)
    async def embed(self, texts: list[str]) -> Any:
        return [[1.0] * len(text) for text in texts]


def test_a_declared_length_above_the_vectors_own_is_refused() -> None:
    """Numbers that are not there cannot be sent."""
    with serving(Uneven) as model:
        error = embed_answer(model, "abc", dimensions=9).wait().error
    assert error is not None
    assert error.message().startswith("UNSUPPORTED: dimensions: 9 is not supported")


def test_vectors_of_one_request_have_one_length() -> None:
    """Also where each text was a batch of its own."""
    with serving(Uneven) as model:
        error = embed_answer(model, "a", "bb").wait().error
    assert error is not None and "embed gave vectors of 1 and 2 numbers" in error.message()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([1.0], "embed gave an array of shape [1] for 1 texts; give one vector for each"),
        (np.zeros((1, 0)), "embed gave an array of shape [1, 0] for 1 texts"),
        ([[1.0], [2.0, 3.0]], "embed gave no array of numbers: "),
        ([["a"]], "embed gave a list that is no array of numbers"),
        (None, "embed gave a NoneType that is no array of numbers"),
        (np.full((1, 1), 1e300), "embed gave a vector with a number that is not finite"),
        (np.ones((2, 1)), "embed gave 2 vectors for 1 texts; give one for each"),
    ],
)
def test_what_is_no_vector_for_each_text_is_told(given: Any, problem: str) -> None:
    class Wrong(StreamingModel):
        async def embed(self, texts: list[str]) -> Any:
            return given

    with serving(Wrong) as model:
        error = embed_answer(model, "a").wait().error
    assert error is not None and problem in error.message()


class Tone(StreamingModel):
    """Says a text as a sample for each character; waits before what follows a comma."""

    speech = Speech(voices=("anna", "ben"), rate=16_000)

    async def speak(self, text: str, voice: str) -> AsyncIterator[Any]:
        for piece in text.split(","):
            if piece == "wait":
                await asyncio.Event().wait()
            if piece == "fail":
                raise RuntimeError
            yield np.full(len(piece), 0.5 if voice == "ben" else 1.0, np.float32)


def speech_answer(model: LoadedModel, text: str, **more: Any) -> Any:
    """Ask for a sound, and do not wait."""
    request = json.dumps({"input": text, **more})
    return model.ask(speech_request=request, outputs=["speech_audio", "speech_type", "face_end"])


def test_a_sound_is_streamed_as_it_is_made() -> None:
    """As a WAV by default, whose header comes with the first samples."""
    with serving(Tone) as model:
        ask = speech_answer(model, "hi,there", voice="ben").wait()
    sounds = [bytes(sound) for sound in ask.said("speech_audio")]
    assert ask.said("speech_type") == [[b"audio/wav"]]
    assert [len(sound) for sound in sounds] == [44 + 4, 10]
    with wave.open(io.BytesIO(b"".join(sounds))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(file.readframes(100), "<i2")
    assert samples.tolist() == [16384] * 7


def test_samples_alone_are_sent_as_pcm() -> None:
    with serving(Tone) as model:
        ask = speech_answer(model, "hi", voice="anna", response_format="pcm").wait()
    assert ask.said("speech_audio") == [[0xFF, 0x7F, 0xFF, 0x7F]]
    assert ask.said("speech_type") == [[b"audio/pcm;rate=16000"]]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"voice": "eve"}, "INVALID_ARG: voice: there is no voice 'eve'; send anna or ben"),
        (
            {"response_format": "mp3"},
            "UNSUPPORTED: response_format: 'mp3' is not supported; send wav or pcm",
        ),
        ({"voice": 5}, "INVALID_ARG: voice: must be a text"),
        ({"input": None}, "INVALID_ARG: input: must be a text"),
    ],
)
def test_another_voice_or_format_is_refused(more: dict[str, Any], problem: str) -> None:
    with serving(Tone) as model:
        error = speech_answer(model, "hi", **more).wait().error
    assert error is not None and error.message() == problem


def test_a_caller_who_leaves_ends_the_sound() -> None:
    with serving(Tone) as model:
        ask = speech_answer(model, "hi,wait").wait(responses=1)
        ask.leave()
        ask.wait()


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        (b"abc", "speak gave 3 bytes; a sample has 2"),
        ("abc", "speak gave a str; give bytes, or an array of samples"),
        (np.zeros((2, 2), np.float32), "speak gave an array of shape [2, 2]"),
        (np.array([0.5, np.nan]), "speak gave a sample that is no finite number"),
        (np.zeros(2, np.int64), "speak gave samples of type int64; give float32 or int16"),
    ],
)
def test_what_is_no_sound_is_told(piece: Any, problem: str) -> None:
    class Wrong(StreamingModel):
        async def speak(self, text: str, voice: str) -> AsyncIterator[Any]:
            yield piece

    with serving(Wrong) as model:
        error = speech_answer(model, "hi").wait().error
    assert error is not None and problem in error.message()


def test_speak_without_yield_is_told() -> None:
    class Wrong(StreamingModel):
        async def speak(self, text: str, voice: str) -> Any:
            return b""

    with serving(Wrong) as model:
        error = speech_answer(model, "hi").wait().error
    assert error is not None and "speak is no async generator; write yield" in error.message()


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ([0.5, 1.0], None),
        ([0.5], "rerank gave an array of shape [1] for 2 documents; give one number for each"),
        ([0.5, float("nan")], "rerank gave no finite number for document 1"),
        ("no", "rerank gave a str that is no array of numbers"),
    ],
)
def test_a_score_for_each_document(scores: Any, problem: str | None) -> None:
    class Reranks(StreamingModel):
        async def rerank(self, query: str, documents: list[str]) -> Any:
            return scores

    request = json.dumps({"query": "q", "documents": ["a", "b"]})
    with serving(Reranks) as model:
        ask = model.ask(rerank_request=request, outputs=["rerank_scores", "face_end"]).wait()
    if problem is None:
        assert ask.said("rerank_scores") == [[0.5, 1.0]]
        assert len(ask.said("face_end")) == 1
    else:
        assert ask.error is not None and problem in ask.error.message()


def test_a_face_has_its_tensors_beside_the_models_own() -> None:
    inputs, outputs = Tone.tensors()
    assert [tensor.name for tensor in inputs] == ["speech_request"]
    assert [tensor.name for tensor in outputs] == ["speech_audio", "speech_type", "face_end"]


@pytest.mark.parametrize(
    "declaration", [{"format": "ogg"}, {"rate": 0}, {"voices": "anna"}, {"rate": 1.5}]
)
def test_a_speech_that_cannot_be_is_refused(declaration: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"Speech: {next(iter(declaration))}: "):
        Speech(**declaration)
