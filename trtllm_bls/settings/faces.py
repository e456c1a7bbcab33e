"""The faces of a pipeline: the methods that stand behind endpoints of OpenAI's API.

A method of a face is called over tensors of its own, which ``trtllm-bls new`` writes into
``config.pbtxt``. So the inputs of a model tell which faces it has.
"""

from __future__ import annotations

from dataclasses import dataclass

# The last response of each face has it: the usage of language models, as JSON. An answer without
# it has not ended in order.
FACE_END = "face_end"


@dataclass(frozen=True)
class Face:
    """One face.

    ``capability``: its name in ``/v1/models``. ``method``: the method of the user's model.
    ``arguments``: the number of arguments that it takes. ``path``: the endpoint. ``request``: the
    STRING input that holds a request, as JSON. ``outputs``: name, type and dims of each output.
    """

    capability: str
    method: str
    arguments: int
    path: str
    request: str
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]


CHAT = Face(
    "chat",
    "chat",
    1,
    "/v1/chat/completions",
    "chat_request",
    (("chat_events", "STRING", (1,)),),
)
_END_OUTPUT = (FACE_END, "STRING", (1,))
EMBED_VECTORS = "embed_vectors"
EMBED = Face(
    "embeddings",
    "embed",
    1,
    "/v1/embeddings",
    "embed_request",
    ((EMBED_VECTORS, "FP32", (-1, -1)), _END_OUTPUT),
)
SPEECH_AUDIO = "speech_audio"
SPEECH_TYPE = "speech_type"
SPEAK = Face(
    "speech",
    "speak",
    2,
    "/v1/audio/speech",
    "speech_request",
    ((SPEECH_AUDIO, "UINT8", (-1,)), (SPEECH_TYPE, "STRING", (1,)), _END_OUTPUT),
)
RERANK_SCORES = "rerank_scores"
RERANK = Face(
    "rerank",
    "rerank",
    2,
    "/v1/rerank",
    "rerank_request",
    ((RERANK_SCORES, "FP32", (-1,)), _END_OUTPUT),
)
# The inputs that hold the bytes of content parts, by the kinds that a pipeline may accept.
PART_INPUTS = {"image": "chat_image", "audio": "chat_audio", "file": "chat_file"}
FACES = (CHAT, EMBED, SPEAK, RERANK)


@dataclass(frozen=True)
class ServedPipeline:
    """A model of a repository with faces.

    ``capabilities``: the names of its faces. ``accepts``: the kinds of content parts that its
    conversations may have beside text.
    """

    name: str
    capabilities: frozenset[str]
    accepts: frozenset[str] = frozenset()
