"""The gRPC client over h2, against grpcio's own server and, where a server must misbehave, h2's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl

import grpc
import grpc.aio
import pytest
import trustme

from tests.helpers.grpc_calls import MEGABYTE, Caller, Service, connected, grpcio
from tests.helpers.waiting import eventually
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError

# Against grpcio's server


async def test_a_unary_call_answers() -> None:
    """The headers are those of the gRPC protocol."""
    service = Service()
    async with grpcio(service) as (_, target), connected(target) as connection:
        assert await connection.unary("/test.Service/reverse", b"abc") == b"cba"
        assert await connection.unary("/test.Service/reverse", b"", timeout=30) == b""
    assert service.metadata["user-agent"] == "trtllm-bls"


async def test_an_unknown_method_is_unimplemented() -> None:
    """An answer of headers alone is an ending too."""
    async with grpcio(Service()) as (_, target), connected(target) as connection:
        with pytest.raises(GrpcError) as caught:
            await connection.unary("/test.Service/nothing", b"")
        assert caught.value.status == "UNIMPLEMENTED"


@pytest.mark.parametrize("details", ["naïve: 100 % wrong\n再来", " space around ", ""])
async def test_an_error_has_its_status_and_details(details: str) -> None:
    """Details are any text; the connection lives on."""
    async with grpcio(Service()) as (_, target), connected(target) as connection:
        for _ in range(2):
            with pytest.raises(GrpcError) as caught:
                await connection.unary("/test.Service/fail", details.encode())
            # A space at the edge is lost on HTTP/2's way; it must not cost more than itself.
            assert caught.value.status == "INVALID_ARGUMENT"
            assert caught.value.details.strip(" ") == details.strip(" ")


async def test_a_unary_call_that_takes_too_long_is_cancelled() -> None:
    """The server sees the cancellation."""
    service = Service()
    async with grpcio(service) as (_, target), connected(target) as connection:
        with pytest.raises(GrpcError) as caught:
            await connection.unary("/test.Service/hold", b"", timeout=0.2)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        assert "did not answer in time" in caught.value.details
        await connection.unary("/test.Service/reverse", b"")
        assert service.running == 0


async def test_many_streams_keep_their_messages_apart_and_in_order() -> None:
    """More streams than a server's default limit of 100, each with many messages."""
    async with grpcio(Service()) as (_, target), connected(target) as connection:
        sent = {k: [f"{k}:{i}".encode() * (i % 40) for i in range(50)] for k in range(150)}
        callers = {k: Caller(connection, "echo", *messages) for k, messages in sent.items()}
        for caller in callers.values():
            caller.call.half_close()
        for k, caller in callers.items():
            assert await caller.status() == "OK"
            assert caller.messages == sent[k] and caller.call.replies == 50
            assert caller.call.done


