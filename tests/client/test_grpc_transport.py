"""The gRPC client over h2, against grpcio's own server and, where a server must misbehave, h2's."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamReset

from trtllm_bls.engines.grpc_transport import Connection, GrpcCall, GrpcError

MEGABYTE = 1 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # with it, a free port may be one that another grpcio server has
)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


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
        except asyncio.CancelledError:
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
    address = f"localhost:{port}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield server, f"localhost:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(target: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Connection]:
    connection = Connection(target, tls=tls)
    try:
        yield connection
    finally:
        await connection.close()


class Caller:
    """A call, and what its callbacks were given."""

    def __init__(self, connection: Connection, name: str, *messages: bytes) -> None:
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


# Against grpcio's server


def test_a_unary_call_answers() -> None:
    """The headers are those of the gRPC protocol."""

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (_, target), connected(target) as connection:
            assert await connection.unary("/test.Service/reverse", b"abc") == b"cba"
            assert await connection.unary("/test.Service/reverse", b"", timeout=30) == b""
        assert service.metadata["user-agent"] == "trtllm-bls"

    run(scenario())


def test_an_unknown_method_is_unimplemented() -> None:
    """An answer of headers alone is an ending too."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target), connected(target) as connection:
            with pytest.raises(GrpcError) as caught:
                await connection.unary("/test.Service/nothing", b"")
            assert caught.value.status == "UNIMPLEMENTED"

    run(scenario())


@pytest.mark.parametrize("details", ["naïve: 100 % wrong\n再来", " space around ", ""])
def test_an_error_has_its_status_and_details(details: str) -> None:
    """Details are any text; the connection lives on."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target), connected(target) as connection:
            for _ in range(2):
                with pytest.raises(GrpcError) as caught:
                    await connection.unary("/test.Service/fail", details.encode())
                # A space at the edge is lost on HTTP/2's way; it must not cost more than itself.
                assert caught.value.status == "INVALID_ARGUMENT"
                assert caught.value.details.strip(" ") == details.strip(" ")

    run(scenario())


def test_a_unary_call_that_takes_too_long_is_cancelled() -> None:
    """The server sees the cancellation."""

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (_, target), connected(target) as connection:
            with pytest.raises(GrpcError) as caught:
                await connection.unary("/test.Service/hold", b"", timeout=0.2)
            assert caught.value.status == "DEADLINE_EXCEEDED"
            assert "did not answer in time" in caught.value.details
            await connection.unary("/test.Service/reverse", b"")
            assert service.running == 0

    run(scenario())


def test_many_streams_keep_their_messages_apart_and_in_order() -> None:
    """More streams than a server's default limit of 100, each with many messages."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target), connected(target) as connection:
            sent = {k: [f"{k}:{i}".encode() * (i % 40) for i in range(50)] for k in range(150)}
            callers = {k: Caller(connection, "echo", *messages) for k, messages in sent.items()}
            for caller in callers.values():
                caller.call.half_close()
            for k, caller in callers.items():
                assert await caller.status() == "OK"
                assert caller.messages == sent[k] and caller.call.replies == 50
                assert caller.call.done

    run(scenario())


def test_large_messages_flow_both_ways() -> None:
    """50 MB there and back on one stream, while another is answered."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target), connected(target) as connection:
            large = bytes(range(251)) * (50 * MEGABYTE // 251)
            caller = Caller(connection, "echo", large, b"small", large)
            assert await connection.unary("/test.Service/reverse", b"ab") == b"ba"
            assert not caller.over
            caller.call.half_close()
            assert await caller.status() == "OK"
            assert caller.messages == [large, b"small", large]

    run(scenario())


def test_a_call_is_kept_for_the_next_request() -> None:
    """Two requests one after the other, each with callbacks of its own."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target), connected(target) as connection:
            caller = Caller(connection, "echo", b"one")
            assert await caller.until(1) == [b"one"]
            second: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
            caller.call.on_messages = second.set_result
            caller.call.send(b"two")
            assert await second == [b"two"]
            caller.call.half_close()
            caller.call.half_close()
            assert await caller.status() == "OK" and caller.call.replies == 2
            with pytest.raises(RuntimeError):
                caller.call.send(b"three")

    run(scenario())


