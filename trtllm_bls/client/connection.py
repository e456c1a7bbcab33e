"""The client: one channel, any number of requests on it.

Owns the channel (address, TLS, keepalive) and what its failures are called. What is sent comes
from ``requests``, what happens to one request is in ``stream``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtllm_bls.client.events import Result
from trtllm_bls.client.requests import infer_request
from trtllm_bls.client.stream import Reader, Stream
from trtllm_bls.contract import BLS, ENGINE, MODELS, Model
from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineError,
    SettingsError,
    TrtllmBlsError,
)

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be silent for long
    # A retry that finds gRPC waiting to connect again fails at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
# By default a gRPC server closes a connection that is pinged more often than every 300 s.
KEEPALIVE_S = 310.0

# grpc.aio's message if a call ends before its request is written, whatever the reason.
_UNSENT = "Internal error from Core"
_CLOCKS_DIFFER_S = 0.05  # gRPC's deadline may come so much before ours


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files (PEM) of a TLS connection; the system's root certificates are the default.

    ``server_name``: the name in the server's certificate, if it is not the host of the URL.
    """

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None
    server_name: str | None = None

    @classmethod
    def of_options(cls, given: Mapping[str, Any]) -> Tls | None:
        """What the options of a command say (``settings.TlsConnection``); ``None`` = no TLS."""
        named = {
            "root_certificates": given["tls_ca"],
            "private_key": given["tls_key"],
            "certificate_chain": given["tls_cert"],
            "server_name": given["tls_server_name"],
        }
        return cls(**named) if given["tls"] or any(named.values()) else None


_C = TypeVar("_C", bound="Client")


