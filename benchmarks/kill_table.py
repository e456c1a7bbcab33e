"""Every process of a server killed, or stopped for 20 s, under streams: what clients saw.

A real tritonserver under ``trtllm-bls serve``, two scripted engines, half of the streams with
speculative decoding. Each trial has a server of its own, with its own ports, work directory and
shared memory; ``--parallel`` runs so many at once. Every answer, and what came of one before an
error, is compared with the right one. "ends": how long after the blow the last client had its
answer or an error. "down": when /health/ready said so. "ready": when it said yes again and a
request was answered; a trial ends there, so a process whose server was replaced is not waited for.

Prints a table; ``--json`` is written after every trial, ``--within`` starts none after so many
seconds, and progress goes to stderr. ``--probes N`` kills nothing: it prints how long N answers of
/health/ready, and of Triton's own /v2/health/ready, take under the streams; each must be 200.

examples:
  python benchmarks/kill_table.py --times 20 --parallel 8 --victims tensorrt_llm_bls,guard
  python benchmarks/kill_table.py --probes 3000 --streams 128 --step-ms 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
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

import numpy as np
import psutil
from bench.arguments import parser_of
from bench.report import conditions
from bench.repository import MODEL, write_scripted_pair

from tests.helpers.served import Served, good
from trtllm_bls.client import Client
from trtllm_bls.errors import DeadlineExceeded, TrtllmBlsError

MODELS = ("tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft", "preprocessing")
VICTIMS = ("tritonserver", *MODELS, "postprocessing", "guard")
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STOPPED_S = 20.0
PATIENCE_S = 60.0  # of a client
UNNOTICED_S = 5.0  # a server that is ready for so long after the blow was not hurt by it
FIRST_PORT = 20_000  # below those that systems hand out: nobody takes them during a restart
TOKENS = 160
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


def find(server: Served, victim: str) -> psutil.Process:
    """The process that plays this part."""
    if victim == "guard":
        return server.children(server.process.pid, "guard.py")[0]
    if victim == "tritonserver":
        return server.server
    return server.children(server.server.pid, f"/{victim}/")[0]


def is_ready(server: Served) -> bool:
    """What its health endpoint says."""
    try:
        return bool(good(server.urls["health"])["ok"])
    except urllib.error.HTTPError as error:
        error.close()
        return False


@contextmanager
def serving(step_ms: float, place: int = 0) -> Iterator[Served]:
    """A ready server on the ports of this place."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "models"
        write_scripted_pair(repository)
        words = ["--exit-timeout", "5", "--model", str(MODEL)]
        for number, port in enumerate(("http", "grpc", "metrics", "health")):
            words += [f"--{port}-port", str(FIRST_PORT + 10 * place + number)]
        for override in (
            f"tensorrt_llm.step_ms={step_ms}",
            "tensorrt_llm_draft.step_ms=2",
            "tensorrt_llm_draft.agrees=0.5",
            "tensorrt_llm_bls.tensorrt_llm_draft_model_name=tensorrt_llm_draft",
        ):
            words += ["--set", override]
        server = Served(repository, *words)
        try:
            yield server
        finally:
            server.process.terminate()
            server.process.wait(120)


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


async def strike(server: Served, victim: str, action: str, streams: int) -> Trial:
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
    process = find(server, victim)
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
    server: Served, result: Trial, struck: float, clients: list[asyncio.Task[str]]
) -> None:
    """Until the server is ready again, or was all the time until the clients' end."""
    while (after := time.monotonic() - struck) < PATIENCE_S * 2:
        ready = await asyncio.to_thread(is_ready, server)
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


def run(victim: str, action: str, streams: int, step_ms: float, place: int) -> Trial:
    """One trial, on a server of its own."""
    with serving(step_ms, place) as server:
        return asyncio.run(strike(server, victim, action, streams))


