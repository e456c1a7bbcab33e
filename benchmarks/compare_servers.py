"""How fast servers answer chats: Triton's gRPC ports and OpenAI APIs, compared in one run.

Two loads, or the one that --mode names. batch: all requests at once; tokens/s and requests/s.
latency: one request after the other; p50, p90 and p99 of the time to the first token and of whole
answers. The servers take turns, and a different one begins each turn, so that other work of the
machine slows all of them alike. Each is compared with the first one.

Every answer's end is checked. A failed request is counted by its message, has no part in the
figures, and makes the exit code 1. One Python process takes the times. At tens of thousands of
tokens/s it is the limit; use perf_analyzer or AIPerf there.

examples:
  python benchmarks/compare_servers.py 127.0.0.1:8001 --requests 128 --max-tokens 64 --ignore-eos
  python benchmarks/compare_servers.py 127.0.0.1:8001 http://127.0.0.1:9000/v1 --json both.json
  python benchmarks/compare_servers.py http://a:8000/v1 http://b:8000/v1 --prompts prompts.txt
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from bench.arguments import parser_of
from rich.console import Console
from rich.table import Table

from trtllm_bls.client.terminal import ClientReply, assignments
from trtllm_bls.client.terminal_chat import Server, TritonTextModel, server_at
from trtllm_bls.errors import TrtllmBlsError

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

PROMPTS = (
    "Tell me about the sea.",
    "What is machine learning?",
    "Write a short letter to a friend.",
    "Explain how a bicycle stays upright.",
)
# None: a server that gives no reason.
FINISH_REASONS = {"stop", "length", "end_id", "tool_calls", None}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One request. Times in seconds; ``None`` where nothing came. ``problem``: why the request
    counts as failed."""

    target: int  # index of the server
    sent: float  # time.perf_counter()
    ttft_s: float | None
    whole_s: float  # from sending to the end of the answer
    tokens: int | None
    problem: str | None = None


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each mode's figures, as --json has them."""
    modes = ["batch", "latency"] if options.mode == "both" else [options.mode]
    prompts = PROMPTS
    if options.prompts:
        lines = options.prompts.read_text(encoding="utf-8-sig").splitlines()
        prompts = tuple(line for line in lines if line.strip())
        if not prompts:
            raise SystemExit(f"error: --prompts {options.prompts}: has no prompt")
    connection = {"api_key": os.environ.get("OPENAI_API_KEY"), "tls": options.tls}
    connection |= {"tls_ca": options.tls_ca, "tls_cert": None, "tls_key": None}
    connection |= {"tls_server_name": None}
    async with AsyncExitStack() as stack:
        opened = [server_at(url, options.model, connection) for url in options.urls]
        servers = [await stack.enter_async_context(server) for server in opened]
        return [await run(mode, servers, prompts, options) for mode in modes]


