"""Routes of the faces of pipelines: embeddings, speech and rerank."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from trtllm_bls.engines.pipeline_faces import FaceCall, FaceUsage
from trtllm_bls.errors import EngineError, InvalidRequest, Overloaded
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import ClientGone, Refused, traceparent
from trtllm_bls.http.shares import NoShare, Share, holder_of
from trtllm_bls.openai.api_errors import ApiError, api_error, invalid
from trtllm_bls.openai.exchange import Reply, run_for_client, tenant_of
from trtllm_bls.openai.face_requests import (
    EmbeddingsRequest,
    RerankRequest,
    SpeechRequest,
    Voice,
)
from trtllm_bls.openai.generating import Services
from trtllm_bls.openai.schema import decode
from trtllm_bls.settings.faces import (
    EMBED,
    EMBED_VECTORS,
    RERANK,
    RERANK_SCORES,
    SPEAK,
    SPEECH_AUDIO,
    SPEECH_TYPE,
    Face,
)
from trtllm_bls.types import Array

log = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", EmbeddingsRequest, SpeechRequest, RerankRequest)


class _FaceRoute(Generic[_Kind]):
    """``POST`` of one face, as an ASGI application."""

    face: ClassVar[Face]
    request_type: type[_Kind]

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        reply = Reply(scope, send)
        request_id = reply.request_id.decode()
        share: Share | None = None
        try:
            try:
                services.places.note(holder_of(scope))
                services.orchestrator.admission.check_room()
                async with services.bodies.read(scope, receive) as body:
                    request = await services.bodies.in_turn(
                        len(body), decode, body, self.request_type
                    )
                model, _ = services.models.pipeline_of(self.face, request.model)
                fields = self._fields(request)
                share = self._place(scope)
            except (InvalidRequest, Overloaded, Refused) as error:
                raise services.refusals.report(reply, error, "input") from None
            cache_salt = None
            owner = tenant_of(scope)
            if owner and not services.share_kv_cache:
                cache_salt = salt_of(owner)
            call = FaceCall(
                model=model,
                face=self.face,
                fields=fields,
                request_id=request_id,
                key=scope.get("tenant"),
                cache_salt=cache_salt,
                traceparent=traceparent(scope).decode() or None,
            )
            with services.running.one(request_id):
                await run_for_client(self._answer(request, call, reply), reply, receive)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            await self._fail(reply, ApiError(503, "the server shuts down", code="shutting_down"))
        except Exception as error:
            await self._fail(reply, api_error(error, "input", None, request_id=request_id))
        finally:
            if share is not None:
                share.release()

    def _place(self, scope: Scope) -> Share:
        """Return the request's share of all places. Raises ``Overloaded``."""
        try:
            return self._services.places.take(holder_of(scope), 1)
        except NoShare:
            raise self._services.orchestrator.admission.crowded() from None

    async def _fail(self, reply: Reply, error: ApiError) -> None:
        """Answer an error. A started stream ends without its last chunk, which its client sees."""
        if reply.is_started:
            log.warning("%s: ends early: %s", reply.request_id.decode(), error.message)
        else:
            await reply.error(error)

    def _fields(self, request: _Kind) -> Mapping[str, Any]:
        """Return the fields for the pipeline. Raises ``ApiError``."""
        raise NotImplementedError

    async def _answer(self, request: _Kind, call: FaceCall, reply: Reply) -> None:
        """Run the request, and write its answer."""
        raise NotImplementedError

    async def _run_whole(self, call: FaceCall, output: str) -> tuple[Array, FaceUsage]:
        """Return one output of an answer in one response, and the usage."""
        _, faces = self._services.models.pipeline_of(self.face, call.model)
        arrays: list[Array] = []

        async def take(outputs: Mapping[str, Array]) -> None:
            self._services.running.responses += 1
            arrays.append(outputs[output])

        usage = await faces.run(call, take)
        if len(arrays) != 1:
            raise EngineError(f"{call.model}: {len(arrays)} responses; there has to be one")
        return arrays[0], usage


