"""Every process of a server killed, or stopped for 20 s, under 32 streams: what clients saw.

    python benchmarks/kill_table.py [--times 20] [--victims tensorrt_llm_bls,guard] [--actions kill]

A real tritonserver under ``trtllm-bls serve``, two scripted engines, half of the streams with
speculative decoding. Each trial has a server of its own. Every answer is compared with the right
one. "ends": how long after the blow the last client had its answer or an error. "down": when
/health/ready said so. "ready": when it said yes again and a request was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trtllm_bls.client import Client
from trtllm_bls.errors import DeadlineExceeded, TrtllmBlsError

ROOT = Path(__file__).parents[1]
MODELS = ("tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft", "preprocessing")
VICTIMS = ("tritonserver", *MODELS, "postprocessing", "guard")
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STOPPED_S = 20.0
PATIENCE_S = 60.0  # of a client
STEP_MS, TOKENS = 50, 160
PROMPT = {"text_input": "a b c d e", "end_id": -1}


@dataclass
class Trial:
    """Seconds after the blow; ``None``: it never came to that."""

    outcomes: Counter[str] = field(default_factory=Counter)
    ends: float = 0.0
    down: float | None = None
    ready: float | None = None


class Server:
    """``trtllm-bls serve`` as a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout
        self.urls: dict[str, str] = {}
        for line in process.stdout:
            name, _, url = line.partition(" ")
            self.urls[name] = url.strip()
            if name == "health":
                break

    def find(self, victim: str) -> psutil.Process:
        """The process that plays this part."""
        processes = psutil.Process(self._process.pid).children(recursive=True)
        if victim == "guard":
            return next(p for p in processes if "guard.py" in " ".join(p.cmdline()))
        if victim == "tritonserver":
            return next(p for p in processes if p.name() == victim)
        stubs = [p for p in processes if p.name().startswith("triton_python")]
        return next(p for p in stubs if f"/{victim}/" in " ".join(p.cmdline()))

    def ready(self) -> bool:
        """What its health endpoint says."""
        try:
            with urllib.request.urlopen(self.urls["health"], timeout=5) as answer:
                return bool(json.load(answer)["ok"])
        except urllib.error.HTTPError as error:
            error.close()
            return False


@contextmanager
def serving(step_ms: int = STEP_MS) -> Iterator[Server]:
    """A ready server on free ports."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "models"
        shutil.copytree(ROOT / "models", repository)
        for model in ("tensorrt_llm", "tensorrt_llm_draft"):
            shutil.rmtree(repository / model, ignore_errors=True)
            shutil.copytree(ROOT / "models" / "tensorrt_llm", repository / model)
            shutil.copy(ROOT / "benchmarks/scripted/1/model.py", repository / model / "1/model.py")
        words = [sys.executable, "-m", "trtllm_bls.cli", "serve", "--exit-timeout", "5"]
        for port in ("http", "grpc", "metrics", "health", "openai"):
            words += [f"--{port}-port", "0"]
        words += [
            "--model",
            str(ROOT / "assets/demo/target"),
            "--model-repository",
            str(repository),
        ]
        for override in (
            f"tensorrt_llm.step_ms={step_ms}",
            "tensorrt_llm_draft.step_ms=2",
            "tensorrt_llm_draft.agrees=0.5",
            "tensorrt_llm_bls.tensorrt_llm_draft_model_name=tensorrt_llm_draft",
        ):
            words += ["--set", override]
        log = (Path(scratch) / "serve.log").open("w")
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, start_new_session=True
        ) as process:
            try:
                server = Server(process)
                if "health" not in server.urls:
                    raise SystemExit(f"error: no server:\n{Path(log.name).read_text()}")
                yield server
            finally:
                process.terminate()
                process.wait(120)
                log.close()


async def answer(url: str, begun: asyncio.Event | None = None, **more: int) -> str:
    """The text of one answer, on a connection of its own."""
    text = ""
    async with Client(url) as client:
        stream = client.stream(**PROMPT, deadline_s=PATIENCE_S, **{"max_tokens": TOKENS} | more)
        async with stream:
            async for event in stream:
                text += event.text
                if begun is not None:
                    begun.set()
    return text


async def outcome(url: str, begun: asyncio.Event, expected: str, **more: int) -> str:
    """What one client saw."""
    try:
        text = await answer(url, begun, **more)
    except DeadlineExceeded:
        return "no end"
    except TrtllmBlsError:
        return "error"
    finally:
        begun.set()
    return "whole" if text == expected else "wrong"


async def trial(server: Server, victim: str, action: str, streams: int) -> Trial:
    """One blow, from the first tokens to a server that is ready again."""
    url = server.urls["gRPC"]
    expected = await answer(url)
    begun = [asyncio.Event() for _ in range(streams)]
    drafts = [{"num_draft_tokens": 4} if place % 2 else {} for place in range(streams)]
    clients = [
        asyncio.create_task(outcome(url, event, expected, **more))
        for event, more in zip(begun, drafts, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    process = server.find(victim)
    result = Trial()
    struck = time.monotonic()
    process.send_signal(ACTIONS[action])
    watching = asyncio.create_task(watch(server, result, struck, victim, action))
    for client in asyncio.as_completed(clients):
        result.outcomes[await client] += 1
        result.ends = time.monotonic() - struck
    if action == "stop":
        await asyncio.sleep(max(0.0, struck + STOPPED_S - time.monotonic()))
        with suppress(psutil.NoSuchProcess):
            process.resume()
    await watching
    return result


async def watch(server: Server, result: Trial, struck: float, victim: str, action: str) -> None:
    """Until the server is ready again, or clearly was all the time."""
    patience = STOPPED_S + 5 if action == "stop" else 10.0
    while time.monotonic() - struck < PATIENCE_S * 2:
        ready = await asyncio.to_thread(server.ready)
        if not ready and result.down is None:
            result.down = time.monotonic() - struck
        if result.down is None and time.monotonic() - struck > patience:
            return
        if ready and result.down is not None:
            with suppress(TrtllmBlsError):
                await answer(server.urls["gRPC"], max_tokens=1)
                result.ready = time.monotonic() - struck
                return
        await asyncio.sleep(0.05)


def row(victim: str, action: str, trials: list[Trial]) -> str:
    """One line of the table."""
    counts = sum((each.outcomes for each in trials), Counter())
    seen = " | ".join(str(counts[name]) for name in ("whole", "error", "wrong", "no end"))
    times = [spread([getattr(t, name) for t in trials]) for name in ("ends", "down", "ready")]
    return f"| {victim} | {action} | {seen} | {' | '.join(times)} |"


def spread(seconds: list[float | None]) -> str:
    """Median and worst; a dash where nothing was to be measured."""
    known = [each for each in seconds if each is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.1f} / {max(known):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--actions", default=",".join(ACTIONS))
    given = parser.parse_args()
    print(
        f"{given.streams} streams, {given.times} times each; {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}; "
        "seconds are median / worst\n"
    )
    print("| process | | whole | error | wrong | no end | ends | down | ready |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for victim in given.victims.split(","):
        for action in given.actions.split(","):
            trials = []
            for _ in range(given.times):
                with serving() as server:
                    trials.append(asyncio.run(trial(server, victim, action, given.streams)))
            print(row(victim, action, trials), flush=True)


if __name__ == "__main__":
    main()
