"""Conversations with a model of a Triton server that answers them by itself: a pipeline's ``chat``.

A request is one JSON text, and an answer events of JSON, in the tensors that the contract names.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from trtllm_bls.engines.content_parts import split_parts
from trtllm_bls.errors import EngineError, EngineUnavailable, Unsupported, from_wire
from trtllm_bls.settings.model_config import CHAT_EVENTS, CHAT_REQUEST
from trtllm_bls.types import Sampling, TextRequest
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, CallContext, signed_context
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError, ResponseStream, close_or_cancel
from trtllm_bls.wire.kserve import (
    SERVICE,
    is_final,
    output_arrays,
    packed_infer_message,
)

_OPTIONS = (
    "max_tokens",
    "stop_words",
    "stop_token_ids",
    "bad_words",
    "end_id",
    "skip_special_tokens",
    "prediction",
)
_SWITCHES = ("fits_max_tokens", "include_stop")  # sent only if they are on
_GUIDE_NAMES = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}


def chat_request(request: TextRequest) -> bytes:
    """Return a conversation's request as JSON.

    Raises ``Unsupported`` for a field that no pipeline can honour.
    """
    if request.messages is None:
        raise Unsupported("model", "is a pipeline, which answers conversations alone")
    if request.num_return_sequences > 1:
        raise Unsupported("n", "above 1: a pipeline gives one answer; send several requests")
    if request.wants.log_probs:
        raise Unsupported("logprobs", "a pipeline tells none")
    chat = request.chat
    options: dict[str, Any] = {}
    for field in fields(Sampling):
        options[field.name] = getattr(request.sampling, field.name)
    for name in _OPTIONS:
        options[name] = getattr(request, name)
    for name in _SWITCHES:
        options[name] = getattr(request, name) or None
    options["token_bias"] = dict(request.token_bias)
    options["variables"] = chat.variables
    if chat.tool_choice != "auto":
        options["tool_choice"] = chat.tool_choice
    if not chat.parallel_tool_calls:
        options["parallel_tool_calls"] = False
    options["continue_final_message"] = chat.continue_final_message or None
    guide = request.guide
    if guide is not None:
        name = _GUIDE_NAMES.get(guide.kind, "json_schema")
        options[name] = '{"type":"object"}' if guide.text is None else guide.text
    sent_options = {}
    for name, value in options.items():
        if value not in (None, (), {}):
            sent_options[name] = value
    caller = request.caller
    body = {
        "messages": split_parts(request.messages)[0],
        "tools": request.chat.tools or [],
        "options": sent_options,
        "metadata": caller.metadata,
        "user": caller.user,
        "prompt_cache_key": caller.prompt_cache_key,
        "headers": caller.headers,
        "further": caller.further,
    }
    return json.dumps(body).encode()


def chat_context(request: TextRequest, seconds: float | None = None) -> CallContext:
    """Return the context of a pipeline's call. ``seconds``: until the request's time limit."""
    salt = request.cache_salt
    return CallContext(
        key=request.tenant,
        # The engine behind the pipeline's language model may have no salts.
        cache_salt=None if salt is None else str(salt.optional()),
        session=request.caller.session,
        seconds=seconds,
    )


class ChatModels:
    """The pipelines behind the gRPC port ``url``."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._channel = GrpcChannel(url, tls=tls)

    async def events(
        self, model: str, request: TextRequest, seconds: float | None = None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the events of an answer as they come. Closing the iterator ends the model's work.

        ``seconds``: until the request's time limit.
        """
        text = np.array([chat_request(request), None], np.object_)[:1]
        inputs = [(CHAT_REQUEST, "BYTES", text)]
        for name, items in split_parts(request.messages or ())[1].items():
            inputs.append((name, "BYTES", np.array([*items, None], np.object_)[:-1]))
        message = packed_infer_message(
            model,
            request.request_id,
            inputs,
            [CHAT_EVENTS],
            request.traceparent,
            parameters={CONTEXT_PARAMETER: signed_context(model, chat_context(request, seconds))},
        )
        stream = _Events(model, self._channel, message)
        try:
            await stream.wait()
            while batches := stream.take():
                for events in batches:
                    yield events
                await stream.wait()
        finally:
            await stream.aclose()

    async def close(self) -> None:
        """End running requests, and disconnect."""
        await self._channel.close()


class _Events(ResponseStream[list[dict[str, Any]]]):
    """The events of one answer, as far as they have arrived."""

    def __init__(self, model: str, channel: GrpcChannel, message: bytes) -> None:
        super().__init__(close_or_cancel)
        self._model = model
        self._call = channel.open(SERVICE + "ModelStreamInfer", self.on_messages, self.on_end)
        self._call.send(message)

    def _read(self, messages: list[bytes], items: list[list[dict[str, Any]]]) -> bool:
        for message in messages:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise from_wire(reply.error_message)
            outputs = output_arrays(reply.infer_response)
            items += [json.loads(packed) for packed in outputs.get(CHAT_EVENTS, ())]
            if is_final(reply.infer_response):
                return True
        return False

    def _failure(self, error: GrpcError | None) -> EngineError:
        if error is None:
            return EngineError(f"{self._model}: ended in mid-stream")
        kind = EngineUnavailable if error.unreachable else EngineError
        return kind(f"{self._model}: {error.details}")

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"{self._model}: a response cannot be read: {error}")
