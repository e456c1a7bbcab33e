"""Port 8000 in front of a tritonserver, as ``serve`` has it, and what reaches Triton's port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.helpers.waiting import join, until
from trtllm_bls.http.generate import TritonHttp
from trtllm_bls.http.keys import key_of
from trtllm_bls.http.limits import ConnectionLimits
from trtllm_bls.openai.workers import uvicorn_options

KEY = "secret"


@dataclass
class Front:
    """``port`` answers everybody, ``keyed`` who has the key; ``forwarded``: requests, as bytes."""

    port: int
    keyed: int
    forwarded: list[bytes] = field(default_factory=list)


@contextmanager
def in_front_of(grpc_url: str, http_url: str) -> Iterator[Front]:
    """Of Triton at these addresses."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    front = Front(*(each.getsockname()[1] for each in listening))
    apps: list[TritonHttp] = []

    async def program(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            is_allowed = partial(key_of, (sha256(KEY.encode()).digest(),))
            for keys in ({}, {"is_allowed": is_allowed}):
                apps.append(TritonHttp(grpc_url, recorder, **keys))  # type: ignore[arg-type]
            await send({"type": "lifespan.startup.complete"})
            await receive()
            for app in apps:
                await app.close()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await apps[scope["server"][1] == front.keyed](scope, receive, send)

    with _recording(http_url, front.forwarded) as recorder:
        options = uvicorn_options(ConnectionLimits(), exit_timeout=5)
        running = uvicorn.Server(uvicorn.Config(program, date_header=False, **options))
        thread = threading.Thread(target=running.run, args=(listening,), daemon=True)
        thread.start()
        try:
            until(lambda: running.started or not thread.is_alive())
            assert running.started, "uvicorn did not start"
            yield front
        finally:
            running.should_exit = True
            join(thread)
            for each in listening:
                each.close()


@contextmanager
def _recording(http_url: str, into: list[bytes]) -> Iterator[str]:
    """A port that is Triton's, and keeps what is sent to it: a connection brings one request."""
    host, _, port = http_url.removeprefix("http://").rpartition(":")

    def relay(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port)), timeout=60) as server:
            back = threading.Thread(target=_pump, args=(server, client, []), daemon=True)
            back.start()
            parts: list[bytes] = []
            into.append(b"")
            place = len(into) - 1
            _pump(client, server, parts, lambda: into.__setitem__(place, b"".join(parts)))
            join(back)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=relay, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _pump(
    source: socket.socket, sink: socket.socket, parts: list[bytes], noted: Any = lambda: None
) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            parts.append(part)
            noted()
            sink.sendall(part)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
