"""uvicorn with this API: workers that one process supervises, drained on SIGTERM."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import ssl
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import _subprocess
from uvicorn.supervisors import multiprocess
from uvicorn.supervisors.multiprocess import SIGNALS, Multiprocess

from trtllm_bls.errors import SetupError
from trtllm_bls.garbage import freeze_loaded
from trtllm_bls.http.accepting import WorkerConnections, WorkerServer
from trtllm_bls.http.generate import TritonHttp, error_json
from trtllm_bls.http.keys import key_of
from trtllm_bls.http.limits import (
    KEPT_DESCRIPTORS,
    BodyReader,
    BrowserGuard,
    ConnectionLimits,
    GuardedProtocol,
)
from trtllm_bls.openai.api_errors import error_body
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.exposition import SharedSamples
from trtllm_bls.openai.sockets import PATH, socket_protocol
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.log_lines import json_line, log_to_stderr
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.orchestrator.output import drain_output
from trtllm_bls.settings.command_options import listen, raise_open_files
from trtllm_bls.settings.engine_tls import trusting
from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.settings.parent import end_with_parent

_HUNG_S = 30  # a worker whose supervisor gets no answer for this long is replaced
_STARTUP_FAILURE = 3  # exit code of a worker; uvicorn then ends all workers
# Older containers have uvicorn before 0.51, whose supervisor has another constructor.
_SUPERVISES = "target" not in inspect.signature(Multiprocess).parameters


@dataclass(frozen=True, kw_only=True)
class TritonFront:
    """Triton's HTTP surface at ``port``, in front of Triton at ``grpc``, ``http`` and ``metrics``.

    ``alone``: the OpenAI API is not served. ``keys``: clients must send an API key here too.
    ``places``: the number of requests that the model runs, and that may wait; zeros: unknown.
    ``open_control_apis``: Triton's control APIs are answered. ``infer``: ``infer`` is answered.
    ``tls_pin``: Triton's gRPC has TLS with this certificate. ``tls_cert`` and ``tls_key`` are the
    client's certificate and its key.
    """

    port: int
    grpc: str
    http: str
    metrics: str
    alone: bool = False
    keys: bool = False
    places: tuple[int, int] = (0, 0)
    open_control_apis: bool = False
    infer: bool = True
    tls_pin: str = ""
    tls_cert: str = ""
    tls_key: str = ""


def uvicorn_options(
    limits: ConnectionLimits, exit_timeout: int, max_body_bytes: int = ApiSettings.max_body_bytes
) -> dict[str, Any]:
    """Return uvicorn's options, without those of its address."""
    return {
        "http": partial(GuardedProtocol, limits),
        "ws": socket_protocol(),
        "ws_max_size": max_body_bytes,
        "ws_per_message_deflate": False,  # a small message could decompress to any size
        "timeout_keep_alive": limits.idle_s,
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": exit_timeout,
    }


