"""Triton's HTTP surface: ``generate`` over gRPC; the other ``routes`` are forwarded to Triton.

A ``generate`` runs in the same model as it would over Triton's port, with the same id and
parameters, and the engine's work ends when the client disconnects.

The body of a ``generate`` is a flat object. A member named like an input of the model becomes that
tensor, every other member a parameter of the request; the members of ``parameters`` are treated as
if they stood outside it. ``tests/live/test_triton_http.py`` compares all of it with Triton's own
answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send
from tritonclient.grpc import service_pb2

from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    Overloaded,
    WireText,
    from_wire,
    to_wire,
    triton_status,
    unexpected,
)
from trtllm_bls.http.budgets import HELD_TENSOR_BYTES, MAX_MEMBERS, TENSOR_BYTES
from trtllm_bls.http.infer import SALT_INPUT, Forwarded, KeySalt, read_infer, read_settings
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import (
    JSON,
    OCTETS,
    RESPONSE_WRITER,
    RETRY,
    BodyReader,
    ClientGone,
    Refused,
    ResponseWriter,
    header,
    traceparent,
)
from trtllm_bls.http.routes import JSON_LENGTH, TRACE, Route, match_route
from trtllm_bls.http.shares import TENANT, NoShare, Shares, holder_of
from trtllm_bls.http.values import encoded, flat_values, numpy_type, packed, wrong
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.types import CacheSalt
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError, ResponseStream, close_or_cancel
from trtllm_bls.wire.kserve import SERVICE, is_final

_METADATA_SECONDS = 10.0  # a model may be loaded again with other tensors
_TIMEOUT_SECONDS = 30.0
_ONLY_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
# Triton begins the refusal of a request that no model has seen with this; it is never an event.
_NOT_RUN = "[request id: "
_TO_STOP = b'"stop"'  # the key of a request that ends another one, and needs no place itself
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
# Headers of Triton's answers that clients get.
_ANSWER_HEADERS = (b"content-type", b"content-length", JSON_LENGTH)
_HTTP_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "ALREADY_EXISTS": 400,
    "OUT_OF_RANGE": 400,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 400,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 503,
    "CANCELLED": 503,
}
# What Triton reads from a gRPC request's parameters for itself. ``generate`` has no such meaning
# for them: a model sees them as parameters like all others, and they change nothing.
_READ_BY_TRITON = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
)
_FINAL_PARAMETER = "triton_final_response"
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode

log = logging.getLogger(__name__)


class TritonHttp:
    """Triton's HTTP surface as an ASGI application; ``close`` it on the loop that served it.

    Triton is at ``grpc``, as host:port, and at ``http``, a URL; ``tls`` is for gRPC. Without
    ``grpc``, ``generate`` is forwarded, too. ``bodies`` reads the bodies of ``generate``.
    ``is_allowed`` returns the key in ``authorization``, ``None`` where it is not allowed.
    ``opens_control``: the control APIs are answered. ``opens_infer``: ``infer`` is answered.
    ``separates_keys``: requests of different keys share no KV cache.

    ``places``: as many as ``tensorrt_llm_bls`` in Triton has; no request waits for one here. Triton
    needs seconds to refuse many requests at once, so a request without a place is refused before it
    is sent there. Clients of gRPC and of other workers take places too, so Triton may have fewer
    free, and never more. ``on_refused`` counts a refusal.
    """

    def __init__(
        self,
        grpc: str,
        http: str,
        tls: ssl.SSLContext | None = None,
        bodies: BodyReader | None = None,
        is_allowed: Callable[[bytes], bytes | None] | None = None,
        places: Admission | None = None,
        on_refused: Callable[[Overloaded], None] = lambda error: None,
        opens_control: bool = False,
        opens_infer: bool = True,
        separates_keys: bool = True,
    ) -> None:
        self._opens_infer = opens_infer
        self._separates_keys = separates_keys
        self._places = places
        self._shares: Shares | None = None  # in the places
        if places is not None:
            self._shares = Shares(places.total)
        self._on_refused = on_refused
        self._opens_control = opens_control
        self._grpc: GrpcChannel | None = None
        if grpc:
            self._grpc = GrpcChannel(grpc, tls=tls)
        self._bodies = bodies or BodyReader()
        self._tensors = BodyReader(TENSOR_BYTES, HELD_TENSOR_BYTES, set_by="")
        self._is_allowed = is_allowed
        self._http = httpx.AsyncClient(
            base_url=http,
            # A stopping Triton waits for its HTTP connections to close, also idle ones.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(None, connect=_TIMEOUT_SECONDS),
            trust_env=False,  # a proxy of the environment is not for this machine's own ports
        )
        # The inputs of models, by name and version, and the time when Triton was asked for them.
        self._metadata: dict[tuple[str, str], tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def close(self) -> None:
        """Close the connections to Triton; requests that run end with an error."""
        if self._grpc is not None:
            await self._grpc.close()
        await self._http.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except Refused as error:
            await self.refuse(scope, send, error)
        except ClientGone:
            pass
        except Exception as error:
            await _send_error(send, Refused(500, str(unexpected(error, "port 8000"))))

    async def refuse(self, scope: Scope, send: Send, error: Refused) -> None:
        """Answer a request that no model sees."""
        await _send_error(send, error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"]
        method = scope["method"]
        has_key = True
        if self._is_allowed is not None:
            key = self._is_allowed(header(scope, b"authorization"))
            has_key = key is not None
            if key is not None:
                scope[TENANT] = key.hex()
        route, match = match_route(method, path, has_key, self._opens_control, self._opens_infer)
        length = header(scope, b"content-length")
        if not route.body and (length.strip(b"0") or header(scope, b"transfer-encoding")):
            raise Refused(400, f"{method} at this path takes no body; send none")
        if route.by_grpc and self._grpc is not None:
            await self._generate(self._grpc, match, scope, receive, send)
            return
        # Triton reads the path that was matched, these headers and the body that is written anew.
        headers = {b"accept-encoding": b"identity"}
        if TRACE in route.headers and (trace := traceparent(scope)):
            headers[TRACE] = trace
        url = self._http.base_url.copy_with(raw_path=path)
        if not route.body:
            await self._forward(httpx.Request(method, url, headers=headers), receive, send)
            return
        async with self._tensors.read(scope, receive, route.body) as body:
            json_length = b""
            if JSON_LENGTH in route.headers:
                json_length = header(scope, JSON_LENGTH)
            if body or not route.control:
                salt = None
                if route.tensors:
                    salt = await self._salt_input(match, scope)
                forwarded = await self._tensors.in_turn(
                    len(body), self._read_body, body, json_length, route, salt
                )
                body = forwarded.content
                headers[b"content-type"] = JSON
                if forwarded.json_bytes is not None:
                    headers[b"content-type"] = OCTETS
                    headers[JSON_LENGTH] = b"%d" % forwarded.json_bytes
            request = httpx.Request(method, url, headers=headers, content=body)
            await self._forward(request, receive, send)

    def _read_body(
        self, body: bytes, json_length: bytes, route: Route, salt: KeySalt | None
    ) -> Forwarded:
        """Read a body that is forwarded. Raises ``Refused``."""
        max_bytes = self._bodies.max_bytes
        if not route.tensors:
            return read_settings(body, max_bytes)
        shared = self._opens_control
        return read_infer(body, json_length, max_bytes, has_shared_memory=shared, salt=salt)

    def _key(self, scope: Scope) -> str:
        """Return the key that shares no KV cache with other keys; empty where there is none."""
        if not self._separates_keys:
            return ""
        return str(scope.get(TENANT, ""))

    async def _salt_input(self, match: re.Match[bytes], scope: Scope) -> KeySalt | None:
        """Return the salt of the request's key, where the model of an ``infer`` takes one."""
        key = self._key(scope)
        if not key or self._grpc is None:
            return None
        model, version = _model_of(match)
        try:
            inputs = await self._inputs(self._grpc, model, version)
        except GrpcError as error:
            raise _error_of_call(error) from error
        if SALT_INPUT not in inputs:
            return None
        return KeySalt(key, tuple(inputs[SALT_INPUT].shape))

    async def _generate(
        self,
        channel: GrpcChannel,
        match: re.Match[bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        model, version = _model_of(match)
        async with self._bodies.read(scope, receive) as body:
            places = None
            if model == BLS_NAME and _TO_STOP not in body:
                places = self._places
            try:
                if places is not None and self._shares is not None:
                    self._shares.note(holder_of(scope))
                    places.check_room()
                inputs = await self._inputs(channel, model, version)
                trace = traceparent(scope)
                key = self._key(scope)
                request = await self._bodies.in_turn(
                    len(body), infer_request, body, model, inputs, version, trace, key
                )
                exchange = _Exchange()
                if places is not None:
                    exchange = _Exchange(self._take_place(places, scope))
            except Overloaded as error:
                self._on_refused(error)
                raise _error_of_model(to_wire(error)) from error
            except GrpcError as error:
                raise _error_of_call(error) from error
        stream = scope["raw_path"].endswith(b"_stream")
        writer: ResponseWriter | None = scope.pop(RESPONSE_WRITER, None)  # see ``Reply``
        await exchange.run(channel, request, receive, send, stream, writer)

    def _take_place(self, places: Admission, scope: Scope) -> Callable[[], None]:
        """Take a place and return a function that gives it back. Raises ``Overloaded``."""
        assert self._shares is not None
        try:
            share = self._shares.take(holder_of(scope), 1)
        except NoShare:
            raise places.crowded() from None
        try:  # other requests may have taken the last place meanwhile
            place = places.take(1)
        except Overloaded:
            share.release()
            raise

        def leave() -> None:
            share.release()
            places.leave(place)

        return leave

    async def _inputs(self, channel: GrpcChannel, model: str, version: str) -> dict[str, Any]:
        """Return the model's inputs, by name. Raises ``GrpcError``."""

        async def fetch() -> dict[str, Any]:
            request = service_pb2.ModelMetadataRequest(name=model, version=version)
            method = SERVICE + "ModelMetadata"
            answer = await channel.unary(method, request.SerializeToString(), _TIMEOUT_SECONDS)
            inputs = service_pb2.ModelMetadataResponse.FromString(answer).inputs
            return {tensor.name: tensor for tensor in inputs}

        now = asyncio.get_running_loop().time()
        fetched_at, fetching = self._metadata.get((model, version), (-math.inf, None))
        if fetching is None or now - fetched_at > _METADATA_SECONDS:
            fetching = asyncio.create_task(fetch())
            self._metadata[model, version] = now, fetching
        try:
            if fetching.done():
                return fetching.result()
            # Other requests wait for the same task, so a client that leaves does not cancel it.
            return await asyncio.shield(fetching)
        except GrpcError:
            self._metadata.pop((model, version), None)
            raise

    async def _forward(self, request: httpx.Request, receive: Receive, send: Send) -> None:
        """Have Triton's HTTP port answer, until the client disconnects."""
        relaying = asyncio.ensure_future(self._relay(request, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            relaying.cancel()
            leaving.cancel()

    async def _relay(self, request: httpx.Request, send: Send) -> None:
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            log.warning("Triton's HTTP port does not answer: %r", error)
            raise Refused(503, "the server does not answer; try again", RETRY) from error
        try:
            if response.status_code >= 400 and request.method == "POST":
                # Errors are short, and are sent in one piece.
                content = await response.aread()
                if refusal := _error_of_answer(response.status_code, content):
                    raise refusal
            headers: list[tuple[bytes, bytes]] = []
            for name, value in response.headers.raw:
                if name.lower() in _ANSWER_HEADERS:
                    headers.append((name.lower(), value))
            status = response.status_code
            await send({"type": "http.response.start", "status": status, "headers": headers})
            async for chunk in response.aiter_bytes():  # also where ``aread`` has read them
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx.HTTPError as error:  # the client sees that its connection breaks
            log.warning("Triton's HTTP port ended within its answer: %r", error)
        finally:
            await response.aclose()


def _model_of(match: re.Match[bytes]) -> tuple[str, str]:
    """Return the name and the version in a path.

    Triton reads 001 as 1. The version gets one spelling, so that a model's inputs are kept once.
    """
    version = ""
    if match[2]:
        version = str(int(match[2]))
    return match[1].decode(), version


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange(ResponseStream[bytes]):
    """The model's responses to one ``generate``, as JSON; the client may disconnect.

    ``leave`` is called when the model's work ends, even if a slow client still reads.
    """

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        super().__init__(close_or_cancel)
        self.call_at_end(lambda end, error: leave())
        self._is_disconnected = False  # the client

    async def run(
        self,
        connection: GrpcChannel,
        request: bytes,
        receive: Receive,
        send: Send,
        stream: bool,
        writer: ResponseWriter | None,
    ) -> None:
        """Answer the client; where it disconnects, the model's work is cancelled.

        ``writer`` is tried before ``send`` for events.
        """
        self._call = connection.open(SERVICE + "ModelStreamInfer", self.on_messages, self.on_end)
        self._call.send(request)
        watching = asyncio.create_task(self._watch(receive))
        try:
            if stream:
                await self._send_events(send, writer)
                return
            responses: list[bytes] = []
            error = None
            is_over = False
            while not is_over:
                arrivals, error, is_over = await self._next()
                responses += arrivals
            if error is not None and not responses:
                await _send_error(send, error)
            elif error is not None or len(responses) != 1:
                await _send_error(send, Refused(200, _ONLY_ONE))
            else:
                await _send_json(send, 200, responses[0], [])
        finally:
            watching.cancel()
            await self.aclose()

    async def _send_events(self, send: Send, writer: ResponseWriter | None) -> None:
        is_started = False
        is_over = False
        while not is_over:
            events, error, is_over = await self._next()
            if not is_started:
                if error is not None and error.message.startswith(_NOT_RUN):
                    await _send_error(send, error)
                    return
                status = 200
                headers = [_EVENTS]
                if error is not None and not events:
                    # An error in place of the first response decides the status, as in Triton.
                    status = error.status
                    headers += error.header_pairs
                await send({"type": "http.response.start", "status": status, "headers": headers})
                is_started = True
            if error is not None:
                events.append(error_json(error.message))
            body = b"".join([b"data: %b\n\n" % event for event in events])
            if is_over or writer is None or not writer.write(body):
                await send({"type": "http.response.body", "body": body, "more_body": not is_over})

    async def _next(self) -> tuple[list[bytes], Refused | None, bool]:
        """Wait for responses; return them, the error that ended the model's work, and true at its
        end. Raises ``ClientGone``, also for a client that reads too slowly."""
        error = None
        try:
            await self.wait()
        except Refused as refused:
            error = refused
        except Overloaded as behind:
            raise ClientGone from behind
        if self._is_disconnected:
            raise ClientGone
        if isinstance(self._error, Refused):
            error = self._error
        is_over = self._over
        return self.take(), error, is_over

    async def _watch(self, receive: Receive) -> None:
        await _until_gone(receive)
        self._is_disconnected = True
        await self.aclose()

    def _read(self, messages: list[bytes], items: list[bytes]) -> bool:
        for message in messages:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise _error_of_model(reply.error_message)
            response = reply.infer_response
            is_last = is_final(response)
            if response.outputs or not is_last:
                items.append(response_json(response))
            if is_last:
                return True
        return False

    def _failure(self, error: GrpcError | None) -> Refused:
        if error is None:
            error = GrpcError("UNAVAILABLE", "the server ended before its last response")
        return _error_of_call(error)

    def _unreadable(self, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        log.error("a response cannot be written as JSON", exc_info=error)
        return Refused(500, f"a response cannot be written as JSON: {error!r}")


def _error_of_model(text: str) -> Refused:
    """Translate the error of a model, or of Triton in its place.

    Triton's own HTTP port would answer each with 400.
    """
    error = from_wire(text)
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        return Refused(429, text, {"retry-after": str(error.retry_after_s)})
    if isinstance(error, (Overloaded, EngineUnavailable, EngineStalled)):
        return Refused(503, text, RETRY)
    status = WireText.parse(text).status
    if status == EngineError.status:
        return Refused(502, text)
    if status:
        return Refused(400, text)
    return _error_of_status(triton_status(text), text)


def _error_of_call(error: GrpcError) -> Refused:
    return _error_of_status(error.status, error.details)


def _error_of_status(grpc_status: str, text: str) -> Refused:
    status = _HTTP_STATUSES.get(grpc_status, 502)
    if status == 503:
        return Refused(status, text, RETRY)
    return Refused(status, text)


def _error_of_answer(status: int, body: bytes) -> Refused | None:
    """Return the error to send in place of Triton's own answer; ``None`` where that one fits."""
    try:
        text = msgspec.json.decode(body, type=dict[str, str])["error"]
    except (msgspec.MsgspecError, KeyError):
        text = ""
    if text:
        error = _error_of_model(text)
        if WireText.parse(text).status or error.status in (429, 502, 503):
            return error
    if status == 503:
        return Refused(503, text or "the server does not answer; try again", RETRY)
    if status == 500:
        return Refused(502, text or "Triton failed")
    return None


async def _send_error(send: Send, error: Refused) -> None:
    await _send_json(send, error.status, error_json(error.message), error.header_pairs)


async def _send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    length = (b"content-length", b"%d" % len(body))
    headers = [_JSON, length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --- JSON: a body to tensors, a response to JSON; no I/O ---------------------------------------


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object, in order; a dict would hide a repeated key, an error."""


def infer_request(
    body: bytes,
    model: str,
    inputs: Mapping[str, Any],
    version: str,
    trace: bytes = b"",
    key_name: str = "",
) -> bytes:
    """Write ``body`` as a ``ModelInferRequest`` to ``model``, whose metadata has these ``inputs``.

    ``key_name``: the key that shares no KV cache with other keys, if there is one.

    Raises ``Refused``, also for too many parameters: Triton's time grows with the square of their
    number.
    """
    try:
        members = json.loads(body, object_pairs_hook=_Members)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(members, _Members):
        raise Refused(400, "the body must be a JSON object")
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    keys = set()
    for key, value in _flat(members):
        if key in keys:
            raise wrong(key, "is sent twice; send it once")
        keys.add(key)
        if key in inputs:
            if key == SALT_INPUT and key_name:
                value = _salted(key_name, value)
            _add_input(request, inputs[key], value)
        elif key not in _READ_BY_TRITON and not key.startswith("triton_"):
            if len(request.parameters) == MAX_MEMBERS:
                problem = f"more than {MAX_MEMBERS} members are no inputs of the model"
                raise Refused(400, problem)
            _set_parameter(request.parameters[key], key, value)
    if key_name and SALT_INPUT in inputs and SALT_INPUT not in keys and request.inputs:
        salt = str(CacheSalt(salt_of(key_name), required=False))
        _add_input(request, inputs[SALT_INPUT], [salt] * request.inputs[0].shape[0])
    request_id = dict(members).get("id", "")
    if not isinstance(request_id, str):
        raise wrong("id", "must be a string")
    request.id = request_id
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if trace:
        request.parameters["traceparent"].string_param = trace.decode()
    return bytes(request.SerializeToString())


def _salted(key: str, value: Any) -> list[Any]:
    """Replace each salt that a client sent by one that no other key has."""
    salts: list[Any] = []
    for salt in flat_values(value):
        if isinstance(salt, str):
            salt = salt_of(key, salt)
        salts.append(salt)
    return salts


def _flat(members: _Members) -> Iterator[tuple[str, Any]]:
    for key, value in members:
        if key != "parameters":
            yield key, value
        elif isinstance(value, _Members):
            yield from value
        else:
            raise wrong(key, "must be an object")


def _set_parameter(parameter: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = encoded(key, value)
    else:
        problem = "the model has no such input; send a boolean, a string or a 64-bit number"
        raise wrong(key, problem)


def _add_input(request: Any, tensor: Any, value: Any) -> None:
    """Add the input ``tensor``. The values decide its innermost open dimension; others are 1."""
    values = list(flat_values(value))
    content = packed(tensor.name, tensor.datatype, values)
    count = len(values)
    shape: list[int] = []
    open_axis = None
    for axis, size in enumerate(tensor.shape):
        if size < 0:
            open_axis = axis
            size = 1
        shape.append(size)
    fixed = math.prod(shape)
    if open_axis is not None and fixed and count % fixed == 0:
        shape[open_axis] = count // fixed
    elif count != fixed:
        raise wrong(tensor.name, f"{count} values do not fill the shape {list(tensor.shape)}")
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    request.raw_input_contents.append(content)


def response_json(response: Any) -> bytes:
    """Write a ``ModelInferResponse`` as one JSON object, its members sorted by name."""
    members: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        members["id"] = response.id
    for key, parameter in response.parameters.items():
        if key != _FINAL_PARAMETER:
            members[key] = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        values: list[Any] = []
        if output.datatype != "BYTES":
            numbers = np.frombuffer(content, numpy_type(output.datatype)).tolist()
            # JSON has no infinity, so it becomes null. RapidJSON in Triton writes nothing in its
            # place, and no client can read that.
            values = [number if math.isfinite(number) else None for number in numbers]
        else:
            offset = 0
            while offset < len(content):
                (size,) = struct.unpack_from("<I", content, offset)
                offset += 4 + size
                # Bytes that are not UTF-8 are passed on as they are, as Triton does.
                values.append(content[offset - size : offset].decode("utf-8", "surrogateescape"))
        if len(values) == 1:
            members[output.name] = values[0]
        else:
            members[output.name] = values
    return _written(members)


def error_json(message: str) -> bytes:
    """Write the body of an error."""
    return _written({"error": message})


def _written(members: Mapping[str, Any]) -> bytes:
    return _encode(members).encode("utf-8", "surrogateescape")
