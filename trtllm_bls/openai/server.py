"""uvicorn with this API: workers that one process supervises, drained on SIGTERM."""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import signal
import socket
import ssl
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.supervisors import Multiprocess

from trtllm_bls.errors import SetupError, TrtllmBlsError
from trtllm_bls.openai.app import ApiSettings, create_app
from trtllm_bls.openai.front import Front, SharedProofs, WorkerLoop
from trtllm_bls.openai.replies import BODY_SEND, BODY_WRITE
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.services.triton_log import log_to_stderr
from trtllm_bls.settings import listen

MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, which then close first
_HUNG_S = 30  # a worker that says nothing for so long is replaced
_PR_SET_PDEATHSIG = 1
_STARTUP_FAILURE = 3  # of a worker, for which uvicorn then ends all
# Before 0.51, which containers of earlier years have, it starts such a worker for ever, or is made
# in another way.
_SUPERVISES = "target" not in inspect.signature(Multiprocess).parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the API is served.

    ``port`` 0 is any free port, ``exit_timeout`` is in seconds. With ``tls_client_ca`` only clients
    that show a certificate of these authorities are accepted.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 1
    exit_timeout: int = 30
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None


class LimitedHeaders(HttpToolsProtocol):
    """uvicorn's protocol, which by itself reads headers of any size."""

    _header_bytes = 0
    _in_headers = True

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            self.transport.write(b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        scope = cast("dict[str, Any]", self.scope)
        scope[BODY_SEND] = self.cycle.send
        scope[BODY_WRITE] = partial(self._write_body, self.cycle)

    def on_message_complete(self) -> None:
        self._in_headers, self._header_bytes = True, 0  # of the connection's next request
        super().on_message_complete()

    def _write_body(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """What ``cycle.send`` does with a part of a chunked body, in a third of its time."""
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def uvicorn_options(exit_timeout: int) -> dict[str, Any]:
    """What uvicorn is told apart from where it listens."""
    return {
        "http": LimitedHeaders,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": _KEEP_ALIVE_S,
        "timeout_graceful_shutdown": exit_timeout,
    }


def serve(parameters: BlsParameters, api: ApiSettings, server: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; requests that run then have ``exit_timeout`` seconds to end.

    Returns the exit code. Raises ``SetupError``.
    """
    listening = listen(server.host, server.port, "--port")
    with listening, TemporaryDirectory(prefix="trtllm-bls-openai-") as shared:
        _serve(parameters, replace(api, shared=Path(shared)), server, listening)
    return 0


def _serve(
    parameters: BlsParameters, api: ApiSettings, server: ServerSettings, listening: socket.socket
) -> None:
    host, port = listening.getsockname()[:2]
    scheme = "http" if server.tls_cert is None else "https"
    shown = f"[{host}]" if ":" in host else host
    options = uvicorn_options(server.exit_timeout)
    if _SUPERVISES:
        options["timeout_worker_healthcheck"] = _HUNG_S
    config = uvicorn.Config(
        partial(make_app, parameters, api, os.getpid()),
        factory=True,
        workers=server.workers,
        ssl_certfile=server.tls_cert,
        ssl_keyfile=server.tls_key,
        ssl_ca_certs=str(server.tls_client_ca) if server.tls_client_ca is not None else None,
        ssl_cert_reqs=ssl.CERT_NONE if server.tls_client_ca is None else ssl.CERT_REQUIRED,
        **options,
    )
    print(f"OpenAI API: {scheme}://{shown}:{port}/v1", flush=True)
    if not _SUPERVISES:
        _serve_with_older(config, listening)
        return
    assert api.shared is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config.loop = f"{WorkerLoop.__module__}:{WorkerLoop.__name__}"
    workers = _Workers(config, [theirs])
    # With TLS nobody but a worker can read what is asked.
    healthy = None if server.tls_cert else SharedProofs(api.shared).hold
    Front(listening, (ours, theirs), healthy, workers.should_exit.is_set).start()
    workers.run()
    if any(process.exitcode == _STARTUP_FAILURE for process in workers.processes):
        raise SetupError("the API did not start; the log says why")


def _serve_with_older(config: uvicorn.Config, listening: socket.socket) -> None:
    """One worker is this process, and nothing is in front of several."""
    if config.workers > 1:
        supervisor: Any = Multiprocess
        supervisor(config, uvicorn.Server(config).run, [listening]).run()
        return
    # uvicorn ends by the signal that stopped it; here that is a normal end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        uvicorn.Server(config).run([listening])
    except SystemExit as error:
        raise SetupError("the API did not start; the log says why") from error


class _Workers(Multiprocess):
    """uvicorn's, which would wait for the answer of a worker that ends meanwhile."""

    def init_processes(self) -> None:
        super().init_processes()
        for process in self.processes:
            process.child_conn.close()  # so that the worker's own is the last


def make_app(parameters: BlsParameters, api: ApiSettings, started_by: int) -> Starlette:
    """The application of one worker, which ends with the process ``started_by``."""
    log_to_stderr("openai")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if os.getpid() != started_by:
        end_with_parent()
        if os.getppid() != started_by:  # it has ended before
            sys.exit(0)
    try:
        return create_app(Deployment(parameters, model_name=api.model_names[0]), api)
    except TrtllmBlsError as error:
        log.error("%s", error)
        sys.exit(_STARTUP_FAILURE)


def end_with_parent() -> None:
    """Have this process drain and end when the one that started it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