def test_a_server_may_end_a_call_before_its_caller_does() -> None:
    """The stream is given back: calls far beyond the server's limit go through one by one."""

    async def scenario() -> None:
        one = (("grpc.max_concurrent_streams", 1),)
        async with grpcio(Service(), options=one) as (_, target), connected(target) as connection:
            for _ in range(5):
                caller = Caller(connection, "mute", b"unread")
                assert await caller.status() == "OK"
                caller.call.send(b"too late, and no error")
                caller.call.cancel()

    run(scenario())


def test_a_cancelled_call_ends_in_the_server_and_leaves_the_others_alone() -> None:
    """No callback follows a cancellation."""

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (_, target), connected(target) as connection:
            gone, other = Caller(connection, "hold"), Caller(connection, "echo", b"a")
            await gone.until(1)
            gone.call.cancel()
            gone.call.cancel()
            await service.cancelled.wait()
            other.call.send(b"b")
            assert await other.until(2) == [b"a", b"b"]
            assert gone.call.done and not gone.over and gone.messages == [b"held"]

    run(scenario())


def test_a_call_cancelled_before_it_was_sent_sends_nothing() -> None:
    """Cancelled at once, or while it waits for a free stream."""

    async def scenario() -> None:
        one = (("grpc.max_concurrent_streams", 1),)
        service = Service()
        async with grpcio(service, options=one) as (_, target), connected(target) as connection:
            Caller(connection, "hold", b"never").call.cancel()
            assert await connection.unary("/test.Service/reverse", b"ab") == b"ba"
            first = Caller(connection, "echo", b"a")
            await first.until(1)
            Caller(connection, "hold", b"never").call.cancel()
            last = Caller(connection, "echo", b"z")
            first.call.half_close()
            assert await last.until(1) == [b"z"]
            assert service.most_running == 0

    run(scenario())


def test_messages_of_many_calls_may_gather() -> None:
    """None is lost or out of order, and the connection ends as any other."""

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (_, target):
            connection = Connection(target, gathers=True)
            callers = [Caller(connection, "hold") for _ in range(40)]
            for caller in callers:
                caller.call.half_close()
                await caller.until(1)
            service.released.set()
            assert [await caller.status() for caller in callers] == ["OK"] * 40
            assert all(caller.messages == [b"held", b"released"] for caller in callers)
            await connection.close()

    run(scenario())


def test_calls_beyond_the_servers_limit_wait_in_order() -> None:
    """SETTINGS_MAX_CONCURRENT_STREAMS holds from the first call on."""

    async def scenario() -> None:
        two, service = (("grpc.max_concurrent_streams", 2),), Service()
        async with grpcio(service, options=two) as (_, target), connected(target) as connection:
            callers = [Caller(connection, "hold") for _ in range(10)]
            ended: list[Caller] = []
            for caller in callers:
                caller.call.half_close()
                caller.when_over(ended.append)
            await callers[0].until(1)
            await callers[1].until(1)
            assert [bool(caller.batches) for caller in callers[2:]] == [False] * 8
            service.released.set()
            assert [await caller.status() for caller in callers] == ["OK"] * 10
            # Each began when all but one of those before it had ended.
            assert all(ended.index(caller) >= k - 1 for k, caller in enumerate(callers))
            assert service.most_running <= 2

    run(scenario())


def test_a_server_that_stops_ends_its_calls_and_is_found_again_on_its_port() -> None:
    """UNAVAILABLE in mid-stream, UNAVAILABLE while it is gone, and then as before."""

    async def scenario() -> None:
        async with grpcio(Service()) as (server, target), connected(target) as connection:
            caller = Caller(connection, "hold")
            await caller.until(1)
            await server.stop(None)
            assert await caller.status() in ("UNAVAILABLE", "CANCELLED")
            with pytest.raises(GrpcError) as caught:
                await connection.unary("/test.Service/reverse", b"")
            assert caught.value.status == "UNAVAILABLE"
            async with grpcio(Service(), port=int(target.split(":")[1])):
                assert await connection.unary("/test.Service/reverse", b"ab") == b"ba"

    run(scenario())


def test_after_goaway_running_calls_finish_and_new_ones_connect_anew() -> None:
    """The new connection finds nobody."""

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (server, target), connected(target) as connection:
            holder, echo = Caller(connection, "hold"), Caller(connection, "echo", b"a")
            await holder.until(1)
            await echo.until(1)
            stopping = asyncio.create_task(server.stop(30))
            status = ""
            while status != "UNAVAILABLE":  # CANCELLED where the server knows before its GOAWAY
                try:
                    await connection.unary("/test.Service/reverse", b"")
                except GrpcError as error:
                    status = error.status
            echo.call.send(b"b")
            assert await echo.until(2) == [b"a", b"b"]
            service.released.set()
            echo.call.half_close()
            holder.call.half_close()
            assert [await echo.status(), await holder.status()] == ["OK", "OK"]
            assert holder.messages == [b"held", b"released"]
            await stopping

    run(scenario())