async def run(
    mode: str, servers: Sequence[Server], prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """One mode's figures. Each turn is at each server before the next turn."""
    asked = list(islice(cycle(prompts), options.requests or {"batch": 128, "latency": 20}[mode]))
    turns = [asked] * options.rounds if mode == "batch" else [[prompt] for prompt in asked]
    found: list[list[Measurement]] = [[] for _ in servers]
    seconds = [0.0] * len(servers)
    for target, server in enumerate(servers):
        await ask(server, target, asked[0], options)  # to warm up
    for turn, together in enumerate(turns):
        for n in range(len(servers)):
            target = (turn + n) % len(servers)
            began = time.perf_counter()
            requests = (ask(servers[target], target, prompt, options) for prompt in together)
            found[target] += await asyncio.gather(*requests)
            seconds[target] += time.perf_counter() - began
    return {
        "mode": mode,
        "servers": [
            {
                "name": f"{server.model} at {url}",
                **figures(measurements, took),
                "outcomes": [asdict(each) for each in measurements],
            }
            for server, url, measurements, took in zip(
                servers, options.urls, found, seconds, strict=True
            )
        ],
        "compared_with_the_first": [compare(found[0], other) for other in found[1:]],
    }


async def ask(server: Server, target: int, prompt: str, options: argparse.Namespace) -> Measurement:
    fields = {"temperature": options.temperature, **assignments("--field", options.fields)}
    if options.ignore_eos:
        fields |= {"end_id": -1} if isinstance(server, TritonTextModel) else {"ignore_eos": True}
    messages = ({"role": "user", "content": prompt},)
    reply = ClientReply(options.max_tokens)
    try:
        async with (
            timeout(options.timeout),
            aclosing(server.ask(messages, options.max_tokens, fields)) as events,
        ):
            async for event in events:
                reply.add(event)
        problem = problem_of(reply, options.ignore_eos)
    except TrtllmBlsError as error:
        problem = str(error)
    except asyncio.TimeoutError:
        problem = f"no complete answer within {options.timeout:g} s"
    return Measurement(
        target=target,
        sent=reply.sent_at,
        ttft_s=reply.ttft_s,
        whole_s=time.perf_counter() - reply.sent_at,
        tokens=reply.completion_tokens,
        problem=problem,
    )


def problem_of(reply: ClientReply, ignore_eos: bool) -> str | None:
    """What is wrong with an answer that came to its end; ``None`` if all is well."""
    tokens, max_tokens = reply.completion_tokens, reply.max_tokens
    if reply.finish_reason not in FINISH_REASONS:
        return f"ended by {reply.finish_reason!r}"
    if not reply.text:
        return "no text came"
    if tokens is not None and tokens > max_tokens:
        return f"{tokens} tokens, more than the {max_tokens} asked for"
    if ignore_eos and tokens is not None and tokens < max_tokens:
        return f"{tokens} tokens where {max_tokens} were asked for with --ignore-eos"
    return None


def figures(measurements: Sequence[Measurement], seconds: float) -> dict[str, Any]:
    """Of one server, which worked on them for ``seconds``; ``None`` where nothing was measured."""
    good = [each for each in measurements if each.problem is None]
    counts = [each.tokens for each in good if each.tokens is not None]
    tokens = sum(counts) if good and len(counts) == len(good) else None
    return {
        "requests": len(measurements),
        "failed": len(measurements) - len(good),
        "problems": Counter(m.problem for m in measurements if m.problem is not None),
        "tokens": tokens,
        "tokens_per_s": tokens and tokens / seconds,
        "requests_per_s": len(good) / seconds if good else None,
        "ttft_ms": percentiles([m.ttft_s for m in good if m.ttft_s is not None]),
        "whole_ms": percentiles([m.whole_s for m in good]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds."""
    if not seconds:
        return None
    p50, p90, p99 = (np.percentile(seconds, (50, 90, 99)) * 1000).tolist()
    return {"p50": p50, "p90": p90, "p99": p99}


def compare(first: Sequence[Measurement], other: Sequence[Measurement]) -> dict[str, Any]:
    """A server beside the first one, both in the order of asking: over the requests that both
    answered, medians of its time divided by the first one's."""
    both = [
        (a, b) for a, b in zip(first, other, strict=True) if a.problem is None and b.problem is None
    ]
    first_tokens = [b.ttft_s / a.ttft_s for a, b in both if a.ttft_s and b.ttft_s]
    wholes = [b.whole_s / a.whole_s for a, b in both]
    return {
        "pairs": len(both),
        "ttft_ratio": statistics.median(first_tokens) if first_tokens else None,
        "whole_ratio": statistics.median(wholes) if wholes else None,
    }


def show(measured: dict[str, Any]) -> None:
    """A table with a row per server, then the comparisons and the problems, a line each."""
    table = Table(title=f"{measured['mode']}; times in ms", title_justify="left")
    parts = [f"{what} p{p}" for what in ("first token", "whole answer") for p in (50, 90, 99)]
    for name in ("server", "requests", "failed", "tokens/s", "requests/s", *parts):
        table.add_column(name, justify="left" if name == "server" else "right")
    for server in measured["servers"]:
        numbers = [server["tokens_per_s"], server["requests_per_s"]]
        for times in (server["ttft_ms"], server["whole_ms"]):
            numbers += [times and times[part] for part in ("p50", "p90", "p99")]
        cells = ["-" if number is None else f"{number:,.1f}" for number in numbers]
        table.add_row(server["name"], str(server["requests"]), str(server["failed"]), *cells)
    console = Console()
    console.print(table)
    others = measured["servers"][1:]
    for server, compared in zip(others, measured["compared_with_the_first"], strict=True):
        ratios = {"first token": compared["ttft_ratio"], "whole answer": compared["whole_ratio"]}
        told = ", ".join(f"{what} {ratio:.2f}x" for what, ratio in ratios.items() if ratio)
        line = f"{server['name']}, beside the first, {compared['pairs']} pairs: {told or '-'}"
        console.print(line, markup=False, soft_wrap=True)
    for server in measured["servers"]:
        for problem, count in server["problems"].items():
            console.print(f"{server['name']}: {count} x {problem}", markup=False, soft_wrap=True)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="HOST:PORT of gRPC, or http://HOST:PORT/v1")
    add("--model", help="asked at each URL; default tensorrt_llm_bls, or the API's first")
    add("--mode", choices=("batch", "latency", "both"), default="both")
    add("--prompts", type=Path, help="a file with one prompt a line, repeated or cut to --requests")
    add("--requests", type=int, help="of each load; default 128 in a batch, 20 one by one")
    add("--rounds", type=int, default=1, help="batches in turn; default 1")
    add("--max-tokens", type=int, default=64, help="of each answer; default 64")
    add("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    add("--temperature", type=float, default=0.0, help="default 0, greedy")
    add("--field", dest="fields", action="append", default=[], metavar="NAME=JSON")
    add("--timeout", type=float, default=600.0, help="seconds of a request; default 600")
    add("--tls", action="store_true", help="for gRPC; an OpenAI API's key is $OPENAI_API_KEY")
    add("--tls-ca", type=Path, help="authority of the gRPC server's certificate")
    add("--json", type=Path, help="a file for all figures and every request")
    return parser.parse_args()


def main() -> int:
    options = parse()
    try:
        runs = asyncio.run(measure(options))
    except (TrtllmBlsError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    for measured in runs:
        show(measured)
    if options.json:
        conditions = {name: str(value) for name, value in vars(options).items()}
        written = json.dumps({"conditions": conditions, "runs": runs}, indent=1)
        options.json.write_text(written + "\n", encoding="utf-8")
    return 1 if any(each["failed"] for measured in runs for each in measured["servers"]) else 0


if __name__ == "__main__":
    sys.exit(main())
