"""Triton's HTTP surface: ``generate`` over gRPC, everything else passed on to Triton's HTTP port.

A ``generate`` runs in the same model as it would over Triton's port, with the same id and
parameters, and the engine's work ends when the caller leaves. A body that Triton would refuse is
passed on as well, so that Triton words the refusal.

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
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cache
from typing import Any

import httpx
import numpy as np
from starlette.types import Receive, Scope, Send
from tritonclient.grpc import service_pb2

from trtllm_bls.errors import Overloaded, from_wire, is_for_room, to_wire
from trtllm_bls.grpc_client import GrpcChannel, GrpcError
from trtllm_bls.http.guard import (
    BODY_WRITE,
    RETRY,
    BodyReader,
    ClientGone,
    Refused,
    header,
    received,
)

_SERVICE = "/inference.GRPCInferenceService/"
_GENERATE = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]{1,18}))?/(generate|generate_stream)")
_METADATA_SECONDS = 10.0  # a model may be loaded again with other tensors
_TIMEOUT_SECONDS = 30.0
_LONG_BODY = 256 * 1024  # bytes; a longer one is read in a thread, since other streams would wait
_MOST_OTHER_BYTES = 64 * 2**20  # of a body that is passed on
_MOST_WAITING = 16_384  # responses that a caller has not read; it is then given up
_ONLY_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
# How Triton begins its refusal of a request that no model has seen; it is never an event.
_NOT_RUN = "[request id: "
_LIMITED = "tensorrt_llm_bls"
_TO_STOP = b'"stop"'  # the key of a request that ends another one, and needs no place itself
_AGAIN_IN = re.compile(r"try again in about (\d+) s")
_DRAINING = "has no available versions"  # Triton's words from the moment that it is told to stop
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_SENT_BY_ANY_PAGE = (
    b"application/x-www-form-urlencoded",
    b"multipart/form-data",
    b"text/plain",
)
# Of one connection, not of the message (RFC 9110, section 7.6.1); the client library and uvicorn
# write their own.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host expect".split()
)
# What Triton reads from a gRPC request's parameters for itself. ``generate`` has no such meaning
# for them: a model sees them as parameters like all others, and they change nothing.
_READ_BY_TRITON = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
)
_FINAL = "triton_final_response"
_MOST_PARAMETERS = 1000
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode

log = logging.getLogger(__name__)


class Room:
    """The requests to ``tensorrt_llm_bls`` in Triton, which has ``places`` for them.

    Triton needs seconds to refuse many requests at once. A request that Triton has no place for is
    therefore refused before it is sent there. Clients of gRPC and of other workers take places too,
    so Triton may have fewer than this says, and never has more. ``on_refused``: counts a refusal.
    """

    def __init__(self, places: float, on_refused: Callable[[Overloaded], None]) -> None:
        self._places, self._on_refused = places, on_refused
        self._since: dict[object, float] = {}
        self._average_s = 0.0  # how long a request has its place

    def check(self) -> None:
        """Raises ``Overloaded`` if Triton would refuse another request."""
        if len(self._since) >= self._places:
            why = f"requests running and waiting: {self._places}, as many as may"
            limit, seconds = "max_queued_requests", max(1, math.ceil(self._average_s))
            told = f"{why} (parameter {limit}); try again in about {seconds} s"
            error = Overloaded(told, limit)
            self._on_refused(error)
            raise error

    def enter(self, request: object) -> None:
        self._since[request] = time.monotonic()

    def leave(self, request: object) -> None:
        """The model has sent its last response, or the request was cancelled."""
        if since := self._since.pop(request, None):
            self._average_s += 0.2 * (time.monotonic() - since - self._average_s)


class TritonHttp:
    """Triton's HTTP surface as an ASGI application; ``close`` it on the loop that served it.

    Triton is at ``grpc``, as host:port, and at ``http``, a URL; ``tls`` is for gRPC. Without
    ``grpc``, ``generate`` is passed on like everything else. ``bodies`` reads those of
    ``generate``. ``is_allowed`` judges the ``authorization`` of every request but those for health.
    """

    def __init__(
        self,
        grpc: str,
        http: str,
        tls: ssl.SSLContext | None = None,
        bodies: BodyReader | None = None,
        is_allowed: Callable[[bytes], object] | None = None,
        room: Room | None = None,
    ) -> None:
        self._room = room
        self._grpc = GrpcChannel(grpc, tls=tls) if grpc else None
        self._bodies = bodies or BodyReader()
        self._is_allowed = is_allowed
        self._http = httpx.AsyncClient(
            base_url=http,
            # A stopping Triton waits for its HTTP connections to close, also idle ones.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(None, connect=_TIMEOUT_SECONDS),
            trust_env=False,  # a proxy of the environment is not for this machine's own ports
        )
        # What models declare, by name and version, and when they were asked.
        self._declared: dict[tuple[str, str], tuple[float, asyncio.Task[dict[str, Any]]]] = {}

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

    async def refuse(self, scope: Scope, send: Send, error: Refused) -> None:
        """Answer a request that no model sees."""
        await _send_error(send, error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = self._is_allowed if not scope["path"].startswith("/v2/health") else None
        if asks is not None and not asks(header(scope, b"authorization")):
            problem = "no valid API key; send Authorization: Bearer KEY"
            raise Refused(401, problem, {"www-authenticate": "Bearer"})
        called = _GENERATE.fullmatch(scope["path"])
        if called is None or scope["method"] != "POST":
            await self._pass_on(scope, receive, send)
            return
        model, request = called[1], None
        # Triton reads 001 as 1: one spelling, or what is known of a model would be kept for each.
        version = str(int(called[2])) if called[2] else ""
        async with self._bodies.read(scope, receive) as body:
            room = self._room if model == _LIMITED and _TO_STOP not in body else None
            try:
                if self._grpc is None:
                    raise LeftToTriton
                if room is not None:
                    room.check()
                declared = await self._inputs(self._grpc, model, version)
                if room is not None:
                    room.check()  # others may have entered meanwhile
                traceparent = header(scope, b"traceparent").decode("latin-1")

                def written() -> bytes:
                    message = infer_request(body, model, declared, version, traceparent)
                    return bytes(message.SerializeToString())

                is_long = len(body) > _LONG_BODY
                request = await asyncio.to_thread(written) if is_long else written()
            except LeftToTriton:
                await self._pass_on(scope, receive, send, body)
            except Overloaded as error:
                raise _error_of_model(to_wire(error)) from error
            except GrpcError as error:
                raise _error_of_call(error) from error
        if request is not None and self._grpc is not None:
            exchange = _Exchange(room.leave if room is not None else lambda exchange: None)
            if room is not None:
                room.enter(exchange)
            stream, write = called[3] == "generate_stream", scope.get(BODY_WRITE)
            await exchange.run(self._grpc, request, receive, send, stream, write)

    async def _inputs(self, channel: GrpcChannel, model: str, version: str) -> dict[str, Any]:
        """What the model declares, by name. Raises ``GrpcError``."""

        async def ask() -> dict[str, Any]:
            asked = service_pb2.ModelMetadataRequest(name=model, version=version)
            method = _SERVICE + "ModelMetadata"
            answer = await channel.unary(method, asked.SerializeToString(), _TIMEOUT_SECONDS)
            inputs = service_pb2.ModelMetadataResponse.FromString(answer).inputs
            return {tensor.name: tensor for tensor in inputs}

        now = asyncio.get_running_loop().time()
        asked_at, asking = self._declared.get((model, version), (-math.inf, None))
        if asking is None or now - asked_at > _METADATA_SECONDS:
            asking = asyncio.create_task(ask())
            self._declared[model, version] = now, asking
        try:
            # A caller that leaves meanwhile does not end the question, which others wait for too.
            return asking.result() if asking.done() else await asyncio.shield(asking)
        except GrpcError:
            self._declared.pop((model, version), None)
            raise

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, generate: bytes | None = None
    ) -> None:
        """Have Triton's HTTP port answer, until the caller leaves.

        ``generate``: a body of that kind, which Triton is to refuse. Its status for JSON of wrong
        types, 500, then becomes 400.
        """
        path = scope["raw_path"]
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        headers = [(key, value) for key, value in scope["headers"] if key not in _HOP_BY_HOP]
        if not any(key == b"accept-encoding" for key, _ in headers):
            headers.append((b"accept-encoding", b"identity"))  # else httpx would ask for gzip
        body_read = asyncio.Event()
        content: bytes | AsyncIterator[bytes] | None = generate
        has_body = {b"content-length", b"transfer-encoding"} & {key for key, _ in scope["headers"]}
        if generate is not None or not has_body:
            body_read.set()
        else:
            content = self._other_body(scope, receive, body_read)
        url = self._http.base_url.copy_with(raw_path=path)
        request = httpx.Request(scope["method"], url, headers=headers, content=content)
        working = asyncio.create_task(self._relay(request, send, generate is not None))

        async def cancel_without_caller() -> None:
            await body_read.wait()  # until then the body's end shows that the caller left
            await _until_gone(receive)
            working.cancel()

        watching = asyncio.create_task(cancel_without_caller())
        try:
            await asyncio.wait({working})
            if not working.cancelled():
                working.result()
        finally:
            watching.cancel()
            working.cancel()

    async def _relay(self, request: httpx.Request, send: Send, is_generate: bool) -> None:
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            log.warning("Triton's HTTP port does not answer: %r", error)
            await _send_error(send, Refused(503, "the server does not answer; try again", RETRY))
            return
        try:
            status = response.status_code
            if status == 500 and is_generate:
                status = 400
            kept = [(key.lower(), value) for key, value in response.headers.raw]
            kept = [(key, value) for key, value in kept if key not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": status, "headers": kept})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    async def _other_body(
        self, scope: Scope, receive: Receive, body_read: asyncio.Event
    ) -> AsyncIterator[bytes]:
        """A body that is passed on, as it arrives. Raises ``Refused`` and ``ClientGone``.

        Pages of other servers may send forms and plain text without asking; no client of Triton
        does.
        """
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        if kind in _SENT_BY_ANY_PAGE:
            problem = f"a body must not be {kind.decode()}; send Content-Type: application/json"
            raise Refused(415, problem)
        async with aclosing(received(scope, receive, _MOST_OTHER_BYTES)) as arriving:
            async for part in arriving:
                yield part
        body_read.set()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange:
    """One ``generate``: the call to the model, and what it sent that the caller has not got yet."""

    def __init__(self, leave: Callable[[_Exchange], None] = lambda exchange: None) -> None:
        self._leave = leave  # called when the model's work ends, which a slow reader may outlast
        self._arrived: list[bytes] = []  # responses, as JSON
        self._error: Refused | None = None
        self._over = False  # the model sends no more
        self._gone = False  # the caller has left
        self._changed = asyncio.Event()

    async def run(
        self,
        connection: GrpcChannel,
        request: bytes,
        receive: Receive,
        send: Send,
        stream: bool,
        write: Callable[[bytes], bool] | None,
    ) -> None:
        """Answer the caller; where it leaves, the model's work is cancelled.

        ``write`` is tried before ``send`` for events, in a third of its time.
        """
        call = connection.open(_SERVICE + "ModelStreamInfer", self._on_messages, self._on_end)
        call.send(request)
        watching = asyncio.create_task(self._watch(receive))
        try:
            if stream:
                await self._send_events(send, write)
                return
            while not self._over:
                await self._wait(arrived=len(self._arrived))
            if self._error is not None and not self._arrived:
                await _send_error(send, self._error)
            elif self._error is not None or len(self._arrived) != 1:
                await _send_error(send, Refused(200, _ONLY_ONE))
            else:
                await _send_json(send, 200, self._arrived[0], [])
        finally:
            watching.cancel()
            self._leave(self)
            # Triton 24.10 keeps a request for ever whose cancel meets its last response. So a call
            # whose request is over is closed in order.
            if self._over:
                call.half_close()
            else:
                call.cancel()

    async def _send_events(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        begun = over = False
        while not over:
            await self._wait()
            over, error = self._over, self._error
            events, self._arrived = self._arrived, []
            if not begun:
                if error is not None and error.message.startswith(_NOT_RUN):
                    await _send_error(send, error)
                    return
                # An error in place of the first response decides the status, as in Triton.
                first = error if error is not None and not events else Refused(200, "")
                headers = [_EVENTS, *first.header_pairs]
                await send(
                    {"type": "http.response.start", "status": first.status, "headers": headers}
                )
                begun = True
            if error is not None:
                events.append(error_json(error.message))
            body = b"".join([b"data: %b\n\n" % event for event in events])
            if over or write is None or not write(body):
                await send({"type": "http.response.body", "body": body, "more_body": not over})

    async def _wait(self, arrived: int = 0) -> None:
        """Return once more than ``arrived`` responses wait, or none will come."""
        while len(self._arrived) <= arrived and not self._over:
            if self._gone:
                raise ClientGone
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self, receive: Receive) -> None:
        await _until_gone(receive)
        self._gone = True
        self._changed.set()

    def _on_messages(self, messages: list[bytes]) -> None:
        try:
            for message in messages:
                reply = service_pb2.ModelStreamInferResponse.FromString(message)
                if self._over:
                    return
                if reply.error_message:
                    self._fail(_error_of_model(reply.error_message))
                    return
                response = reply.infer_response
                self._over = is_final(response)
                if response.outputs or not self._over:
                    self._arrived.append(response_json(response))
        except Exception as error:  # the call would end without telling, and its caller wait
            log.exception("a response cannot be written as JSON")
            self._fail(Refused(500, f"a response cannot be written as JSON: {error!r}"))
            return
        if len(self._arrived) > _MOST_WAITING:
            self._gone = True
        if self._over:
            self._leave(self)
        self._changed.set()

    def _on_end(self, error: GrpcError | None) -> None:
        if not self._over:
            ended = GrpcError("UNAVAILABLE", "the server ended before its last response")
            self._fail(_error_of_call(error or ended))

    def _fail(self, error: Refused) -> None:
        self._error, self._over = error, True
        self._leave(self)
        self._changed.set()


def _error_of_model(text: str) -> Refused:
    """What a model, or Triton in its place, said. Triton's own HTTP port answers 400 to all."""
    error = from_wire(text)
    if isinstance(error, Overloaded) and is_for_room(error):
        seconds = _AGAIN_IN.search(text)
        return Refused(429, text, {"retry-after": seconds[1]} if seconds else RETRY)
    if isinstance(error, Overloaded) or _DRAINING in text:
        return Refused(503, text, RETRY)
    return Refused(400, text)


