"""What routers and cluster engines in front of two replicas cost, and what they lose.

Each engine of docs/scale.md over two replicas of this package, which share nothing and have a
scripted TrtllmService each. Every answer is checked. Columns:

  killed    requests that failed of those that ran or began while a replica was killed (SIGKILL)
  affinity  of eight conversations, those whose four turns all reached one replica
  restart   requests that failed while both replicas were drained, ended and started again
  TTFT      median time to the first text of a stream, ms, above that of one replica alone
  CPU       user and system time per token of all processes but the engines and this one, µs

docs/scale.md says what to install. Use a machine with 16 cores.

examples:
  python benchmarks/routers.py --smg VENV/bin/smg --dynamo VENV/bin/python
  python benchmarks/routers.py --targets alone,smg --smg VENV/bin/smg --requests 200
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.arguments import parser_of
from bench.load import Connection, connected, events, post, text_of
from bench.processes import child_ids, cpu_seconds
from bench.report import console, print_conditions
from bench.repository import MODEL
from rich.table import Table

from doubles.scripted import Script, ScriptedEngine
from doubles.trtllm_service import Behaviour
from tests.helpers.ports import unused_ports
from tests.helpers.processes import Process
from tests.helpers.scripted_services import service_in_a_thread
from trtllm_bls.text.tokenizer import load_tokenizer

WORDS = " ".join(f"word {number}" for number in range(12))
SAID = " one two three four five six seven eight nine ten"
TOKENS, START_S, REQUEST_S, REPLICAS = 40, 180.0, 60.0, 2
SMG = """--policy cache_aware --health-check-interval-secs 1 --health-check-timeout-secs 2
    --health-failure-threshold 2 --health-success-threshold 1 --cb-timeout-duration-secs 2"""
TARGETS = ("alone", "smg", "smg-defaults", "dynamo", "dynamo-tokens")
DYNAMO = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
}


class Model:
    """What the scripted engines say: words in turn, from one that the prompt's last token chooses.

    As with a real model, what is said so far decides how it goes on, so that a request may be
    resumed elsewhere.
    """

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(MODEL)
        self._ids = list(dict.fromkeys(self._tokenizer.encode_word(SAID)))
        self._next = dict(zip(self._ids, [*self._ids[1:], self._ids[0]], strict=True))

    def rule(self, context: Sequence[int]) -> int:
        """The next id."""
        return self._next.get(context[-1]) or self._ids[context[-1] % len(self._ids)]

    def answer(self, prompt: str) -> str:
        """The text of ``TOKENS`` ids."""
        ids = [self._tokenizer.encode(prompt, add_special_tokens=False, field="prompt")[-1]]
        for _ in range(TOKENS):
            ids.append(self.rule(ids))
        return self._tokenizer.decode(ids[1:], skip_special_tokens=False).strip()


class Engines:
    """A scripted service for each replica, in a thread with an event loop of its own."""

    def __init__(self, step_s: float, stack: ExitStack) -> None:
        tokenizer = load_tokenizer(MODEL)
        script = Script(step_seconds=step_s, vocab_size=tokenizer.model_vocab_size)
        shown = Behaviour(
            eos_id=tokenizer.eos_id or 0, vocab_size=tokenizer.vocab_size, leaks=False
        )
        self.model = Model()
        self.services, self.urls = [], []
        for _ in range(REPLICAS):
            engine = ScriptedEngine(self.model.rule, script)
            service, address = stack.enter_context(service_in_a_thread(engine, shown))
            self.services.append(service)
            self.urls.append(f"trtllm://{address}")

    @property
    def tokens(self) -> int:
        return sum(service.tokens for service in self.services)

    @property
    def requests(self) -> list[int]:
        """How many each service has had."""
        return [len(service.requests) for service in self.services]


@dataclass
class Cluster:
    """Replicas behind a front; ``url`` is where clients ask."""

    url: str
    replicas: list[Process]
    front: list[Process]


@dataclass
class Load:
    """Requests, half of them streamed, so many at a time; each is sent once."""

    url: str  # HOST:PORT
    at_once: int
    model: Model
    failed: int = 0
    wrong: int = 0
    done: int = 0
    first_ms: list[float] = field(default_factory=list)

    async def run(self, numbers: Iterable[int]) -> None:
        shared = iter(numbers)

        async def one_after_the_other() -> None:
            client: Connection | None = None
            for number in shared:
                try:
                    if client is None or client.closed:
                        client = await connected(self.url)
                    await asyncio.wait_for(self._ask(client, number), REQUEST_S)
                except (OSError, asyncio.TimeoutError, KeyError, IndexError, ValueError):
                    self.failed, client = self.failed + 1, None
                self.done += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(self.at_once)))

    async def _ask(self, client: Connection, number: int) -> None:
        """Raises ``OSError`` or ``ValueError`` where no answer comes."""
        prompt, streamed = f"{WORDS} {number}", number % 2 == 1
        began = time.time_ns()
        status = await client.ask(completion(prompt, TOKENS, stream=streamed))
        if status != 200:
            raise OSError(f"status {status}")
        if streamed:
            text, arrivals = "", list[int]()
            for arrived, data in events(client.times, client.bodies):
                if data == "[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise ValueError(data)
                arrivals.append(arrived)
                text += text_of(event)
            self.first_ms += [(arrived - began) / 1e6 for arrived in arrivals[:1]]
        else:
            text = text_of(json.loads(b"".join(client.bodies)))
        self.wrong += text.strip() != self.model.answer(prompt)


def completion(prompt: str, tokens: int, *, stream: bool = False) -> bytes:
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": tokens, "stream": stream}
    return post("/v1/completions", body)


# --- what is started --------------------------------------------------------------------------


def cluster_of(
    target: str, engines: Engines, options: argparse.Namespace, scratch: Path
) -> Cluster:
    front, metrics, *ports = unused_ports(2 + REPLICAS)
    url = f"127.0.0.1:{front}"
    if target.startswith("dynamo"):
        environment = {**DYNAMO, "DYN_FILE_KV": str(scratch / "discovery")}
        tokens = ["--tokens"] if target == "dynamo-tokens" else []
        more = ["--migration-limit", "3", "--router-mode", "kv", "--no-router-kv-events"]
        words = [options.dynamo, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        words += ["--http-port", str(front), *(more if tokens else [])]
        fronts = [Process(words, environment=environment)]
        ours = [options.dynamo, "-m", "trtllm_bls.cli", "dynamo", *tokens]
        where = [[] for _ in ports]
        states: list[Path | None] = [None] * REPLICAS
    else:
        environment = {}
        ours = [sys.executable, "-m", "trtllm_bls.cli", "openai"]
        states = [scratch / f"status{number}" for number in range(REPLICAS)]
        where = [
            ["--port", str(port), "--status-dir", str(state)]
            for port, state in zip(ports, states, strict=True)
        ]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        words = [options.smg, "launch", "--host", "127.0.0.1", "--port", str(front)]
        words += ["--prometheus-port", str(metrics), "--worker-urls"]
        words += [f"http://{address}" for address in addresses]
        words += shlex.split(SMG) if target == "smg" else []
        fronts = [Process(words)]
        if target == "alone":
            fronts, where, url = [], where[:1], addresses[0]
    replicas = [
        Process(
            [*ours, "--tokenizer-dir", str(MODEL), "--engine", engine, *more_words],
            states[number],
            environment,
        )
        for number, (engine, more_words) in enumerate(zip(engines.urls, where, strict=False))
    ]
    return Cluster(url, replicas, fronts)


def wait_for(cluster: Cluster, engines: Engines) -> None:
    """Return once each replica has answered through the front."""
    end, before, asked = time.monotonic() + START_S, engines.requests, itertools.count()
    while sum(now > then for now, then in zip(engines.requests, before, strict=True)) < len(
        cluster.replicas
    ):
        if time.monotonic() > end:
            raise SystemExit(f"error: {cluster.url} does not answer from every replica")
        asyncio.run(Load(cluster.url, 4, engines.model).run(itertools.islice(asked, 4)))
        time.sleep(0.2)


# --- what is asked ----------------------------------------------------------------------------


async def conversations(url: str, engines: Engines) -> int:
    """How many of eight stayed at one replica."""
    seen: list[set[int]] = [set() for _ in range(8)]
    texts = [f"conversation {number * 7919}: {WORDS}" for number in range(8)]
    client = await connected(url)
    for turn in range(4):
        for place in range(8):
            number = (place + turn) % 8  # no place is always the same conversation's
            before = engines.requests
            if client.closed:
                client = await connected(url)
            if (status := await client.ask(completion(texts[number], 5))) != 200:
                raise SystemExit(f"error: {url}: status {status}")
            after = engines.requests
            seen[number].add(max(range(REPLICAS), key=lambda n: after[n] - before[n]))
            texts[number] += f" and {WORDS} {turn}"
    return sum(len(replicas) == 1 for replicas in seen)


async def killed(cluster: Cluster, engines: Engines, options: argparse.Namespace) -> Load:
    load = Load(cluster.url, options.at_once, engines.model)
    loading = asyncio.create_task(load.run(range(options.requests)))
    while load.done < options.requests // 4:
        await asyncio.sleep(0.01)
    cluster.replicas[0].kill()
    await loading
    return load


async def restarted(cluster: Cluster, engines: Engines, options: argparse.Namespace) -> Load:
    load, over = Load(cluster.url, options.at_once, engines.model), False
    numbers = itertools.takewhile(lambda _: not over, itertools.count())
    loading = asyncio.create_task(load.run(numbers))
    for number, replica in enumerate(cluster.replicas):
        await asyncio.to_thread(replica.end)
        before = engines.requests[number]
        replica.start()
        end = time.monotonic() + options.wait_s
        while engines.requests[number] == before and time.monotonic() < end:
            await asyncio.sleep(0.1)  # until it is sent requests again
    over = True
    await loading
    return load


def measure(target: str, options: argparse.Namespace, alone_ms: float | None) -> list[str]:
    """A row of the table; the last field is the median TTFT, in ms."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = Engines(options.step_ms / 1000, stack)
        cluster = cluster_of(target, engines, options, scratch)
        for process in (*cluster.replicas, *cluster.front):
            process.start()
            stack.callback(process.kill)
        wait_for(cluster, engines)
        used, tokens = cpu_seconds(child_ids()), engines.tokens
        plain = Load(cluster.url, options.at_once, engines.model)
        asyncio.run(plain.run(range(options.requests)))
        used = cpu_seconds(child_ids()) - used
        cpu = used / (engines.tokens - tokens) * 1e6
        first = statistics.median(plain.first_ms)
        added = "" if alone_ms is None else f"{first - alone_ms:+.1f}"
        failed = f"{plain.failed}, {plain.wrong} WRONG" if plain.wrong else str(plain.failed)
        row = [target, failed]
        if len(cluster.replicas) == 1:
            return [*row, "", "", "", f"{first:.1f}", f"{cpu:.0f}", f"{first}"]
        stayed = asyncio.run(conversations(cluster.url, engines))
        restart = asyncio.run(restarted(cluster, engines, options))
        kill = asyncio.run(killed(cluster, engines, options))
        row += [f"{kill.failed} of {kill.done}", f"{stayed} of 8"]
        row += [f"{restart.failed} of {restart.done}", added, f"{cpu:.0f}", f"{first}"]
        wrong = plain.wrong + kill.wrong + restart.wrong
        return [target, f"{wrong} WRONG", *row[2:]] if wrong else row


