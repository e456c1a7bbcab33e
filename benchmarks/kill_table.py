"""Every process of a server killed, or stopped for 20 s, under 32 streams: what clients saw.

    python benchmarks/kill_table.py [--times 20] [--parallel 8] [--victims tensorrt_llm_bls,guard]

A real tritonserver under ``trtllm-bls serve``, two scripted engines, half of the streams with
speculative decoding. Each trial has a server of its own, with its own ports, work directory and
shared memory; ``--parallel`` runs so many at once. Every answer, and what came of one before an
error, is compared with the right one. "ends": how long after the blow the last client had its
answer or an error. "down": when /health/ready said so. "ready": when it said yes again and a
request was answered; a trial ends there, so a process whose server was replaced is not waited for.

Prints a table; ``--json`` is written after every trial, ``--within`` starts none after so many
seconds, and progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from bench.repository import ROOT, write_scripted_pair

from trtllm_bls.client import Client
from trtllm_bls.errors import DeadlineExceeded, TrtllmBlsError

MODELS = ("tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft", "preprocessing")
VICTIMS = ("tritonserver", *MODELS, "postprocessing", "guard")
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STOPPED_S = 20.0
PATIENCE_S = 60.0  # of a client
UNNOTICED_S = 5.0  # a server that is ready for so long after the blow was not hurt by it
FIRST_PORT = 20_000  # below those that systems hand out: nobody takes them during a restart
STEP_MS, TOKENS = 50, 160
PROMPT = {"text_input": "a b c d e", "end_id": -1}
RIGHT: list[str] = []  # the whole answer, from this process's first server: all say the same


@dataclass
class Trial:
    """Seconds after the blow; ``None``: it never came to that."""

    victim: str
    action: str
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
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
def serving(step_ms: int = STEP_MS, place: int = 0) -> Iterator[Server]:
    """A ready server on the ports of this place."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "models"
        write_scripted_pair(repository)
        words = [sys.executable, "-m", "trtllm_bls.cli", "serve", "--exit-timeout", "5"]
        for number, port in enumerate(("http", "grpc", "metrics", "health")):
            words += [f"--{port}-port", str(FIRST_PORT + 10 * place + number)]
        words += ["--openai-port", "0", "--model", str(ROOT / "assets/demo/target")]
        words += ["--model-repository", str(repository)]
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


async def answer(url: str, heard: list[str] | None = None, **more: int) -> str:
    """The text of one answer, on a connection of its own; pieces are added to ``heard``."""
    heard = [] if heard is None else heard
    async with Client(url) as client:
        stream = client.stream(**PROMPT, deadline_s=PATIENCE_S, **{"max_tokens": TOKENS} | more)
        async with stream:
            async for event in stream:
                heard.append(event.text)
    return "".join(heard)


async def outcome(
    url: str, heard: list[str], expected: str, errors: Counter[str], **more: int
) -> str:
    """What one client saw."""
    try:
        text = await answer(url, heard, **more)
    except DeadlineExceeded:
        return "no end"
    except TrtllmBlsError as error:
        errors[f"{type(error).__name__}: {error}"] += 1
        return "error" if expected.startswith("".join(heard)) else "wrong"
    return "whole" if text == expected else "wrong"


async def trial(server: Server, victim: str, action: str, streams: int) -> Trial:
    """One blow, from the first tokens to a server that is ready again."""
    url, result = server.urls["gRPC"], Trial(victim, action)
    if not RIGHT:
        RIGHT.append(await answer(url))
    expected = RIGHT[0]
    heard: list[list[str]] = [[] for _ in range(streams)]
    drafts = [{"num_draft_tokens": 4} if place % 2 else {} for place in range(streams)]
    clients = [
        asyncio.create_task(outcome(url, pieces, expected, result.errors, **more))
        for pieces, more in zip(heard, drafts, strict=True)
    ]
    while not all(pieces or client.done() for pieces, client in zip(heard, clients, strict=True)):
        await asyncio.sleep(0.01)
    process = server.find(victim)
    struck = time.monotonic()
    process.send_signal(ACTIONS[action])
    watching = asyncio.create_task(watch(server, result, struck, clients))
    for client in asyncio.as_completed(clients):
        result.outcomes[await client] += 1
        result.ends = time.monotonic() - struck
    if action == "stop":
        await asyncio.wait({watching}, timeout=max(0.0, struck + STOPPED_S - time.monotonic()))
        with suppress(psutil.NoSuchProcess):
            process.resume()
    await watching
    return result


