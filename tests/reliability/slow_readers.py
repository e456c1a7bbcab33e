"""Clients that stop reading beside clients that read: what the readers notice, what memory does.

    python -m tests.reliability.slow_readers [--readers 32] [--pause 30] [--step-ms 50]

Twice the same load, of as many readers as others; the second time the others stop reading for a
while after their first text, and then read on to the end. Nobody's text may differ.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from tests.live.conftest import echo_settings
from tests.reliability.fuzz import text_of, valid
from tests.reliability.processes import memory_mb, named
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override
from trtllm_bls.wire.contract import BLS

# A small window, which is full soon: whoever does not read is not read for by gRPC either.
_OPTIONS = (
    *(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)),
    ("grpc.use_local_subchannel_pool", 1),
)
_TOKENS_BEYOND = 400  # of an answer, after the pause
Answer = tuple[str, list[float]]  # the text, and when each response came


async def _one(url: str, message: Any, pause_s: float) -> Answer:
    async with grpc.aio.insecure_channel(url, options=_OPTIONS) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]))
        replies, times = [], []
        async for reply in call:
            replies.append(reply)
            times.append(time.monotonic())
            if len(replies) == 1 and pause_s:
                await asyncio.sleep(pause_s)
        errors = [reply.error_message for reply in replies if reply.error_message]
        return (f"error: {errors}" if errors else text_of(replies)), times


def _clients(url: str, message: bytes, count: int, pause_s: float) -> list[Answer]:
    request = valid(BLS.name)
    request.ParseFromString(message)

    async def run() -> list[Answer]:
        return await asyncio.gather(*(_one(url, request, pause_s) for _ in range(count)))

    return asyncio.run(run())


def measure(server: TritonServer, text: str, readers: int, pause_s: float) -> dict[str, Any]:
    """The readers' gaps in ms, the peak of memory, and how many texts were right."""
    message = valid(
        BLS.name,
        text_input=np.array([[text]], object),
        max_tokens=np.array([[100_000]], np.int32),
        stream=np.array([[True]]),
    ).SerializeToString()
    processes = named(server)
    peak: dict[str, float] = {}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        others = pool.apply_async(_clients, (server.grpc_url, message, readers, pause_s))
        ours = pool.apply_async(_clients, (server.grpc_url, message, readers, 0.0))
        while not (others.ready() and ours.ready()):
            for name, size in memory_mb(processes).items():
                peak[name] = max(size, peak.get(name, 0.0))
            time.sleep(0.2)  # between two looks
        answers, slow = ours.get(), others.get()
    gaps = np.concatenate([np.diff(times) for _, times in answers]) * 1000
    return {
        "p50": float(np.percentile(gaps, 50)),
        "p99": float(np.percentile(gaps, 99)),
        "longest": float(gaps.max()),
        "peak MB": {name: round(size) for name, size in peak.items()},
        "right": [sum(said == text for said, _ in part) for part in (answers, slow)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=32)
    parser.add_argument("--pause", type=float, default=30)
    parser.add_argument("--step-ms", type=int, default=50)
    given = parser.parse_args()
    words = int(given.pause * 1000 / given.step_ms) + _TOKENS_BEYOND
    text = " ".join(f"{number % 10}" for number in range(words // 2))
    with tempfile.TemporaryDirectory() as scratch:
        plain = echo_settings(Path(scratch), openai_port=0)
        kept = tuple(each for each in plain.overrides if each.parameter != "step_ms")
        step = Override("tensorrt_llm", "step_ms", str(given.step_ms))
        with TritonServer(replace(plain, overrides=(*kept, step))) as server:
            measure(server, text[:50], given.readers, 0.0)
            baseline = measure(server, text, given.readers, 0.0)
            paused = measure(server, text, given.readers, given.pause)
            after = memory_mb(named(server))
    print(f"{given.readers} readers beside {given.readers} that pause for {given.pause:g} s")
    for name, found in (("all read", baseline), ("others pause", paused)):
        print(f"{name}:", found)
    print(f"p99 with the others paused: {paused['p99'] / baseline['p99']:.2f} times")
    print("MB afterwards:", {name: round(size) for name, size in after.items()})


if __name__ == "__main__":
    main()