def run_all(options: argparse.Namespace) -> Iterator[Trial]:
    """All trials, each cell once, then each once more; a process for each that runs at once."""
    cells = [(v, a) for v in options.victims.split(",") for a in options.actions.split(",")]
    waiting = deque(cells * options.times)
    places = list(range(options.parallel))
    running: dict[Future[Trial], int] = {}
    begun = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.parallel, mp_context=spawn) as pool:
        while running or waiting:
            while places and waiting:
                place = places.pop()
                load = (options.streams, options.step_ms)
                running[pool.submit(run, *waiting.popleft(), *load, place)] = place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                places.append(running.pop(future))
                if error := future.exception():
                    print(f"no trial: {error!r}", file=sys.stderr)
                else:
                    yield future.result()
            if options.within and time.monotonic() - begun > options.within:
                waiting.clear()


def spread(seconds: list[float | None]) -> str:
    """Median, 95th percentile and worst; a dash where nothing was to be measured."""
    known = [value for value in seconds if value is not None]
    if not known:
        return "-"
    return " / ".join(f"{np.percentile(known, p, method='higher'):.1f}" for p in (50, 95, 100))


def table(trials: list[Trial]) -> str:
    """All lines of the table, and what the errors said."""
    lines = [
        "| process | | trials | whole | error | wrong | no end | ends | down | ready |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for victim, action in dict.fromkeys((trial.victim, trial.action) for trial in trials):
        same = [trial for trial in trials if (trial.victim, trial.action) == (victim, action)]
        counts = sum((trial.outcomes for trial in same), Counter())
        cells = [victim, action, str(len(same))]
        cells += [str(counts[name]) for name in ("whole", "error", "wrong", "no end")]
        for name in ("ends", "down", "ready"):
            cells.append(spread([getattr(trial, name) for trial in same]))
        lines.append(f"| {' | '.join(cells)} |")
    errors = sum((trial.errors for trial in trials), Counter())
    return "\n".join([*lines, "", *(f"{n} x {said}" for said, n in errors.most_common())])


def probe(url: str, times: int) -> list[float]:
    """Milliseconds of each answer; all must be 200."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as reply:
            reply.read()
        took.append((time.perf_counter() - begun) * 1000)
    return took


async def probe_under_load(urls: dict[str, str], streams: int, probes: int) -> None:
    right: list[str] = []

    async def stream() -> None:
        while True:
            text = await answer(urls["gRPC"], max_tokens=400)
            right.append(text)
            if text != right[0]:
                raise SystemExit(f"error: an answer differs: {text}")

    load = [asyncio.create_task(stream()) for _ in range(streams)]
    await asyncio.sleep(5)
    loop = asyncio.get_running_loop()
    # A process of its own: this one is busy reading streams.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        for url in (urls["health"], f"{urls['HTTP']}/v2/health/ready"):
            took = await loop.run_in_executor(other, probe, url, probes)
            cuts = [f"p{p} {np.percentile(took, p):.1f} ms" for p in (50, 99, 99.9)]
            print(f"{url}: {', '.join(cuts)}", flush=True)
    for task in load:
        if task.done():
            task.result()  # raises what ended it
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--times", type=int, default=3, help="trials of each kind; default 3")
    add("--parallel", type=int, default=1, help="servers at once; default 1")
    add("--within", type=float, help="seconds after which no trial starts")
    add("--streams", type=int, default=32, help="default 32")
    add("--step-ms", type=float, default=50, help="the target's step; default 50")
    add("--victims", default=",".join(VICTIMS), help=f"default {','.join(VICTIMS)}")
    add("--actions", default=",".join(ACTIONS), help=f"default {','.join(ACTIONS)}")
    add("--probes", type=int, help="of each health endpoint, in place of trials")
    add("--json", type=Path, help="a file for all trials")
    options = parser.parse_args()
    setting = conditions(options)
    for name, value in setting.items():
        print(f"{name}: {value}")
    if options.probes:
        with serving(options.step_ms) as server:
            asyncio.run(probe_under_load(server.urls, options.streams, options.probes))
        return
    begun = time.monotonic()
    trials: list[Trial] = []
    for trial in run_all(options):
        trials.append(trial)
        if options.json:
            told = {"conditions": setting, "trials": [vars(done) for done in trials]}
            options.json.write_text(json.dumps(told, indent=1))
        print(f"[{len(trials)}, {time.monotonic() - begun:.0f} s] {trial}", file=sys.stderr)
    print(f"\nseconds are median / p95 / worst\n\n{table(trials)}")


if __name__ == "__main__":
    main()
