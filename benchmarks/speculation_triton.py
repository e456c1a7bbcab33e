"""Speculation through the real tritonserver, on scripted engines: what a round costs beside them.

    python benchmarks/speculation_triton.py [--tokens 300] [--requests 3] [--overlap off|on|auto]

The target takes 20 ms for a step, the draft 2 ms. Every request goes client, gRPC,
tensorrt_llm_bls, both engines and back; speed-ups are ratios to plain decoding in the same run.
Overhead of a round = its wall time less the engines' steps. Beside it stands the least that Triton
allows: the same two requests made bare, by a gRPC client that does nothing else, one after the
other to the same engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
from bench.repository import ROOT, write_scripted_pair
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtllm_bls.client import Client, Result
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings

TARGET_MS, DRAFT_MS = 20, 2
BEST = {0.6: 3, 0.8: 5, 0.9: 8}  # draft length that the formula calls best, near enough


def settings(repository: Path, agrees: float, *, overlap: str = "off") -> ServeSettings:
    """A server whose two engines are scripts."""
    write_scripted_pair(repository)
    return ServeSettings(
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        model=ROOT / "assets/demo/target",
        model_repository=repository,
        overrides=(
            Override("tensorrt_llm", "step_ms", str(TARGET_MS)),
            Override("tensorrt_llm_draft", "step_ms", str(DRAFT_MS)),
            Override("tensorrt_llm_draft", "agrees", str(agrees)),
            Override("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "tensorrt_llm_draft"),
            Override("tensorrt_llm_bls", "overlap_drafts", overlap),
        ),
    )


async def ask(url: str, tokens: int, **speculation: int) -> Result:
    async with Client(url) as client:
        return await client.generate(
            text_input="a b c d e", max_tokens=tokens, end_id=-1, **speculation
        )


async def bare_rounds(url: str, length: int, rounds: int = 60) -> float:
    """Milliseconds that a draft and its verification take beyond their steps, median."""
    drafting = bare_request("tensorrt_llm_draft", length)
    verifying = bare_request("tensorrt_llm", length + 1, drafted=length)
    took = []
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = stub.ModelStreamInfer(), stub.ModelStreamInfer()
        for _ in range(rounds):
            begun = time.perf_counter()
            for call, request in zip(calls, (drafting, verifying), strict=True):
                await call.write(request)
                reply = await call.read()
                assert not reply.error_message, reply.error_message
            took.append((time.perf_counter() - begun) * 1000 - length * DRAFT_MS - TARGET_MS)
        for call in calls:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
    return statistics.median(took)


def bare_request(model: str, tokens: int, drafted: int = 0) -> service_pb2.ModelInferRequest:
    """With the tensors of a round: a prompt as long as the benchmark's half-way."""
    request = service_pb2.ModelInferRequest(model_name=model, id=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    values = {"input_ids": [1] * 150, "input_lengths": [150], "request_output_len": [tokens]}
    values |= {"end_id": [-1], "pad_id": [0], "runtime_top_k": [1], "min_tokens": [0]}
    if drafted:
        values["draft_input_ids"] = [1] * drafted
    for name, ids in values.items():
        request.inputs.add(name=name, datatype="INT32", shape=[1, len(ids)])
        request.raw_input_contents.append(np.array(ids, np.int32).tobytes())
    for name in ("output_ids", "sequence_length"):
        request.outputs.add(name=name)
    return request


def seconds(result: Result) -> float:
    return result.events[-1].received_at - result.started_at


def cpu_seconds() -> float:
    """CPU time of every stub and server below this process so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def measure(server: TritonServer, rate: float, tokens: int, requests: int) -> None:
    length = BEST[rate]
    plain = statistics.median(
        seconds(asyncio.run(ask(server.grpc_url, tokens))) for _ in range(requests)
    )
    times, overheads, rounds_in_all = [], [], 0
    before = cpu_seconds()
    for _ in range(requests):
        result = asyncio.run(ask(server.grpc_url, tokens, num_draft_tokens=length))
        outputs = result.events[-1].outputs
        rounds = int(outputs["num_draft_rounds"].item())
        drafted = int(outputs["total_draft_tokens"].item())
        slept = (drafted * DRAFT_MS + (rounds + 1) * TARGET_MS) / 1000
        times.append(seconds(result))
        overheads.append((times[-1] - slept) / rounds * 1000)
        rounds_in_all += rounds
    cpu = (cpu_seconds() - before) / rounds_in_all * 1e6
    expected = (1 - rate ** (length + 1)) / (1 - rate) / (length * DRAFT_MS / TARGET_MS + 1)
    gain = plain / statistics.median(times)
    bare = asyncio.run(bare_rounds(server.grpc_url, length))
    print(
        f"a={rate} k={length}: {gain:.2f}x of the formula's {expected:.2f}x, "
        f"{gain / expected:.0%}; "
        f"round overhead p50 {statistics.median(overheads):.2f} ms (two bare requests: "
        f"{bare:.2f} ms), CPU {cpu:.0f} us per round",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--overlap", choices=("off", "on", "auto"), default="auto")
    given = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; "
        f"target {TARGET_MS} ms, draft {DRAFT_MS} ms, {given.tokens} tokens, "
        f"overlap {given.overlap}"
    )
    for rate in BEST:
        with tempfile.TemporaryDirectory() as scratch:
            repository = Path(scratch) / "models"
            chosen = settings(repository, rate, overlap=given.overlap)
            with TritonServer(chosen) as server:
                measure(server, rate, given.tokens, given.requests)


if __name__ == "__main__":
    main()
