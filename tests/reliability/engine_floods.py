"""What streams of one engine wait while another engine floods its connection, in one process.

    python -m tests.reliability.engine_floods [--seconds 10] [--streams 16]

The good engine sends a token every 10 ms on each stream. The other one sends frames of one kind as
fast as its socket takes them. Prints, for each kind, the good streams' waits between two tokens,
the process's growth, and what became of the flooded call.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.helpers.fake_grpc_server import FakeGrpcServer, Pause, tokens
from tests.helpers.waiting import join
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError
from trtllm_bls.wire.kserve import SERVICE, packed_infer_message

METHOD = SERVICE + "ModelStreamInfer"
TICK_S = 0.01
AGAIN_S = 0.5  # until the engine that floods is asked again
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """One HTTP/2 frame (RFC 9113, 4.1)."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


OK = frame(_HEADERS, b"\x88", 4, 1)  # ":status: 200", on the first call's stream
# Sent once, then again and again.
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "SETTINGS of one entry": (b"", frame(_SETTINGS, struct.pack(">HI", 3, 100))),
    "SETTINGS of 2,730 entries": (b"", frame(_SETTINGS, struct.pack(">HI", 3, 100) * 2730)),
    "PING": (b"", frame(_PING, bytes(8))),
    "WINDOW_UPDATE": (b"", frame(_WINDOW, struct.pack(">I", 1), 0, 1)),
    "GOAWAY": (b"", frame(_GOAWAY, struct.pack(">II", 2**31 - 1, 0))),
    "RST_STREAM of other streams": (b"", frame(_RST, struct.pack(">I", 8), 0, 99)),
    "DATA without content": (OK, frame(_DATA, b"", 0, 1)),
    "DATA of a byte, of a message of 4 GiB": (OK + frame(_DATA, b"\0\xff\xff\xff\xff", 0, 1),
                                              frame(_DATA, b"x", 0, 1)),
    "messages without content": (OK, frame(_DATA, bytes(5) * 100, 0, 1)),
    "headers that do not end": (frame(_HEADERS, b"", 0, 1), frame(_CONTINUATION, bytes(0), 0, 1)),
    "unknown frames": (b"", frame(99, bytes(100))),
}  # fmt: skip


def flood(kind: str, listening: socket.socket) -> None:
    """Send frames of one kind to who connects, again and again."""
    once, repeated = FLOODS[kind]
    while True:
        connection, _ = listening.accept()
        with suppress(OSError):
            connection.recv(65536)
            connection.sendall(frame(_SETTINGS))
            time.sleep(0.2)  # its request is there
            connection.sendall(once)
            block = repeated * max(1, 2**18 // len(repeated))
            connection.setblocking(False)
            while True:
                with suppress(BlockingIOError):
                    if not connection.recv(65536):
                        break
                connection.setblocking(True)
                connection.sendall(block)
                connection.setblocking(False)


def good_engine(told: Connection) -> None:
    """A token every ``TICK_S`` on every stream, without an end."""

    async def run() -> None:
        steps = [step for _ in range(100_000) for step in (tokens(1), Pause(TICK_S))]
        async with FakeGrpcServer(steps) as server:
            told.send(server.url)
            await asyncio.Event().wait()

    asyncio.run(run())


@dataclass
class Outcome:
    """Waits in seconds; growth of the largest resident size in MiB."""

    waits: list[float] = field(default_factory=list)
    ended: str = "still open"
    grown: float = 0.0
    calls: int = 0

    def p99(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.99)]


async def measure(good: str, flooded: str, seconds: float, streams: int) -> Outcome:
    """Read the good engine's streams while the other one floods."""
    outcome = Outcome()
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = packed_infer_message("tensorrt_llm", "1", [])
    other, engine = GrpcChannel(flooded), GrpcChannel(good, coalesce_reads=True)
    over = asyncio.get_running_loop().time() + seconds

    def ask() -> None:
        """One call at a time to the engine that floods, as a server's retries would."""
        outcome.calls += 1
        call = other.open(METHOD, lambda messages: None, ended)
        call.send(message)

    def ended(error: GrpcError | None) -> None:
        outcome.ended = str(error)
        if asyncio.get_running_loop().time() + AGAIN_S < over:
            asyncio.get_running_loop().call_later(AGAIN_S, ask)

    def read() -> None:
        last = time.perf_counter()

        def on_messages(messages: list[bytes]) -> None:
            nonlocal last
            now = time.perf_counter()
            outcome.waits.append(now - last)
            last = now

        call = engine.open(METHOD, on_messages, lambda error: None)
        call.send(message)

    for _ in range(streams):
        read()
    ask()
    await asyncio.sleep(seconds)
    await asyncio.gather(other.close(), engine.close())
    outcome.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1024
    return outcome


def run(kind: str | None, seconds: float, streams: int) -> Outcome:
    """One kind of flood; ``None``: the other engine is silent."""
    here, there = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        engines = [multiprocessing.Process(target=good_engine, args=(there,), daemon=True)]
        if kind is not None:
            words = (kind, listening)
            engines.append(multiprocessing.Process(target=flood, args=words, daemon=True))
        for process in engines:
            process.start()
        try:
            flooded = f"127.0.0.1:{listening.getsockname()[1]}"
            return asyncio.run(measure(here.recv(), flooded, seconds, streams))
        finally:
            for process in engines:
                process.kill()
                join(process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--streams", type=int, default=16)
    asked = parser.parse_args()
    print(
        f"{asked.streams} streams, a token every {TICK_S * 1000:g} ms, {asked.seconds:g} s each\n"
    )
    print("| frames | p50, ms | p99, ms | worst, ms | grown, MiB | calls | the call |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in (None, *FLOODS):
        made = run(kind, asked.seconds, asked.streams)
        waits = sorted(made.waits)
        shown = [1000 * value for value in (waits[len(waits) // 2], made.p99(), waits[-1])]
        told = " | ".join(f"{value:.1f}" for value in (*shown, made.grown))
        print(f"| {kind or 'none'} | {told} | {made.calls} | {made.ended} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
