"""What reading a token from an engine's gRPC costs this process, without text, HTTP or clients.

    python benchmarks/engine_reading.py [--streams 8 32 128] [--triton]

The engine is one process of TrtllmService (grpcio in Python), or with --triton a tritonserver with
the scripted model. CPU is user and system time of this process per token, from the first request to
the last answer's end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import uvloop
from bench import repository
from bench.stepping import Doubles
from openai_servers import MOST_STREAMS
from orchestration import serving

from trtllm_bls.bundled import DEMO
from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.types import EngineRequest, Sampling


async def read(stream: ChunkStream) -> int:
    """How many tokens there were."""
    tokens = 0

    try:
        await stream.wait()
        while chunks := stream.take():
            tokens += sum(len(chunk.token_ids) for chunk in chunks)
            await stream.wait()
    finally:
        await stream.aclose()
    return tokens


async def measure(engine: Engine, streams: int, length: int) -> tuple[float, int]:
    """Microseconds per token, and tokens per second."""

    async def all_of() -> int:
        requests = [
            EngineRequest(
                request_id=str(n),
                input_ids=tuple(range(5, 25)),
                max_tokens=length,
                end_id=-1,
                sampling=Sampling(top_k=1),
            )
            for n in range(streams)
        ]
        return sum(await asyncio.gather(*(read(engine.generate(each)) for each in requests)))

    await engine.capacity()
    await all_of()
    began, wall = time.process_time(), time.perf_counter()
    tokens = await all_of()
    taken = time.process_time() - began
    return taken / tokens * 1e6, round(tokens / (time.perf_counter() - wall))


async def table(engine: Engine, options: argparse.Namespace) -> None:
    for streams in options.streams:
        cost, rate = await measure(engine, streams, options.tokens)
        print(f"{engine.name}, {streams} streams: {cost:.1f} µs per token, {rate} tokens/s")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[1, 32, 128, 512])
    add("--tokens", type=int, default=200, help="of each answer")
    add("--step-ms", type=float, default=10)
    add("--engines", type=int, default=4, help="processes of the model in Triton")
    add("--triton", action="store_true")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.triton:
        with serving(["direct"], options.engines, options.step_ms, MOST_STREAMS) as server:
            run(lambda: GrpcEngine(server.grpc_url, repository.ENGINE, 32_000), options)
    else:
        doubles = Doubles(1, DEMO / "target", options.step_ms / 1000)
        run(lambda: TrtllmServiceEngine(f"127.0.0.1:{doubles.ports[0]}"), options)
        doubles.close()


def run(make: Any, options: argparse.Namespace) -> None:
    async def start() -> None:
        await table(make(), options)

    uvloop.run(start())


if __name__ == "__main__":
    main()