def test_tls_is_verified_and_speaks_h2() -> None:
    """A certificate of an authority that the context trusts, and one that it does not."""

    async def scenario() -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        credentials = grpc.ssl_server_credentials(
            [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
        )
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        async with grpcio(Service(), credentials=credentials) as (_, target):
            async with connected(target, trusting) as connection:
                assert await connection.unary("/test.Service/reverse", b"ab") == b"ba"
                large = bytes(MEGABYTE)
                caller = Caller(connection, "echo", large)
                assert await caller.until(1) == [large]
            async with connected(target, ssl.create_default_context()) as connection:
                caller = Caller(connection, "echo", b"")
                error = await caller.end()
                assert error and error.status == "UNAVAILABLE" and "certificate" in error.details

    run(scenario())


def test_a_callback_that_raises_costs_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the server is told."""

    def broken(_: object) -> None:
        raise ValueError("broken callback")

    async def scenario() -> None:
        service = Service()
        async with grpcio(service) as (_, target), connected(target) as connection:
            other = Caller(connection, "echo", b"a")
            call = connection.open("/test.Service/hold", broken, broken)
            await service.cancelled.wait()
            assert call.done
            connection.open("/test.Service/fail", broken, broken).half_close()
            other.call.send(b"b")
            assert await other.until(2) == [b"a", b"b"]
            with pytest.raises(GrpcError):
                await connection.unary("/test.Service/fail", b"")

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "broken callback",
        "broken callback",
    ]


def test_closing_ends_what_is_open() -> None:
    """Connected or still connecting; later calls are refused."""

    async def scenario() -> None:
        async with grpcio(Service()) as (_, target):
            connection = Connection(target)
            running = Caller(connection, "hold")
            await running.until(1)
            waiting = Caller(connection, "hold")
            await connection.close()
            assert [await running.status(), await waiting.status()] == ["CANCELLED"] * 2
            with pytest.raises(GrpcError):
                Caller(connection, "hold")
            connection = Connection(target)
            connecting = Caller(connection, "hold")
            await connection.close()
            await connection.close()
            assert await connecting.status() == "CANCELLED"

    run(scenario())


# Servers that are not there, or not gRPC's


@pytest.mark.parametrize("target", ["localhost", ":8001", "localhost:", "localhost:grpc"])
def test_a_target_is_a_host_and_a_port(target: str) -> None:
    """Said where it is given, not at the first call."""
    with pytest.raises(ValueError, match="host:port"):
        Connection(target)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_refused_connection_is_unavailable(host: str) -> None:
    """Each call tries again."""

    async def scenario() -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        async with connected(f"{host}:{port}") as connection:
            for _ in range(2):
                error = await Caller(connection, "echo", b"a").end()
                assert error and error.status == "UNAVAILABLE"
                assert f"{host}:{port}" in error.details

    run(scenario())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\4\0\0\0\0\0\1abcd", b"", b"\0\0\1"]
)
def test_a_server_of_another_protocol_is_unavailable(answer: bytes) -> None:
    """Bytes that are no HTTP/2, or none at all and an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, connected(f"127.0.0.1:{port}") as connection:
            assert await Caller(connection, "echo", b"a").status() == "UNAVAILABLE"

    run(scenario())


# A server of h2's, which does what a gRPC server would not


class Peer:
    """One connection of a server written with h2; a script answers its requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.h2.initiate_connection()
        self.write()
        self._events: list[Any] = []

    def write(self, data: bytes = b"") -> None:
        self._writer.write(data or self.h2.data_to_send())

    async def trickle(self) -> None:
        """Send what is due byte by byte, each in a packet of its own as far as that is possible."""
        for byte in self.h2.data_to_send():
            self._writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def until(self, kind: type) -> Any:
        """The next event of a kind; those before it are forgotten."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionError("the client has gone")
            self._events += self.h2.receive_data(data)
            self.write()

    async def request(self) -> int:
        """The stream of the next request, its response begun."""
        event = await self.until(RequestReceived)
        self.h2.send_headers(
            event.stream_id, [(":status", "200"), ("content-type", "application/grpc")]
        )
        return int(event.stream_id)

    def end(self, stream_id: int) -> None:
        self.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        self.write()


def prefixed(message: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def peers(*scripts: Script) -> AsyncIterator[str]:
    """A server whose first connection follows the first script, and so on."""
    left, running = list(scripts), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.current_task())
        try:
            await left.pop(0)(Peer(reader, writer))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*(task for task in running if task), return_exceptions=True)