async def watch(
    server: Server, result: Trial, struck: float, clients: list[asyncio.Task[str]]
) -> None:
    """Until the server is ready again, or was all the time until the clients' end."""
    while (after := time.monotonic() - struck) < PATIENCE_S * 2:
        ready = await asyncio.to_thread(server.ready)
        after = time.monotonic() - struck
        if not ready and result.down is None:
            result.down = after
        if result.down is None and after > UNNOTICED_S and all(each.done() for each in clients):
            return
        if ready and result.down is not None:
            with suppress(TrtllmBlsError):
                await answer(server.urls["gRPC"], max_tokens=1)
                result.ready = time.monotonic() - struck
                return
        await asyncio.sleep(0.05)


def run(victim: str, action: str, streams: int, place: int) -> Trial:
    """One trial, on a server of its own."""
    with serving(place=place) as server:
        return asyncio.run(trial(server, victim, action, streams))


def run_all(given: argparse.Namespace) -> Iterator[Trial]:
    """All trials, each cell once, then each once more; a process for each that runs at once."""
    cells = [(v, a) for v in given.victims.split(",") for a in given.actions.split(",")]
    waiting = deque(cells * given.times)
    places = list(range(given.parallel))
    running: dict[Future[Trial], int] = {}
    begun = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.parallel, mp_context=spawn) as pool:
        while running or waiting:
            while places and waiting:
                place = places.pop()
                running[pool.submit(run, *waiting.popleft(), given.streams, place)] = place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                places.append(running.pop(future))
                if error := future.exception():
                    print(f"no trial: {error!r}", file=sys.stderr)
                else:
                    yield future.result()
            if given.within and time.monotonic() - begun > given.within:
                waiting.clear()


def row(victim: str, action: str, trials: list[Trial]) -> str:
    """One line of the table."""
    counts = sum((each.outcomes for each in trials), Counter())
    seen = " | ".join(str(counts[name]) for name in ("whole", "error", "wrong", "no end"))
    times = [spread([getattr(t, name) for t in trials]) for name in ("ends", "down", "ready")]
    return f"| {victim} | {action} | {len(trials)} | {seen} | {' | '.join(times)} |"


def spread(seconds: list[float | None]) -> str:
    """Median, 95th percentile and worst; a dash where nothing was to be measured."""
    known = sorted(each for each in seconds if each is not None)
    if not known:
        return "-"
    p95 = known[math.ceil(0.95 * len(known)) - 1]
    return f"{statistics.median(known):.1f} / {p95:.1f} / {known[-1]:.1f}"


def table(trials: list[Trial]) -> str:
    """All lines of the table, and what the errors said."""
    lines = [
        "| process | | trials | whole | error | wrong | no end | ends | down | ready |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for victim, action in dict.fromkeys((each.victim, each.action) for each in trials):
        same = [each for each in trials if (each.victim, each.action) == (victim, action)]
        lines.append(row(victim, action, same))
    errors = sum((each.errors for each in trials), Counter())
    return "\n".join([*lines, "", *(f"{n} x {said}" for said, n in errors.most_common())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--within", type=float, help="seconds after which no trial starts")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--actions", default=",".join(ACTIONS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    conditions = (
        f"{given.streams} streams, {given.parallel} servers at once; {os.cpu_count()} cores, "
        f"load at the start {os.getloadavg()[0]:.0f}, Python {platform.python_version()}; "
        "seconds are median / p95 / worst"
    )
    begun = time.monotonic()
    trials: list[Trial] = []
    for each in run_all(given):
        trials.append(each)
        if given.json:
            told = {"conditions": conditions, "trials": [vars(done) for done in trials]}
            given.json.write_text(json.dumps(told, indent=1))
        print(f"[{len(trials)}, {time.monotonic() - begun:.0f} s] {each}", file=sys.stderr)
    print(f"{conditions}\n\n{table(trials)}")


if __name__ == "__main__":
    main()
