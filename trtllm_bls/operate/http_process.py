"""The HTTP in front of a server: a child process that supervises its workers.

They answer the OpenAI API, and Triton's HTTP API at ``--http-port`` in front of Triton's own port.

It is started when the models are ready and restarted when it dies. It replaces workers itself that
die or are silent. A process of it that is stopped (SIGSTOP) is killed, since nobody would notice it
for half a minute otherwise. So is a worker whose event loop is stuck: its other threads still
answer their supervisor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import psutil

from trtllm_bls.client.client import Tls
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.http.keys import KEYS_VARIABLE, read_keys
from trtllm_bls.openai.openai_command import SERVE_OPTIONS
from trtllm_bls.operate import preparation
from trtllm_bls.operate.ports import ask, curl_tls, own_tls
from trtllm_bls.operate.supervisor import (
    GRACE_MARGIN,
    Child,
    ProcessStopped,
    describe_exit,
    keep_running,
)
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings.command_options import (
    ServeSettings,
    auto_processes,
    listen,
    option,
    words_of,
)
from trtllm_bls.settings.engine_tls import trusting
from trtllm_bls.settings.model_names import BLS_NAME

_START_S = 120.0
_LOOK_S = 0.5
_PROBE_S = 15.0


def check(settings: ServeSettings) -> bool:
    """Return True if HTTP can be answered here.

    Raises ``SetupError`` if the port of the API is taken, or if a setting needs this program and
    its packages are missing. Call it before the models load, which takes long.
    """
    if not all(map(find_spec, ("uvicorn", "starlette", "msgspec", "httptools"))):
        for name in ("tls_cert", "http_keys"):
            if getattr(settings, name):
                raise SettingsError(
                    f"{option(name)}: HTTP needs pip install 'trtllm-bls[openai]' for it"
                )
        return False
    if not read_keys(settings.api_keys_file) and settings.http_keys:
        raise SettingsError(
            f"--http-keys: there are no keys; add --api-keys-file or {KEYS_VARIABLE}"
        )
    if settings.openai_port:
        listen(settings.host, settings.openai_port, "--openai-port", "no OpenAI API").close()
    return True


def model_names(settings: ServeSettings) -> tuple[str, ...]:
    """Return the names by which requests call the model.

    Where no option names them, it is called as its directory, or as the model in the user's
    repository.
    """
    if settings.served_model_names:
        return settings.served_model_names
    if settings.model is not None:
        return (preparation.real_path(settings.model).name,)
    if settings.model_repository is not None:
        return (BLS_NAME,)
    return ("demo",)


def chat_curl(url: str, settings: ServeSettings) -> str:
    """Return a command that asks the API at ``url``."""
    question = '{"role": "user", "content": "What is 12 * 9?"}'
    request = f'{{"model": "{model_names(settings)[0]}", "messages": [{question}]}}'
    headers = "-H 'Content-Type: application/json'"
    if settings.api_keys_file is not None:
        headers += ' -H "Authorization: Bearer $KEY"'
    return f"curl -s{curl_tls(settings)} {url}/v1/chat/completions {headers} -d '{request}'"


class HttpProcess:
    """``trtllm-bls openai`` in front of a running server; ``kill`` does not wait for its end.

    With ``with_api`` it has the OpenAI API too, whose address is ``url``.

    ``start`` it, then ``keep`` it: from then on it is started again whenever it fails. It drains
    when the server is asked to stop, as the server's models do. ``on_problem`` gets the
    reason when it ends, and ``None`` when it answers again; ``on_line`` gets every line of its log.
    Both are called on other threads.
    """

    def __init__(
        self,
        server: TritonServer,
        with_api: bool,
        on_problem: Callable[[str | None], object],
        on_line: Callable[[str], object],
    ) -> None:
        settings = server.settings
        self.url: str | None = None
        if with_api:
            scheme = "https" if settings.tls_cert else "http"
            self.url = f"{scheme}://{server.host}:{settings.openai_port}"
            self._probe_url = f"{self.url}/health"
        else:
            self._probe_url = f"{server.public_http_url}/v2"
        self._context = None
        tls = own_tls(settings) or Tls()
        chain = tls.certificate_chain
        key = tls.private_key
        if settings.tls_cert is not None:
            self._context = trusting(settings.tls_cert)
            if chain is not None:
                self._context.load_cert_chain(chain, key)
        grpc_url = server.grpc_url
        if settings.tls_client_ca and not key:
            grpc_url = ""  # Triton asks for a certificate, and we have none
        front = {
            "port": settings.http_port,
            "grpc": grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
            "alone": not with_api,
            "keys": settings.http_keys,
            "open_control_apis": settings.open_control_apis,
            "infer": settings.triton_infer == "on",
            "tls_pin": str(settings.tls_cert or ""),
            "tls_cert": str(chain or ""),
            "tls_key": str(key or ""),
        }
        workers = settings.openai_workers
        if workers == "auto" and not with_api:  # it reads no parameters then
            workers, _ = auto_processes(settings.max_streams, remembers=False)
        store = settings.store_dir or server.workdir / "responses"
        names = model_names(settings)
        worker_settings = replace(settings, served_model_names=names, store_dir=store)
        self.command = [
            *(sys.executable, "-m", "trtllm_bls.cli", f"--exit-with-parent={os.getpid()}"),
            "openai",
            f"--port={settings.openai_port}",
            f"--model-repository={server.repository}",
            f"--workers={workers}",
            f"--in-front-of={json.dumps(front)}",
            *words_of(worker_settings, SERVE_OPTIONS),
        ]
        self._server = server
        self._on_problem = on_problem
        self._on_line = on_line
        self._closing = threading.Event()
        self._process: Child | None = None
        self._is_away = False
        self._keeping = threading.Thread(target=self._keep, name="http", daemon=True)

    @property
    def pid(self) -> int:
        """The process id, which is that of the workers' supervisor where there are several."""
        assert self._process is not None, "it has not been started"
        return self._process.pid

    def start(self) -> None:
        """See ``Restartable``: return when it answers.

        Raises ``ProcessStopped`` if the server is stopping or has ended meanwhile, and
        ``SetupError`` if it ends or takes longer than two minutes.
        """
        self._process = Child(
            "the HTTP program",
            self.command,
            self._server.environment,
            self._on_line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._process.wait_until(self._is_well, _START_S, self.is_stopping)

    def keep(self) -> None:
        """From now on restart it when it ends."""
        self._keeping.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def is_stopping(self) -> bool:
        """See ``Restartable``: true if the server is stopping, or has ended."""
        is_server_gone = self._server.stop_requested or not self._server.running
        return self._closing.is_set() or is_server_gone

    def on_failure(self, error: SetupError, pause_s: float) -> None:
        """See ``Restartable``."""
        self._is_away = True
        self._on_problem(str(error))

    def on_recovery(self, away_s: float) -> None:
        """See ``Restartable``."""
        self._is_away = False
        self._on_problem(None)

    def discard(self) -> None:
        """See ``Restartable``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def replace(self, reason: str) -> None:
        """Kill it, so that another one is started."""
        with suppress(psutil.NoSuchProcess):
            self._kill(psutil.Process(self.pid), reason)

    def answers(self, timeout: float) -> bool:
        """Return True if it answers a GET in ``timeout`` seconds, or is being started again."""
        return self._is_away or self._status(timeout) is not None

    def close(self) -> None:
        """End it; kill it if its drain takes longer than ``--exit-timeout`` and a margin."""
        self._closing.set()
        if self._keeping.ident is not None:
            self._keeping.join()
        if self._process is not None:
            self._process.end(self._server.settings.exit_timeout + GRACE_MARGIN)

    def _keep(self) -> None:
        try:
            keep_running(self, self._server.settings.on_failure == "restart")
        except ProcessStopped:
            return
        except SetupError as error:
            self._server.fail(str(error))

    def wait(self) -> None:
        """See ``Restartable``. Until then kill processes of it that are stopped or stuck."""
        assert self._process is not None, "it has not been started"
        stopped: set[psutil.Process] = set()
        files = StatusDirectory(self._server.status_dir)
        stall_s = self._server.settings.stall_timeout
        while not self._closing.wait(_LOOK_S):
            # A single look may fall into the moment between a SIGSTOP and its SIGCONT.
            pid = self.pid
            stopped_now = set()
            workers: dict[int, psutil.Process] = {}
            with suppress(OSError, psutil.Error):
                # psutil would look at every process of the machine to find the children.
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                workers = {int(child): psutil.Process(int(child)) for child in children}
                for process in (psutil.Process(pid), *workers.values()):
                    if process.status() == psutil.STATUS_STOPPED:
                        stopped_now.add(process)
            for process in stopped & stopped_now:
                self._kill(process, "was stopped")
            stopped = stopped_now
            now = time.monotonic()
            for status in files.read():
                worker = workers.get(status.pid)
                if worker is not None and now - status.loop_at > stall_s:
                    self._kill(worker, f"had its event loop stuck for {stall_s} s")
            code = self._process.poll()
            if code is not None and not self._server.stop_requested:
                raise SetupError(f"the HTTP program has ended ({describe_exit(code)})")
            if code is not None:
                return

    def _kill(self, process: psutil.Process, reason: str) -> None:
        """Kill the process, unless another one has its id by now."""
        self._on_line(f"process {process.pid} of the HTTP program {reason}: killed it")
        with suppress(psutil.Error):
            process.kill()

    def _is_well(self) -> bool:
        """Return True if it answers that it is well.

        The API works even while an engine in another process cannot be reached.
        """
        status = self._status(_PROBE_S)
        return status == HTTPStatus.OK or (
            status is not None and self._server.settings.engine_is_elsewhere
        )

    def _status(self, timeout: float) -> int | None:
        """Return the status of its answer to a GET; ``None`` without an answer in time."""
        try:
            return ask(self._probe_url, timeout, self._context)[0]
        except (ConnectionRefusedError, TimeoutError):
            return None
        except OSError:
            if self._server.settings.tls_client_ca is None:
                return None
            # It asks for a certificate, we have none, and it refused the handshake. So it lives.
            return HTTPStatus.OK
