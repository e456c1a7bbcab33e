"""Which way an engine is reached: as ``engine_transport`` says, and no other way."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from tests.helpers.fake_engine_server import ASK, Triton
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.contract import ENGINE
from trtllm_bls.engines.base import AskedCapacity
from trtllm_bls.engines.triton import triton_engine
from trtllm_bls.engines.triton.bls import BlsEngine
from trtllm_bls.engines.triton.grpc import GrpcEngine
from trtllm_bls.engines.triton.own_port import is_own
from trtllm_bls.errors import EngineError, EngineUnavailable, InvalidRequest, SetupError
from trtllm_bls.types import EngineCapacity, Sampling

LISTEN = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()
"""


@contextmanager
def foreign_port() -> Iterator[int]:
    """Another process listens at it."""
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as foreign:
        assert foreign.stdout is not None
        try:
            yield int(foreign.stdout.readline())
        finally:
            foreign.kill()


def route(url: str, transport: str = "auto") -> dict[str, Any]:
    return dict(
        transport=transport,
        url=url,
        pb_utils=object(),
        vocab_size=50,
        max_streams=2,
        stall_seconds=1,
    )


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", GrpcEngine), ("grpc", GrpcEngine), ("bls", BlsEngine)]
)
async def test_the_transport_is_the_one_that_is_configured(transport: str, kind: type) -> None:
    """Over gRPC the model is asked once for what it declares, also where two requests come at
    once; BLS cannot ask."""
    async with Triton() as triton:
        engine = triton_engine("tensorrt_llm", **route(triton.url, transport))
        assert isinstance(engine, kind)
        await engine.capacity()
        await asyncio.gather(engine.capacity(), engine.capacity())
        assert triton.config_asked == (kind is GrpcEngine)
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_without_a_port_requests_fail_until_there_is_one(transport: str) -> None:
    """BLS is never a way out; where the port was not named, the error tells how to name it."""
    engine = triton_engine("tensorrt_llm", **route("127.0.0.1:1", transport))
    for _ in range(2):
        with pytest.raises(EngineUnavailable) as caught:
            await engine.capacity()
        named = "engine_transport" in str(caught.value) and "engine_url" in str(caught.value)
        assert named is (transport == "auto")
    await engine.close()


def test_bls_is_for_models_inside_triton() -> None:
    """Another process has no BLS API, which shows when it starts."""
    with pytest.raises(SetupError, match="engine_transport: bls"):
        triton_engine("tensorrt_llm", **route("127.0.0.1:1", "bls") | {"pb_utils": None})


async def test_bls_reads_in_the_repository_what_a_model_declares(tmp_path: Path) -> None:
    """An older engine must not be sent inputs that it does not have."""
    config = model_config(ENGINE, {"max_sequence_tokens": "77"})
    kept = [tensor for tensor in config.input if tensor.name not in ("seed", "random_seed")]
    del config.input[:]
    config.input.extend(kept)
    path = tmp_path / "tensorrt_llm" / "config.pbtxt"
    path.parent.mkdir()
    path.write_text(text_format.MessageToString(config))
    there = route("127.0.0.1:1", "bls") | {"repository": tmp_path}
    engine = triton_engine("tensorrt_llm", **there)
    assert (await engine.capacity()).max_sequence_tokens == 77
    with pytest.raises(InvalidRequest, match="seed"):
        asked = replace(ASK, sampling=Sampling(seed=1))
        await engine.generate(asked).wait()
    await engine.close()
    path.write_text("name: {")
    engine = triton_engine("tensorrt_llm", **there)
    with pytest.raises(EngineError, match=r"config.pbtxt cannot be read"):
        await engine.capacity()
    await engine.close()


def test_a_port_of_somebody_elses_server_is_known() -> None:
    """One that nobody listens at, or of another machine, is nobody's."""
    with foreign_port() as port:
        assert is_own(f"localhost:{port}") is False
        assert is_own(f"elsewhere.example:{port}") is not False
    assert is_own(f"localhost:{port}") is not False
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert is_own(f"127.0.0.1:{ours.getsockname()[1]}") is not False


async def test_auto_does_not_speak_to_somebody_elses_server() -> None:
    """With host networking another Triton may own the default port, and have the same models."""
    with foreign_port() as port:
        engine = triton_engine("tensorrt_llm", **route(f"127.0.0.1:{port}"))
        with pytest.raises(EngineUnavailable, match=r"another process .* set engine_url"):
            await engine.capacity()
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_a_model_that_cannot_serve_us_is_an_error(transport: str) -> None:
    """It is not there; the port is not to blame."""
    async with Triton(config=model_config(ENGINE, {})) as triton:
        engine = triton_engine("misspelt", **route(triton.url, transport))
        with pytest.raises(EngineError, match="misspelt") as caught:
            await engine.capacity()
        assert "engine_url" not in str(caught.value)
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_a_model_that_is_still_loading_is_unavailable(transport: str) -> None:
    """Until it has loaded."""
    async with Triton() as triton:
        triton.loading = True
        engine = triton_engine("tensorrt_llm", **route(triton.url, transport))
        with pytest.raises(EngineUnavailable) as caught:
            await engine.capacity()
        assert "engine_url" not in str(caught.value)
        triton.loading = False
        assert (await engine.capacity()).max_sequence_tokens == 64
        await engine.close()


async def test_who_asks_as_the_capacity_comes_is_told_it() -> None:
    """Its turn of the event loop comes after the answer and before the callbacks of the answer."""
    late: list[asyncio.Task[EngineCapacity]] = []

    async def ask() -> EngineCapacity:
        late.append(asyncio.create_task(capacity.get()))
        return EngineCapacity(max_sequence_tokens=77)

    capacity = AskedCapacity(ask, 30)
    told = [await capacity.get(), await late[0]]
    assert [each.max_sequence_tokens for each in told] == [77, 77]
    assert len(late) == 1  # the answer serves both


async def test_a_capacity_that_cannot_be_asked_is_asked_for_by_the_next_request() -> None:
    """Each request that waited is told why; an old answer serves until it is in doubt."""
    answers: list[EngineCapacity | EngineError] = [
        EngineError("lost"),
        EngineCapacity(max_sequence_tokens=1),
        EngineCapacity(max_sequence_tokens=2),
    ]

    async def ask() -> EngineCapacity:
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    capacity = AskedCapacity(ask, 30)
    failed = await asyncio.gather(capacity.get(), capacity.get(), return_exceptions=True)
    assert [str(each) for each in failed] == ["lost", "lost"]
    assert [(await capacity.get()).max_sequence_tokens for _ in range(2)] == [1, 1]
    capacity.doubt()
    assert (await capacity.get()).max_sequence_tokens == 2