def against(script: Script, *more: Script) -> Callable[[Callable[[Connection], Any]], None]:
    """Run a scenario with a connection to such a server."""

    def play(scenario: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with peers(script, *more) as target, connected(target) as connection:
                await scenario(connection)

        run(whole())

    return play


def test_messages_may_be_cut_anywhere() -> None:
    """Frames of single bytes that arrive as single bytes, padding included."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        for byte in prefixed(b"hello") + prefixed(b"") + prefixed(b"world"):
            peer.h2.send_data(stream_id, bytes([byte]), pad_length=byte % 3 or None)
        await peer.trickle()
        peer.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        await peer.trickle()

    async def scenario(connection: Connection) -> None:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "OK"
        assert caller.messages == [b"hello", b"", b"world"]

    against(script)(scenario)


def test_messages_that_arrive_together_are_given_together() -> None:
    """Of each call in one list, before the end of the call."""

    async def script(peer: Peer) -> None:
        first, second = await peer.request(), await peer.request()
        for k in range(3):
            peer.h2.send_data(first, prefixed(b"first %d" % k) + prefixed(b"and more"))
            peer.h2.send_data(second, prefixed(b"second %d" % k))
        peer.end(first)
        await peer.until(DataReceived)

    async def scenario(connection: Connection) -> None:
        first, second = Caller(connection, "echo"), Caller(connection, "echo")
        assert await first.status() == "OK"
        assert [len(batch) for batch in first.batches] == [6]
        assert second.batches == [[b"second 0", b"second 1", b"second 2"]]
        second.call.send(b"enough")

    against(script)(scenario)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCodes.CANCEL, "CANCELLED"),
        (ErrorCodes.ENHANCE_YOUR_CALM, "RESOURCE_EXHAUSTED"),
        (ErrorCodes.INADEQUATE_SECURITY, "PERMISSION_DENIED"),
        (ErrorCodes.NO_ERROR, "INTERNAL"),
        (0xBEEF, "INTERNAL"),
    ],
)
def test_a_reset_stream_has_the_status_of_its_code(code: int, status: str) -> None:
    """gRPC's table."""

    async def script(peer: Peer) -> None:
        peer.h2.reset_stream((await peer.until(RequestReceived)).stream_id, code)
        peer.write()

    async def scenario(connection: Connection) -> None:
        assert await Caller(connection, "echo", b"a").status() == status

    against(script)(scenario)


def test_refused_calls_are_sent_again_in_order_until_the_server_takes_them() -> None:
    """A refused stream was never looked at; in which order streams are refused plays no part."""
    messages = [b"first", b"second", b"third"]

    async def script(peer: Peer) -> None:
        for _ in range(6):
            streams = [(await peer.until(RequestReceived)).stream_id for _ in messages]
            for stream_id in reversed(streams):
                peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            peer.write()
        taken = [await peer.request() for _ in messages]
        for stream_id, message in zip(taken, messages, strict=True):
            received = await peer.until(DataReceived)
            assert (received.stream_id, received.data) == (stream_id, prefixed(message))
            peer.h2.send_data(stream_id, received.data)
            peer.end(stream_id)

    async def scenario(connection: Connection) -> None:
        callers = [Caller(connection, "echo", message) for message in messages]
        assert [await caller.status() for caller in callers] == ["OK"] * 3
        assert [caller.messages for caller in callers] == [[message] for message in messages]

    against(script)(scenario)


def test_a_call_that_is_refused_for_long_is_unavailable() -> None:
    """The others go on."""

    async def script(peer: Peer) -> None:
        stream_id = (await peer.until(RequestReceived)).stream_id
        peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        peer.write()
        peer.end(await peer.request())

    async def scenario() -> None:
        async with peers(script) as target:
            connection = Connection(target, refused_seconds=0)
            assert await Caller(connection, "echo", b"a").status() == "UNAVAILABLE"
            assert await Caller(connection, "echo", b"b").status() == "OK"
            await connection.close()

    run(scenario())


@pytest.mark.parametrize(
    ("headers", "body", "error"),
    [
        ([(":status", "503")], b"busy", "UNAVAILABLE: HTTP status 503"),
        ([(":status", "404"), ("content-type", "text/html")], b"", "UNKNOWN: HTTP status 404"),
        ([(":status", "200"), ("content-type", "text/html")], b"<html>", "UNKNOWN: not gRPC"),
        ([(":status", "200")], b"", "UNKNOWN: the call ended without a grpc-status"),
        ([(":status", "200")], prefixed(b"a"), "UNKNOWN: the call ended without a grpc-status"),
        ([(":status", "200")], prefixed(b"a", compressed=1), "INTERNAL: the server compressed"),
        ([(":status", "200"), ("grpc-status", "99")], b"", "UNKNOWN: "),
    ],
)
def test_what_is_no_grpc_response_is_a_clear_error(
    headers: list[tuple[str, str]], body: bytes, error: str
) -> None:
    """The connection goes on."""

    async def script(peer: Peer) -> None:
        event = await peer.until(RequestReceived)
        peer.h2.send_headers(event.stream_id, headers, end_stream=not body)
        if body:
            peer.h2.send_data(event.stream_id, body, end_stream=True)
        peer.write()
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"next"))
        peer.end(stream_id)

    async def scenario(connection: Connection) -> None:
        assert str(await Caller(connection, "echo", b"a").end()).startswith(error)
        assert await connection.unary("/test.Service/echo", b"") == b"next"

    against(script)(scenario)


