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
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.supervisors import Multiprocess

from trtllm_bls.errors import SetupError, TrtllmBlsError
from trtllm_bls.http.guard import ConnectionLimits, accepting, raise_descriptor_limit
from trtllm_bls.openai.app import ApiSettings, create_app
from trtllm_bls.openai.errors import error_body
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.services.triton_log import log_to_stderr
from trtllm_bls.settings import listen

try:
    from uvloop import Loop
except ModuleNotFoundError:  # uvloop has no wheel for every interpreter
    from asyncio import SelectorEventLoop as Loop  # type: ignore[assignment]

_HUNG_S = 30  # a worker whose supervisor gets no answer for this long is replaced
_HANDSHAKE_S = 10.0
_PR_SET_PDEATHSIG = 1
_STARTUP_FAILURE = 3  # exit code of a worker; uvicorn then ends all workers
# Older containers have uvicorn before 0.51. Its supervisor starts a worker that cannot start again
# and again, or has another constructor.
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


def uvicorn_options(limits: ConnectionLimits, exit_timeout: int) -> dict[str, Any]:
    """What uvicorn is told apart from where it listens."""
    return {
        **limits.uvicorn_options(),
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
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
    host = f"[{host}]" if ":" in host else host
    raise_descriptor_limit()
    options = uvicorn_options(ConnectionLimits(error_body=error_body), server.exit_timeout)
    if _SUPERVISES:
        options["timeout_worker_healthcheck"] = _HUNG_S
        options["loop"] = f"{WorkerLoop.__module__}:{WorkerLoop.__name__}"
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
    print(f"OpenAI API: {scheme}://{host}:{port}/v1", flush=True)
    if not _SUPERVISES:
        _serve_with_older(config, listening)
        return
    workers = _Workers(config, accepting(listening))
    workers.run()
    if any(process.exitcode == _STARTUP_FAILURE for process in workers.processes):
        raise SetupError("the API did not start; the log says why")


def _serve_with_older(config: uvicorn.Config, listening: socket.socket) -> None:
    """A single worker is this process, which nothing restarts."""
    if config.workers > 1:
        supervisor: Any = Multiprocess
        supervisor(config, uvicorn.Server(config).run, accepting(listening)).run()
        return
    # uvicorn ends by raising the signal that stopped it again; here that is a normal end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        uvicorn.Server(config).run(accepting(listening))
    except SystemExit as error:
        raise SetupError("the API did not start; the log says why") from error


class _Workers(Multiprocess):
    """uvicorn's supervisor. Its workers accept from one listening socket, each as it is free."""

    def init_processes(self) -> None:
        super().init_processes()
        for process in self.processes:
            # The supervisor asks over a pipe whether a worker is alive. While it holds the worker's
            # end too, it would wait 30 s for the answer of one that has just ended.
            process.child_conn.close()

    def terminate_all(self) -> None:
        # From here on the kernel refuses connections, once the workers have closed theirs too.
        for listening in self.sockets:
            listening.close()
        super().terminate_all()


class WorkerLoop(Loop):
    """An event loop that gives a TLS handshake 10 s instead of 60 s, which uvicorn cannot set."""

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """See ``asyncio``."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = _HANDSHAKE_S
        return await super().create_server(*args, **options)


def make_app(parameters: BlsParameters, api: ApiSettings, started_by: int) -> Starlette:
    """The application of one worker, which ends with the process ``started_by``."""
    log_to_stderr("openai")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if os.getpid() != started_by:
        end_with_parent()
        if os.getppid() != started_by:  # it ended before this process could ask for its signal
            sys.exit(0)
    try:
        return create_app(Deployment(parameters, model_name=api.model_names[0]), api)
    except TrtllmBlsError as error:
        log.error("%s", error)
        sys.exit(_STARTUP_FAILURE)


def end_with_parent() -> None:
    """Have this process drain and end when the one that started it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
