"""The faces of a pipeline in its own process: ``embed``, ``speak`` and ``rerank``.

A face is a method of the user's that answers an endpoint of OpenAI's API. A request is one JSON
text, which any client of Triton may send. The method's result is checked here, so that a mistake
in it becomes one line that names the method.
"""

from __future__ import annotations

import inspect
import json
import struct
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from trtllm_bls.errors import InvalidRequest, SettingsError, TrtllmBlsError, Unsupported
from trtllm_bls.pipeline.batching import BatchedMethod, BatchedStage, BatchLimits
from trtllm_bls.pipeline.content_parts import part_tensors
from trtllm_bls.settings.faces import (
    CHAT,
    EMBED,
    EMBED_VECTORS,
    FACE_END,
    FACES,
    RERANK,
    RERANK_SCORES,
    SPEAK,
    SPEECH_AUDIO,
    SPEECH_TYPE,
    Face,
)
from trtllm_bls.text.json_values import json_value
from trtllm_bls.types import Array
from trtllm_bls.wire.contract import Tensor

# The batches of an ``embed`` that has no ``@batched`` itself.
_EMBED_LIMITS = BatchLimits(max_size=64, max_wait_ms=2)
_MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}
_SAMPLE_BYTES = 2
_UNKNOWN_SIZE = 0xFFFFFFFF  # in the header of a WAV whose length is not known yet

Send: TypeAlias = Callable[[Mapping[str, Any]], Any]