def test_an_end_within_a_message_is_an_error() -> None:
    """Though the status says OK."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"whole") + prefixed(b"cut")[:-1])
        peer.end(stream_id)

    async def scenario(connection: Connection) -> None:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "INTERNAL"
        assert caller.messages == [b"whole"]

    against(script)(scenario)


def test_goaway_ends_the_calls_beyond_its_last_stream_alone() -> None:
    """Those go over the next connection, with all that they had sent."""

    async def script(peer: Peer) -> None:
        first = await peer.request()
        await peer.until(RequestReceived)
        peer.write()
        await peer.until(DataReceived)
        peer.write(bytes.fromhex("00000a 07 00 00000000") + first.to_bytes(4, "big") + bytes(4))
        peer.write(b"ok")
        peer.h2.send_data(first, prefixed(b"still here"))
        peer.end(first)

    async def next_script(peer: Peer) -> None:
        stream_id = await peer.request()
        again = await peer.until(DataReceived)
        assert again.stream_id == stream_id
        peer.h2.send_data(stream_id, again.data)
        peer.end(stream_id)

    async def scenario(connection: Connection) -> None:
        first, second = Caller(connection, "echo"), Caller(connection, "echo", b"a")
        assert await second.status() == "OK" and second.messages == [b"a"]
        assert await first.status() == "OK" and first.messages == [b"still here"]

    against(script, next_script)(scenario)


def test_a_server_that_never_takes_a_call_is_unavailable() -> None:
    """A GOAWAY on each connection: a call is not moved for ever."""

    async def script(peer: Peer) -> None:
        peer.write(bytes.fromhex("00000a 07 00 00000000 00000000 00000000") + b"no")
        await peer.until(RequestReceived)

    async def scenario(connection: Connection) -> None:
        error = await Caller(connection, "echo", b"a").end()
        assert error and error.status == "UNAVAILABLE" and error.details.endswith(": no")

    against(script, script, script)(scenario)


def test_a_server_that_breaks_the_protocol_loses_its_calls() -> None:
    """What had arrived before is delivered."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"before"))
        peer.write(peer.h2.data_to_send() + bytes.fromhex("000000 08 00 00000000"))

    async def scenario(connection: Connection) -> None:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "UNAVAILABLE"
        assert caller.messages == [b"before"]

    against(script)(scenario)


def test_a_cancelled_stream_is_reset_and_its_late_messages_are_dropped() -> None:
    """The server may send until it has read the reset."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"early"))
        peer.write()
        data = b"\0\0\x06\0\0" + stream_id.to_bytes(4, "big") + prefixed(b"x")
        event = await peer.until(StreamReset)
        assert event.error_code == ErrorCodes.CANCEL
        peer.write(data)
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"next"))
        peer.end(stream_id)

    async def scenario(connection: Connection) -> None:
        caller = Caller(connection, "echo", b"a")
        await caller.until(1)
        caller.call.cancel()
        assert await connection.unary("/test.Service/echo", b"") == b"next"
        assert caller.messages == [b"early"] and not caller.over

    against(script)(scenario)