async def test_large_messages_flow_both_ways() -> None:
    """50 MB there and back on one stream, while another is answered."""
    async with grpcio(Service()) as (_, target), connected(target) as connection:
        large = bytes(range(251)) * (50 * MEGABYTE // 251)
        caller = Caller(connection, "echo", large, b"small", large)
        assert await connection.unary("/test.Service/reverse", b"ab") == b"ba"
        assert not caller.over
        caller.call.half_close()
        assert await caller.status() == "OK"
        assert caller.messages == [large, b"small", large]


async def test_a_call_is_kept_for_the_next_request() -> None:
    """Two requests one after the other, each with callbacks of its own."""
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


async def test_a_server_may_end_a_call_before_its_caller_does() -> None:
    """The stream is given back: calls far beyond the server's limit go through one by one."""
    one = (("grpc.max_concurrent_streams", 1),)
    async with grpcio(Service(), options=one) as (_, target), connected(target) as connection:
        for _ in range(5):
            caller = Caller(connection, "mute", b"unread")
            assert await caller.status() == "OK"
            caller.call.send(b"too late, and no error")
            caller.call.cancel()


async def test_a_cancelled_call_ends_in_the_server_and_leaves_the_others_alone() -> None:
    """No callback follows a cancellation."""
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


async def test_a_call_cancelled_before_it_was_sent_sends_nothing() -> None:
    """Cancelled at once, or while it waits for a free stream."""
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


async def test_messages_of_many_calls_may_gather() -> None:
    """None is lost or out of order, and the connection ends as any other."""
    service = Service()
    async with grpcio(service) as (_, target):
        connection = GrpcChannel(target, coalesce_reads=True)
        callers = [Caller(connection, "hold") for _ in range(40)]
        for caller in callers:
            caller.call.half_close()
            await caller.until(1)
        service.released.set()
        assert [await caller.status() for caller in callers] == ["OK"] * 40
        assert all(caller.messages == [b"held", b"released"] for caller in callers)
        await connection.close()


async def test_no_first_message_waits_for_others() -> None:
    """As long as one of the calls has had none, each read follows as soon as there is something."""
    async with grpcio(Service()) as (_, target):
        connection = GrpcChannel(target, coalesce_reads=True)
        callers = [Caller(connection, "echo", b"a") for _ in range(40)]
        for caller in callers:
            await caller.until(1)
        (only,) = connection.connections
        transport, paused = only._transport, 0
        assert transport is not None

        async def reads_pause(sent: int) -> bool:
            callers[0].call.send(b"b")
            await callers[0].until(sent)
            return not transport.is_reading()

        silent = Caller(connection, "echo")
        for sent in range(2, 50):
            paused += await reads_pause(sent)
        assert not paused
        silent.call.cancel()
        sent = itertools.count(50)
        await eventually(lambda: reads_pause(next(sent)))
        await connection.close()


async def test_calls_beyond_the_servers_limit_wait_in_order() -> None:
    """SETTINGS_MAX_CONCURRENT_STREAMS holds from the first call on."""
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


async def test_a_server_that_stops_ends_its_calls_and_is_found_again_on_its_port() -> None:
    """In mid-stream by its connection (UNAVAILABLE) or by itself (CANCELLED), as it happens;
    UNAVAILABLE while it is gone, and then as before."""
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


async def test_after_goaway_running_calls_finish_and_new_ones_connect_anew() -> None:
    """The new connection finds nobody."""
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


async def test_tls_is_verified_and_speaks_h2() -> None:
    """A certificate of an authority that the context trusts, and one that it does not."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
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


async def test_a_callback_that_raises_costs_its_call_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged, and the server is told."""

    def broken(_: object) -> None:
        raise ValueError("broken callback")

    service = Service()
    caplog.set_level(logging.ERROR)
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
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "broken callback",
        "broken callback",
    ]


async def test_closing_ends_what_is_open() -> None:
    """Connected or still connecting; later calls are refused."""
    async with grpcio(Service()) as (_, target):
        connection = GrpcChannel(target)
        running = Caller(connection, "hold")
        await running.until(1)
        waiting = Caller(connection, "hold")
        await connection.close()
        assert [await running.status(), await waiting.status()] == ["CANCELLED"] * 2
        with pytest.raises(GrpcError):
            Caller(connection, "hold")
        connection = GrpcChannel(target)
        connecting = Caller(connection, "hold")
        await connection.close()
        await connection.close()
        assert await connecting.status() == "CANCELLED"


# Servers that are not there, or not gRPC's


@pytest.mark.parametrize("target", ["localhost", ":8001", "localhost:", "h:grpc", "h:65536"])
def test_a_target_is_a_host_and_a_port(target: str) -> None:
    """Said where it is given, not at the first call."""
    with pytest.raises(ValueError, match="host:port"):
        GrpcChannel(target)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_refused_connection_is_unavailable(host: str) -> None:
    """Each call tries again."""
    with socket.socket(socket.AF_INET6) as held:  # bound on both families, and nobody listens
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("::", 0))
        port = held.getsockname()[1]
        async with connected(f"{host}:{port}") as connection:
            for _ in range(2):
                error = await Caller(connection, "echo", b"a").end()
                assert error and error.status == "UNAVAILABLE"
                assert f"{host}:{port}" in error.details


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\4\0\0\0\0\0\1abcd", b"", b"\0\0\1"]
)
async def test_a_server_of_another_protocol_is_unavailable(answer: bytes) -> None:
    """Bytes that are no HTTP/2, or none at all and an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connected(f"127.0.0.1:{port}") as connection:
        assert await Caller(connection, "echo", b"a").status() == "UNAVAILABLE"


@pytest.mark.parametrize(
    "asks", [b"\0\0\x08\6\0\0\0\0\0" + bytes(8), b"\0\0\0\4\0\0\0\0\0"], ids=["PING", "SETTINGS"]
)
async def test_a_server_that_asks_without_reading_is_given_up(asks: bytes) -> None:
    """Each of its frames is owed an answer, and all of them would wait in memory."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
        writer.write(b"\0\0\0\4\0\0\0\0\0")
        try:
            while True:
                writer.write(asks * 4096)
                await writer.drain()
        except ConnectionError:
            gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, connected(target) as connection:
        error = await Caller(connection, "echo", b"a").end()
        assert error and error.status == "UNAVAILABLE"
        assert "does not read" in error.details
        await gone.wait()  # the socket goes, too, though what is in it was never read