class EmbeddingsRoute(_FaceRoute[EmbeddingsRequest]):
    """``POST /v1/embeddings``."""

    face = EMBED
    request_type = EmbeddingsRequest

    def _fields(self, request: EmbeddingsRequest) -> Mapping[str, Any]:
        texts = [request.input] if isinstance(request.input, str) else request.input
        for index, text in enumerate(texts):
            if isinstance(text, (int, list)):
                # LangChain's client sends ids of OpenAI's own tokenizer unless it is told not to.
                remedy = "in LangChain, check_embedding_ctx_length=False"
                raise invalid("input", f"has token ids; this model takes texts: {remedy}")
            if not isinstance(text, str):
                raise invalid(f"input[{index}]", "must be a text")
            if not text:
                raise invalid("input", "has an empty text; leave it out")
        return {"input": texts, "dimensions": request.dimensions}

    async def _answer(self, request: EmbeddingsRequest, call: FaceCall, reply: Reply) -> None:
        vectors, usage = await self._run_whole(call, EMBED_VECTORS)
        if len(vectors) != len(call.fields["input"]):
            raise EngineError(f"{call.model}: {len(vectors)} vectors; not one for each text")
        is_base64 = request.encoding_format == "base64"

        def encoded() -> bytes:
            data = []
            for index, vector in enumerate(vectors):
                embedding: Any = vector.tolist()
                if is_base64:
                    embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
                data.append({"object": "embedding", "index": index, "embedding": embedding})
            return msgspec.json.encode(
                {"object": "list", "data": data, "model": call.model, "usage": _usage(usage)}
            )

        # Millions of numbers would hold up every stream.
        await reply.json(await asyncio.to_thread(encoded))


class SpeechRoute(_FaceRoute[SpeechRequest]):
    """``POST /v1/audio/speech``, sent while it is made."""

    face = SPEAK
    request_type = SpeechRequest

    def _fields(self, request: SpeechRequest) -> Mapping[str, Any]:
        voice = request.voice.id if isinstance(request.voice, Voice) else request.voice
        return {
            "input": request.input,
            "voice": voice,
            "response_format": request.response_format,
        }

    async def _answer(self, request: SpeechRequest, call: FaceCall, reply: Reply) -> None:
        _, faces = self._services.models.pipeline_of(self.face, call.model)

        async def take(outputs: Mapping[str, Array]) -> None:
            self._services.running.responses += 1
            if SPEECH_TYPE in outputs:
                reply.stream_type = bytes(outputs[SPEECH_TYPE][0])
            await reply.events(outputs[SPEECH_AUDIO].tobytes())

        await faces.run(call, take)
        await reply.events(b"", end=True)


class RerankRoute(_FaceRoute[RerankRequest]):
    """``POST /v1/rerank``."""

    face = RERANK
    request_type = RerankRequest

    def _fields(self, request: RerankRequest) -> Mapping[str, Any]:
        return {"query": request.query, "documents": _texts(request)}

    async def _answer(self, request: RerankRequest, call: FaceCall, reply: Reply) -> None:
        scores, usage = await self._run_whole(call, RERANK_SCORES)
        documents: list[str] = call.fields["documents"]
        if len(scores) != len(documents):
            raise EngineError(f"{call.model}: {len(scores)} scores; not one for each document")
        results: list[dict[str, Any]] = []
        for index in np.argsort(-scores, kind="stable")[: request.top_n].tolist():
            result = {"index": index, "relevance_score": float(scores[index])}
            if request.return_documents is not False:
                result["document"] = {"text": documents[index]}
            results.append(result)
        body = {
            "id": f"rerank-{call.request_id}",
            "model": call.model,
            "usage": _usage(usage),
            "results": results,
        }
        await reply.json(body)


def _texts(request: RerankRequest) -> list[str]:
    texts: list[str] = []
    for document in request.documents:
        if isinstance(document, str):
            texts.append(document)
        else:
            texts.append(document.text)
    return texts


def _usage(usage: FaceUsage) -> dict[str, int]:
    total = usage.prompt_tokens + usage.completion_tokens
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": total}