def _error_of_call(error: GrpcError) -> Refused:
    if _DRAINING in error.details or error.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Refused(503, error.details, RETRY)
    if error.status == "NOT_FOUND":
        return Refused(404, error.details)
    return Refused(400 if error.status == "INVALID_ARGUMENT" else 500, error.details)


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


class LeftToTriton(Exception):
    """The body is not one that this module reads: Triton answers it, nearly always by refusing."""


@cache
def _numpy_type(datatype: str) -> np.dtype[Any]:
    """Of Triton's numbers and BOOL. Raises ``TypeError`` for others."""
    return np.dtype(datatype.lower().replace("fp", "float"))


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object, in order; a dict would hide a repeated key, which is wrong."""


def infer_request(
    body: bytes, model: str, inputs: Mapping[str, Any], version: str, traceparent: str = ""
) -> service_pb2.ModelInferRequest:
    """``body`` as a request to ``model``, whose metadata has these ``inputs``, by name.

    Raises ``LeftToTriton``. Raises ``Refused`` for an integer that its input's type cannot hold,
    which Triton would cut to other digits, and for more parameters than a request may have, whose
    time in Triton grows with the square of their number.
    """
    try:
        members = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_Members)
    except (ValueError, RecursionError) as error:  # of UTF-8 as well
        raise LeftToTriton from error
    if not isinstance(members, _Members):
        raise LeftToTriton
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    given = set()
    for key, value in _flat(members):
        # In order: what Triton would refuse at the end may not hide that there are too many before.
        if key in given:
            raise LeftToTriton
        given.add(key)
        if key in inputs:
            _add_input(request, inputs[key], value)
        elif key not in _READ_BY_TRITON and not key.startswith("triton_"):
            if len(request.parameters) == _MOST_PARAMETERS:
                problem = f"more than {_MOST_PARAMETERS} members are no inputs of the model"
                raise Refused(400, problem)
            _set_parameter(request.parameters[key], value)
    request_id = dict(members).get("id", "")
    if not isinstance(request_id, str):
        raise LeftToTriton
    request.id = request_id
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if traceparent:
        request.parameters["traceparent"].string_param = traceparent
    return request


def _flat(members: _Members) -> Iterator[tuple[str, Any]]:
    for key, value in members:
        if key != "parameters":
            yield key, value
        elif isinstance(value, _Members):
            yield from value
        else:
            raise LeftToTriton


def _set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = _encoded(value)
    else:
        raise LeftToTriton


def _add_input(request: Any, declared: Any, value: Any) -> None:
    """Add a tensor; the innermost open dimension takes what the others leave."""
    values = value if isinstance(value, list) and not isinstance(value, _Members) else [value]
    content, count, dims = _packed(declared, values), len(values), declared.shape
    fixed = math.prod(dim for dim in dims if dim >= 0)
    shape = [1 if dim < 0 else dim for dim in dims]
    open_dims = [axis for axis, dim in enumerate(dims) if dim < 0]
    if open_dims and fixed and count % fixed == 0:
        shape[open_dims[-1]] = count // fixed
    elif count != fixed:
        raise LeftToTriton
    request.inputs.add(name=declared.name, datatype=declared.datatype, shape=shape)
    request.raw_input_contents.append(content)


def _packed(declared: Any, values: Sequence[Any]) -> bytes:
    kinds, datatype = set(map(type, values)), declared.datatype
    if datatype == "BYTES" and kinds <= {str}:
        texts = [_encoded(value) for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BOOL" and kinds <= {bool}:
        return bytes(values)
    if "INT" in datatype and kinds <= {int}:
        held = np.iinfo(_numpy_type(datatype))
        for value in (min(values), max(values)) if values else ():
            if not held.min <= value <= held.max:
                problem = f"input '{declared.name}': {value} does not fit {datatype}"
                raise Refused(400, problem)
        return np.array(values, held.dtype).tobytes()
    if datatype in ("FP32", "FP64") and kinds <= {int, float}:
        with suppress(OverflowError):
            return np.array(values, _numpy_type(datatype)).tobytes()
    raise LeftToTriton


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise LeftToTriton from error


def is_final(response: Any) -> bool:
    """Whether the ``ModelInferResponse`` is the last of its request."""
    return _FINAL in response.parameters and bool(response.parameters[_FINAL].bool_param)


def response_json(response: Any) -> bytes:
    """A ``ModelInferResponse`` as one JSON object, its members sorted by name."""
    members: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        members["id"] = response.id
    for key, parameter in response.parameters.items():
        if key != _FINAL:
            members[key] = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        values: list[Any] = []
        if output.datatype != "BYTES":
            numbers = np.frombuffer(content, _numpy_type(output.datatype)).tolist()
            # JSON has no infinity. RapidJSON writes nothing in its place, which no client can read.
            values = [number if math.isfinite(number) else None for number in numbers]
        else:
            offset = 0
            while offset < len(content):
                (size,) = struct.unpack_from("<I", content, offset)
                offset += 4 + size
                # Bytes that are not UTF-8 are passed on as they are, as Triton does.
                values.append(content[offset - size : offset].decode("utf-8", "surrogateescape"))
        members[output.name] = values[0] if len(values) == 1 else values
    return _written(members)


def error_json(message: str) -> bytes:
    """The body of an error."""
    return _written({"error": message})


def _written(members: Mapping[str, Any]) -> bytes:
    return _encode(members).encode("utf-8", "surrogateescape")
