"""The fields of ``/v1/embeddings``, ``/v1/audio/speech`` and ``/v1/rerank``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from trtllm_bls.http.budgets import (
    MAX_DOCUMENTS,
    MAX_EMBEDDED_TEXTS,
    MAX_NAME,
    MAX_SPEECH_CHARACTERS,
)
from trtllm_bls.openai.schema import Count, UnsupportedFields

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``."""

    no_effect = ("user", "metadata", "add_special_tokens")
    unsupported: ClassVar[UnsupportedFields] = {
        "truncate_prompt_tokens": (),
        "embed_dtype": ("float32",),
        "messages": ([],),
    }

    model: str = ""
    input: str | Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MAX_EMBEDDED_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


class Voice(msgspec.Struct, kw_only=True):
    """A voice by its id."""

    id: _Name


class SpeechRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/audio/speech``."""

    no_effect = ("user", "metadata")
    unsupported: ClassVar[UnsupportedFields] = {
        "speed": (1,),
        "instructions": ("",),
        "stream_format": ("audio",),
    }

    model: str = ""
    input: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SPEECH_CHARACTERS)]
    voice: _Name | Voice | None = None
    response_format: _Name | None = None


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document of one text."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/rerank``, as Cohere and vLLM have it."""

    no_effect = ("user", "metadata", "priority")
    unsupported: ClassVar[UnsupportedFields] = {
        "truncate_prompt_tokens": (),
        "max_tokens_per_doc": (),
        "rank_fields": ([], ["text"]),
        "max_chunks_per_doc": (),
    }

    model: str = ""
    query: str
    documents: Annotated[
        list[str | RerankDocument], msgspec.Meta(min_length=1, max_length=MAX_DOCUMENTS)
    ]
    top_n: Count | None = None
    return_documents: bool | None = None
