"""What the OpenAI API costs: CPU per token of its process, with an engine that costs little.

    .venv/bin/python benchmarks/openai_api.py --streams 128 --step-ms 10

The server is a process of its own: uvicorn, the API, the orchestrator and an engine whose one timer
gives every stream a token at each step. The client, in this process, reads sockets and counts
events. `--sink` leaves HTTP out: the same requests run into a sink that drops their text, which is
what engine and orchestrator cost; the API's own work is the difference. CPU is user and system
time of the server's process (/proc), from the first token of the last stream to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.stepping_api import Backend, serving_api

from trtllm_bls.engines.base import Engine
from trtllm_bls.types import TextChunk, TextRequest

TICK = os.sysconf("SC_CLK_TCK")


class Dropping:
    async def ready(self) -> None:
        pass

    def send(self, chunk: TextChunk) -> None:
        pass


def into_sink(
    step_s: float, streams: int, tokens: int, over: Callable[[Engine], Engine] | None = None
) -> float:
    """CPU in microseconds per token of engine and orchestrator alone, in this process; what
    ``over`` makes of the engine is between them."""
    import uvloop

    backend = Backend(step_s, over)

    async def run() -> float:
        requests = [
            TextRequest(request_id=str(n), text="x", max_tokens=tokens, stream=True)
            for n in range(streams)
        ]
        began = time.process_time()
        await asyncio.gather(*(backend.orchestrator.run(r, Dropping()) for r in requests))
        return time.process_time() - began

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run()) / (streams * tokens) * 1e6


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def read(port: int, path: bytes, body: bytes) -> tuple[float, float, int]:
    """Seconds to the first event, to the end, and how many events there were."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % path
    head += b"content-type: application/json\r\n"
    began = time.perf_counter()
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    first, events = 0.0, 0
    while data := await reader.read(65536):
        events += data.count(b"data: ")
        if events and not first:
            first = time.perf_counter() - began
    writer.close()
    return first, time.perf_counter() - began, events


TURN = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[bytes, str, str]] = {  # path, and the fields of prompt and limit
    "chat": (b"/v1/chat/completions", "messages", "max_tokens"),
    "responses": (b"/v1/responses", "input", "max_output_tokens"),
    "messages": (b"/v1/messages", "messages", "max_tokens"),
}


async def load(api: str, port: int, pid: int, streams: int, tokens: int) -> dict[str, Any]:
    path, prompt, limit = APIS[api]
    request = {"model": "m", prompt: TURN, limit: tokens, "stream": True, "temperature": 0}
    body = json.dumps(request).encode()
    await read(port, path, body)  # everything is loaded
    before, began = cpu_seconds(pid), time.perf_counter()
    found = await asyncio.gather(*(read(port, path, body) for _ in range(streams)))
    wall, cpu = time.perf_counter() - began, cpu_seconds(pid) - before
    firsts = sorted(first for first, _, _ in found)
    return {
        "api": api,
        "streams": streams,
        "tokens_per_s": round(streams * tokens / wall),
        "cpu_us_per_token": round(cpu / (streams * tokens) * 1e6, 1),
        "cores_busy": round(cpu / wall, 2),
        "events_per_token": round(sum(n for _, _, n in found) / (streams * tokens), 2),
        "ttft_ms_p50": round(firsts[len(firsts) // 2] * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--apis", nargs="+", default=["chat"], choices=APIS, help="in turns")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--sink", action="store_true", help="also without HTTP, for comparison")
    options = parser.parse_args()
    step_s = options.step_ms / 1000
    print(
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores,"
    )
    print(f"load {os.getloadavg()[0]:.1f}, {options.tokens} tokens, {options.step_ms} ms a step")
    with serving_api(step_s) as (port, pid):
        for streams, api in itertools.product(options.streams, options.apis):
            found = asyncio.run(load(api, port, pid, streams, options.tokens))
            if options.sink:
                alone = into_sink(step_s, streams, options.tokens)
                found["without_http_us"] = round(alone, 1)
                found["http_us"] = round(found["cpu_us_per_token"] - alone, 1)
            print(json.dumps(found))


if __name__ == "__main__":
    main()
