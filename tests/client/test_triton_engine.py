"""Which way an engine is reached: gRPC where there is a server, BLS where there is none."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from tests.helpers.fake_engine_server import ASK, Triton
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.contract import ENGINE
from trtllm_bls.engines.triton import Route, TritonEngine, _is_foreign
from trtllm_bls.errors import EngineError, EngineUnavailable, InvalidRequest
from trtllm_bls.types import Sampling

LISTEN = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()
"""


def route(url: str, transport: str = "auto") -> Route:
    return Route(
        transport=transport,
        url=url,
        pb_utils=object(),
        vocab_size=50,
        max_streams=2,
        stall_seconds=1,
    )


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", "GrpcEngine"), ("grpc", "GrpcEngine"), ("bls", "BlsEngine")]
)
async def test_a_reachable_server_is_spoken_to_over_grpc_unless_told_otherwise(
    transport: str, kind: str
) -> None:
    """Opened once, by the first request, also where two come at once."""
    async with Triton() as triton:
        model = TritonEngine("tensorrt_llm", route(triton.url, transport))
        await asyncio.gather(model.capacity(), model.capacity())
        for _ in range(2):
            assert (await model.capacity()).max_sequence_tokens == 64
            assert type(model._chosen).__name__ == kind
        assert triton.config_asked == 1
        await model.close()


async def test_without_a_port_only_auto_and_bls_go_on() -> None:
    """grpc was asked for, so its absence is an error; the next request tries again."""
    for transport in ("auto", "bls"):
        model = TritonEngine("tensorrt_llm", route("127.0.0.1:1", transport))
        await model.capacity()
        assert type(model._chosen).__name__ == "BlsEngine"
        await model.close()
    model = TritonEngine("tensorrt_llm", route("127.0.0.1:1", "grpc"))
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await model.capacity()
    await model.close()


async def test_a_choice_made_for_want_of_a_port_is_made_again() -> None:
    """The server may only have been slow to open it."""
    async with Triton() as triton:
        model = TritonEngine("tensorrt_llm", route(triton.url))
        down = TritonEngine("tensorrt_llm", route("127.0.0.1:1"))
        await down.capacity()
        assert type(down._chosen).__name__ == "BlsEngine"
        down._grpc, model._grpc = model._grpc, down._grpc
        down._look_again_at = 0.0  # the time has come
        await down.capacity()
        assert type(down._chosen).__name__ == "GrpcEngine"
        for engine in (model, down):
            await engine.close()


async def test_tensors_are_read_from_the_repository_where_nobody_can_be_asked(
    tmp_path: Path,
) -> None:
    """An older engine must not be sent inputs that it does not have."""
    config = model_config(ENGINE, {"max_sequence_tokens": "77"})
    kept = [tensor for tensor in config.input if tensor.name not in ("seed", "random_seed")]
    del config.input[:]
    config.input.extend(kept)
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text(text_format.MessageToString(config))
    there = replace(route("127.0.0.1:1"), repository=tmp_path)
    model = TritonEngine("tensorrt_llm", there)
    assert (await model.capacity()).max_sequence_tokens == 77
    with pytest.raises(InvalidRequest, match="seed"):
        asked = replace(ASK, sampling=Sampling(seed=1))
        await model.generate(asked).wait()
    await model.close()


def test_a_port_of_somebody_elses_server_is_not_spoken_to() -> None:
    """With host networking another Triton may own the default port."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True
    ) as foreign:
        assert foreign.stdout is not None
        port = int(foreign.stdout.readline())
        try:
            assert _is_foreign(f"localhost:{port}")
            assert not _is_foreign(f"elsewhere.example:{port}")
        finally:
            foreign.kill()
    assert not _is_foreign(f"localhost:{port}")  # nobody listens any more
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert not _is_foreign(f"127.0.0.1:{ours.getsockname()[1]}")


@pytest.mark.parametrize("transport", ["auto", "grpc", "bls"])
@pytest.mark.parametrize("name", ["tensorrt_llm", "misspelt"])
async def test_a_model_that_cannot_serve_us_is_an_error_on_any_transport(
    name: str, transport: str
) -> None:
    """Not decoupled, or not there: another way to reach it would not help."""
    config = model_config(ENGINE, {})
    config.model_transaction_policy.decoupled = False
    async with Triton(config=config) as triton:
        model = TritonEngine(name, route(triton.url, transport))
        with pytest.raises(EngineError, match=r"decoupled|misspelt"):
            await model.capacity()


@pytest.mark.parametrize("transport", ["auto", "grpc", "bls"])
async def test_a_model_that_is_still_loading_decides_nothing(transport: str) -> None:
    """The server is there, so the transport is chosen once the model tells what it declares."""
    async with Triton() as triton:
        triton.loading = True
        model = TritonEngine("tensorrt_llm", route(triton.url, transport))
        with pytest.raises(EngineUnavailable, match="no available versions"):
            await model.capacity()
        triton.loading = False
        assert (await model.capacity()).max_sequence_tokens == 64
        await model.close()
