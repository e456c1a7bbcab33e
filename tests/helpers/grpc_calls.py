"""Calls of our gRPC transport, and a server of grpcio that answers them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from trtllm_bls.wire.grpc_client import GrpcCall, GrpcChannel, GrpcError

MEGABYTE = 1 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # with it, a free port may be one that another grpcio server has
)


class Service(grpc.GenericRpcHandler):
    """grpcio's side: methods that echo, fail, and wait."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.cancelled = asyncio.Event()
        self.released = asyncio.Event()
        self.metadata: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.removeprefix("/test.Service/")
        self.metadata = dict(details.invocation_metadata)
        if name in ("reverse", "fail"):
            return grpc.unary_unary_rpc_method_handler(getattr(self, name))
        if name in ("echo", "hold", "mute"):
            return grpc.stream_stream_rpc_method_handler(getattr(self, name))
        return None

    async def reverse(self, message: bytes, context: Any) -> bytes:
        return message[::-1]

    async def fail(self, message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message.decode())
        return b""

    async def echo(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    async def hold(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One message at once, one when released."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield b"held"
            await self.released.wait()
            yield b"released"
        except (asyncio.CancelledError, GeneratorExit):  # the latter while a response is sent
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def mute(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Ends without a word, and without waiting for the caller's end."""
        return
        yield b""


@asynccontextmanager
async def grpcio(
    service: Service,
    *,
    port: int = 0,
    options: tuple[tuple[str, Any], ...] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server(options=OPTIONS + options)
    server.add_generic_rpc_handlers((service,))
    address = f"127.0.0.1:{port}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(target: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[GrpcChannel]:
    connection = GrpcChannel(target, tls=tls)
    try:
        yield connection
    finally:
        await connection.close()


class Caller:
    """A call, and what its callbacks were given."""

    def __init__(self, connection: GrpcChannel, name: str, *messages: bytes) -> None:
        self.batches: list[list[bytes]] = []
        self._ended: asyncio.Future[GrpcError | None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._tell: Callable[[Caller], object] = lambda _: None
        self.call: GrpcCall = connection.open(f"/test.Service/{name}", self._add, self._end)
        for message in messages:
            self.call.send(message)

    def _add(self, messages: list[bytes]) -> None:
        self.batches.append(messages)
        self._changed.set()

    def _end(self, error: GrpcError | None) -> None:
        self._ended.set_result(error)
        self._changed.set()
        self._tell(self)

    def when_over(self, tell: Callable[[Caller], object]) -> None:
        self._tell = tell

    @property
    def messages(self) -> list[bytes]:
        return [message for batch in self.batches for message in batch]

    @property
    def over(self) -> bool:
        return self._ended.done()

    async def until(self, count: int) -> list[bytes]:
        while len(self.messages) < count:
            assert not self.over, self._ended.result()
            self._changed.clear()
            await self._changed.wait()
        return self.messages

    async def end(self) -> GrpcError | None:
        return await self._ended

    async def status(self) -> str:
        error = await self.end()
        return "OK" if error is None else error.status
