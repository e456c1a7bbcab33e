"""Servers as processes of their own: how one is started, and when it is ready."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench import repository
from tests.helpers.ports import unused_ports
from trtllm_bls.operate.preparation import SENDING_THREADS
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings

START_S = 120


def openai_command(port: int, model: Path, workers: int | str, *engine: str) -> list[str]:
    """``trtllm-bls openai`` with so many workers, over what the options ``engine`` name."""
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", str(port)]
    command += ["--workers", str(workers), "--tokenizer-dir", str(model)]
    return [*command, "--max-running-requests", "8192", "--max-queued-requests", "8192", *engine]


def smg_command(program: str, port: int, model: Path, *workers: str) -> list[str]:
    """The gateway smg over ``workers``, without retries."""
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model-path", str(model), "--prometheus-port", str(unused_ports(1)[0])]
    command += ["--policy", "round_robin", "--disable-retries"]
    return [*command, "--worker-urls", *workers]


@contextmanager
def serving(
    targets: list[str], engine_instances: int, step_ms: float, max_streams: int
) -> Iterator[TritonServer]:
    """A tritonserver with every target's models in it."""
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models"
        repository.write(models, targets, engine_instances)
        settings = ServeSettings(
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            openai_port=0,
            model=repository.MODEL,
            model_repository=models,
            max_streams=max_streams,
            thread_pool_size=SENDING_THREADS,  # the engine stands for one in C++
            overrides=(Override(repository.ENGINE, "step_ms", str(step_ms)),),
        )
        with TritonServer(settings) as server:
            yield server


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[list[int]]:
    """The ids of a server's processes, once its /health says 200."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"error: {command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        yield [process.pid, *(child.pid for child in children)]
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
