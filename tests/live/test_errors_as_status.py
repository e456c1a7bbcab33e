"""Errors that a client asks for as gRPC status, which Triton 24.10 does not survive when they come
before the thread that handed the request over reads from its stream again."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as grpcaio

from tests.helpers.server_settings import free_ports
from tests.helpers.waiting import run_async
from tests.helpers.watched import watched
from trtllm_bls.client import Client
from trtllm_bls.operate.tritonserver import TritonServer

# Keeps that thread for 1.2 s, as other threads do where cores are contended: longer than the timer
# that holds the error back where nothing tells what that thread does.
pytestmark = pytest.mark.slow

SLOW_THREAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
void *TRITONSERVER_ServerInferAsync(void *server, void *request, void *trace) {
    void *(*real)(void *, void *, void *) = dlsym(RTLD_NEXT, "TRITONSERVER_ServerInferAsync");
    void *error = real(server, request, trace);
    usleep(1200000);
    return error;
}
"""


def column(value: Any, dtype: Any) -> Any:
    return np.array([[value]], dtype)


ONCE, FOUR = column(b"Once", np.object_), column(4, np.int32)
BAD: dict[str, dict[str, Any]] = {
    "tensorrt_llm_bls": {
        "text_input": ONCE,
        "max_tokens": FOUR,
        "top_p": column(2, np.float32),
    },
    "tensorrt_llm": {
        "input_ids": np.array([[5, 6]], np.int32),
        "input_lengths": column(99, np.int32),
        "request_output_len": FOUR,
    },
    "preprocessing": {"QUERY": ONCE},
    "postprocessing": {
        "TOKENS_BATCH": np.zeros((1, 1, 2), np.int32),
        "SEQUENCE_LENGTH": column(9, np.int32),
    },
    "ensemble": {"text_input": ONCE, "max_tokens": FOUR, "top_p": column(3, np.float32)},
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    if shutil.which("cc") is None:
        pytest.skip("no cc: `apt-get install gcc` runs it")
    source: Path = tmp_path_factory.mktemp("slow") / "slow.c"
    source.write_text(SLOW_THREAD)
    library = source.with_suffix(".so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=120
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        with watched(free_ports(threads=1), "slow") as server:
            yield server


@pytest.mark.parametrize("attacks", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", BAD)
def test_errors_as_grpc_status_leave_the_server_up(
    slow: TritonServer, model: str, attacks: int
) -> None:
    """Each caller gets its status, and the next request an answer of the same process."""
    process = slow.process
    codes = run_async(attack(slow.grpc_url, model, attacks))
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * attacks
    assert run_async(ask(slow.grpc_url))
    assert slow.process == process


async def ask(url: str) -> str:
    async with Client(url) as client:
        return (await client.generate(text_input="Once", max_tokens=4)).text


async def attack(url: str, model: str, attacks: int) -> list[grpc.StatusCode]:
    inputs = []
    for name, array in BAD[model].items():
        kind = {"O": "BYTES", "i": "INT32", "f": "FP32"}[array.dtype.kind]
        inputs.append(grpcaio.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    async def status(client: grpcaio.InferenceServerClient) -> grpc.StatusCode:
        answers = client.stream_infer(requests(), headers={"triton_grpc_error": "true"})
        with pytest.raises(grpc.RpcError) as raised:
            async for _ in answers:
                raise AssertionError("an answer instead of an error")
        return raised.value.code()

    async with grpcaio.InferenceServerClient(url) as client:
        return await asyncio.gather(*(status(client) for _ in range(attacks)))