class Client:
    """A client of one Triton server over gRPC: ``async with Client("127.0.0.1:8001") as client:``.

    Belongs to the event loop that entered it: a request in another loop, before entering or after
    leaving is a ``RuntimeError``. ``url`` is ``host:port``. Leaving cancels what still runs.
    ``compression`` is ``gzip``, ``deflate`` or none. ``retries``: how often a request is sent again
    if it failed before its first response because the connection was refused or broke, or the
    server was overloaded. A retry has the same id and the same deadline, and follows a random pause
    of at most 0.4 s, 0.8 s, ... 5 s. ``keepalive_s``: seconds of silence before the client pings
    the server. Raises ``SettingsError`` for invalid values.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | None = None,
        compression: str | None = None,
        retries: int = 0,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        if url.startswith(("http://", "https://", "grpc://")):
            raise SettingsError(f"url: {url!r} has a scheme; write host:port, gRPC is understood")
        if retries < 0:
            raise SettingsError(f"retries: {retries} is not allowed; it must be at least 0")
        if keepalive_s <= 0:
            raise SettingsError(f"keepalive_s: {keepalive_s} is not allowed; it must be above 0")
        self.url = url
        self.retries = retries
        self._credentials = None if tls is None else _credentials(tls)
        self._compression = grpc.Compression[compression.title()] if compression else None
        keepalive = ("grpc.keepalive_time_ms", int(keepalive_s * 1000))
        self._options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS, keepalive]
        if tls is not None and tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        if url.rpartition(":")[0] in _THIS_MACHINE:  # whatever proxy the environment names
            self._options.append(("grpc.enable_http_proxy", 0))
        self._channel: Any = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[Reader] = set()

    async def __aenter__(self: _C) -> _C:
        if self._stub is not None:
            raise RuntimeError("the client is open already")
        self._loop = asyncio.get_running_loop()
        how = {"options": self._options, "compression": self._compression}
        self._channel = (
            grpc.aio.insecure_channel(self.url, **how)
            if self._credentials is None
            else grpc.aio.secure_channel(self.url, self._credentials, **how)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel unfinished requests, let finished ones end, close the channel."""
        if self._channel is None:
            return
        self._stub = None
        readers = tuple(self._readers)
        for reader in readers:
            reader.cancel()
        try:
            await Reader.join(readers)
        finally:
            await self._channel.close()

    def stream(
        self,
        model: str | Model = BLS,
        *,
        deadline_s: float | None = None,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        **fields: Any,
    ) -> Stream:
        """The answer to one request as it comes; ``fields`` are inputs by wire name.

        Values may be Python scalars, strings, lists or numpy arrays, with or without a batch
        dimension; ``None`` means "not given". A model name outside the contract is taken for a
        text model; for a renamed one pass ``dataclasses.replace(ENGINE, name=...)``. Streaming
        is asked for unless ``fields`` say otherwise. ``deadline_s`` bounds the whole request.
        Raises ``InvalidRequest`` at once for a field that cannot be sent.
        """
        row = model if isinstance(model, Model) else _model_named(model)
        for flag in ("stream", "streaming"):
            if flag in row.input_named:
                fields.setdefault(flag, True)
        request_id = request_id or uuid.uuid4().hex
        message = infer_request(row, fields, request_id, outputs)
        begin = partial(self._send, message, deadline_s)
        return Stream(request_id, begin, self.retries, deadline_s)

    async def generate(self, model: str | Model = BLS, **arguments: Any) -> Result:
        """The whole answer; ``arguments`` and errors as for ``stream`` and its iteration.

        With ``stream=False`` it is one response, also from a model that is not decoupled: Triton
        serves those on a gRPC stream as well, so no unary call is needed.
        """
        async with self.stream(model, **arguments) as stream:
            events = tuple([event async for event in stream])
            assert stream.started_at is not None
            return Result(request_id=stream.request_id, started_at=stream.started_at, events=events)

    async def stop(self, request_id: str, model: str | Model = ENGINE) -> None:
        """Ask an engine model to end its running request of that id.

        The running request still gets its final answer, with what was generated so far.
        """
        required = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0}
        await self.generate(model, request_id=request_id, stop=True, **required)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether ``model`` is ready; false also for a model that the server does not have.

        Raises ``ConnectionFailed`` or ``DeadlineExceeded`` without an answer.
        """
        request: Any = service_pb2.ModelReadyRequest(name=model)
        over_at = time.monotonic() + timeout_s
        try:
            return bool((await self._stub.ModelReady(request, timeout=timeout_s)).ready)
        except grpc.aio.AioRpcError as error:
            translated = _translated(self.url, timeout_s, over_at, error)
            if isinstance(translated, (ConnectionFailed, DeadlineExceeded)):
                raise translated from error
            return False

    def _send(self, message: Any, deadline_s: float | None, left_s: float | None) -> Reader:
        if self._stub is None:
            raise RuntimeError("the client is not open: use it as 'async with Client(...)'")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "the client was opened in another event loop: open one in this loop too, "
                "with 'async with Client(...)'"
            )
        call = self._stub.ModelStreamInfer(iter([message]), timeout=left_s)
        over_at = None if left_s is None else time.monotonic() + left_s
        reader = Reader(call, partial(_translated, self.url, deadline_s, over_at))
        self._readers.add(reader)
        reader.task.add_done_callback(lambda _: self._readers.discard(reader))
        return reader


def _model_named(name: str) -> Model:
    return next((model for model in MODELS if model.name == name), replace(BLS, name=name))


def _credentials(tls: Tls) -> Any:
    files = ("root_certificates", "private_key", "certificate_chain")
    return grpc.ssl_channel_credentials(
        **{name: _contents(name.replace("_", " "), getattr(tls, name)) for name in files}
    )


def _contents(what: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{what}: cannot read {path}: {error.strerror}") from error


def _translated(
    url: str, deadline_s: float | None, over_at: float | None, error: grpc.RpcError | None
) -> TrtllmBlsError:
    """gRPC's error as one of ours; ``None``: the call ended before its request was sent.

    ``over_at``: the deadline on the monotonic clock.
    """
    code = grpc.StatusCode.INTERNAL if error is None else error.code()
    details = _UNSENT if error is None else " ".join((error.details() or "").split())
    if code is grpc.StatusCode.INTERNAL and details == _UNSENT:
        late = over_at is not None and time.monotonic() > over_at - _CLOCKS_DIFFER_S
        code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.UNAVAILABLE
        details = "the call ended before the request was sent"
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionFailed(f"{url}: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None:
        return DeadlineExceeded(f"no complete answer within {deadline_s:g} s")
    return EngineError(f"{code.name}: {details}")