def face_tensors(model: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the inputs and outputs of the faces that a user's model has."""
    inputs: list[Tensor] = []
    outputs: dict[str, Tensor] = {}
    for face in FACES:
        if _has_face(model, face):
            inputs.append(Tensor(face.request, "STRING"))
            for name, dtype, dims in face.outputs:
                outputs[name] = Tensor(name, dtype, dims)
    part_inputs = list(part_tensors(model.accepts))
    if part_inputs and getattr(model, CHAT.method, None) is None:
        raise SettingsError("accepts: is of conversations; write a method chat")
    inputs += part_inputs
    return tuple(inputs), tuple(outputs.values())


def _has_face(model: Any, face: Face) -> bool:
    """Return True if a user's model, or its class, has the method of a face.

    Models that are older than the faces may have methods of the same names with other arguments.
    The number of arguments tells them apart.
    """
    method = getattr(model, face.method, None)
    if isinstance(method, BatchedMethod):
        method = method.method
    if method is None or face is CHAT:
        return method is not None
    arguments = [name for name in inspect.signature(method).parameters if name != "self"]
    return len(arguments) == face.arguments


def requested_face(inputs: Collection[str]) -> Face | None:
    """Return the face that a request with these inputs is for, or None (also for ``chat``)."""
    for face in (EMBED, SPEAK, RERANK):
        if face.request in inputs:
            return face
    return None


@dataclass(frozen=True)
class Speech:
    """The sound that ``speak`` makes.

    ``voices``: the names that a caller may choose; if it is empty, any name. ``rate``: samples a
    second. ``format``: ``pcm`` (16-bit samples of one channel), which callers get as ``pcm`` or
    ``wav``, or the only format that ``speak`` writes: ``mp3``, ``opus``, ``aac`` or ``flac``.
    """

    voices: tuple[str, ...] = ()
    rate: int = 24_000
    format: str = "pcm"

    def __post_init__(self) -> None:
        if self.format not in ("pcm", *_MEDIA_TYPES):
            formats = ", ".join(("pcm", *_MEDIA_TYPES))
            raise SettingsError(f"Speech: format: {self.format!r} is none of {formats}")
        if type(self.rate) is not int or not 0 < self.rate < 2**31:
            raise SettingsError(f"Speech: rate: {self.rate!r} is no number of samples a second")
        if isinstance(self.voices, str):
            raise SettingsError(f"Speech: voices: {self.voices!r} is one text; write a tuple")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that callers may choose, the default first."""
        return ("wav", "pcm") if self.format == "pcm" else (self.format,)


class FaceFields:
    """The fields of a face's request. Reading one raises ``InvalidRequest`` for a wrong type."""

    def __init__(self, face: Face, text: str) -> None:
        fields = json_value(text)
        if not isinstance(fields, dict):
            raise InvalidRequest(face.request, "must be a JSON object")
        self._fields = fields

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise InvalidRequest(name, "must be a text")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text, or None if the request has none."""
        return None if self._fields.get(name) is None else self.text(name)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, at least one."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not value:
            raise InvalidRequest(name, "must be a list of texts, at least one")
        if not all(isinstance(item, str) for item in value):
            raise InvalidRequest(name, "must be a list of texts")
        return value

    def optional_number(self, name: str) -> int | None:
        """Return a whole number above 0, or None if the request has none."""
        value = self._fields.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest(name, "must be a whole number above 0")
        return value


class Faces:
    """The faces of one loaded model. Raises ``SettingsError`` if ``speech`` is no ``Speech``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._embedder = _embedder(model)
        self._dimensions: tuple[int, ...] = tuple(model.dimensions)
        if not isinstance(model.speech, Speech):
            raise SettingsError("speech: is no Speech; write speech = Speech(voices=(…))")

    async def answer(self, face: Face, fields: FaceFields, send: Send) -> None:
        """Send all responses to one request except the last one, which is ``face_end``."""
        if face is EMBED:
            await self._embed(fields, send)
        elif face is SPEAK:
            await self._speak(fields, send)
        else:
            await self._rerank(fields, send)

    async def _embed(self, fields: FaceFields, send: Send) -> None:
        texts = fields.texts("input")
        dimensions = fields.optional_number("dimensions")
        vectors = await self._embedder.many(texts)
        lengths = sorted({len(vector) for vector in vectors})
        if len(lengths) > 1:
            raise TrtllmBlsError(f"embed gave vectors of {lengths[0]} and {lengths[-1]} numbers")
        matrix = np.stack(vectors)
        if dimensions is not None:
            matrix = self._truncated(matrix, dimensions)
        await send({EMBED_VECTORS: matrix})

    def _truncated(self, vectors: Array, dimensions: int) -> Array:
        """Return vectors of fewer dimensions, normalised again. Raises ``Unsupported``."""
        full = vectors.shape[1]
        if dimensions == full:
            return vectors
        if dimensions not in self._dimensions or dimensions > full:
            choices = " or ".join([str(size) for size in (*self._dimensions, full)])
            raise Unsupported("dimensions", f"{dimensions} is not supported; send {choices}")
        short = vectors[:, :dimensions]
        norms = np.linalg.norm(short, axis=1, keepdims=True)
        normalised: Array = np.divide(short, norms, out=np.zeros_like(short), where=norms > 0)
        return normalised

    async def _speak(self, fields: FaceFields, send: Send) -> None:
        speech: Speech = self._model.speech
        format = _audio_format(speech, fields)
        voice = _voice(speech, fields)
        media_type = _MEDIA_TYPES.get(format, f"audio/{format}")
        if format == "pcm":
            media_type += f";rate={speech.rate}"
        header = b""
        if format == "wav":
            header = wav_header(speech.rate)
        outputs: dict[str, Any] = {SPEECH_TYPE: media_type}
        generator = self._model.speak(fields.text("input"), voice)
        if not hasattr(generator, "__aiter__"):
            _close_unread(generator)
            raise TrtllmBlsError("speak is no async generator; write yield for each piece of sound")
        # The first response has the media type and the header; both are sent once.
        async with aclosing(_iterator(generator)) as pieces:
            async for piece in pieces:
                sound = header + _sound(piece, speech.format)
                header = b""
                if sound:
                    await send({**outputs, SPEECH_AUDIO: np.frombuffer(sound, np.uint8)})
                    outputs = {}
        if outputs:  # no piece had a sound
            await send({**outputs, SPEECH_AUDIO: np.frombuffer(header, np.uint8)})

    async def _rerank(self, fields: FaceFields, send: Send) -> None:
        documents = fields.texts("documents")
        scores = _numbers("rerank", await self._model.rerank(fields.text("query"), documents))
        if scores.shape != (len(documents),):
            problem = f"gave an array of shape {list(scores.shape)} for {len(documents)} documents"
            raise TrtllmBlsError(f"rerank {problem}; give one number for each")
        if not np.isfinite(scores).all():
            index = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise TrtllmBlsError(f"rerank gave no finite number for document {index}")
        await send({RERANK_SCORES: scores})


def _audio_format(speech: Speech, fields: FaceFields) -> str:
    """Return the format that a request asks for. Raises ``Unsupported``."""
    format = fields.optional_text("response_format") or speech.formats[0]
    if format not in speech.formats:
        choices = " or ".join(speech.formats)
        raise Unsupported("response_format", f"{format!r:.40} is not supported; send {choices}")
    return format


def _voice(speech: Speech, fields: FaceFields) -> str:
    """Return a request's voice, or the first one if it names none. Raises ``InvalidRequest``."""
    voice = fields.optional_text("voice")
    if voice is None:
        return speech.voices[0] if speech.voices else ""
    if speech.voices and voice not in speech.voices:
        choices = " or ".join(speech.voices)
        raise InvalidRequest("voice", f"there is no voice {voice!r:.80}; send {choices}")
    return voice


def face_end(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the outputs of a face's last response."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {FACE_END: json.dumps(usage)}


def wav_header(rate: int) -> bytes:
    """Return the header of a WAV of 16-bit samples of one channel, whose length is not known."""
    format = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 16)
    size = struct.pack("<I", _UNKNOWN_SIZE)
    return b"RIFF" + size + b"WAVEfmt " + format + b"data" + size


def _sound(piece: Any, format: str) -> bytes:
    """Return the bytes of one piece of sound. Raises ``TrtllmBlsError``."""
    if isinstance(piece, (bytes, bytearray, memoryview)):
        sound = bytes(piece)
        if format == "pcm" and len(sound) % _SAMPLE_BYTES:
            raise TrtllmBlsError(f"speak gave {len(sound)} bytes; a sample has {_SAMPLE_BYTES}")
        return sound
    if format != "pcm":
        raise TrtllmBlsError(f"speak gave a {type(piece).__name__}; give bytes")
    if not isinstance(piece, np.ndarray):
        types = "bytes, or an array of samples"
        raise TrtllmBlsError(f"speak gave a {type(piece).__name__}; give {types}")
    if piece.ndim != 1:
        problem = f"gave an array of shape {list(piece.shape)}"
        raise TrtllmBlsError(f"speak {problem}; give samples of one channel")
    if piece.dtype == np.int16:
        return bytes(piece.astype("<i2").tobytes())
    if piece.dtype.kind != "f":
        raise TrtllmBlsError(f"speak gave samples of type {piece.dtype}; give float32 or int16")
    if not np.isfinite(piece).all():
        raise TrtllmBlsError("speak gave a sample that is no finite number")
    return bytes(np.round(np.clip(piece, -1, 1) * 32767).astype("<i2").tobytes())


async def _iterator(iterable: Any) -> AsyncGenerator[Any, None]:
    """Iterate over a user's async iterable, and close it when this generator is closed."""
    try:
        async for item in iterable:
            yield item
    finally:
        close = getattr(iterable, "aclose", None)
        if close is not None:
            await close()


def _close_unread(value: Any) -> None:
    """Close a coroutine that nobody will await."""
    close = getattr(value, "close", None)
    if close is not None:
        close()


def _embedder(model: Any) -> BatchedStage[str, Array]:
    """Return the batched stage that calls ``embed``; each of its results is a vector.

    A model without ``embed`` has no input for such requests, so the stage never runs.
    """
    method: Any = getattr(type(model), EMBED.method, None)
    limits = _EMBED_LIMITS
    if isinstance(method, BatchedMethod):
        limits = method.limits
        method = method.method

    async def vectors(texts: list[str]) -> list[Any]:
        return _vectors(await method(model, texts), len(texts))

    return BatchedStage(vectors, limits, EMBED.method)


def _vectors(result: Any, count: int) -> list[Any]:
    """Return a vector for each text, or an exception in its place. Raises ``TrtllmBlsError``."""
    if isinstance(result, (list, tuple)) and any(isinstance(row, Exception) for row in result):
        rows: list[Any] = []
        for row in result:
            if not isinstance(row, Exception):
                (row,) = _vectors([row], 1)
            rows.append(row)
        return rows
    array = _numbers("embed", result)
    if array.ndim != 2 or not array.shape[1]:
        problem = f"gave an array of shape {list(array.shape)} for {count} texts"
        raise TrtllmBlsError(f"embed {problem}; give one vector for each")
    if len(array) != count:
        raise TrtllmBlsError(
            f"embed gave {len(array)} vectors for {count} texts; give one for each"
        )
    vectors: list[Any] = list(array)
    for index in np.flatnonzero(~np.isfinite(array).all(axis=1)).tolist():
        vectors[index] = TrtllmBlsError("embed gave a vector with a number that is not finite")
    return vectors


def _numbers(method: str, result: Any) -> Array:
    """Return a method's result as float32. Raises ``TrtllmBlsError``."""
    try:
        array = np.asarray(result)
    except (TypeError, ValueError) as error:
        raise TrtllmBlsError(f"{method} gave no array of numbers: {error}") from None
    if array.dtype.kind not in "fiu":
        raise TrtllmBlsError(f"{method} gave a {type(result).__name__} that is no array of numbers")
    with np.errstate(over="ignore"):
        numbers: Array = array.astype(np.float32)
    return numbers