def serve(
    parameters: BlsParameters | None,
    api: ApiSettings,
    front: TritonFront | None,
    *,
    host: str,
    port: int,
    workers: int,
    workers_note: str,
    exit_timeout: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests that run then have ``exit_timeout`` seconds to end.

    ``parameters`` may be ``None`` where only ``front`` is served. ``port`` 0 is any free port.
    ``workers_note`` says for the log how ``workers`` was chosen. With ``tls_client_ca`` only
    clients with a certificate of these authorities are accepted. Raises ``SetupError``.
    """
    streams = 0
    if parameters is not None:
        streams = parameters.max_streams
    raise_open_files(KEPT_DESCRIPTORS + streams, f"lower --max-streams, which is {streams}")
    with ExitStack() as stack:
        sockets = []
        if parameters is not None:
            sockets.append(listen(host, port, "--port"))
        if front is not None:
            sockets.append(listen(host, front.port, "--http-port"))
        for listening in sockets:
            stack.enter_context(listening)
        # Lines that ``serve`` reads have Triton's form.
        as_json = front is None and parameters is not None and parameters.log_format == "json"
        log_to_stderr("openai", as_json=as_json)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        if workers_note:
            logging.getLogger(__name__).info("%s", workers_note)

        def refusal(status: int, message: str, port: int) -> bytes:
            """Write an error in the form of the API that has the port."""
            if front is not None and port == front.port:
                return error_json(message)
            return error_body(status, message)

        options = uvicorn_options(
            ConnectionLimits(error_body=refusal, socket_path=PATH.encode()),
            exit_timeout,
            api.max_body_bytes,
        )
        if _SUPERVISES:
            options["timeout_worker_healthcheck"] = _HUNG_S
        # A fork has none of its parent's threads. So the tokenizer library starts its threads in
        # the workers, and none here.
        parallel = os.environ.get("TOKENIZERS_PARALLELISM", "true")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            config = uvicorn.Config(
                make_app(parameters, replace(api, shared=SharedSamples()), front),
                workers=workers,
                ssl_certfile=tls_cert,
                ssl_keyfile=tls_key,
                ssl_ca_certs=str(tls_client_ca) if tls_client_ca else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls_client_ca else ssl.CERT_NONE,
                **options,
            )
            config.load()
        except (OSError, ValueError) as error:
            raise SetupError(f"the API did not start: {error}") from error
        os.environ["TOKENIZERS_PARALLELISM"] = parallel
        if parameters is not None:
            host, port = sockets[0].getsockname()[:2]
            if ":" in host:
                host = f"[{host}]"
            scheme = "https" if tls_cert else "http"
            line = f"OpenAI API: {scheme}://{host}:{port}/v1"
            if as_json:
                line = json_line(line)
            sys.stdout.write(f"{line}\n")
        drain_output()  # No thread may run when the workers are forked.
        freeze_loaded()
        turns = WorkerConnections()
        arguments: list[Any] = [config, sockets]
        if not _SUPERVISES:
            arguments.insert(1, WorkerServer(turns, config).run)
        supervisor = _Workers(turns, *arguments)
        supervisor.run()
        if any(worker.process.exitcode == _STARTUP_FAILURE for worker in supervisor.processes):
            raise SetupError("the API did not start; the log says why")


class _Workers(Multiprocess):
    """uvicorn's supervisor. Its workers accept from the same sockets in turn (``http.accepting``).

    They are forks of this process, which has loaded the application, and share its memory. No
    thread may run here when they are forked.
    """

    def __init__(self, turns: WorkerConnections, *arguments: Any) -> None:
        super().__init__(*arguments)
        multiprocess.Server = partial(WorkerServer, turns)  # type: ignore[assignment,attr-defined]
        _subprocess.spawn = multiprocessing.get_context("fork")  # type: ignore[assignment]
        # A worker ends by ``os._exit``, and its last lines are written by then.
        multiprocessing.util.register_after_fork(self, _drain_at_exit)
        os.register_at_fork(after_in_child=partial(self._become_worker, os.getpid()))

    def _become_worker(self, parent: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for process in self.processes:
            process.parent_conn.close()
            process.child_conn.close()
        end_with_parent(parent)

    def init_processes(self) -> None:
        super().init_processes()
        for process in self.processes:
            # The supervisor asks over a pipe whether a worker is alive. While it holds the worker's
            # end too, it would wait 30 s for the answer of one that has just ended.
            process.child_conn.close()

    def terminate_all(self) -> None:
        # The kernel refuses connections once the workers have closed their sockets too.
        for listening in self.sockets:
            listening.close()
        super().terminate_all()


def _drain_at_exit(supervisor: _Workers) -> None:
    multiprocessing.util.Finalize(None, drain_output, exitpriority=0)


def make_app(
    parameters: BlsParameters | None, api: ApiSettings, front: TritonFront | None
) -> ASGIApp:
    """Return the application of all workers: ``front`` at its port, the API at the other.

    Raises ``SetupError``, and ``OSError`` and ``ValueError`` for certificates that cannot be read.
    """
    app: ASGIApp = Starlette()
    counts: dict[str, Any] = {}
    if parameters is not None:
        backend = Deployment(parameters, model_name=api.model_names[0])
        app = create_app(backend, api)
        counts["on_refused"] = partial(backend.orchestrator.refused, "")
    if front is None:
        return app
    tls = None
    if front.tls_pin:
        tls = trusting(Path(front.tls_pin))
        if front.tls_cert:
            tls.load_cert_chain(front.tls_cert, front.tls_key)
    is_allowed = None
    if front.keys and api.keys:
        is_allowed = partial(key_of, api.keys)
    places = None
    if any(front.places):
        places = Admission(*front.places, None)
    bodies = BodyReader(api.max_body_bytes)
    triton = TritonHttp(
        front.grpc,
        front.http,
        tls,
        bodies,
        is_allowed=is_allowed,
        places=places,
        opens_control=front.open_control_apis,
        opens_infer=front.infer,
        separates_keys=not api.share_kv_cache,
        **counts,
    )
    guarded: ASGIApp = triton
    if api.allowed_hosts is not None:
        guarded = BrowserGuard(triton, api.allowed_hosts, api.allowed_origins, triton.refuse)

    async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await app(scope, receive, send)
            finally:
                await triton.close()
        else:
            _, port = scope["server"]
            if port != front.port:
                await app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close"})
            else:
                await guarded(scope, receive, send)

    return by_port
