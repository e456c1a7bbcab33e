"""What long inputs cost: a token's price by the length of its prompt, and what a request with a
huge prompt or word list does to the streams beside it.

The same server and engine as in ``orchestration.py``; the load comes from its own client, in
processes of its own. Every answer of the streams is checked.

examples:
  python benchmarks/long_inputs.py
  python benchmarks/long_inputs.py --streams 4 --prompt-tokens 10,1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from bench import repository
from bench.answers import make_prompts, staggered, text_request
from bench.arguments import parser_of
from bench.figures import Row, steady_row
from bench.load import Load
from bench.processes import Processes
from orchestration import MODEL, console, numbers, serving
from rich.table import Table

from trtllm_bls.client import Client

TOKENS = 200  # of each stream's answer
PROMPTS = 8
PAUSE_S = 0.2  # between two disturbing requests
_WORD = " abcdefghi"
DISTURBANCES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a 150 KB word list": {
        "text_input": "Hello",
        "bad_words": [f"{n} " + _WORD * 24 for n in range(600)],
    },
    "a 200 KB prompt": {"text_input": _WORD * 20_000},
    "a 1 MB prompt": {"text_input": _WORD * 100_000},
    "1 MB of messages": {"messages": json.dumps([{"role": "user", "content": _WORD * 100_000}])},
}


@contextlib.contextmanager
def disturbed(url: str, inputs: dict[str, Any]) -> Iterator[list[float]]:
    """The requests beside the streams, one after the other; yields the seconds each has taken."""
    taken: list[float] = []
    ending = threading.Event()

    async def ask() -> None:
        async with Client(url) as client:
            while not ending.is_set():
                begun = time.monotonic()
                async with client.stream(**inputs, max_tokens=1) as stream:
                    async for _ in stream:
                        pass
                taken.append(time.monotonic() - begun)
                await asyncio.sleep(PAUSE_S)

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    if inputs:
        thread.start()
    yield taken
    ending.set()
    if inputs:
        thread.join()


def row_of(
    load: Load, url: str, processes: Processes, streams: int, prompt_tokens: int, seconds: float
) -> Row:
    prompts = make_prompts(MODEL / "tokenizer.json", PROMPTS, prompt_tokens)
    waves = max(1, round(seconds * 100 / TOKENS))
    plan = [
        [text_request(prompts[(n + turn) % PROMPTS], length) for turn, length in enumerate(one)]
        for n, one in enumerate(staggered(streams, waves, TOKENS))
    ]
    answers = load.ask(url, repository.BLS, "text_output", plan)
    return steady_row("bls", streams, answers, processes)


def table_of(title: str, first: str, rows: list[tuple[str, Row, str]]) -> Table:
    table = Table(title=title)
    for name in (first, "TTFT p50", "token p50", "p99", "gap p99", "CPU server", "model", "RSS MB"):
        table.add_column(name, justify="right")
    table.add_column("each took", justify="right")
    table.add_column("bad", justify="right")
    for name, row, took in rows:
        times = (row.ttft_p50, row.token_p50, row.token_p99, row.gap_p99)
        cells = [f"{value:.1f}" for value in times]
        cells += [f"{row.cpu['server']:.0f}", f"{row.cpu['model']:.0f}", f"{row.rss_mb:.0f}"]
        table.add_row(name, *cells, took, f"{row.bad}/{row.answers}")
    return table


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--streams", type=numbers, default=[8], help="busy streams; default 8")
    add("--prompt-tokens", type=numbers, default=[10, 100, 1000, 10_000, 30_000])
    add("--seconds", type=float, default=6.0, help="of each load; default 6")
    options = parser.parse_args()
    options.engine_instances = 4 if (os.cpu_count() or 1) >= 8 else 1
    return options


def main() -> int:
    options = parse()
    lengths: list[tuple[str, Row, str]] = []
    beside: list[tuple[str, Row, str]] = []
    load = Load(2)
    try:
        with serving(["bls"], options.engine_instances, 10, 48) as server:
            processes = Processes(server.region_prefix)
            url = server.grpc_url
            for streams in options.streams:
                for tokens in (10, *options.prompt_tokens):  # the first time warms up
                    row = row_of(load, url, processes, streams, tokens, options.seconds)
                    lengths.append((f"{tokens:,}", row, ""))
                lengths.pop(-1 - len(options.prompt_tokens))
                for name, inputs in DISTURBANCES.items():
                    with disturbed(url, inputs) as taken:
                        row = row_of(load, url, processes, streams, 20, options.seconds)
                    took = f"{1000 * sum(taken) / len(taken):.0f} ms" if taken else ""
                    beside.append((name, row, took))
            processes.close()
    finally:
        load.close()
    busy = f"{options.streams} streams, {TOKENS} tokens each; ms, µs of CPU per token"
    console.print(table_of(f"by the prompt's length; {busy}", "prompt tokens", lengths))
    console.print(table_of(f"beside other requests; {busy}", "beside", beside))
    return 1 if any(row.bad for _, row, _ in lengths + beside) else 0


if __name__ == "__main__":
    sys.exit(main())
