"""What the HTTP program in front of Triton costs: generate_stream over Triton's own port and over
ours, in turns, with a scripted engine.

    .venv/bin/python benchmarks/triton_http.py --streams 1,32,128 --turns 3

A client in processes of its own opens one connection for each stream and counts events. TTFT is
from the request to the first event, CPU from /proc over the whole wave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import replace
from typing import Any

import httptools
import psutil
from orchestration import serving
from rich.console import Console
from rich.table import Table

from tests.helpers.processes import unused_ports
from trtllm_bls.operate.http_process import HttpProcess

PATH = "/v2/models/tensorrt_llm_bls/generate_stream"


class Stream(asyncio.Protocol):
    """One request: when each of its events arrived."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.arrived: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.arrived += [time.perf_counter()] * body.count(b"\n\n")

    def on_message_complete(self) -> None:
        self.done.set_result(self._parser.get_status_code())


def wave(arguments: tuple[int, int, int]) -> list[tuple[float, float, int]]:
    """TTFT and time of the last event, in seconds, and the events of each stream."""
    port, streams, tokens = arguments
    fields = {"text_input": "Once upon a time", "max_tokens": tokens, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def one() -> tuple[float, float, int]:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", port)
        status = await stream.done
        assert status == 200 and stream.arrived, status
        first, last = stream.arrived[0], stream.arrived[-1]
        return first - stream.begun, last - stream.begun, len(stream.arrived)

    async def all_of_them() -> list[tuple[float, float, int]]:
        return await asyncio.gather(*(one() for _ in range(streams)))

    return asyncio.run(all_of_them())


def cpu_seconds(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", default="1,32,128", help="default 1,32,128")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer; default 100")
    parser.add_argument("--step-ms", type=float, default=10, help="the engine's step; default 10")
    parser.add_argument("--turns", type=int, default=3, help="waves over each port; default 3")
    options = parser.parse_args()
    loads = [int(number) for number in options.streams.split(",")]
    console = Console(width=120)
    console.print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {options.tokens} tokens, {options.step_ms:g} ms a step"
    )
    table = Table("streams", "port", "TTFT p50 ms", "TTFT max ms", "tokens/s", "CPU µs/token")
    processes = 4 if (os.cpu_count() or 1) >= 8 else 1
    with serving(["bls"], processes, options.step_ms, max(loads) + 16) as server:
        (port,) = unused_ports(1)
        server.settings = replace(server.settings, http_port=port)
        server.behind_http = True
        front = HttpProcess(server, False, print, print, print)
        try:
            assert front.wait_until_ready()
            below = [each.pid for each in psutil.Process().children(recursive=True)]
            ports = {"Triton": int(server.http_url.rpartition(":")[2]), "ours": port}
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                for streams in loads:
                    figures: dict[str, list[list[float]]] = {name: [] for name in ports}
                    for turn in range(options.turns + 1):  # the first one fills caches
                        for name, asked in ports.items():
                            shares = [len(range(n, streams, processes)) for n in range(processes)]
                            plan = [(asked, share, options.tokens) for share in shares if share]
                            before = cpu_seconds(below)
                            answers = [each for part in pool.map(wave, plan) for each in part]
                            cpu = cpu_seconds(below) - before
                            tokens = streams * options.tokens
                            firsts = [first * 1e3 for first, _, _ in answers]
                            rate = tokens / max(last for _, last, _ in answers)
                            row = [statistics.median(firsts), max(firsts), rate, cpu / tokens * 1e6]
                            figures[name] += [row] if turn else []
                    for name, rows in figures.items():
                        median = [statistics.median(column) for column in zip(*rows, strict=True)]
                        shown = [f"{value:,.1f}" for value in median]
                        table.add_row(str(streams), name, *shown)
        finally:
            front.close()
    console.print(table)


if __name__ == "__main__":
    main()
