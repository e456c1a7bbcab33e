"""The OpenAI API beside a server: a child process, started when the models are ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.util import find_spec

from trtllm_bls.errors import SetupError
from trtllm_bls.launcher.process import GRACE_MARGIN, describe_exit
from trtllm_bls.launcher.server import TritonServer
from trtllm_bls.settings import ServeSettings

MODEL = "tensorrt_llm_bls"  # whose parameters it takes
_POLL_S = 0.05
_START_S = 120.0


def check(settings: ServeSettings) -> bool:
    """Whether the API is to be served. Raises ``SetupError`` if its port is taken.

    Asked before the models load, which takes long.
    """
    if not settings.openai_port or find_spec("uvicorn") is None:
        return False
    host = settings.plain_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, settings.openai_port), family=family).close()
    except OSError as error:
        problem = os.strerror(error.errno).lower() if error.errno else str(error)
        raise SetupError(
            f"port {settings.openai_port} on {host}: {problem}; stop what uses it or "
            "choose another with --openai-port (0 = no OpenAI API)"
        ) from error
    return True


def model_name(settings: ServeSettings) -> str:
    """What requests call the model: its directory, or whatever a repository of the user's has."""
    if settings.model is not None:
        return settings.model.resolve().name
    return "demo" if settings.model_repository is None else MODEL


def chat_curl(url: str, settings: ServeSettings) -> str:
    """A command that asks the API at ``url``."""
    question = '{"role": "user", "content": "What is 12 * 9?"}'
    request = f'{{"model": "{model_name(settings)}", "messages": [{question}]}}'
    headers = "-H 'Content-Type: application/json'"
    if settings.api_keys_file is not None:
        headers += ' -H "Authorization: Bearer $KEY"'
    return f"curl -s {url}/v1/chat/completions {headers} -d '{request}'"


class OpenAIProcess:
    """``trtllm-bls openai`` for a running server; ``stop`` and ``kill`` only ask."""

    def __init__(self, server: TritonServer) -> None:
        settings = server.settings
        host = server.host if settings.tls_cert is None else settings.plain_host
        self.url = f"http://{host}:{settings.openai_port}"
        self.curl = chat_curl(self.url, settings)
        command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--exit-with-parent"]
        command += ["--host", settings.plain_host, "--port", str(settings.openai_port)]
        command += ["--model-repository", str(server.repository)]
        command += ["--workers", str(settings.openai_workers)]
        command += ["--exit-timeout", str(settings.exit_timeout)]
        if settings.expose:
            command.append("--expose")
        command += ["--served-model-name", model_name(settings)]
        if settings.api_keys_file is not None:
            command += ["--api-keys-file", str(settings.api_keys_file)]
        self._limit = settings.exit_timeout + GRACE_MARGIN
        self._process = subprocess.Popen(
            command,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the launcher's to pass on
        )

    def wait_until_ready(self) -> None:
        """Return when it answers. Raises ``SetupError`` if it does not."""
        deadline = time.monotonic() + _START_S
        while not self._answers():
            code = self._process.poll()
            if code is not None:
                raise SetupError(f"the OpenAI API did not start ({describe_exit(code)})")
            if time.monotonic() > deadline:
                raise SetupError(f"the OpenAI API did not answer within {_START_S:g} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._process.terminate()

    def kill(self) -> None:
        """Ask for the end at once."""
        self._process.kill()

    def close(self) -> None:
        """End it, at once if it takes longer than running requests have."""
        self.stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._limit)
        self.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=15):
                return True
        except (OSError, urllib.error.URLError):
            return False