def targets(options: argparse.Namespace) -> Iterator[str]:
    for target in options.targets.split(","):
        missing = target.startswith("dynamo") and not options.dynamo
        missing = missing or (target.startswith("smg") and not options.smg)
        if not missing:
            yield target


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--targets", default=",".join(TARGETS), help=f"default {','.join(TARGETS)}")
    add("--smg", default="", help="the program; without it smg is left out")
    add("--dynamo", default="", help="a python with ai-dynamo; without it Dynamo is left out")
    add("--requests", type=int, default=1000, help="of each load; default 1000")
    add("--at-once", type=int, default=16, help="requests at a time; default 16")
    add("--step-ms", type=float, default=5, help="of the engines; default 5")
    add("--wait-s", type=float, default=90, help="longest wait for a restarted replica")
    options = parser.parse_args()
    print_conditions(options, f"own client, {options.at_once} at once")
    names = ("engine", "failed", "killed", "affinity", "restart", "TTFT", "CPU")
    table = Table(*names, title="two replicas; TTFT added, ms; CPU, µs per token")
    alone: float | None = None
    bad = False
    for target in targets(options):
        row = measure(target, options, alone)
        alone = float(row[-1]) if target == "alone" else alone
        bad |= "WRONG" in row[1]
        console.print("  ".join(row[:-1]), markup=False)
        table.add_row(*row[:-1])
    console.print(table)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
