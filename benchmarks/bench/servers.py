"""Servers as processes of their own: how one is started, and when it is ready."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

START_S = 120


def openai_command(port: int, model: Path, workers: int | str, *engine: str) -> list[str]:
    """``trtllm-bls openai`` with so many workers, over what the options ``engine`` name."""
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", str(port)]
    command += ["--workers", str(workers), "--tokenizer-dir", str(model)]
    return [*command, "--max-running-requests", "8192", "--max-queued-requests", "8192", *engine]


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
